"""A shop over HTTP: one transaction creates an order and its job, or neither.

    pip install fastapi uvicorn                 # and, in a checkout of pgdefer, '.[all]'
    cd examples
    export DATABASE_URL=postgresql+psycopg:///shop
    createdb shop
    pgdefer install --dsn postgresql:///shop
    uvicorn fastapi_shop:web
    pgdefer worker -A fastapi_shop:queue        # in another terminal, with the same folder and URL

    curl -d '{"customer": "ann", "product": "tea", "quantity": 2}' \
      -H 'content-type: application/json' localhost:8000/orders
    curl localhost:8000/orders/1

docs/sqlalchemy.md explains how.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import sqlalchemy as sa
from fastapi import FastAPI, HTTPException
from pydantic import BaseModel, Field
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

import pgdefer
from pgdefer.models import Job

URL = os.environ["DATABASE_URL"]

queue = pgdefer.App(URL)
engine = create_async_engine(URL, pool_size=20)  # as many as the worker runs jobs at once
sessions = async_sessionmaker(engine)


class Base(DeclarativeBase):
    """The shop's own tables."""


class Product(Base):
    """A product, and its stock, which is never negative."""

    __tablename__ = "product"
    __table_args__ = (sa.CheckConstraint("stock >= 0", name="product_stock_check"),)

    name: Mapped[str] = mapped_column(primary_key=True)
    stock: Mapped[int]


class Order(Base):
    """An order; a job writes the receipt."""

    __tablename__ = "order"

    id: Mapped[int] = mapped_column(primary_key=True)
    customer: Mapped[str]
    product: Mapped[str] = mapped_column(sa.ForeignKey(Product.name))
    quantity: Mapped[int]
    receipt: Mapped[str | None]
    job_id: Mapped[int | None] = mapped_column(sa.BigInteger)


@queue.task(name="write_receipt", lock="customer:{customer}", transactional=sessions)
async def write_receipt(session: AsyncSession, order_id: int, customer: str) -> None:
    """Write the receipt in the transaction that also ends the job: once, whatever happens."""
    order = await session.get_one(Order, order_id)
    order.receipt = f"{order.quantity} x {order.product} for {customer}"


@asynccontextmanager
async def lifespan(_web: FastAPI) -> AsyncIterator[None]:
    """Create the shop's tables; a real shop has migrations."""
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
        await connection.execute(
            sa.text("insert into product values ('tea', 5) on conflict do nothing")
        )
    async with queue:
        yield
    await engine.dispose()


web = FastAPI(lifespan=lifespan)


class NewOrder(BaseModel):
    """A customer's request."""

    customer: str
    product: str
    quantity: int = Field(gt=0)


class OrderState(BaseModel):
    """The answer to a customer."""

    id: int
    receipt: str | None
    job: str | None


@web.post("/orders", status_code=201)
async def place(new: NewOrder) -> OrderState:
    """Take an order. It is committed with its job, before the answer is sent."""
    try:
        async with sessions.begin() as session:
            order = Order(customer=new.customer, product=new.product, quantity=new.quantity)
            session.add(order)
            await session.flush()
            deferring = write_receipt.configure(connection=session)
            job = await deferring.defer_async(order_id=order.id, customer=new.customer)
            order.job_id = job.id
            # If the stock is too low, this fails, and nothing of the above has happened.
            taken = sa.update(Product).where(Product.name == new.product)
            await session.execute(taken.values(stock=Product.stock - new.quantity))
            return OrderState(id=order.id, receipt=None, job="ready")
    except IntegrityError as error:
        raise HTTPException(409, "there is not enough of that") from error


@web.get("/orders/{id}")
async def show(id: int) -> OrderState:
    """Show an order and the state of its job."""
    async with sessions() as session:
        order = await session.get(Order, id)
        if order is None:
            raise HTTPException(404)
        job = await session.get(Job, order.job_id)
        return OrderState(id=order.id, receipt=order.receipt, job=job.state if job else None)
