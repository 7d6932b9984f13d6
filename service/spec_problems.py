"""Turns pydantic's errors into problems a person can act on: the path, what stood there, and what would be legal.

What is legal is read from the JSON schema of the model, so that a bound is stated once, beside its field.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from service.errors import Problem

MAX_SHOWN = 80
"""Characters of a value that a problem repeats."""

_BOUNDS: Mapping[str, tuple[str, str]] = {
    "greater_than": ("gt", "above"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "below"),
    "less_than_equal": ("le", "at most"),
}
"""pydantic's error to its bound's name in the context, and the words for it."""
_OF_ANOTHER_TYPE: Mapping[str, str] = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "text",
    "tuple_type": "a list",
    "list_type": "a list",
    "dict_type": "a mapping",
    "mapping_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
}
"""pydantic's error to what belongs there."""
_BRANCHES = frozenset({"bool", "int", "str", "float"})
"""Entries of an error's place that are no fields or indices: they name a union's branch and mean nothing to a reader."""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that `name` was most likely meant to be; None when none is close."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return matches[0] if matches else None


def problems_of(error: ValidationError, model: type[BaseModel]) -> list[Problem]:
    """Every error of a validation, each with its dotted path, its value and what is legal there."""
    all_details = error.errors(include_url=False)
    # A list whose entries were refused counts as too short; its entries' own errors say what is wrong.
    refused = {details["loc"][:-1] for details in all_details}
    told = [details for details in all_details if not (details["type"] == "too_short" and details["loc"] in refused)]
    return [_problem(details, model) for details in told]


def shorten(value: Any) -> Any:
    """`value` as a problem shows it: of a bounded length, and of a kind that JSON can spell."""
    if isinstance(value, Mapping):
        return f"a mapping with {len(value)} keys"
    if isinstance(value, float):
        value = spell_float(value)
    text = value if isinstance(value, str) else repr(value)
    return value if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "…"


def spell_float(value: float) -> float | str:
    """`value` as JSON can write it: text where it is not finite."""
    return value if math.isfinite(value) else "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _problem(details: ErrorDetails, model: type[BaseModel]) -> Problem:
    place = [part for part in details["loc"] if not (isinstance(part, str) and part in _BRANCHES)]
    schema = _schema_at(model, place)
    message, legal = _texts(details, place, model, schema)
    value = None if details["type"] == "missing" else shorten(details["input"])
    return Problem(".".join(str(shorten(part)) for part in place), value, message, legal)


def _texts(details: ErrorDetails, place: Sequence[Any], model: type[BaseModel], schema: Mapping[str, Any]) -> tuple[str, str]:
    """What is wrong, and what would be legal."""
    kind, context, value = details["type"], details.get("ctx", {}), details["input"]
    legal = _sentence(model, schema) or legal_by_error(kind, context)
    if kind == "illegal":
        return context["message"], context["legal"]
    if kind == "extra_forbidden":
        known = list(_schema_at(model, place[:-1]).get("properties", ()))
        close = nearest(str(place[-1]), known)
        return f"unknown field {place[-1]!r:.{MAX_SHOWN}}" + (f"; did you mean {close}?" if close else ""), ", ".join(known)
    if kind == "missing":
        return "is missing", legal or "required"
    if kind == "literal_error":
        return f"{_quoted(value)} is not one of the legal values", legal
    # An int beyond every float is no float to pydantic.
    if kind in _BOUNDS or (kind == "float_type" and isinstance(value, int) and not isinstance(value, bool)):
        return f"{_quoted(value)} is out of range", legal
    if kind == "finite_number":
        return f"{_quoted(value)} is not a finite number", legal
    if kind in ("too_short", "too_long"):
        return f"has {_counted(context['actual_length'], 'entry', 'entries')}", legal
    if kind in ("string_too_short", "string_too_long"):
        return f"has {_counted(len(value), 'character', 'characters')}", legal
    if kind == "string_pattern_mismatch":
        return f"{_quoted(value)} has characters a name cannot have", legal
    if kind == "string_unicode":
        return "holds half a surrogate pair, which is no character", legal
    if kind in _OF_ANOTHER_TYPE:
        return f"is {_named(value)} where {_OF_ANOTHER_TYPE[kind]} belongs", legal + _rewritten(kind, value, schema)
    if kind == "value_error":
        return str(context["error"]), legal
    return details["msg"][0].lower() + details["msg"][1:], legal


def legal_by_error(kind: str, context: Mapping[str, Any]) -> str:
    """What is legal by the error alone: for what no schema describes, like the parameters of a query."""
    if kind in _BOUNDS:
        name, words = _BOUNDS[kind]
        return f"{words} {_number(context[name])}"
    if kind == "string_too_short":
        return f"text of at least {_counted(context['min_length'], 'character', 'characters')}"
    if kind == "string_too_long":
        return f"text of at most {_counted(context['max_length'], 'character', 'characters')}"
    if kind == "too_short":
        return f"at least {context['min_length']:,}"
    if kind == "too_long":
        return f"at most {context['max_length']:,}"
    return context.get("expected") or _OF_ANOTHER_TYPE.get(kind, "")


def _quoted(value: Any) -> str:
    """A value as a spec would write it."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    short = shorten(value)
    return repr(short) if isinstance(value, str) else str(short)


def _named(value: Any) -> str:
    """What a value of another type is, in the words of a spec."""
    if isinstance(value, str):
        return f"the text {_quoted(value)}"
    if isinstance(value, Mapping):
        return "a mapping"
    return "a list" if isinstance(value, list | tuple) else _quoted(value)


def _rewritten(kind: str, value: Any, schema: Mapping[str, Any]) -> str:
    """How a value that was refused for its type alone would be written."""
    if kind == "int_type" and isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return f"; write {int(value)}"
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind == "string_type" and is_number and re.search(schema.get("pattern", "$."), str(shorten(value))):
        return f'; write "{shorten(value)}"'
    return ""


def _counted(count: int, one: str, more: str) -> str:
    return f"{count:,} {one if count == 1 else more}"


@cache
def _schema_of(model: type[BaseModel]) -> Mapping[str, Any]:
    return {} if model is BaseModel else model.model_json_schema()


def _schema_at(model: type[BaseModel], place: Sequence[Any]) -> Mapping[str, Any]:
    """The JSON schema of what stands at a place; empty where there is none."""
    current = _schema_of(model)
    for part in place:
        inner = _resolved(model, current)
        if isinstance(part, int):
            current = inner.get("items") or next(iter(inner.get("prefixItems", ())), {})
        else:
            current = inner.get("properties", {}).get(part) or {}
    return {**_resolved(model, current), **{key: value for key, value in current.items() if key == "description"}}


def _resolved(model: type[BaseModel], schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """`schema` with its reference followed; of one that may be null, the other branch, marked as such."""
    branches = schema.get("anyOf", ())
    others = [branch for branch in branches if branch.get("type") != "null"]
    if len(others) == 1:
        return {**_resolved(model, others[0]), "nullable": len(branches) > 1}
    if "$ref" in schema:
        return _resolved(model, _schema_of(model)["$defs"][schema["$ref"].rpartition("/")[2]])
    return schema


def _sentence(model: type[BaseModel], schema: Mapping[str, Any]) -> str:
    """What is legal by a resolved schema, in words."""
    kind = schema.get("type")
    if "enum" in schema or "const" in schema:
        *others, last = (repr(value) for value in schema.get("enum", [schema.get("const")]))
        text = f"{', '.join(others)} or {last}" if others else last
    elif kind in ("integer", "number"):
        text = ("a whole number" if kind == "integer" else "a number") + _range(schema)
    elif kind == "boolean":
        text = "true or false"
    elif kind == "string":
        text = "text" + (f" of at most {schema['maxLength']} characters" if "maxLength" in schema else "")
        if "pattern" in schema and "description" not in schema:
            text += f" that matches {schema['pattern']}"
    elif kind == "array":
        text = f"a list{_length(schema)}, each {_sentence(model, _resolved(model, schema.get('items', {})))}"
    elif kind == "object":
        fields = ", ".join(schema.get("properties", ()))
        text = f"a mapping with keys of: {fields}" if fields else "a mapping"
        if "maxProperties" in schema:
            text += f" of at most {_counted(schema['maxProperties'], 'entry', 'entries')}"
        return ("null or " if schema.get("nullable") else "") + text
    else:
        return schema.get("description", "")
    text += " or null" if schema.get("nullable") else ""
    return text + (f" ({schema['description']})" if "description" in schema else "")


def _range(schema: Mapping[str, Any]) -> str:
    low, above, high, below = (_number(schema.get(key)) for key in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"))
    if low is not None and high is not None:
        return f" from {low} to {high}"
    bounds = (("at least", low), ("above", above), ("at most", high), ("below", below))
    text = " and ".join(f"{word} {bound}" for word, bound in bounds if bound is not None)
    return f" {text}" if text else ""


def _number(bound: float | None) -> str | None:
    return None if bound is None else f"{int(bound):,}" if float(bound).is_integer() else f"{bound:g}"


def _length(schema: Mapping[str, Any]) -> str:
    low, high = schema.get("minItems"), schema.get("maxItems")
    if low is not None and high is not None:
        return f" of {low} to {_counted(high, 'entry', 'entries')}"
    if low is not None:
        return f" of at least {_counted(low, 'entry', 'entries')}"
    return f" of at most {_counted(high, 'entry', 'entries')}" if high is not None else ""
