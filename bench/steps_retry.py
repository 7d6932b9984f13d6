"""What the retry loop costs when nothing overflows: its step time beside a loop without the feature, measured in turns in one run.

    ./dev bench steps_retry                    # a small deepseek-custom on four virtual CPU devices
    ./dev bench steps_retry --devices gpu      # on attached devices
    ./dev bench steps_retry --rounds 20

Four loops take turns, so that a busy machine slows them alike: `plain` runs the donating program of a spec without retry and never reads a
flag before the next step is started; `plain undonated` the retry's own candidate in the same loop, which tells what not donating costs;
`retry` looks one step ahead (the default of a steps job), `retry 0` reads every flag before it starts the next step. Each turn is compared
with the plain turn of its own round; the median of these ratios must not exceed 1.03 for `retry`. On a busy machine their spread tells how
much the figure is worth: run it on an idle one.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from service.models.config import DroplessConfig, MeshAxes, MoeConfig, StepConfig, TrainConfig, deepseek_custom
from service.steps.config import StepsConfig
from service.steps.devices import attached_devices, steps_environment
from service.steps.reduction import reduce_model

TARGET_RATIO = 1.03
NO_OVERFLOW_FACTOR = 4.0
"""More than can arrive: the buffer is the worst case and nothing is dropped."""


def config_of(axes: MeshAxes, *, retry: bool) -> StepConfig:
    moe = MoeConfig(ragged_buffer_factor=NO_OVERFLOW_FACTOR, retry_when_tokens_dropped=retry, dropless=DroplessConfig(token_chunks=2))
    train = TrainConfig(seq_len=256, per_device_batch=2, dtype="float32", param_dtype="float32")
    return StepConfig(model=reduce_model(deepseek_custom(), axes), train=train, axes=axes, moe=moe)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="cpu:4", help="as steps.devices of a spec")
    parser.add_argument("--rounds", type=int, default=10, help="turns of each loop")
    parser.add_argument("--steps", type=int, default=10, help="steps in one turn, the first of which is not counted")
    arguments = parser.parse_args()
    steps = StepsConfig(devices=arguments.devices)
    axes = MeshAxes(expert=2, context=2) if steps.num_cpu_devices in (4, None) else MeshAxes(fsdp=steps.num_cpu_devices)
    if steps.num_cpu_devices is None:
        axes = MeshAxes()
    # Flags and devices are fixed before JAX is loaded, as a steps child's are.
    os.environ.update(steps_environment(steps, axes.num_devices, Path(tempfile.gettempdir())))
    seconds = measure(steps, axes, rounds=arguments.rounds, num_steps=arguments.steps)
    report(seconds, load=os.getloadavg()[0])


def measure(steps: StepsConfig, axes: MeshAxes, *, rounds: int, num_steps: int) -> dict[str, list[float]]:
    """The median seconds of a step in each turn of each loop."""
    from service.models.train_step import init_state
    from service.steps.loop import PlainLoop, RetryLoop
    from service.steps.programs import StepPrograms, discard, has_overflowed, to_host

    devices, _ = attached_devices(steps, axes.num_devices, memory_limit_bytes=None)
    programs = StepPrograms(devices)
    plain = programs.compile(config_of(axes, retry=False), "candidate")
    candidate, dropless = (programs.compile(config_of(axes, retry=True), name) for name in ("candidate", "dropless"))
    initial = to_host(init_state(plain.config, plain.mesh, 0))
    batches = [plain.batch_at(index, 0) for index in range(num_steps)]

    def retry(look_ahead: int) -> RetryLoop:
        return RetryLoop(candidate, dropless, has_overflowed=has_overflowed, discard=discard, look_ahead=look_ahead)

    def undonated(state: Any, batch: Any) -> Any:
        new, metrics = candidate(state, batch)
        discard(state)
        return new, metrics

    loops: dict[str, Callable[[], Any]] = {
        "plain": lambda: PlainLoop(plain, "candidate", wait=has_overflowed),
        "plain undonated": lambda: PlainLoop(undonated, "candidate", wait=has_overflowed),
        "retry": lambda: retry(1),
        "retry 0": lambda: retry(0),
    }
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(rounds):
        for name, make in loops.items():
            loop = make()
            outcomes = list(loop.run(plain.place(initial), num_steps, batches.__getitem__))
            assert all(outcome.discarded is None for outcome in outcomes), "a step overflowed; the loops would not be compared"
            discard(loop.state)
            seconds[name].append(statistics.median(outcome.seconds for outcome in outcomes[1:]))
    return seconds


def report(seconds: dict[str, list[float]], *, load: float) -> None:
    rounds = len(seconds["plain"])
    print(f"load {load:.1f}; {rounds} turns of each loop")
    print(f"{'loop':<16} {'median step':>12} {'of plain':>9} {'lowest':>8} {'highest':>8}")
    for name, values in seconds.items():
        ratios = [value / plain for value, plain in zip(values, seconds["plain"], strict=True)]
        median = 1000 * statistics.median(values)
        print(f"{name:<16} {median:>9.1f} ms {statistics.median(ratios):>9.3f} {min(ratios):>8.3f} {max(ratios):>8.3f}")
        if name == "retry":
            ratio = statistics.median(ratios)
    print(f"retry over plain: {ratio:.3f}, {'within' if ratio <= TARGET_RATIO else 'beyond'} {TARGET_RATIO}")


if __name__ == "__main__":
    main()
