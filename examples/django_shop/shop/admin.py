"""The shop's own tables in the admin."""

from django.contrib import admin

from .models import Letter, Order

admin.site.register(Order)
admin.site.register(Letter)
