"""Orders, and their letters."""

from django.db import models


class Order(models.Model):
    """A customer's order."""

    customer = models.TextField()
    total = models.IntegerField()
    state = models.TextField(default="placed")

    def __str__(self) -> str:
        return f"order {self.pk} of {self.customer}"


class Letter(models.Model):
    """A letter; this example sends none."""

    order = models.ForeignKey(Order, models.CASCADE)
    text = models.TextField()

    def __str__(self) -> str:
        return self.text
