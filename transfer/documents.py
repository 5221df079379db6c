"""Documents in JSON, TOML or msgpack from outside: records that are their schema, and a check of keys."""

from __future__ import annotations

import difflib
import json
import reprlib
from collections import Counter
from functools import cache
from numbers import Integral, Real
from typing import Any, ClassVar, Self

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from weightcast.transfer.errors import InputError, LayoutError

__all__ = ["Record", "as_json", "unique_keys", "whole_number"]

_UNKNOWN = "unexpected_keyword_argument"
"""The name that pydantic has for a key that a dataclass does not have."""

_TYPES = {"array": "a list", "integer": "a whole number", "object": "a table", "string": "text"}


class Record:
    """Base of the dataclasses that are read from documents. Their annotations are the schema; other keys are refused.

    The description of a value is what errors say was expected. `__post_init__` may raise ValueError.
    """

    __slots__ = ()
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", revalidate_instances="always")
    refusal: ClassVar[type[InputError]] = InputError

    @classmethod
    @cache
    def schema(cls) -> TypeAdapter[Any]:
        """The schema of this kind of record, which is made when it is first used."""
        return TypeAdapter(cls)

    @classmethod
    def given(cls, document: object, where: str = "") -> Self:
        """Reads a record from JSON, as bytes or text, or from the values of a document that is decoded already.

        A record that was made in code is checked in the same way.

        Raises `refusal` in one line that begins with `where` and names the key, the value and what was expected.
        """
        schema = cls.schema()
        try:
            if isinstance(document, bytes | str):
                record: Self = schema.validate_json(document)
            else:
                record = schema.validate_python(document)
        except ValidationError as error:
            # A misspelt key comes first: it may be why another one is missing.
            fault = min(error.errors(), key=lambda fault: fault["type"] != _UNKNOWN)
            message = f"{where or cls.__name__.lower()}: {_explained(fault, schema.json_schema())}"
            raise cls.refusal(" ".join(message.split())[:1000]) from None
        return record


def _explained(fault: ErrorDetails, schema: dict[str, Any]) -> str:
    path = ".".join(map(str, fault["loc"]))
    if fault["type"] == "missing":
        return f"{path} is missing"
    if fault["type"] == _UNKNOWN:
        keys = _property(schema, fault["loc"][:-1])["properties"]
        near = difflib.get_close_matches(str(fault["loc"][-1]), keys, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        return f"{path:.80} is not known; known are {', '.join(keys)}{hint}"
    if fault["type"] in ("value_error", "json_invalid"):  # of several values, or of all
        return f"{path}: {fault['msg'].removeprefix('Value error, ')}".removeprefix(": ")
    field = _property(schema, fault["loc"])
    start = f"{path or 'it'} is {_shown(fault['input'])}"
    if "properties" in field:
        return f"{start}, expected a table of {', '.join(field['properties'])}"
    if "enum" in field:
        return f"{start}, expected {', '.join(map(repr, field['enum']))}"
    if "description" in field:
        return f"{start}, expected {field['description']}"
    if fault["type"].endswith("_type") and field.get("type") in _TYPES:
        return f"{start}, expected {_TYPES[field['type']]}"
    return f"{start}: {fault['msg']}"


def _property(schema: dict[str, Any], path: tuple[int | str, ...]) -> dict[str, Any]:
    """The part of a JSON schema that is for the value at a path."""
    part = _resolved(schema, schema)
    for step in path:
        inner = part.get("properties", {}).get(step) or part.get("additionalProperties") or part.get("items")
        part = _resolved(inner if isinstance(inner, dict) else {}, schema)
    return part


def _resolved(part: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    """A part of a JSON schema in place of the reference to it; of one that may be null, the other alternative."""
    while alternatives := part.get("allOf") or part.get("anyOf"):
        part = alternatives[0]
    return schema["$defs"][part["$ref"].rpartition("/")[2]] if "$ref" in part else part


def _shown(value: object) -> str:
    # Python refuses to write out integers of thousands of digits, which TOML can have in hexadecimal.
    if isinstance(value, int) and value.bit_length() > 256:
        return f"of {value.bit_length()} bits"
    try:
        return f"{value!r:.80}"
    except (ValueError, RecursionError):
        return f"a {type(value).__name__} that is too large to show"


def whole_number(name: str, value: object) -> int:
    """The int of a whole number of any library. Raises InputError for other values, truth values among them."""
    if isinstance(value, Integral) and not isinstance(value, bool):
        return int(value)
    raise InputError(f"{name} is {_shown(value)}, expected a whole number")


def as_json(document: object) -> bytes:
    """A document as JSON, with the numbers of any library. Raises InputError for what JSON does not have."""
    try:
        return json.dumps(document, default=_plain_number, allow_nan=False, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"{_shown(document)} cannot be sent as JSON: {error}") from None


def _plain_number(value: object) -> int | float:
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    raise TypeError(f"{_shown(value)} is a {type(value).__name__}")


def unique_keys(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    """The object of these keys and values, for the `object_pairs_hook` of a decoder. A decoder alone would take the
    last of equal keys. Raises LayoutError."""
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        duplicate = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise LayoutError(f"key {reprlib.repr(duplicate)} occurs twice in one object")
    return mapping
