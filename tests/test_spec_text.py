"""Text is read as what it looks like: one spelling for numbers and booleans, and everything else is text."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from service.errors import SpecError
from service.spec import load_spec, parse_spec
from service.spec_text import MAX_DIGITS, MAX_SPEC_NESTING, read_plain, write_plain
from weighbridge.overrides import apply_overrides

READ: dict[str, Any] = {
    "4000": 4000,
    "-5": -5,
    "+5": 5,
    "0": 0,
    "0.5": 0.5,
    ".5": 0.5,
    "1.": 1.0,
    "3e-4": 0.0003,
    "1.5E+3": 1500.0,
    "4e3": 4000.0,
    "true": True,
    "False": False,
    "null": None,
    "~": None,
    "": None,
}
TEXT = (
    *("yes", "no", "on", "off", "y", "n", "Yes", "ON"),
    *("0200", "012", "0o17", "0x10", "0b1", "00", "01.5", "1_000", "1:30", "1:30.5", "1e", "."),
    *("2026-01-01", "2026-01-01T00:00:00Z", ".inf", "-.Inf", ".nan", "="),
)
SPEC = """
model: {preset: tiny}
train: {seq_len: 64}
mesh: {topology: v5e-4, fsdp: 4}
"""


@pytest.mark.parametrize("written", READ)
def test_a_plain_scalar_is_read_as_in_json(written: str) -> None:
    value = read_plain(f"a: {written}")["a"]
    assert (type(value), value) == (type(READ[written]), READ[written])


@pytest.mark.parametrize("written", TEXT)
def test_what_looks_like_no_json_scalar_is_text(written: str) -> None:
    assert read_plain(f"a: {written}") == {"a": written}
    assert read_plain(f'{{"a": "{written}"}}') == {"a": written}


def test_quotes_make_text_of_a_number() -> None:
    assert read_plain("{a: '4', b: \"true\", c: 'null'}") == {"a": "4", "b": "true", "c": "null"}


@pytest.mark.parametrize(
    ("path", "written", "belongs"),
    [
        ("train.seq_len", "yes", "a whole number"),
        ("train.seq_len", "0200", "a whole number"),
        ("train.seq_len", "1:30", "a whole number"),
        ("train.seq_len", "0x40", "a whole number"),
        ("train.seq_len", "6_4", "a whole number"),
        ("train.per_device_batch", "on", "a number"),
        ("train.packing", "off", "true or false"),
    ],
)
def test_a_spec_and_the_command_line_refuse_the_same_text(path: str, written: str, belongs: str) -> None:
    field = path.removeprefix("train.")
    lines = "".join(f"  {name}: {value}\n" for name, value in ({"seq_len": "64"} | {field: written}).items())
    text = SPEC.replace("train: {seq_len: 64}", f"train:\n{lines}")
    for read in (lambda: load_spec(text), lambda: parse_spec(apply_overrides(read_plain(SPEC), [f"{path}={written}"]))):
        with pytest.raises(SpecError) as caught:
            read()
        (problem,) = caught.value.problems
        assert (problem.path, problem.value) == (path, written)
        assert problem.message == f"is the text {written!r} where {belongs} belongs"


def test_a_number_with_an_exponent_is_no_count_but_a_number() -> None:
    with pytest.raises(SpecError) as caught:
        load_spec(SPEC.replace("64", "4e3"))
    (problem,) = caught.value.problems
    assert (problem.message, problem.legal[-12:]) == ("is 4000.0 where a whole number belongs", "; write 4000")
    assert load_spec(SPEC.replace("64", "64, learning_rate: 3e-4")).train.learning_rate == 3e-4


def test_a_date_is_text_and_so_a_name() -> None:
    assert load_spec("scenario: 2026-01-01" + SPEC).scenario == "2026-01-01"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("<<: {a: 1}", "merge keys are not taken; write the keys out"),
        ("a: &x {b: 1}\nc:\n  <<: *x", "aliases are not taken; write the value out"),
        ("a: !!int '0200'", "tags like tag:yaml.org,2002:int are not taken"),
        ("a: ! b", "tags like ! are not taken"),
        ("!!str yes: 1", "tags like"),
        ("yes: 1\nyes: 2", "key 'yes' stands twice"),
        ("true: 1", "key True is not a name"),
        ("? [a]\n: 1", "key .'a'. is not a name"),
        ("a: " + "1" * (MAX_DIGITS + 1), "a number of 401 digits"),
        ("a: -" + "1" * 5000, "a number of 5,001 digits"),
        ("- " * (MAX_SPEC_NESTING + 1), "nested deeper than 32 levels"),
        ("[" * 10_000, "nested deeper than 32 levels"),
    ],
)
def test_what_stands_for_something_else_is_refused_with_its_place(text: str, words: str) -> None:
    with pytest.raises(SpecError, match=rf"at line \d+, column \d+: .*{words}"):
        load_spec(text)


def test_a_billion_laughs_are_refused_at_the_first() -> None:
    lines = ["a: &a [lol, lol, lol, lol, lol, lol, lol, lol, lol]"]
    lines += [f"{name}: &{name} [{', '.join(['*' + before] * 9)}]" for before, name in zip("abcdefgh", "bcdefghi", strict=True)]
    started = time.monotonic()
    with pytest.raises(SpecError, match=r"aliases are not taken; write the value out"):
        load_spec("\n".join(lines))
    assert time.monotonic() - started < 1


@given(st.text(max_size=12) | st.sampled_from(["4e3", "yes", "true", "null", "0200", "1:30", "2026-01-01", "<<", "*a", "-", "1.5"]))
@example("\x85")
def test_what_is_written_is_read_as_the_same_data(text: str) -> None:
    data = {"scenario": text, "list": [text, 4000, 3e-4, 1e16, True, None], "again": [[4, 5], [4, 5]]}
    assert read_plain(write_plain(data)) == data
