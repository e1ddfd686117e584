"""The work after an order was placed."""

import datetime as dt

from pgdefer.contrib.django import app

from .models import Letter, Order


@app.task(transactional=True, lock="customer:{customer}")
def charge(order: Order, customer: str) -> int:
    """Charge an order; those of a customer one at a time, in their order.

    Its writes, the next job and its own end are one transaction.
    """
    order.state = "charged"
    order.save(update_fields=["state"])
    write.defer(order, f"Thank you, {customer}: {order.total} EUR.")
    return order.total


@app.task(queue="mail", concurrency_key="printer", concurrency_limit=2)
def write(order: Order, text: str) -> None:
    """Write a letter; two at a time."""
    Letter.objects.create(order=order, text=text)


@app.task(transactional=True)
def stamp(text: str) -> None:
    """Write a short letter about the first order."""
    Letter.objects.create(order=Order.objects.earliest("id"), text=text)


@app.task(run_in="process")
def count_letters() -> int:
    """Count the letters, in a separate process."""
    return Letter.objects.count()


@app.recurring("0 6 * * *", timezone="Europe/Berlin")
@app.task(transactional=True)
def forget_old_orders(scheduled_for: dt.datetime) -> None:
    """Remove charged orders, every morning."""
    del scheduled_for
    Order.objects.filter(state="forgotten").delete()
