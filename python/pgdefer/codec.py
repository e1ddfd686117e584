"""Arguments and results as JSON and back, exactly.

JSON's own types are stored as they are. Every other value is a tagged object::

    {"__pgdefer__": "<tag>", "value": ...}

=============  ==========================================================================
tag            value
=============  ==========================================================================
datetime       ISO 8601 text; also "zone": a key of zoneinfo, and "fold": 1, if it has them
date, time     ISO 8601 text; time also has "zone" and "fold"
timedelta      [days, seconds, microseconds]
uuid, decimal  their text
float          its repr, for floats that jsonb does not preserve: -0.0, and 1e16 and above
str            base64 of its UTF-8, for text with NUL or lone surrogates, which jsonb refuses
bytes          base64; bytearray too
tuple          a list; set and frozenset too
dict           [[key, value], ...], for dicts with keys that are not text, or "__pgdefer__"
enum           the member's name, and "type": "module:Class" (composite flags: their number)
dataclass      an object of its fields, and "type": "module:Class"
=============  ==========================================================================

Classes named by "type" are looked up only in modules that are already imported: data never
makes a process import anything. NaN and infinities are refused.
"""

from __future__ import annotations

import base64
import dataclasses
import datetime as dt
import enum
import functools
import inspect
import json
import math
import sys
import types
import uuid
import zoneinfo
from collections.abc import Awaitable, Callable, Iterable, Mapping
from decimal import Decimal
from typing import Any, Generic, NoReturn, TypeVar, cast

from pgdefer.errors import DecodeError, EncodeError, PgDeferError

__all__ = [
    "STEP_FAILED",
    "TAG",
    "UNENCODABLE",
    "VERSION",
    "Codec",
    "is_deep",
    "is_storable",
    "model_codec",
    "parsed",
    "raw",
]

TAG = "__pgdefer__"
# The tag of a result that could not be stored; the value is the type's name.
UNENCODABLE = "unencodable"
# That value of a result that the database has refused for its size.
TOO_LARGE = "JSON that is too large"
# The tag of the value of a step that has failed for good; its value is the error.
STEP_FAILED = "step_failed"
# The key of a job's arguments with their version; without it, that is 1.
VERSION = "__version__"

T = TypeVar("T")
Encoder = Callable[[Any], Any]
Decoder = Callable[[Any], Any]

_scan = json.JSONDecoder().raw_decode
_TOO_DEEP = "the value is nested too deeply"
# What to do about a type that can't be stored. Our own types may have an attribute for it.
_INSTEAD = "Pass JSON's types, or register the type with app.codec.register."


def unwrap(stored: str) -> Any:
    """Return the value of jsonb in PostgreSQL's binary form: a version byte, then JSON.

    Raises DecodeError if Python can't read it: too many digits, or nested too deeply.
    """
    try:
        return _scan(stored, 1)[0]
    except RecursionError:
        raise DecodeError(_TOO_DEEP) from None
    except ValueError as error:
        raise DecodeError(f"the value can't be read: {error}") from error


def parsed(text: str) -> Any:
    """Return the value of JSON text. Raises DecodeError as `unwrap`."""
    return unwrap(f" {text}")


def is_deep(value: Any, levels: int) -> bool:
    """Whether a JSON value has more than so many levels. This does not recur, as others do."""
    items = [value]
    for _ in range(levels):
        inner = [item for item in items if isinstance(item, dict | list)]
        if not inner:
            return False
        items = [
            each for item in inner for each in (item.values() if isinstance(item, dict) else item)
        ]
    return True


def raw(stored: str) -> str | bytes:
    """Return the plain form of JSON text: text, bytes, or the text of a value with a tag of _TEXTS.

    Anything else stays as stored. Raises DecodeError if a tagged value is malformed.
    """
    if stored[0] != '"' and not (stored[0] == "{" and TAG in stored):
        return stored
    try:
        value = json.loads(stored)
    except (RecursionError, ValueError):  # too deep, or too many digits, for one of those
        return stored
    match value:
        case {"__pgdefer__": str(tag)} if tag in _TEXTS:
            value = Codec().decode(value)
    match value:
        case bytes() | bytearray():
            return bytes(value)
        case dt.date() | dt.time():
            return value.isoformat()
        case dict():
            return stored
        case _:
            return str(value)


# JSON's own types.
_JSON_TYPES = frozenset({str, int, float, bool, list, dict, type(None)})

_dumps = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


@dataclasses.dataclass(frozen=True)
class _Own(Generic[T]):
    """A type registered by the application."""

    tag: str
    encode: Callable[[T], Any]
    decode: Callable[[Any], T | Awaitable[T]]
    is_async: bool
    is_blocking: bool


class Codec:
    """Turns arguments into JSON text and back. Each App has one, `app.codec`."""

    def __init__(self) -> None:
        self._own: dict[type, _Own[Any]] = {}
        self._by_tag: dict[str, _Own[Any]] = {}
        self._found: dict[type, Encoder | None] = {}

    def register(
        self,
        type_: type[T],
        tag: str,
        encode: Callable[[T], Any],
        decode: Callable[[Any], T | Awaitable[T]],
        *,
        blocking: bool = False,
    ) -> None:
        """Store `type_` and its subclasses by `encode`, under `tag`.

        `encode` returns anything that can itself be stored; `decode` receives it. `decode` may
        be `async def`. If it does I/O without being async, pass `blocking=True`; workers then
        run it in a thread. Any exception from it fails the job at once.
        """
        if type_ in _JSON_TYPES:
            raise ValueError(
                f"JSON has values of type {type_.__name__}, which are stored as they are"
            )
        if not tag.isidentifier():
            raise ValueError(f"a tag is made of letters, digits and _, and {tag!r} isn't")
        if (
            tag in _DECODERS
            or tag in _SPECIAL
            or tag == STEP_FAILED
            or self._by_tag.get(tag) not in (None, self._own.get(type_))
        ):
            raise ValueError(f"the tag {tag!r} is taken")
        own = _Own(tag, encode, decode, inspect.iscoroutinefunction(decode), blocking)
        self._own[type_] = own
        self._by_tag[tag] = own
        self._found.clear()

    # Encoding

    def dumps(self, value: Any) -> str:
        """Return the JSON text of a value.

        Raises EncodeError if it can't be stored.
        """
        try:
            return _dumps(self.encode(value))
        except RecursionError:
            raise EncodeError("the value is nested too deeply, or contains itself") from None
        except ValueError as error:
            raise EncodeError(str(error)) from error

    def dumps_args(self, args: Mapping[str, Any]) -> str:
        """Return the JSON object of a job's arguments: always an object, never a tagged one."""
        encoded: dict[str, Any] = {}
        for name, value in args.items():
            if name == TAG:
                raise EncodeError(f"an argument can't be named {TAG}")
            try:
                encoded[_key(name)] = self.encode(value)
            except EncodeError as error:
                raise EncodeError(f"argument {name!r}: {error.message}", hint=error.hint) from error
            except RecursionError:
                raise EncodeError(f"argument {name!r} is nested too deeply") from None
        try:
            return _dumps(encoded)
        except ValueError as error:
            raise EncodeError(str(error)) from error

    def encode(self, value: Any) -> Any:
        """Return the value in JSON's own types."""
        kind = type(value)
        if kind is str:
            return value if is_storable(value) else _tagged("str", _base64(_utf8(value)))
        if kind is int or kind is bool or value is None:
            return value
        if kind is dict:
            encode = self.encode
            if TAG in value or not all(type(key) is str and is_storable(key) for key in value):
                _hashed(value, EncodeError)
                pairs = [[encode(key), encode(item)] for key, item in value.items()]
                return _tagged("dict", pairs)
            return {key: encode(item) for key, item in value.items()}
        if kind is list:
            encode = self.encode
            return [encode(item) for item in value]
        try:
            encoder = self._found[kind]
        except KeyError:
            encoder = self._found[kind] = self._find_encoder(kind)
        if encoder is None:
            raise EncodeError(
                f"{_class_name(kind)} can't be stored",  # the value may be secret
                hint=getattr(kind, "_pgdefer_instead", _INSTEAD),
            )
        return encoder(value)

    def _find_encoder(self, kind: type) -> Encoder | None:
        for base in kind.__mro__:
            if (own := self._own.get(base)) is not None:
                return functools.partial(self._encode_own, own)
        if issubclass(kind, enum.Enum):
            return _encode_enum
        if kind.__module__ == "freezegun.api":  # in a test that stops the clock
            kind = kind.__mro__[1]
        if (simple := _ENCODERS.get(kind)) is not None:
            return simple
        if kind in _SEQUENCES:
            return functools.partial(self._encode_sequence, _SEQUENCES[kind])
        if "__dataclass_fields__" in kind.__dict__ and not hasattr(kind, "_pgdefer_instead"):
            return self._encode_dataclass
        return None

    def _encode_own(self, own: _Own[Any], value: Any) -> Any:
        return _tagged(own.tag, self.encode(own.encode(value)))

    def _encode_sequence(self, tag: str, value: Any) -> Any:
        is_hashed = tag in ("set", "frozenset")
        if is_hashed:
            _hashed(value, EncodeError)
        items = [self.encode(item) for item in value]
        if is_hashed:
            items.sort(key=_dumps)
        return _tagged(tag, items)

    def _encode_dataclass(self, value: Any) -> Any:
        kind = type(value)
        if hasattr(kind, "_sa_class_manager"):
            raise EncodeError(
                f"{_class_name(kind)} is a row of a database",
                hint="Register its base class with pgdefer.model_codec, or pass its key.",
            )
        fields = {
            field.name: getattr(value, field.name)
            for field in dataclasses.fields(value)
            if hasattr(value, field.name)
        }
        return _tagged("dataclass", self.encode(fields)) | {"type": _type_name(kind)}

    # Decoding

    def loads(self, text: str) -> Any:
        """Return the value of JSON text.

        Raises DecodeError if it is malformed, or if the decode of a registered type raises.
        """
        try:
            return self.decode(json.loads(text)) if TAG in text else json.loads(text)
        except RecursionError:
            raise DecodeError(_TOO_DEEP) from None
        except ValueError as error:
            if isinstance(error, DecodeError):
                raise
            raise DecodeError(f"not JSON: {error}") from error

    def decode_stored(self, stored: str) -> Any:
        """Decode a jsonb as loaded by a worker's connection: see `unwrap`."""
        value = unwrap(stored)
        try:
            return self.decode(value) if TAG in stored else value
        except RecursionError as error:
            raise DecodeError(_TOO_DEEP) from error

    async def decode_stored_async(self, stored: str) -> Any:
        """Decode a stored value with types whose decode is `async def`."""
        value = unwrap(stored)
        try:
            return await self.decode_async(value)
        except RecursionError as error:
            raise DecodeError(_TOO_DEEP) from error

    def how(self, text: str) -> str:
        """Return how JSON text must be decoded: anywhere, in a thread, or by `decode_async`."""
        if TAG not in text:
            return "direct"
        used = [own for tag, own in self._by_tag.items() if f'"{tag}"' in text]
        if any(own.is_async for own in used):
            return "async"
        return "thread" if any(own.is_blocking for own in used) else "direct"

    def decode(self, value: Any) -> Any:
        """Return the value that `encode` took."""
        if type(value) is dict:
            if TAG not in value:
                return {key: self.decode(item) for key, item in value.items()}
            tag, inner = _opened(value)
            own = self._by_tag.get(tag)
            if own is not None and own.is_async:
                raise DecodeError(f"values tagged {tag!r} are decoded asynchronously")
            return self._rebuild(value, tag, self.decode(inner), own)
        if type(value) is list:
            return [self.decode(item) for item in value]
        return value

    async def decode_async(self, value: Any) -> Any:
        """Decode a value with types whose decode is `async def`."""
        if type(value) is dict:
            if TAG not in value:
                return {key: await self.decode_async(item) for key, item in value.items()}
            tag, inner = _opened(value)
            own = self._by_tag.get(tag)
            rebuilt = self._rebuild(value, tag, await self.decode_async(inner), own)
            if own is not None and own.is_async:
                return await _guarded(tag, rebuilt)
            return rebuilt
        if type(value) is list:
            return [await self.decode_async(item) for item in value]
        return value

    def _rebuild(self, whole: dict[str, Any], tag: str, inner: Any, own: _Own[Any] | None) -> Any:
        decoder: Decoder | None
        try:
            if own is not None:
                return own.decode(inner)
            if (special := _SPECIAL.get(tag)) is not None:
                return special(inner, whole)
            if (decoder := _DECODERS.get(tag)) is not None:
                return decoder(inner)
        except DecodeError:
            raise
        except Exception as error:
            if own is not None:
                raise DecodeError(f"{tag}: {type(error).__name__}: {error}") from error
            # The error would quote the value, which may be a secret.
            raise DecodeError(f"{tag}: {type(error).__name__}: the value is malformed") from None
        raise DecodeError(f"unknown tag {tag!r}", hint="Register its type with app.codec.register.")


def _hashed(keys: Iterable[Any], error: type[PgDeferError]) -> set[Any]:
    """Return the keys as a set. Raise an error if that takes too long: see _MOST_COMPARED.

    Keys with one hash are compared with each other. Texts can't be chosen so, as Python salts
    their hashes; numbers can.
    """
    found: set[Any] = set()
    alike: dict[int, int] = {}
    compared: dict[int, int] = {}
    for key in keys:
        before = len(found)
        found.add(key)
        number = hash(key)
        others = alike.get(number, 0)
        if len(found) == before:
            others -= 1  # the key itself was met before
        else:
            alike[number] = others + 1
        if others:
            compared[number] = compared.get(number, 0) + others
            if compared[number] > _MOST_COMPARED:
                raise error(
                    "a set or dict has too many keys with one hash", hint="Store them as a list."
                )
    return found


def _set(value: list[Any]) -> set[Any]:
    return _hashed(value, DecodeError)


def _dict(value: list[Any]) -> dict[Any, Any]:
    _hashed((key for key, _ in value), DecodeError)
    return {key: item for key, item in value}  # noqa: C416 (checks the pairs)


async def _guarded(tag: str, awaitable: Awaitable[Any]) -> Any:
    try:
        return await awaitable
    except DecodeError:
        raise
    except Exception as error:
        raise DecodeError(f"{tag}: {type(error).__name__}: {error}") from error


def _opened(value: dict[str, Any]) -> tuple[str, Any]:
    tag = value[TAG]
    if type(tag) is not str or "value" not in value:
        raise DecodeError("a tagged object lacks its tag or value")
    return tag, value["value"]


def _tagged(tag: str, value: Any) -> dict[str, Any]:
    return {TAG: tag, "value": value}


def is_storable(text: str) -> bool:
    """Whether jsonb can hold the text: no NUL, no lone surrogate."""
    if "\0" in text:
        return False
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _key(name: str) -> str:
    if not is_storable(name):
        raise EncodeError(f"an argument's name can't hold NUL or lone surrogates: {name!r}")
    return name


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _base64(data: bytes | bytearray) -> str:
    return base64.b64encode(data).decode("ascii")


def _unbase64(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _encode_float(value: float) -> Any:
    if not math.isfinite(value):
        raise EncodeError(f"{value} can't be stored: JSON has no NaN and no infinity")
    if abs(value) >= 1e16 or (value == 0 and math.copysign(1, value) < 0):
        return _tagged("float", repr(value))
    return value


def _zoned(tag: str, value: dt.datetime | dt.time) -> dict[str, Any]:
    encoded = _tagged(tag, value.isoformat())
    if isinstance(value.tzinfo, zoneinfo.ZoneInfo):
        if value.tzinfo.key is None:
            raise EncodeError(f"{value!r} can't be stored: its time zone has no name")
        encoded["value"] = value.replace(tzinfo=None).isoformat()
        encoded["zone"] = value.tzinfo.key
    if value.fold:
        encoded["fold"] = 1
    return encoded


def _unzoned(value: Any, whole: dict[str, Any]) -> Any:
    changes: dict[str, Any] = {}
    if "zone" in whole:
        changes["tzinfo"] = zoneinfo.ZoneInfo(whole["zone"])
    if "fold" in whole:
        changes["fold"] = whole["fold"]
    return value.replace(**changes) if changes else value


def _encode_enum(value: enum.Enum) -> dict[str, Any]:
    kind = type(value)
    stored: Any = value.name
    if kind.__members__.get(stored) is not value:
        stored = value.value
    return _tagged("enum", stored) | {"type": _type_name(kind)}


def _decode_enum(value: Any, whole: dict[str, Any]) -> Any:
    kind = _find_type(whole.get("type"))
    if not issubclass(kind, enum.Enum):
        raise DecodeError(f"{_class_name(kind)} is no enum")
    try:
        return kind[value] if isinstance(value, str) else kind(value)
    except (KeyError, ValueError):
        raise DecodeError(f"{_class_name(kind)} has no such member") from None


def _decode_dataclass(value: Any, whole: dict[str, Any]) -> Any:
    kind = _find_type(whole.get("type"))
    if not dataclasses.is_dataclass(kind):
        raise DecodeError(f"{_class_name(kind)} is no dataclass")
    fields = {field.name: field for field in dataclasses.fields(kind)}
    if unknown := value.keys() - fields.keys():
        raise DecodeError(f"{_class_name(kind)} has no field {', '.join(sorted(unknown))}")
    made = cast("Any", object.__new__(kind))
    for name, field in fields.items():
        if name in value:
            item = value[name]
        elif field.default is not dataclasses.MISSING:
            item = field.default
        elif field.default_factory is not dataclasses.MISSING:
            item = field.default_factory()
        else:
            raise DecodeError(f"{_class_name(kind)}: the field {name} is missing")
        object.__setattr__(made, name, item)
    return made


def _class_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _type_name(kind: type) -> str:
    name = f"{kind.__module__}:{kind.__qualname__}"
    if _look_up(name) is not kind:
        raise EncodeError(
            f"{_class_name(kind)} can't be stored: it can't be found by its name",
            hint="Define the class at the top level of a module.",
        )
    return name


def _look_up(name: str) -> Any:
    """Return the attribute of a module or class without running its code.

    getattr would not do: a module's own __getattr__ may import something.
    """
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = _members(found).get(part)
    return found


def _members(holder: object) -> Mapping[str, Any]:
    for kind in (types.ModuleType, type):
        if issubclass(type(holder), kind):
            members: Mapping[str, Any] = vars(kind)["__dict__"].__get__(holder)
            return members
    return {}


def _find_type(name: Any) -> type:
    found = _look_up(name) if isinstance(name, str) else None
    if not issubclass(type(found), type):
        is_main = isinstance(name, str) and name.startswith("__main__:")
        raise DecodeError(
            f"the class {name!r} isn't known here",
            hint="It is from a main program: move it to a module that the worker's tasks import."
            if is_main
            else "Import its module where the worker's tasks are imported.",
        )
    return cast("type", found)


def _refuse_unencodable(value: Any, whole: dict[str, Any]) -> NoReturn:
    said = f"the result, of type {value}, could not be stored"
    if "why" in whole:
        raise DecodeError(f"{said}: {whole['why']}")
    if value == TOO_LARGE:
        raise DecodeError(
            "the result is too large to be stored",
            hint="Keep large data elsewhere and return a reference to it. The owner may raise the "
            "limit, max_size: queue.configure.",
        )
    raise DecodeError(
        said, hint="Return JSON's types, or register the type with app.codec.register."
    )


_ENCODERS: dict[type, Encoder] = {
    float: _encode_float,
    dt.datetime: functools.partial(_zoned, "datetime"),
    dt.time: functools.partial(_zoned, "time"),
    dt.date: lambda value: _tagged("date", value.isoformat()),
    dt.timedelta: lambda value: _tagged(
        "timedelta", [value.days, value.seconds, value.microseconds]
    ),
    uuid.UUID: lambda value: _tagged("uuid", str(value)),
    Decimal: lambda value: _tagged("decimal", str(value)),
    bytes: lambda value: _tagged("bytes", _base64(value)),
    bytearray: lambda value: _tagged("bytearray", _base64(value)),
}
# How often a set or dict may compare keys with one hash: that of 500 keys with each other. Many
# such sets in 3 MB take about a second.
_MOST_COMPARED = 500 * 499 // 2
_SEQUENCES = {tuple: "tuple", set: "set", frozenset: "frozenset"}
_SPECIAL: dict[str, Callable[[Any, dict[str, Any]], Any]] = {
    "datetime": lambda value, whole: _unzoned(dt.datetime.fromisoformat(value), whole),
    "time": lambda value, whole: _unzoned(dt.time.fromisoformat(value), whole),
    "enum": _decode_enum,
    "dataclass": _decode_dataclass,
    UNENCODABLE: _refuse_unencodable,
}
_DECODERS: dict[str, Decoder] = {
    "date": dt.date.fromisoformat,
    "timedelta": lambda value: dt.timedelta(*value),
    "uuid": uuid.UUID,
    "decimal": Decimal,
    "float": float,
    "str": lambda value: _unbase64(value).decode("utf-8", "surrogatepass"),
    "bytes": _unbase64,
    "bytearray": lambda value: bytearray(_unbase64(value)),
    "tuple": tuple,
    "set": _set,
    "frozenset": lambda value: frozenset(_set(value)),
    "dict": _dict,
}

# The tags of values that `raw` decodes.
_TEXTS = frozenset({"float", "decimal", "uuid", "date", "time", "datetime", "timedelta"})
_TEXTS |= {"str", "bytes", "bytearray"}


def model_codec(
    get: Callable[[type[Any], Any], Any],
) -> tuple[Encoder, Decoder]:
    """Return encode and decode for SQLAlchemy's mapped classes: stored by key, fetched when run.

    `get(model, key)` returns the row, or None if it no longer exists; `key` is the primary key, a
    tuple if it has several columns. With an AsyncSession `get` is `async def`; register a
    synchronous one with `blocking=True`::

        async def get(model, key):
            async with AsyncSession(engine) as session:
                return await session.get(model, key)

        app.codec.register(Base, "row", *model_codec(get))

    If the row no longer exists, the job fails at once with a DecodeError that names it.
    """

    def encode(row: Any) -> Any:
        from sqlalchemy import inspect as inspect_row  # noqa: PLC0415 (optional)

        identity = inspect_row(row).identity
        if identity is None:
            raise EncodeError(
                f"{_class_name(type(row))} has no key yet", hint="Flush the session first."
            )
        key = identity[0] if len(identity) == 1 else tuple(identity)
        return {"type": _type_name(type(row)), "key": key}

    def gone(value: Any) -> DecodeError:
        return DecodeError(f"the row {value['type']} {value['key']!r} has gone")

    if inspect.iscoroutinefunction(get):

        async def decode_async(value: Any) -> Any:
            row = await get(_find_type(value["type"]), value["key"])
            if row is None:
                raise gone(value)
            return row

        return encode, decode_async

    def decode(value: Any) -> Any:
        row = get(_find_type(value["type"]), value["key"])
        if row is None:
            raise gone(value)
        return row

    return encode, decode
