"""The shop and its admin."""

from django.contrib import admin
from django.urls import path

from .views import place

urlpatterns = [path("admin/", admin.site.urls), path("orders", place)]
