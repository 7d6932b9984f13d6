"""What stands at the peak of a real program of the model is its closed forms: state, batch, saved carries and receive buffers."""

from __future__ import annotations

from typing import Any

import pytest

from service.compile.interface import ChildLimits, CompileRequest
from service.compile.runner import ChildCompiler
from service.models.costs import argument_bytes, moe_receive_bytes, saved_carry_bytes
from service.records import Report, ReportStatus
from service.spec import Spec, parse_spec

pytestmark = pytest.mark.tpu

EXPERTS = {"num_experts": 16, "num_experts_per_token": 4, "expert_dim": 256, "num_shared_experts": 1}
WIDE: dict[str, Any] = {
    "scenario": "wide-experts",
    "model": {"preset": "deepseek-v2-16b", "num_layers": 3, "vocab_size": 1024, "num_heads": 8, "experts": EXPERTS},
    "train": {"seq_len": 2048, "per_device_batch": 4, "dtype": "bfloat16", "param_dtype": "bfloat16"},
    "mesh": {"topology": "v5e-4", "expert": 4},
    "programs": ["dropless"],
}
"""Receive buffers of half a gigabyte, which cannot be kept on chip."""


@pytest.fixture(scope="module")
def weighed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Spec, Report]:
    spec, directory = parse_spec(WIDE), tmp_path_factory.mktemp("wide")
    request = CompileRequest(spec=spec.as_json(), program="dropless", depth="memory", work_dir=str(directory / "work"))
    limits = ChildLimits(wall_seconds=600, rss_bytes=4 << 30)
    report = ChildCompiler(directory / "capacity.json")(request, limits=limits, on_event=lambda event: None, is_cancelled=lambda: False)
    assert report.status is ReportStatus.OK, report.failure
    return spec, report


def test_state_and_batch_are_their_closed_forms(weighed: tuple[Spec, Report]) -> None:
    spec, report = weighed
    forms = argument_bytes(spec.step_config())
    assert report.classes["parameters"] == forms.parameters
    assert report.classes["optimizer_first_moment"] == forms.first_moment
    assert report.classes["optimizer_second_moment"] == forms.second_moment
    assert report.classes["batch"] == forms.batch
    assert report.argument_bytes == forms.total


def test_worst_case_receive_buffers_stand_at_the_peak(weighed: tuple[Spec, Report]) -> None:
    spec, report = weighed
    row_buffer = moe_receive_bytes(spec.step_config(), "dropless")
    # 4 * 2048 tokens with 4 experts each, from 4 ranks, 2048 wide in bfloat16.
    assert row_buffer == 4 * 2048 * 4 * 4 * 2048 * 2
    dispatch = [buffer.padded_bytes for buffer in report.buffers if buffer.class_ == "moe_dispatch"]
    # In the backward pass: the rows, their cotangents as they came, and those in the matmul's layout.
    assert dispatch.count(row_buffer) == 3
    assert report.classes["moe_dispatch"] - 3 * row_buffer < 0.01 * row_buffer


def test_saved_activations_are_the_carries_of_the_layers(weighed: tuple[Spec, Report]) -> None:
    spec, report = weighed
    carries = saved_carry_bytes(spec.step_config())
    saved = [buffer for buffer in report.buffers if buffer.class_ == "saved_activations"]
    # The two scanned layers' as one stack, and the first layer's, which is the embedding.
    assert [buffer.padded_bytes for buffer in saved[:2]] == [carries * 2 // 3, carries // 3]
    assert report.classes["saved_activations"] - carries < 0.06 * carries
    # Weights that are gathered in the forward pass and kept for the backward one are the parameters', not the activations'.
    assert not [buffer for buffer in saved if buffer.scope.startswith("state[")]
    assert [buffer.scope.rsplit("[", 1)[-1] for buffer in report.buffers if buffer.class_ == "parameter_copies"][:2] == [
        "'gate']",
        "'down']",
    ]
