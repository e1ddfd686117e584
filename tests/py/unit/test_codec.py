"""Arguments round-trip exactly, through JSON as jsonb stores it."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import datetime as dt
import enum
import json
import math
import sys
import types
import uuid
import zoneinfo
from decimal import Decimal
from typing import Any

import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pgdefer import App, Codec, DecodeError, EncodeError


class Colour(enum.Enum):
    RED = "red"
    ALSO_RED = "red"  # noqa: PIE796 (an alias)
    POINT = (1, 2)


class Level(enum.IntEnum):
    LOW = 1


class Right(enum.Flag):
    READ = enum.auto()
    WRITE = enum.auto()


@dataclasses.dataclass
class Point:
    x: float
    y: float = 0.0
    tags: set[str] = dataclasses.field(default_factory=set)


@dataclasses.dataclass(frozen=True, slots=True)
class Doubled:
    value: int
    half: float = dataclasses.field(init=False, default=0.5)

    def __post_init__(self) -> None:
        object.__setattr__(self, "value", self.value * 2)


zones = st.sampled_from(["UTC", "Europe/Paris", "America/New_York", "Asia/Kathmandu"])
offsets = st.integers(-1439, 1439).map(lambda m: dt.timezone(dt.timedelta(minutes=m)))
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(),
    st.text(st.characters(categories=["Cs", "Cc", "L"]), max_size=5),
    st.just("__pgdefer__"),
    st.binary(),
    st.binary().map(bytearray),
    st.uuids(),
    st.decimals(allow_nan=False),
    st.dates(),
    st.times(),
    st.times(timezones=offsets),
    st.datetimes(),
    st.datetimes(timezones=offsets),
    st.datetimes(timezones=zones.map(zoneinfo.ZoneInfo), allow_imaginary=True),
    st.timedeltas(),
    st.sampled_from([*Colour, *Level, *Right, Right.READ | Right.WRITE, Right(0)]),
)
keys = st.one_of(scalars.filter(lambda v: type(v) is not bytearray), st.tuples(st.text()))
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.sets(keys, max_size=4),
        st.frozensets(keys, max_size=4),
        st.dictionaries(st.text(), inner, max_size=4),
        st.dictionaries(st.sampled_from(["__pgdefer__", "value", "type"]), inner),
        st.dictionaries(keys, inner, max_size=4),
        st.builds(Point, x=inner, y=inner),
    ),
    max_leaves=15,
)


def same(left: Any, right: Any) -> bool:
    """Whether two values are the same at every depth, with the same types."""
    if type(left) is not type(right):
        return False
    if isinstance(left, float):
        return left == right and math.copysign(1, left) == math.copysign(1, right)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return len(left) == len(right) and all(same(left[key], right.get(key)) for key in left)
    if isinstance(left, dt.datetime | dt.time):
        return left == right and (left.fold, left.utcoffset()) == (right.fold, right.utcoffset())
    if dataclasses.is_dataclass(left):
        fields = dataclasses.fields(left)
        return all(same(getattr(left, f.name), getattr(right, f.name)) for f in fields)
    return bool(left == right)


def as_jsonb(text: str) -> str:
    """Return JSON as jsonb would print it: numbers in full, keys sorted by length."""

    def number(text: str) -> int | float:
        value = Decimal(text)
        plain = f"{value:f}"
        if value == 0:
            plain = plain.lstrip("-")
        return float(plain) if "." in plain else int(plain)

    def walk(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: walk(value[k]) for k in sorted(value, key=lambda k: (len(k.encode()), k))}
        if isinstance(value, list):
            return [walk(item) for item in value]
        if isinstance(value, str):
            assert "\0" not in value
            value.encode()
        return value

    parsed = json.loads(text, parse_float=number, parse_int=number)
    return json.dumps(walk(parsed), ensure_ascii=False)


@pytest.mark.long
@given(values)
def test_round_trip(value: Any) -> None:
    codec = Codec()
    stored = as_jsonb(codec.dumps(value))
    assert same(codec.loads(stored), value)


@given(st.dictionaries(st.text(st.characters(categories=["L"])), values, max_size=3))
def test_args_are_a_plain_object(args: dict[str, Any]) -> None:
    codec = Codec()
    stored = as_jsonb(codec.dumps_args(args))
    assert json.loads(stored).keys() == args.keys()
    assert same(codec.loads(stored), args)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, [1, {"a": math.nan}]])
def test_floats_without_a_number_are_refused(value: Any) -> None:
    with pytest.raises(EncodeError, match="no NaN and no infinity"):
        Codec().dumps(value)


def test_an_argument_that_cannot_be_stored_is_named() -> None:
    with pytest.raises(EncodeError, match=r"argument 'when'.*builtins\.object.*register"):
        Codec().dumps_args({"what": 1, "when": object()})


def test_what_contains_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(EncodeError, match="nested too deeply"):
        Codec().dumps(loop)


class Text(str):
    __slots__ = ()


@pytest.mark.parametrize(
    "value", [Text("a"), type("Sub", (dict,), {})(), range(3), memoryview(b"")]
)
def test_subclasses_are_not_silently_changed(value: Any) -> None:
    with pytest.raises(EncodeError, match="can't be stored"):
        Codec().dumps(value)


def test_times_of_a_clock_that_freezegun_has_stopped_are_times() -> None:
    def stopped(base: type[Any]) -> type[Any]:
        return type(f"Fake{base.__name__}", (base,), {"__module__": "freezegun.api"})

    moment = stopped(dt.datetime)(2026, 1, 2, 3, tzinfo=dt.UTC)
    day = stopped(dt.date)(2026, 1, 2)
    assert Codec().loads(Codec().dumps([moment, day])) == [moment, dt.date(2026, 1, 2)]
    with pytest.raises(EncodeError, match="can't be stored"):
        Codec().dumps(type("Own", (dt.datetime,), {})(2026, 1, 2))


def test_a_refusal_does_not_show_the_value() -> None:
    """An error goes to logs and trackers, and the value may be secret."""

    class Card:
        def __repr__(self) -> str:
            return "4111"

    with pytest.raises(EncodeError, match="argument 'card'") as refused:
        Codec().dumps_args({"card": {"number": Card()}})
    assert "4111" not in str(refused.value)


def test_a_class_without_a_name_of_its_own_is_refused() -> None:
    @dataclasses.dataclass
    class Local:
        x: int

    with pytest.raises(EncodeError, match="top level of a module"):
        Codec().dumps(Local(1))


def test_a_dataclass_comes_back_as_it_was() -> None:
    value = Doubled(2)
    object.__setattr__(value, "half", 7.5)
    assert Codec().loads(Codec().dumps(value)) == value


def test_a_field_added_since_has_its_default() -> None:
    codec = Codec()
    stored = json.loads(codec.dumps(Point(1.5, 2.5, {"a"})))
    del stored["value"]["tags"]
    assert codec.decode(stored) == Point(1.5, 2.5, set())
    del stored["value"]["x"]
    with pytest.raises(DecodeError, match="the field x is missing"):
        codec.decode(stored)


def test_a_field_dropped_since_is_an_error() -> None:
    codec = Codec()
    stored = json.loads(codec.dumps(Point(1.5)))
    stored["value"]["z"] = 1
    with pytest.raises(DecodeError, match="no field z"):
        codec.decode(stored)


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        ("{", "not JSON"),
        ('{"__pgdefer__": "uuid"}', "lacks its tag or value"),
        ('{"__pgdefer__": 1, "value": 2}', "lacks its tag or value"),
        ('{"__pgdefer__": "uuid", "value": "x"}', "uuid: ValueError"),
        ('{"__pgdefer__": "date", "value": 1}', "date: TypeError"),
        ('{"__pgdefer__": "bytes", "value": "*"}', "bytes: Error"),
        ('{"__pgdefer__": "set", "value": [[]]}', "set: TypeError"),
        ('{"__pgdefer__": "nothing", "value": 1}', "unknown tag 'nothing'"),
        ('{"__pgdefer__": "enum", "type": "os:system", "value": 1}', "'os:system' isn't known"),
        ('{"__pgdefer__": "enum", "type": "antigravity:X", "value": 1}', "isn't known here"),
        ('{"__pgdefer__": "enum", "type": "__main__:X", "value": 1}', "move it to a module that"),
        ('{"__pgdefer__": "enum", "type": "builtins:int", "value": 1}', "is no enum"),
        ('{"__pgdefer__": "dataclass", "type": "builtins:int", "value": {}}', "is no dataclass"),
        ('{"__pgdefer__": "datetime", "value": "2020-01-01", "zone": "No/Where"}', "datetime: "),
    ],
)
def test_what_is_not_ours_is_refused(stored: str, message: str) -> None:
    with pytest.raises(DecodeError, match=message):
        Codec().loads(stored)


@pytest.mark.parametrize("tag", ["set", "frozenset", "dict"])
def test_keys_of_one_hash_are_refused(tag: str) -> None:
    """A set of a million of them would take hours."""
    numbers = [(2**61 - 1) * n for n in range(1_000_000)]
    codec = Codec()

    def decoded(keys: list[int]) -> Any:
        value = [[key, 0] for key in keys] if tag == "dict" else keys
        return codec.decode({"__pgdefer__": tag, "value": value})

    def made(keys: list[int]) -> Any:
        kinds: Any = {"set": set, "frozenset": frozenset, "dict": lambda k: dict.fromkeys(k, 0)}
        return kinds[tag](keys)

    for keys in numbers, numbers[:501], numbers[:400] + numbers[:1] * 1000:
        with pytest.raises(DecodeError, match="too many keys with one hash"):
            decoded(keys)
    with pytest.raises(EncodeError, match="argument 'x': a set or dict has too many keys with"):
        codec.dumps_args({"x": made(numbers[:501])})
    for keys in numbers[:500], [2**k for k in range(6200)]:  # 102 of each of 61 hashes
        assert codec.loads(codec.dumps(made(keys))) == made(keys)
    assert decoded([1] * 1_000_000) == made([1])


async def test_depth_is_refused() -> None:
    levels = sys.getrecursionlimit() - 10
    stored = "[" * levels + '{"__pgdefer__": "tuple", "value": [1]}' + "]" * levels
    with pytest.raises(DecodeError, match="nested too deeply"):
        Codec().loads(stored)
    stored = "\x01" + stored  # as a worker's connection reads jsonb
    with pytest.raises(DecodeError, match="nested too deeply"):
        Codec().decode_stored(stored)
    with pytest.raises(DecodeError, match="nested too deeply"):
        await Codec().decode_stored_async(stored)


class Money:
    def __init__(self, amount: Decimal) -> None:
        self.amount = amount


class Euro(Money):
    pass


def test_own_types() -> None:
    codec = Codec()
    codec.register(Money, "money", lambda m: m.amount, Money)
    stored = codec.dumps({"price": Euro(Decimal("1.50")), "more": [Money(Decimal(2))]})
    back = codec.loads(stored)
    assert back["price"].amount == Decimal("1.50")
    assert back["more"][0].amount == 2


def test_a_job_is_not_stored_but_its_id() -> None:
    job = App("postgresql://nowhere.invalid/x").job(7)
    with pytest.raises(EncodeError, match=r"\.Job can't be stored\. Pass its id: job\.id\."):
        Codec().dumps([job])


class Purchase(pydantic.BaseModel):
    customer: str
    total: Decimal


def test_models_of_pydantic_are_registered_as_docs_fastapi_says() -> None:
    codec = Codec()
    codec.register(
        Purchase, "order", lambda order: order.model_dump(mode="json"), Purchase.model_validate
    )
    order = Purchase(customer="Ann", total=Decimal("1.10"))
    assert codec.loads(codec.dumps(order)) == order


def test_an_own_type_may_replace_ours() -> None:
    codec = Codec()
    codec.register(uuid.UUID, "short", lambda u: u.hex, lambda h: uuid.UUID(hex=h))
    value = uuid.uuid4()
    assert json.loads(codec.dumps(value))["__pgdefer__"] == "short"
    assert codec.loads(codec.dumps(value)) == value


def test_tags_do_not_clash() -> None:
    codec = Codec()
    codec.register(Money, "money", lambda m: m.amount, Money)
    codec.register(Money, "money", lambda m: m.amount, Money)
    with pytest.raises(ValueError, match="taken"):
        codec.register(Point, "money", lambda p: p.x, Point)
    for tag in ("uuid", "datetime", "dataclass", "unencodable"):
        with pytest.raises(ValueError, match="taken"):
            codec.register(Point, tag, lambda p: p.x, Point)
    with pytest.raises(ValueError, match="letters"):
        codec.register(Point, 'a"b', lambda p: p.x, Point)


def test_an_own_decode_that_raises() -> None:
    codec = Codec()
    codec.register(Money, "money", lambda m: m.amount, lambda _: 1 / 0)  # type: ignore[arg-type,return-value]
    with pytest.raises(DecodeError, match="money: ZeroDivisionError"):
        codec.loads(codec.dumps(Money(Decimal(1))))


async def test_an_own_decode_may_be_async() -> None:
    codec = Codec()

    async def fetch(key: Any) -> Money:
        return Money(key)

    codec.register(Money, "money", lambda m: m.amount, fetch)
    stored = codec.dumps({"a": (Money(Decimal(3)),)})
    assert codec.how(stored) == "async"
    with pytest.raises(DecodeError, match="asynchronously"):
        codec.loads(stored)
    back = await codec.decode_async(json.loads(stored))
    assert back["a"][0].amount == 3


def test_where_to_decode() -> None:
    codec = Codec()
    codec.register(Money, "money", lambda m: m.amount, Money, blocking=True)
    assert codec.how(codec.dumps({"a": 1})) == "direct"
    assert codec.how(codec.dumps({"a": uuid.uuid4()})) == "direct"
    assert codec.how(codec.dumps({"a": Money(Decimal(1))})) == "thread"


def test_data_imports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module may import things on access, by its own __getattr__."""
    for name in list(sys.modules):
        if name.startswith("concurrent.futures."):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(vars(concurrent.futures), "ProcessPoolExecutor", raising=False)
    for kind in ("dataclass", "enum"):
        stored = {
            "__pgdefer__": kind,
            "type": "concurrent.futures:ProcessPoolExecutor",
            "value": {},
        }
        with pytest.raises(DecodeError, match="isn't known here"):
            Codec().decode(stored)
    assert "concurrent.futures.process" not in sys.modules


def test_a_module_that_loads_itself_when_it_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lazy(types.ModuleType):
        def __getattribute__(self, name: str) -> Any:
            raise AssertionError(name)

    monkeypatch.setitem(sys.modules, "lazy_module", Lazy("lazy_module"))
    for name in ("lazy_module:Point", "lazy_module:Point.x", "lazy_module:"):
        with pytest.raises(DecodeError, match="isn't known here"):
            Codec().decode({"__pgdefer__": "dataclass", "type": name, "value": {}})
