"""Trip counts are derived where a loop counts, and unknown with a reason where it does not."""

from __future__ import annotations

import pytest

from service.compile.hlo import Program
from service.compile.trips import Count, execution_counts, trip_count
from tests.compile.hlo_text import program_from_text, recorded


def loop(
    *,
    start: str = "s32[] constant(0)",
    condition: str = "  %n = s32[] constant(6)\n  ROOT %c = pred[] compare(%i, %n), direction=LT",
    step: str = "  %d = s32[] constant(1)\n  %j = s32[] add(%i, %d)",
    before: str = "",
) -> Program:
    """A loop over (counter, bound, value); `start` defines the counter outside, `condition` and `step` what is done with it."""
    return program_from_text(f"""HloModule m

{before}
%body (p: (s32[], s32[], f32[7])) -> (s32[], s32[], f32[7]) {{
  %p = (s32[], s32[], f32[7]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %b = s32[] get-tuple-element(%p), index=1
  %x = f32[7] get-tuple-element(%p), index=2
{step}
  %y = f32[7] sine(%x)
  ROOT %t = (s32[], s32[], f32[7]) tuple(%j, %b, %y)
}}

%condition (p: (s32[], s32[], f32[7])) -> pred[] {{
  %p = (s32[], s32[], f32[7]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %b = s32[] get-tuple-element(%p), index=1
{condition}
}}

ENTRY %e {{
  %x = f32[7] parameter(0)
  %k = s32[] parameter(1)
  %s = {start}
  %eleven = s32[] constant(11)
  %t = (s32[], s32[], f32[7]) tuple(%s, %eleven, %x)
  ROOT %w = (s32[], s32[], f32[7]) while(%t), condition=%condition, body=%body
}}
""")


def count_of(program: Program) -> Count:
    return trip_count(program, next(i for i in program.instructions.values() if i.opcode == "while"))


def compare(left: str, right: str, direction: str, constant: int = 6) -> str:
    return f"  %n = s32[] constant({constant})\n  ROOT %c = pred[] compare({left}, {right}), direction={direction}"


COUNTED = {
    "a scan": ({}, 6),
    "one iteration peeled off": ({"start": "s32[] constant(1)"}, 5),
    "inclusive bound": ({"condition": compare("%i", "%n", "LE")}, 7),
    "bound on the left": ({"condition": compare("%n", "%i", "GT")}, 6),
    "until equal": ({"condition": compare("%i", "%n", "NE")}, 6),
    "bound carried unchanged": ({"condition": compare("%i", "%b", "LT")}, 11),
    "steps of four": ({"step": "  %d = s32[] constant(4)\n  %j = s32[] add(%i, %d)"}, 2),
    "step first in the sum": ({"step": "  %d = s32[] constant(2)\n  %j = s32[] add(%d, %i)"}, 3),
    "counting down": (
        {
            "start": "s32[] constant(17)",
            "condition": compare("%i", "%n", "GE", 2),
            "step": "  %d = s32[] constant(3)\n  %j = s32[] subtract(%i, %d)",
        },
        6,
    ),
    "never": ({"start": "s32[] constant(6)"}, 0),
    "counter copied": (
        {"start": "s32[] constant(2)", "step": "  %q = s32[] copy(%i)\n  %d = s32[] constant(1)\n  %j = s32[] add(%q, %d)"},
        4,
    ),
    "condition and step fused": (
        {
            "before": """%less (a: s32[]) -> pred[] {
  %a = s32[] parameter(0)
  %m = s32[] constant(6)
  ROOT %l = pred[] compare(%a, %m), direction=LT
}

%more (a: s32[]) -> s32[] {
  %a = s32[] parameter(0)
  %o = s32[] constant(1)
  ROOT %r = s32[] add(%a, %o)
}""",
            "condition": "  ROOT %c = pred[] fusion(%i), kind=kLoop, calls=%less",
            "step": "  %j = s32[] fusion(%i), kind=kLoop, calls=%more",
        },
        6,
    ),
}


@pytest.mark.parametrize("case", COUNTED)
def test_counted_loop_has_its_count(case: str) -> None:
    parts, expected = COUNTED[case]
    assert count_of(loop(**parts)) == Count(expected)


UNKNOWN = {
    "start is an argument": ({"start": "s32[] copy(%k)"}, "the start of w is computed at run time"),
    "step is data": ({"step": "  %j = s32[] add(%i, %b)"}, None),
    "counter doubles": ({"step": "  %j = s32[] add(%i, %i)"}, "no counter of w advances by a constant"),
    "moves away from the bound": (
        {"step": "  %d = s32[] constant(1)\n  %j = s32[] subtract(%i, %d)"},
        "the counter of w moves away from its bound",
    ),
    "steps over an equality": (
        {"condition": compare("%i", "%n", "NE"), "step": "  %d = s32[] constant(4)\n  %j = s32[] add(%i, %d)"},
        "the counter of w moves away from its bound",
    ),
    "condition is no comparison": (
        {"condition": "  %n = s32[] constant(6)\n  %c = pred[] compare(%i, %n), direction=LT\n  ROOT %d = pred[] not(%c)"},
        "is not a comparison",
    ),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_loop_that_cannot_be_counted_is_unknown_with_a_reason(case: str) -> None:
    parts, reason = UNKNOWN[case]
    count = count_of(loop(**parts))
    if case == "step is data":
        # The bound that is added is carried unchanged from a constant, so this one does count: 0, 11.
        assert count == Count(1)
        return
    assert count.value is None
    assert reason in (count.reason or "")


def test_bound_that_the_body_changes_is_unknown() -> None:
    program = loop(
        condition=compare("%i", "%b", "LT"), step="  %d = s32[] constant(1)\n  %j = s32[] add(%i, %d)\n  %b2 = s32[] add(%b, %d)"
    )
    assert count_of(program) == Count(11)
    text_changed = program_from_text(CHANGED_BOUND)
    assert count_of(text_changed).value is None


CHANGED_BOUND = """HloModule m

%body (p: (s32[], s32[])) -> (s32[], s32[]) {
  %p = (s32[], s32[]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %b = s32[] get-tuple-element(%p), index=1
  %one = s32[] constant(1)
  %j = s32[] add(%i, %one)
  %c = s32[] subtract(%b, %one)
  ROOT %t = (s32[], s32[]) tuple(%j, %c)
}

%condition (p: (s32[], s32[])) -> pred[] {
  %p = (s32[], s32[]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %b = s32[] get-tuple-element(%p), index=1
  ROOT %c = pred[] compare(%i, %b), direction=LT
}

ENTRY %e {
  %zero = s32[] constant(0)
  %ten = s32[] constant(10)
  %t = (s32[], s32[]) tuple(%zero, %ten)
  ROOT %w = (s32[], s32[]) while(%t), condition=%condition, body=%body
}
"""


def test_counts_of_nested_loops_multiply_and_conditions_run_once_more() -> None:
    program = recorded("v5e-2x4.nested_scans_7_by_5")
    counts = execution_counts(program)
    runs = {}
    for instruction in program.instructions.values():
        if instruction.opcode == "while":
            body, condition = program.loop_parts(instruction)
            runs[counts[instruction.computation].value] = (counts[body].value, counts[condition].value)
    assert runs == {1: (7, 8), 7: (35, 42)}


def test_only_what_control_reaches_is_counted() -> None:
    program = recorded("v5e-2x4.combined_all_reduce")
    assert set(execution_counts(program)) == {program.entry}


def test_unknown_stays_unknown_in_sums_and_products_but_nothing_times_unknown_is_nothing() -> None:
    unknown = Count(None, "why")
    assert Count(3).times(unknown) == unknown.times(Count(3)) == unknown
    assert Count(3).plus(unknown) == unknown.plus(Count(3)) == unknown
    assert Count(0).times(unknown) == unknown.times(Count(0)) == Count(0)
    assert Count(3).times(Count(5)) == Count(15)
    assert Count(3).plus(Count(5)) == Count(8)
