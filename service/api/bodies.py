"""Reads the JSON of a body as strictly as a spec's YAML is read: UTF-8, no key twice, bounded nesting."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from service.api.errors import RequestError, body_path
from service.errors import Problem
from service.spec_text import MAX_SPEC_NESTING

MAX_NESTING = MAX_SPEC_NESTING + 1
"""Levels of lists and objects in a body: a spec's, and the object that the spec stands in."""


class _Object(dict[str, Any]):
    """A JSON object that knows which of its keys stood more than once; the last value of such a key is kept."""

    repeated: tuple[str, ...] = ()


def read_json(body: bytes) -> tuple[Any, list[Problem]]:
    """The plain data, and a problem for each key that stands twice: with the data known, what else is wrong is told beside them.

    `NaN` and `Infinity`, which JSON does not have and many writers give, are read as numbers, so that a field can be named that holds one.

    Raises:
        RequestError: the body is not JSON, or is nested too deep.
    """
    text = decode(body, "JSON")
    try:
        data = json.loads(text, object_pairs_hook=_object_of)
    except json.JSONDecodeError as error:
        reason = error.msg[0].lower() + error.msg[1:]
        raise _refusal(text, f"not readable as JSON at line {error.lineno}, column {error.colno}: {reason}") from error
    except RecursionError as error:
        raise _refusal(text, f"JSON nested deeper than {MAX_NESTING} levels") from error
    except ValueError as error:
        # The one other thing the reader refuses: Python converts no more than 4,300 digits.
        raise _refusal(text, f"not readable as JSON: {error}") from error
    if _depth(data) > MAX_NESTING:
        raise _refusal(text, f"JSON nested deeper than {MAX_NESTING} levels")
    return data, list(_find_repeated(data, ()))


def decode(body: bytes, language: str) -> str:
    """Raises RequestError where the bytes are not UTF-8."""
    try:
        return body.decode()
    except UnicodeDecodeError as error:
        raise RequestError([Problem("body", f"byte {error.start}", "the text is not UTF-8", f"{language} in UTF-8")]) from error


def _refusal(text: str, message: str) -> RequestError:
    return RequestError([Problem("body", text[:80], message, "one JSON object")])


def _object_of(pairs: Sequence[tuple[str, Any]]) -> _Object:
    result = _Object(pairs)
    if len(result) < len(pairs):
        result.repeated = tuple(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
    return result


def _depth(data: Any) -> int:
    """Levels of lists and objects, counted level by level: the data may be nested deeper than functions can call each other."""
    depth, level = 0, [data]
    while level := [each for each in level if isinstance(each, dict | list)]:
        depth += 1
        level = [inner for each in level for inner in (each.values() if isinstance(each, dict) else each)]
    return depth


def _find_repeated(data: Any, location: tuple[str | int, ...]) -> Iterable[Problem]:
    if isinstance(data, _Object):
        for name in data.repeated:
            yield Problem(body_path((*location, name)), name, f"key {name!r} stands twice", "each key once")
    inner = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for part, value in inner:
        yield from _find_repeated(value, (*location, part))
