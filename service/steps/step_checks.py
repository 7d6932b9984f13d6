"""Checks that run whole train steps and compare them with the run, or with each other."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from service.models.config import StepConfig
from service.models.train_step import Batch, State
from service.steps.checks import FORCED_FACTOR, INVARIANCE, Check, CheckContext, Finding, NotApplicableError
from service.steps.config import CheckName
from service.steps.loop import Outcome, RetryLoop
from service.steps.programs import CompiledStep, StepsMade, discard, flags_equal, has_overflowed, losses, read_metrics, run_steps, to_host
from service.steps_records import StepMetrics

FALLING_STEPS = 20


def load_balance(context: CheckContext) -> Finding:
    """Losses of the same steps with the sequence in load-balanced and in natural order."""
    config = context.config
    if config.axes.context == 1:
        raise NotApplicableError("there is one context rank, so the sequence lies in natural order either way")
    flipped = config.context.model_copy(update={"load_balance": not config.context.load_balance})
    other = context.programs.compile(config.model_copy(update={"context": flipped}), "dropless")
    names = ("on", "off") if config.context.load_balance else ("off", "on")
    return _same_losses(context, other, names)


def context_parallel(context: CheckContext) -> Finding:
    """Losses of the same steps with the sequence on one rank, its devices given to `fsdp`."""
    config = context.config
    ranks = config.axes.context
    if ranks == 1:
        raise NotApplicableError("there is one context rank already")
    axes = config.axes.model_copy(update={"context": 1, "fsdp": config.axes.fsdp * ranks})
    if config.global_batch % axes.batch_shards:
        raise NotApplicableError(
            f"without context parallelism the batch would be cut in {axes.batch_shards}, and {config.global_batch} sequences do not divide"
        )
    other = context.programs.compile(config.model_copy(update={"axes": axes}), "dropless")
    return _same_losses(context, other, (f"cp_{ranks}", "cp_1"))


def _same_losses(context: CheckContext, other: CompiledStep, names: tuple[str, str]) -> Finding:
    """Every loss of every step of both programs, from one state, on the same tokens, against the tolerance."""
    num_steps = context.steps.check_steps
    runs = [_run(context, step, num_steps) for step in (context.dropless, other)]
    deviation, numbers = _compare([run.metrics for run in runs], names)
    tolerance = context.tolerance(INVARIANCE)
    shown = ", ".join(f"{name} {numbers[f'loss_{name}'][-1]}" for name in names)
    detail = f"largest relative deviation {deviation:.1e} over {num_steps} steps; last loss {shown}{_moved(runs)}"
    return Finding(deviation <= tolerance, detail, deviation, tolerance, numbers)


def _moved(runs: Sequence[StepsMade]) -> str:
    """What the router decided otherwise, for the detail: a tie that rounding breaks moves a token whole, which no tolerance covers."""
    moved = [int(np.abs(a - b).sum()) // 2 for a, b in zip(*(run.loads for run in runs), strict=True)]
    steps = [step for step, count in enumerate(moved) if count]
    return f"; in steps {steps} the router sent at least {sum(moved)} assignments to another expert" if steps else ""


def _run(context: CheckContext, step: CompiledStep, num_steps: int) -> StepsMade:
    """The job's first steps, made by this program alone."""
    return run_steps(step, context.initial, num_steps, lambda index: step.batch_at(index, context.steps.seed))


def _compare(runs: Sequence[Sequence[StepMetrics]], names: tuple[str, str]) -> tuple[float, dict[str, tuple[float | None, ...]]]:
    """The largest relative deviation of any loss, infinite where one is not finite; and the series."""
    numbers: dict[str, tuple[float | None, ...]] = {}
    deviation = 0.0
    for loss in ("loss", "main_loss", "mtp_loss"):
        series = [losses(run, loss) for run in runs]
        if loss == "mtp_loss" and all(value is None for values in series for value in values):
            continue
        numbers |= {f"{loss}_{name}": values for name, values in zip(names, series, strict=True)}
        deviation = max([deviation, *(relative(a, b) for a, b in zip(*series, strict=True))])
    return deviation, numbers


def relative(a: float | None, b: float | None) -> float:
    """|a - b| over the larger; infinite where either is not finite."""
    if a is None or b is None:
        return math.inf
    scale = max(abs(a), abs(b))
    return abs(a - b) / scale if scale else 0.0


def replay(context: CheckContext) -> Finding:
    """Every loss and the last state of a retry loop whose candidate overflows, against the dropless program alone."""
    config = context.config
    if config.model.experts is None or config.axes.expert == 1:
        raise NotApplicableError("nothing can overflow: the experts are on one rank, or there are none")
    seed, num_steps = context.steps.seed, context.steps.check_steps
    forced, dropless = _forced_pair(context)

    def batch_at(step: int) -> Batch:
        return dropless.batch_at(step, seed)

    loop = RetryLoop(forced, dropless, has_overflowed=has_overflowed, discard=discard, look_ahead=context.steps.look_ahead)
    outcomes = list(loop.run(forced.place(context.initial), num_steps, batch_at))
    replayed_state = to_host(loop.state)
    discard(loop.state)
    replayed = [read_metrics(config, outcome.metrics) for outcome in outcomes]
    made = run_steps(dropless, context.initial, num_steps, batch_at, keep_state=True)
    alone = made.metrics
    dropping = run_steps(forced, context.initial, num_steps, batch_at).metrics
    num_replays = sum(outcome.discarded is not None for outcome in outcomes)
    same_losses = losses(replayed) == losses(alone)
    num_different = _num_different(replayed_state, made.state)
    without = max(relative(a, b) for a, b in zip(losses(dropping), losses(alone), strict=True))
    are_equal = all(map(_flags_equal, outcomes))
    detail = (
        f"{num_replays} of {num_steps} steps replayed; losses {'equal' if same_losses else 'differ'}, {num_different} arrays of the last "
        f"state differ; without retry the losses deviate by up to {without:.1e}; "
        f"flags {'equal' if are_equal else 'differ'} over the devices"
    )
    numbers = {"loss_replayed": losses(replayed), "loss_dropless": losses(alone), "loss_without_retry": losses(dropping)}
    passed = num_replays == num_steps and same_losses and num_different == 0 and without > 0 and are_equal
    deviation = max(relative(a, b) for a, b in zip(losses(replayed), losses(alone), strict=True))
    return Finding(passed, detail, deviation, 0.0, numbers)


def _forced_pair(context: CheckContext) -> tuple[CompiledStep, CompiledStep]:
    """A candidate that overflows in every step, and the dropless program; neither donates."""
    moe = context.config.moe.model_copy(update={"ragged_buffer_factor": FORCED_FACTOR, "retry_when_tokens_dropped": True})
    config: StepConfig = context.config.model_copy(update={"moe": moe})
    dropless = context.dropless if not context.dropless.donates else context.programs.compile(config, "dropless")
    return context.programs.compile(config, "candidate"), dropless


def _flags_equal(outcome: Outcome) -> bool:
    return flags_equal(outcome.metrics) and (outcome.discarded is None or flags_equal(outcome.discarded))


def _num_different(a: State, b: State | None) -> int:
    """Arrays that are not equal bit for bit."""
    return sum(left.tobytes() != right.tobytes() for left, right in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def overflow_flag(context: CheckContext) -> Finding:
    """The flag as each device of the run held it."""
    if context.config.model.experts is None:
        raise NotApplicableError("a model without experts raises no flag")
    unequal = [record.step for record in context.records if not record.flags_equal]
    raised = sum(record.was_replayed or record.metrics.has_moe_overflow for record in context.records)
    found = f"steps {unequal} gave devices different flags" if unequal else f"equal on all {context.config.axes.num_devices} devices"
    return Finding(not unequal, f"{found} in {len(context.records)} steps, raised in {raised}", float(len(unequal)), 0.0)


def loss_falls(context: CheckContext) -> Finding:
    """The losses of repeated steps on one batch: what is learnt there is the batch itself."""
    step, seed = context.dropless, context.steps.seed
    batch = step.batch_at(0, seed)
    series = losses(run_steps(step, context.initial, FALLING_STEPS, lambda _: batch).metrics)
    if any(value is None for value in series):
        return Finding(False, "a loss is not finite", numbers={"loss": series})
    finite = [value for value in series if value is not None]
    first, last = float(np.mean(finite[:5])), float(np.mean(finite[-5:]))
    detail = f"mean of the first five {first:.6f}, of the last five {last:.6f}, over {FALLING_STEPS} steps on one batch"
    return Finding(last < first, detail, numbers={"loss": series})


def same_seed(context: CheckContext) -> Finding:
    """The run's first steps made again from the same seed, bit for bit."""
    num_steps = min(context.steps.total_steps, context.steps.check_steps)
    first, seed = context.candidate, context.steps.seed

    def batch_at(step: int) -> Batch:
        return first.batch_at(step, seed)

    if len(context.compiled) == 2:
        loop = RetryLoop(*context.compiled, has_overflowed=has_overflowed, discard=discard, look_ahead=context.steps.look_ahead)
        again = [read_metrics(context.config, outcome.metrics) for outcome in loop.run(first.place(context.initial), num_steps, batch_at)]
        discard(loop.state)
    else:
        again = run_steps(first, context.initial, num_steps, batch_at).metrics
    before = [record.metrics for record in context.records[:num_steps]]
    different = [step for step, (a, b) in enumerate(zip(before, again, strict=True)) if a != b]
    detail = f"every metric of {num_steps} steps is equal" if not different else f"steps {different} differ"
    deviation = max(relative(a, b) for a, b in zip(losses(before), losses(again), strict=True))
    return Finding(not different, detail, deviation, 0.0, {"loss_first": losses(before), "loss_again": losses(again)})


STEP_CHECKS: Mapping[CheckName, tuple[str, Check]] = {
    "load_balance": ("losses do not depend on the order of the sequence: load balance on = off", load_balance),
    "context_parallel": ("losses do not depend on the context ranks: cp 1 = cp k", context_parallel),
    "replay": ("a replayed step is the step that dropless alone would have made, bit for bit", replay),
    "overflow_flag": ("every device holds the same overflow flag", overflow_flag),
    "loss_falls": ("the loss is finite and falls over 20 steps on one batch", loss_falls),
    "same_seed": ("a second run from the same seed is equal, bit for bit", same_seed),
}
