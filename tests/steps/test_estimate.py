"""What cannot fit is refused before anything is allocated, with its numbers; what is predicted follows from the programs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import jax
import pytest

from service.models.axes import make_mesh
from service.models.config import StepConfig
from service.models.train_step import build_train_program
from service.steps.estimate import DoesNotFitError, bytes_per_device, estimate_memory, refuse_unless_fits, refuse_unless_predicted_to_fit
from service.steps.memory import PeakMeter, predict
from service.steps_records import DeviceFacts, Estimate, ProgramMemory


def host(memory_bytes: int | None) -> DeviceFacts:
    return DeviceFacts(platform="cpu", kind="cpu", num_devices=8, memory_bytes=memory_bytes, memory_is_shared=True)


def accelerator(memory_bytes: int | None) -> DeviceFacts:
    return DeviceFacts(platform="gpu", kind="chip", num_devices=8, memory_bytes=memory_bytes, memory_is_shared=False)


@pytest.fixture
def estimate(make_config: Callable[..., StepConfig]) -> Callable[..., Estimate]:
    config = make_config()
    program = build_train_program(config, "candidate", make_mesh(config.axes, jax.devices()[:8]))

    def make(devices: DeviceFacts, num_states: int = 3) -> Estimate:
        return estimate_memory(config, program, num_states=num_states, devices=devices)

    return make


def test_the_estimate_counts_states_gradients_batch_and_logits(
    make_config: Callable[..., StepConfig], estimate: Callable[..., Estimate]
) -> None:
    found = estimate(host(1 << 30))
    config = make_config()
    # Two int32 sequences of 24 positions on each device, four arrays; logits of a device's 48 positions over 80 tokens in float32.
    assert config.global_batch == 4
    assert found.batch_bytes == 4 * 1 * 24 * 4
    assert found.logits_bytes == 1 * 24 * 80 * 4
    assert found.needed_bytes == 3 * found.state_bytes + found.gradient_bytes + found.batch_bytes + found.logits_bytes
    # Parameters and two moments in float32, a float32 bias per expert and MoE layer (MTP's block too), and the step.
    assert found.state_bytes == 3 * found.gradient_bytes + 2 * 6 * 4 + 4
    assert found.total_needed_bytes == 8 * found.needed_bytes
    assert estimate(accelerator(1 << 30)).total_needed_bytes == found.needed_bytes


def test_the_states_bytes_are_those_of_its_shards(make_config: Callable[..., StepConfig]) -> None:
    config = make_config()
    program = build_train_program(config, "candidate", make_mesh(config.axes, jax.devices()[:8]))
    embedding = program.abstract_state["params"]["embed"]["table"]
    assert bytes_per_device(embedding) == math.prod(embedding.shape) * 4 // 8


def test_a_refusal_says_what_is_needed_what_there_is_and_what_to_do(estimate: Callable[..., Estimate]) -> None:
    small = host(1 << 10)
    found = estimate(small)
    with pytest.raises(DoesNotFitError) as caught:
        refuse_unless_fits(found, small, is_reduced=False)
    message = str(caught.value)
    assert "3 states of" in message
    assert "on the 8 that share the host's memory" in message
    assert "1.00 KiB are available" in message
    assert "set steps.model to tiny-of-same-shape" in message
    with pytest.raises(DoesNotFitError) as caught:
        refuse_unless_fits(found, small, is_reduced=True)
    assert "tiny-of-same-shape" not in str(caught.value)


def test_what_fits_or_cannot_be_known_is_not_refused(estimate: Callable[..., Estimate]) -> None:
    for devices in (host(1 << 30), accelerator(None)):
        refuse_unless_fits(estimate(devices), devices, is_reduced=False)


def program_memory(name: str, allocated: int) -> ProgramMemory:
    return ProgramMemory.model_validate(
        {
            "program": name,
            "argument_bytes": 100,
            "output_bytes": 90,
            "alias_bytes": 0,
            "temp_bytes": allocated - 190,
            "allocated_bytes": allocated,
        }
    )


@pytest.mark.parametrize(
    ("held", "candidate", "dropless", "want"),
    [
        (2, 500, 700, 700),  # no look-ahead: each program alone
        (3, 500, 700, 700),  # the dropless program still decides: 500 + 85 < 700
        (3, 650, 700, 735),  # the candidate beside the third state
    ],
)
def test_the_pairs_peak_is_the_larger_with_the_states_it_stands_beside(held: int, candidate: int, dropless: int, want: int) -> None:
    programs = [program_memory("candidate", candidate), program_memory("dropless", dropless)]
    memory = predict(programs, state_bytes=85, num_states_held=held, devices=accelerator(None), donates=False)
    assert memory.predicted_bytes == want
    assert memory.total_predicted_bytes == 8 * want


def test_a_donating_program_stands_alone() -> None:
    memory = predict([program_memory("candidate", 400)], state_bytes=85, num_states_held=1, devices=accelerator(None), donates=True)
    assert memory.predicted_bytes == 400


def test_the_compilers_figure_refuses_too() -> None:
    memory = predict([program_memory("candidate", 400)], state_bytes=85, num_states_held=1, devices=host(None), donates=True)
    refuse_unless_predicted_to_fit(memory, accelerator(400), is_reduced=True)
    refuse_unless_predicted_to_fit(memory, host(None), is_reduced=True)
    with pytest.raises(DoesNotFitError, match=r"needs as compiled 400 B per device, 3\.12 KiB on the 8"):
        refuse_unless_predicted_to_fit(memory, host(3199), is_reduced=True)


def test_the_meter_sees_what_the_host_takes_while_it_runs() -> None:
    devices = jax.devices()[:2]
    meter = PeakMeter(devices)
    ballast = bytearray(96 << 20)
    ballast[::4096] = b"x" * len(ballast[::4096])
    # Where the kernel keeps no peak, the meter must get to look while it is held.
    time.sleep(0 if meter._is_exact else 1)
    del ballast
    predicted = predict([program_memory("candidate", 48 << 20)], state_bytes=1, num_states_held=1, devices=host(None), donates=True)
    measured = meter.stop(predicted)
    assert measured.source == "host_rss_growth"
    assert measured.total_measured_bytes is not None
    assert 90 << 20 < measured.total_measured_bytes < 160 << 20
    assert measured.measured_bytes == measured.total_measured_bytes // 2
    assert measured.ratio == pytest.approx(1, rel=0.7)
