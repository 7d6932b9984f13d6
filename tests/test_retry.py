"""Which stored jobs are weighed as a pair that retries."""

from __future__ import annotations

from typing import Any

import pytest

from service.records import Report, ReportStatus
from service.retry import retries, weigh_retry
from service.spec import parse_spec

SPEC: dict[str, Any] = {
    "model": {"preset": "tiny"},
    "train": {"seq_len": 64},
    "mesh": {"topology": "v5e-4", "expert": 4},
    "moe": {"ragged_buffer_factor": 0.5, "retry_when_tokens_dropped": True},
    "programs": ["candidate"],
}
DENSE = {"preset": "tiny", "experts": None, "first_num_dense_layers": 4}
REPORTS = [Report(program=name, status=ReportStatus.OK, depth="memory") for name in ("candidate", "dropless")]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [({}, True), ({"moe": {}}, False), ({"model": DENSE}, False), ({"moe": {}, "model": DENSE}, False)],
)
def test_a_spec_retries_as_plain_data_exactly_where_its_step_does(changes: dict[str, Any], expected: bool) -> None:
    spec = parse_spec(SPEC | changes)
    assert retries(spec.as_json()) == spec.step_config().retries == expected
    assert (weigh_retry(spec.as_json(), REPORTS) is not None) == expected


def test_a_job_of_an_older_version_is_weighed_by_the_fields_that_are_still_known() -> None:
    kept = {"model": {"experts": {}}, "moe": {"retry_when_tokens_dropped": True}, "steps": {"look_ahead": 0, "of_old": True}}
    assert weigh_retry(kept, REPORTS) is not None
    assert retries({"moe": {"retry_when_tokens_dropped": True}})
    assert not any(map(retries, ({}, {"moe": None}, {"model": None, "moe": {"retry_when_tokens_dropped": None}})))
