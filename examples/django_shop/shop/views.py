"""Placing an order."""

from django.db import transaction
from django.http import HttpRequest, JsonResponse
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_POST

from .models import Order
from .tasks import charge


@csrf_exempt
@require_POST
def place(request: HttpRequest) -> JsonResponse:
    """Place an order. The job exists if and only if the order does."""
    customer = request.POST["customer"]
    with transaction.atomic():
        order = Order.objects.create(customer=customer, total=int(request.POST["total"]))
        job = charge.defer(order, customer)
    return JsonResponse({"order": order.pk, "job": job.id}, status=201)
