"""A steps job from request to report: devices, refusals, compiles, the training run, its memory, and then the checks."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from service.lifeline import peak_rss_bytes
from service.models.config import ModelConfig, ProgramName, StepConfig
from service.models.train_step import State, init_state
from service.records import Failure, FailureKind
from service.spec import parse_spec
from service.steps.checks import FORCED_FACTOR, CheckContext, run_check
from service.steps.config import StepsConfig
from service.steps.devices import NoDevicesError, attached_devices
from service.steps.estimate import DoesNotFitError, bytes_per_device, estimate_memory, refuse_unless_fits, refuse_unless_predicted_to_fit
from service.steps.findings import Findings
from service.steps.interface import StepsRequest
from service.steps.loop import Outcome, PlainLoop, RetryLoop
from service.steps.memory import PeakMeter, predict
from service.steps.programs import CompiledStep, StepPrograms, discard, flags_equal, has_overflowed, read_metrics, to_host
from service.steps.reduction import describe_reduction, reduce_model
from service.steps_records import StepRecord, StepsReport, StepsStatus

SKEW = 4.0
"""Bias of the preferred experts; scores lie between 0 and 1, so nothing else is chosen."""
_SEND_SECONDS = 0.5

Tell = Callable[[str, Mapping[str, Any]], None]


class NotFiniteError(Exception):
    """The loss became NaN or infinite."""


class StepsRun:
    """One request on its way to a report. `tell` hears every finding as it is made."""

    def __init__(self, request: StepsRequest, tell: Tell) -> None:
        self._request = request
        self._tell_outside = tell
        self._findings = Findings()
        self._seconds: dict[str, float] = {}
        self._entered = time.perf_counter()
        self._unsent: list[StepRecord] = []
        self._sent = 0.0

    def run(self) -> StepsReport:
        """The report, whatever happens."""
        status: StepsStatus | None = None
        failure: Failure | None = None
        try:
            self._run()
        except DoesNotFitError as error:
            status, failure = StepsStatus.DOES_NOT_FIT, Failure(kind=_memory_kind(), message=str(error))
        except NoDevicesError as error:
            status, failure = StepsStatus.FAILED, Failure(kind=FailureKind.UNSUPPORTED, message=str(error))
        except NotFiniteError as error:
            status, failure = StepsStatus.FAILED, Failure(kind=FailureKind.NOT_FINITE, message=str(error))
        except Exception as error:  # the border of the child: every error becomes a recorded outcome
            traceback.print_exc()
            status, failure = self._outcome_of(error)
        self._flush()
        self._know(seconds=dict(self._seconds), child_peak_rss_bytes=peak_rss_bytes())
        return self._findings.report(status, failure)

    def _outcome_of(self, error: Exception) -> tuple[StepsStatus, Failure]:
        message = f"{type(error).__name__}: {error}".strip()[:2000]
        if isinstance(error, jax.errors.JaxRuntimeError) and str(error).startswith("RESOURCE_EXHAUSTED"):
            # The runtime's own status code, at the start of its text.
            return StepsStatus.DOES_NOT_FIT, Failure(kind=_memory_kind(), message=f"in phase {self._findings.phase}: {message}")
        if isinstance(error, ValueError) and self._findings.phase in ("build", "estimate"):
            return StepsStatus.FAILED, Failure(kind=FailureKind.LOWERING, message=message)
        return StepsStatus.FAILED, Failure(kind=FailureKind.CRASHED, message=f"in phase {self._findings.phase}: {message}")

    def _run(self) -> None:
        spec = parse_spec(self._request.spec)
        assert spec.steps is not None
        steps = spec.steps
        jax.config.update("jax_default_matmul_precision", None if steps.matmul_precision == "default" else steps.matmul_precision)
        self._know(toolchain=self._request.toolchain)

        self._enter("devices")
        full = spec.step_config()
        devices, facts = attached_devices(steps, full.axes.num_devices, memory_limit_bytes=self._request.memory_limit_bytes)
        self._know(devices=facts, mesh=full.axes.as_dict())
        if steps.num_cpu_devices is not None:
            self._know(warnings=("the host's step times compare within this run only: its programs are compiled with little optimisation",))

        self._enter("build")
        config, reduction = configure(full, steps)
        names: tuple[ProgramName, ...] = ("candidate", "dropless") if config.retries else (spec.programs[0],)
        programs = StepPrograms(devices)
        num_states = 2 + steps.look_ahead if config.retries else 1
        _, built = programs.build(config, names[0])
        self._know(
            reduction=reduction,
            retry=config.retries,
            look_ahead=steps.look_ahead if config.retries else None,
            num_parameters=sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(built.abstract_state["params"])),
        )

        self._enter("estimate")
        is_reduced = steps.model != "full"
        estimate = estimate_memory(config, built, num_states=num_states, devices=facts)
        self._know(estimate=estimate)
        refuse_unless_fits(estimate, facts, is_reduced=is_reduced)

        self._enter("compile")
        compiled = [programs.compile(config, name) for name in names]
        predicted = predict(
            [step.memory for step in compiled],
            state_bytes=bytes_per_device(built.abstract_state),
            num_states_held=num_states,
            devices=facts,
            donates=compiled[0].donates,
        )
        self._know(memory=predicted)
        refuse_unless_predicted_to_fit(predicted, facts, is_reduced=is_reduced)

        self._enter("init")
        initial = to_host(initial_state(config, compiled[0], steps))
        meter = PeakMeter(devices)
        self._train(steps, compiled, initial)

        self._enter("memory")
        self._know(memory=meter.stop(predicted))

        self._enter("checks")
        context = CheckContext(config, steps, programs, compiled, initial, tuple(self._findings.steps))
        for name in steps.checks:
            self._apply("check", run_check(name, context).model_dump(mode="json"))
        self._enter("done")

    def _train(self, steps: StepsConfig, compiled: list[CompiledStep], initial: State) -> None:
        first = compiled[0]
        loop: RetryLoop | PlainLoop
        if len(compiled) == 2:
            loop = RetryLoop(first, compiled[1], has_overflowed=has_overflowed, discard=discard, look_ahead=steps.look_ahead)
        else:
            loop = PlainLoop(first, first.name, wait=has_overflowed)
        self._enter("warmup" if steps.warmup_steps else "steps")
        load: np.ndarray | None = None
        outcomes = loop.run(first.place(initial), steps.total_steps, lambda step: first.batch_at(step, steps.seed))
        for outcome in outcomes:
            if "expert_load" in outcome.metrics:
                counted = np.asarray(outcome.metrics["expert_load"], dtype=np.int64)
                load = counted if load is None else load + counted
            record = self._record(outcome, first.config, steps)
            self._unsent.append(record)
            if record.metrics.loss is None:
                outcomes.close()
                raise NotFiniteError(_not_finite(record, outcome))
            if time.perf_counter() - self._sent > _SEND_SECONDS:
                self._flush()
            if outcome.index == steps.warmup_steps - 1:
                self._flush()
                self._enter("steps")
        self._flush()
        if load is not None:
            self._know(expert_load=load.tolist())
        discard(loop.state)

    def _record(self, outcome: Outcome, config: StepConfig, steps: StepsConfig) -> StepRecord:
        metrics = read_metrics(config, outcome.metrics)
        equal = flags_equal(outcome.metrics) and (outcome.discarded is None or flags_equal(outcome.discarded))
        return StepRecord(
            step=outcome.index,
            is_warmup=outcome.index < steps.warmup_steps,
            program=outcome.program,
            seconds=outcome.seconds,
            tokens_per_second=metrics.tokens / max(outcome.seconds, 1e-9),
            metrics=metrics,
            discarded=None if outcome.discarded is None else read_metrics(config, outcome.discarded),
            num_wasted=outcome.num_wasted,
            flags_equal=equal,
        )

    def _enter(self, phase: str) -> None:
        now = time.perf_counter()
        self._seconds[self._findings.phase] = self._seconds.get(self._findings.phase, 0.0) + now - self._entered
        self._entered = now
        self._apply(phase, {})

    def _know(self, **fields: Any) -> None:
        # As JSON, which is how the parent gets it too: one path for both.
        dumped = {name: _as_json(value) for name, value in fields.items()}
        self._apply("known", dumped)

    def _flush(self) -> None:
        if self._unsent:
            self._apply("step", {"steps": [step.model_dump(mode="json") for step in self._unsent]})
            self._unsent = []
        self._sent = time.perf_counter()

    def _apply(self, name: str, data: Mapping[str, Any]) -> None:
        self._findings.apply(name, data)
        self._tell_outside(name, data)


def configure(full: StepConfig, steps: StepsConfig) -> tuple[StepConfig, dict[str, tuple[str, str]]]:
    """What is run of a spec's step: reduced and with a forced overflow where that is asked for; and what the reduction changed."""
    model: ModelConfig = reduce_model(full.model, full.axes) if steps.model == "tiny-of-same-shape" else full.model
    moe = full.moe
    if steps.force_overflow == "small_factor":
        moe = moe.model_copy(update={"ragged_buffer_factor": FORCED_FACTOR})
    return full.model_copy(update={"model": model, "moe": moe}), describe_reduction(full.model, model)


def initial_state(config: StepConfig, step: CompiledStep, steps: StepsConfig) -> State:
    """The seeded state on the devices, its router skewed where that is asked for."""
    state = init_state(config, step.mesh, steps.seed)
    if steps.force_overflow == "skewed_router":
        assert config.model.experts is not None
        chosen = config.model.experts.num_experts_per_token
        state = {**state, "router_bias": jax.tree.map(lambda bias: bias.at[..., :chosen].add(SKEW), state["router_bias"])}
    return state


def _not_finite(record: StepRecord, outcome: Outcome) -> str:
    parts = {name: float(outcome.metrics[name]) for name in ("loss", "main_loss", "mtp_loss", "balance_loss")}
    said = ", ".join(f"{name} {value}" for name, value in parts.items())
    return f"step {record.step} gave {said}; the run stopped there: lower train.learning_rate, or look at the step before"


def _memory_kind() -> FailureKind:
    return FailureKind.HOST_MEMORY if jax.default_backend() == "cpu" else FailureKind.DEVICE_MEMORY


def _as_json(value: Any) -> Any:
    return value.model_dump(mode="json") if hasattr(value, "model_dump") else value
