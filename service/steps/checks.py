"""The checks of a steps job: what each claims, whether it applies, and the outcome with its numbers."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from service.models.config import StepConfig
from service.models.train_step import State
from service.steps.config import CheckName, StepsConfig
from service.steps.programs import CompiledStep, StepPrograms
from service.steps_records import CheckResult, CheckStatus, StepRecord

INVARIANCE = 1e-6
"""Relative, in float32 at highest precision: sums run in another order and nothing else differs."""
FORCED_FACTOR = 0.5
"""Receive rows over the mean load. Padding is at most an eighth of a row, so more than half of all assignments are real tokens', and the
buffer of at least one rank must overflow."""


class NotApplicableError(Exception):
    """The check says nothing about this spec; says why."""


@dataclass(frozen=True)
class Finding:
    """What a check found."""

    passed: bool
    detail: str
    deviation: float | None = None
    tolerance: float | None = None
    numbers: Mapping[str, Sequence[float | None]] = field(default_factory=dict)


@dataclass
class CheckContext:
    """What the checks have to work with: the run that has ended, its programs and the state it began with."""

    config: StepConfig
    steps: StepsConfig
    programs: StepPrograms
    compiled: Sequence[CompiledStep]
    """The run's programs: candidate and dropless under retry, else the one."""
    initial: State
    """On the host."""
    records: tuple[StepRecord, ...]

    @property
    def candidate(self) -> CompiledStep:
        return self.compiled[0]

    @cached_property
    def dropless(self) -> CompiledStep:
        """The dropless program, compiled for the checks where the run did without."""
        if self.compiled[-1].name == "dropless":
            return self.compiled[-1]
        if self.config.model.experts is None:
            return self.compiled[0]
        return self.programs.compile(self.config, "dropless")

    @cached_property
    def is_exact(self) -> bool:
        """Whether the arithmetic is float32 throughout, so that only the order of sums can differ."""
        train = self.config.train
        return train.dtype == "float32" and train.param_dtype == "float32" and self.steps.matmul_precision == "highest"

    def tolerance(self, exact: float) -> float:
        """`exact` where the arithmetic is float32; what bfloat16's eight bits leave of it elsewhere."""
        return exact if self.is_exact else max(exact, 2e-2)


Check = Callable[[CheckContext], Finding]


def run_check(name: CheckName, context: CheckContext) -> CheckResult:
    """The outcome of one check; one that cannot be run has failed, and says why."""
    # Here, because these modules need what stands above.
    from service.steps.part_checks import PART_CHECKS
    from service.steps.step_checks import STEP_CHECKS

    claim, check = {**STEP_CHECKS, **PART_CHECKS}[name]
    started = time.perf_counter()
    fields: dict[str, Any]
    try:
        found = check(context)
        fields = {
            "status": CheckStatus.PASSED if found.passed else CheckStatus.FAILED,
            "detail": found.detail,
            "deviation": found.deviation,
            "tolerance": found.tolerance,
            "numbers": {series: tuple(values) for series, values in found.numbers.items()},
        }
    except NotApplicableError as error:
        fields = {"status": CheckStatus.NOT_APPLICABLE, "detail": str(error)}
    except Exception as error:  # one check that breaks must not take the others' outcomes with it
        traceback.print_exc()
        fields = {"status": CheckStatus.FAILED, "detail": f"could not be run: {type(error).__name__}: {error}"[:2000]}
    return CheckResult(name=name, claim=claim, seconds=time.perf_counter() - started, **fields)
