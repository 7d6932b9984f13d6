"""Reads YAML or JSON text as plain data and writes it, one spelling for each kind of value: nothing is read as what it does not look like.

The usual YAML 1.1 reader takes `yes` for true, `0200` for 128, `1:30` for 90 and `2026-01-01` for a date. Here numbers are decimal
(`4000`, `0.5`, `3e-4`), `true` and `false` are the booleans, `null` is null, and everything else that is not quoted is text.
"""

from __future__ import annotations

import json
import re
from typing import Any

import yaml

MAX_SPEC_NESTING = 32
"""Levels of lists and mappings; a spec has five, and the reader recurses."""
MAX_DIGITS = 400
"""Of one whole number: more than any bound has, and few enough for an answer to show."""


def read_plain(text: str) -> Any:
    """The plain data in YAML or JSON text (JSON is YAML).

    Raises:
        yaml.YAMLError: the text is neither, or uses an alias, a tag, a merge key, a key twice, a key that is no text, or deep nesting.
    """
    return yaml.load(text, Loader=_PlainLoader)


def write_plain(data: Any) -> str:
    """YAML that `read_plain` reads as the same data: text that looks like another kind of value is quoted."""
    # PyYAML leaves some line breaks of Unicode bare (U+0085) and reads them back as spaces; with one of them all is escaped.
    is_printable = json.dumps(data, ensure_ascii=False).isprintable()
    return yaml.dump(data, Dumper=_PlainDumper, sort_keys=False, allow_unicode=is_printable, width=100)


class _PlainLoader(yaml.SafeLoader):
    """YAML as data: no aliases (a few of them can stand for gigabytes), no tags (they ask for what the text does not look like)."""

    yaml_implicit_resolvers = {}  # noqa: RUF012  # PyYAML's name; those of YAML 1.1 are not taken over
    nesting = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent):
            raise _refusal("aliases are not taken; write the value out", event)
        if event.tag is not None:
            raise _refusal(f"tags like {event.tag[:40]} are not taken; write the value alone", event)
        if self.nesting == MAX_SPEC_NESTING:
            raise _refusal(f"nested deeper than {MAX_SPEC_NESTING} levels", event)
        self.nesting += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self.nesting -= 1

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise _refusal(f"key {key!r:.80} is not a name", key_node)
            if key == "<<":
                raise _refusal("merge keys are not taken; write the keys out", key_node)
            if key in seen:
                raise _refusal(f"key {key!r:.80} stands twice", key_node)
            seen.add(key)
        return super().construct_mapping(node, deep=deep)

    def construct_whole_number(self, node: yaml.ScalarNode) -> int:
        if len(node.value) > MAX_DIGITS:
            raise _refusal(f"a number of {len(node.value):,} digits", node)
        return int(node.value)

    def construct_number(self, node: yaml.ScalarNode) -> float:
        return float(node.value)


def _refusal(problem: str, place: Any) -> yaml.MarkedYAMLError:
    """`place` is the event or the node that cannot be."""
    return yaml.MarkedYAMLError(problem=problem, problem_mark=place.start_mark)


_DECIMAL = r"[-+]?(?:0|[1-9][0-9]*)"
for _tag, _pattern, _first in (
    ("null", r"(?:~|null|Null|NULL|)", ["~", "n", "N", ""]),
    ("bool", r"(?:true|True|TRUE|false|False|FALSE)", list("tTfF")),
    ("int", _DECIMAL, list("-+0123456789")),
    # 0.5, .5, 1e6; a sequence of digits alone is the line above.
    ("float", rf"(?:{_DECIMAL}(?:\.[0-9]*)?|[-+]?\.[0-9]+)(?:[eE][-+]?[0-9]+)?", list("-+.0123456789")),
):
    _PlainLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"{_pattern}\Z"), _first)
_PlainLoader.add_constructor("tag:yaml.org,2002:int", _PlainLoader.construct_whole_number)
_PlainLoader.add_constructor("tag:yaml.org,2002:float", _PlainLoader.construct_number)


class _PlainDumper(yaml.SafeDumper):
    """Quotes by what the reader here would take a text for."""

    yaml_implicit_resolvers = _PlainLoader.yaml_implicit_resolvers

    def ignore_aliases(self, data: Any) -> bool:
        return True
