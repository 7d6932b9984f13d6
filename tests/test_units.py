"""How quantities are written for people."""

from __future__ import annotations

import pytest

from service.records import Failure, FailureKind, Report, ReportStatus
from service.units import format_bytes, format_count, format_delta, format_parameters, format_seconds, format_share
from service.verdict_text import advice, governing, verdict_sentence
from tests.browser.samples import make_report


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (None, "unknown"),
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.50 KiB"),
        (-(3 << 20), "−3.00 MiB"),
        (102_786_657_280, "95.73 GiB"),
        (5 << 40, "5.00 TiB"),
    ],
)
def test_bytes_stand_in_the_largest_unit_that_keeps_them_above_one(num_bytes: int | None, text: str) -> None:
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize(("delta", "text"), [(None, "unknown"), (0, "no change"), (1536, "+1.50 KiB"), (-1536, "−1.50 KiB")])
def test_a_difference_carries_its_sign(delta: int | None, text: str) -> None:
    assert format_delta(delta) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(None, "unknown"), (0.0, "0 ms"), (3.15e-4, "315 µs"), (0.25, "250 ms"), (1.0, "1.0 s"), (170.04, "170.0 s")]
)
def test_seconds_keep_about_three_digits(seconds: float | None, text: str) -> None:
    assert format_seconds(seconds) == text


def test_counts_and_parameters() -> None:
    assert (format_count(None), format_count(3_621_802)) == ("unknown", "3,621,802")
    assert (format_parameters(671_026_419_200), format_parameters(43_500_000), format_parameters(999)) == ("671.03 B", "43.5 M", "999")


def test_every_verdict_names_both_sides() -> None:
    fits, over = make_report(), make_report(scale=4)
    assert verdict_sentence(fits) == "needs 28.04 GiB, 95.73 GiB available per device: 67.69 GiB free"
    assert verdict_sentence(over) == "needs 112.15 GiB, 95.73 GiB available per device: 16.42 GiB too much"
    near = fits.model_copy(update={"status": ReportStatus.UNKNOWN})
    assert verdict_sentence(near).endswith("too close to tell before code generation; weigh at depth full")
    # Allocated bytes fit by themselves, and the program's code takes what is left.
    squeezed = fits.model_copy(update={"status": ReportStatus.DOES_NOT_FIT})
    assert verdict_sentence(squeezed).endswith("95.73 GiB available per device before program code, which takes the rest")


def test_what_does_not_fit_says_where_to_begin() -> None:
    assert advice(make_report()) == ""
    over = make_report(scale=4)
    assert over.capacity_bytes is not None
    assert advice(
        over.model_copy(update={"argument_bytes": over.capacity_bytes - (3 << 30), "classes": {"logits": 5 << 30, "gradients": 4 << 30}})
    ) == ("State and batch leave 3.00 GiB. The most beside them is logits, 5.00 GiB: try more train.vocab_chunks.")
    state_alone = over.model_copy(update={"argument_bytes": over.capacity_bytes})
    assert advice(state_alone).startswith("State and batch alone take 95.73 GiB, so no remat policy or batch size helps")


def test_a_share_of_nothing_and_a_share_too_small_to_show_are_told_apart() -> None:
    assert [format_share(share) for share in (None, 0.0, 0.0004, 0.0005, 0.1618, 1.0)] == [
        "unknown",
        "0.0 %",
        "<0.1 %",
        "0.1 %",
        "16.2 %",
        "100.0 %",
    ]


def test_a_failed_program_decides_before_any_that_was_measured() -> None:
    failure = Failure(kind=FailureKind.CRASHED, message="signal 11")
    failed = Report(program="dropless", status=ReportStatus.FAILED, depth="memory", failure=failure)
    assert governing([make_report(scale=4), failed]) is failed
    assert governing([make_report(), make_report("dropless", scale=2)]).program == "dropless"  # type: ignore[union-attr]
    assert governing([]) is None
    assert verdict_sentence(failed) == "signal 11"
