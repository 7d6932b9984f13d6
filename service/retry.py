"""Whether the programs of a spec are a pair that replays dropped tokens, and what that pair needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from service.compile.pair import weigh_pair
from service.records import Pair, Report
from service.steps.config import StepsConfig


def weigh_retry(spec: Mapping[str, Any], reports: Sequence[Report], *, step_seconds: tuple[float, float] | None = None) -> Pair | None:
    """The pair of a spec that retries, in the mode its steps job uses; None where it does not retry or a program has no report.

    `spec` is a validated spec as plain data, as jobs keep it; `step_seconds` are measured times of a candidate and of a dropless step.
    """
    by_program = {report.program: report for report in reports}
    if not retries(spec) or not {"candidate", "dropless"} <= by_program.keys():
        return None
    look_ahead = (spec.get("steps") or {}).get("look_ahead", StepsConfig().look_ahead)
    return weigh_pair(by_program["candidate"], by_program["dropless"], looks_ahead=look_ahead > 0, step_seconds=step_seconds)


def retries(spec: Mapping[str, Any]) -> bool:
    """`StepConfig.retries` of a spec as plain data: field by field, since an older version may have kept what the schema refuses now."""
    model, moe = spec.get("model") or {}, spec.get("moe") or {}
    return bool(moe.get("retry_when_tokens_dropped")) and model.get("experts", ...) is not None
