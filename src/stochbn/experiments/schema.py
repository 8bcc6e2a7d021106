"""Values from JSON, held against types: what a file says is checked in full before anything uses it."""

import sys
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from reprlib import repr as shorten
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints, is_typeddict

Count = Annotated[int, 1]  # a whole number of at least 1
Index = Annotated[int, 0]

_MOST = 2**53  # beyond it neighbours share a float
_NAMES = {str: "printable text", int: "a whole number", float: "a number", bool: "true or false", NoneType: "null"}


def check(value: Any, kind: Any, name: str) -> None:
    """Raises `ValueError` unless a value from JSON is of a type, whose parts are checked too.

    A type is one of JSON's; `Count`, `Index` or a `Literal`; a union, a list, a tuple or a dict of such; or a TypedDict
    or dataclass, the former with keys that are not in it. Text has to be printable, since it ends up in pages, and
    whole numbers have to be within what floats can count.

    Examples:
        >>> check({"sizes": [8, 16]}, dict[str, list[Count]], "header")
        >>> check({"sizes": [8, 0]}, dict[str, list[Count]], "header")
        Traceback (most recent call last):
        ValueError: expected a whole number of at least 1 as header.sizes[1], got 0
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if is_typeddict(kind) or is_dataclass(kind):
        _check_fields(value, kind, name)
    elif origin is dict:
        _require(isinstance(value, dict), "an object", name, value)
        _check_all((arguments[1], f"{name}.{key}", item) for key, item in _items(value))
    elif origin is list or (origin is tuple and arguments[-1] is Ellipsis):
        _require(isinstance(value, (list, tuple)), "a list", name, value)
        _check_all((arguments[0], f"{name}[{i}]", item) for i, item in enumerate(value))
    elif origin is tuple:
        wanted = f"{len(arguments)} values"
        _require(isinstance(value, (list, tuple)) and len(value) == len(arguments), wanted, name, value)
        _check_all((one, f"{name}[{i}]", item) for i, (one, item) in enumerate(zip(arguments, value, strict=True)))
    elif origin is Literal:
        _require(value in arguments, f"one of {', '.join(map(str, arguments))}", name, value)
    elif origin is UnionType:
        wanted = " or ".join(_NAMES[one] for one in arguments)
        _require(any(_is_plain(value, one) for one in arguments), wanted, name, value)
    elif origin is Annotated:
        least = arguments[1]
        _require(_is_plain(value, int) and value >= least, f"a whole number of at least {least}", name, value)
    else:
        _require(_is_plain(value, kind), _NAMES[kind], name, value)


def _check_fields(value: object, kind: Any, name: str) -> None:
    _require(isinstance(value, dict), "an object", name, value)
    found = dict(_items(value))
    hints = get_type_hints(kind, include_extras=True)
    if is_dataclass(kind):
        required = {field.name for field in fields(kind) if field.default is MISSING}
        _require(found.keys() <= hints.keys(), "known entries only", name, sorted(found.keys() - hints.keys()))
    else:
        required = kind.__required_keys__
    for key in sorted(required - found.keys()):
        raise ValueError(f"expected {name}.{key}, got none")
    _check_all((hints[key], f"{name}.{key}", item) for key, item in found.items() if key in hints)


def _check_all(parts: Iterable[tuple[Any, str, object]]) -> None:
    for kind, name, value in parts:
        check(value, kind, name)


def _items(value: object) -> Iterable[tuple[str, object]]:
    assert isinstance(value, Mapping)
    for key in value:
        _require(_is_plain(key, str), _NAMES[str], "a key", key)
    return value.items()


def _is_plain(value: object, kind: type) -> bool:
    if kind is float:  # JSON has 1 for 1.0; NaN and infinity are what a diverged training leaves
        return type(value) is float or (type(value) is int and abs(value) <= sys.float_info.max)
    if kind is int:
        return type(value) is int and abs(value) <= _MOST
    if kind is str:
        return isinstance(value, str) and value.isprintable()
    return type(value) is kind


def _require(sound: bool, wanted: str, name: str, got: object) -> None:
    if not sound:
        raise ValueError(f"expected {wanted} as {name}, got {shorten(got)}")
