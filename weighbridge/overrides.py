"""Changes a spec from the command line: `--set train.seq_len=8192` and its like, applied to plain data before it is checked."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import click
import yaml

from service.spec_text import read_plain


def apply_overrides(data: Any, assignments: Iterable[str]) -> Any:
    """A copy of `data` with each `path=value` put in place; values are read as a spec's are, and missing mappings on the way are made.

    Raises:
        click.BadParameter: an assignment has no `=`, an empty part, an unreadable value, or leads through something that is no mapping.
    """
    changed = copy.deepcopy(data)
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        keys = path.strip().split(".")
        if not equals or not all(keys):
            raise click.BadParameter(f"{assignment!r} is not path=value; for example train.seq_len=8192", param_hint="--set")
        try:
            value = read_plain(text)
        except yaml.YAMLError as error:
            reason = getattr(error, "problem", None) or str(error)
            raise click.BadParameter(f"the value of {assignment!r} is not readable as YAML: {reason}", param_hint="--set") from error
        _put(changed, keys, value, assignment)
    return changed


def _put(data: Any, keys: list[str], value: Any, assignment: str) -> None:
    place = data
    for depth, key in enumerate(keys[:-1]):
        if not isinstance(place, dict):
            break
        if isinstance(place.get(key), str) and keys[: depth + 1] == ["train", "remat"]:
            # `remat: full` is short for `remat: {policy: full}`.
            place[key] = {"policy": place[key]}
        if place.get(key) is None:
            place[key] = {}
        place = place[key]
    if not isinstance(place, dict):
        raise click.BadParameter(f"{assignment!r} leads through something that is not a mapping", param_hint="--set")
    place[keys[-1]] = value
