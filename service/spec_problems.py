"""Turns pydantic's errors into problems a person can act on: the path, what stood there, and what would be legal."""

from __future__ import annotations

import difflib
import typing
from collections.abc import Iterable, Mapping
from types import UnionType
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from service.errors import Problem

_BOUNDS = {
    "greater_than": ("gt", "above"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "below"),
    "less_than_equal": ("le", "at most"),
}
_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "text",
    "tuple": "a list",
    "list": "a list",
    "dict": "a mapping",
    "mapping": "a mapping",
    "model": "a mapping",
    "finite": "a finite number",
}


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


def _problem(details: ErrorDetails, model: type[BaseModel]) -> Problem:
    # Loc entries that are not fields or indices name a union's branch; they mean nothing to a reader.
    location = [part for part in details["loc"] if not (isinstance(part, str) and part in _BRANCHES)]
    path = ".".join(str(part) for part in location)
    kind, context, value = details["type"], details.get("ctx", {}), details["input"]
    if kind == "extra_forbidden":
        known = _fields_at(model, location[:-1])
        close = nearest(str(location[-1]), known)
        hint = f"; did you mean {close}?" if close else ""
        return Problem(path, _shorten(value), f"unknown field {location[-1]!r}{hint}", ", ".join(known))
    if kind == "missing":
        return Problem(path, None, "is missing", _description(model, location) or "required")
    if kind == "literal_error":
        return Problem(path, _shorten(value), f"{value!r} is not one of the legal values", context["expected"])
    if kind in _BOUNDS:
        bound, word = _BOUNDS[kind]
        return Problem(path, _shorten(value), f"{value!r} is out of range", f"{word} {context[bound]:,}")
    if kind in ("too_short", "too_long"):
        word, bound = ("at least", context["min_length"]) if kind == "too_short" else ("at most", context["max_length"])
        return Problem(path, _shorten(value), f"has {context['actual_length']} entries", f"{word} {bound}")
    if kind == "string_pattern_mismatch":
        return Problem(path, _shorten(value), f"{value!r} has characters a name cannot have", f"text that matches {context['pattern']}")
    if kind == "value_error":
        return Problem(path, _shorten(value), str(context["error"]), "as the message says")
    if kind in ("model_type", "dict_type"):
        return Problem(path, _shorten(value), f"is {_shorten(value)!r} where a mapping belongs", _mapping_with(_fields_at(model, location)))
    legal = next((text for prefix, text in _KINDS.items() if kind.startswith(prefix)), details["msg"])
    return Problem(path, _shorten(value), details["msg"][0].lower() + details["msg"][1:], legal)


_BRANCHES = frozenset({"bool", "int", "str", "float"})


def _mapping_with(fields: list[str]) -> str:
    return f"a mapping with keys of: {', '.join(fields)}" if fields else "a mapping"


def _fields_at(model: type[BaseModel], location: list[Any]) -> list[str]:
    current: Any = model
    for part in location:
        field = current.model_fields.get(part) if isinstance(current, type) and issubclass(current, BaseModel) else None
        if field is None:
            return []
        current = _model_in(field.annotation)
    return list(current.model_fields) if isinstance(current, type) and issubclass(current, BaseModel) else []


def _description(model: type[BaseModel], location: list[Any]) -> str | None:
    current: Any = model
    description: str | None = None
    for part in location:
        field = current.model_fields.get(part) if isinstance(current, type) and issubclass(current, BaseModel) else None
        if field is None:
            return None
        description, current = field.description, _model_in(field.annotation)
    return description


def _model_in(annotation: Any) -> Any:
    if typing.get_origin(annotation) in (typing.Union, UnionType):
        return next((a for a in typing.get_args(annotation) if isinstance(a, type) and issubclass(a, BaseModel)), None)
    return annotation


def _shorten(value: Any) -> Any:
    if isinstance(value, Mapping):
        return f"a mapping with {len(value)} keys"
    text = value if isinstance(value, str) else repr(value)
    return value if len(text) <= 80 else text[:77] + "…"
