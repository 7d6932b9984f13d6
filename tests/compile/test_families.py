"""In every topology family the answer at buffer assignment is that of the whole compile, to the byte; slow, real compiles of the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from service.compile.failures import stated_hbm_bytes
from service.compile.interface import ChildLimits, CompileRequest
from service.compile.runner import ChildCompiler
from service.compile.toolchain import toolchain_fingerprint
from service.records import Depth, Report, ReportStatus
from service.spec import Spec, load_spec, parse_spec

pytestmark = [pytest.mark.tpu, pytest.mark.slow]

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
COMPARED = ("status", "capacity_bytes", "peak_bytes", "allocated_bytes", "argument_bytes", "output_bytes", "alias_bytes", "temp_bytes")

TINY = {"model": {"preset": "tiny"}, "train": {"seq_len": 128, "per_device_batch": 1}, "programs": ["candidate"]}
LITE = {
    "model": {"preset": "deepseek-v2-16b", "num_layers": 3},
    "train": {"seq_len": 512, "per_device_batch": 1},
    "programs": ["candidate"],
}

SPECS: dict[str, dict[str, Any]] = {
    "v4": TINY | {"mesh": {"topology": "v4-8", "fsdp": 2, "context": 2}},
    "v5e": TINY | {"mesh": {"topology": "v5e-4", "fsdp": 2, "expert": 2}},
    "v6e": TINY | {"mesh": {"topology": "v6e-4", "fsdp": 2, "tensor": 2}},
    "tpu7x": TINY | {"mesh": {"topology": "tpu7x-8", "fsdp": 4, "expert": 2}},
    "v5p-two-slices": TINY | {"mesh": {"topology": "v5p-8", "slices": 2, "data": 2, "fsdp": 4}},
    "another-preset": LITE | {"mesh": {"topology": "v5p-16", "fsdp": 4, "expert": 2}},
}


def weigh(spec: Spec, directory: Path, depth: Depth) -> Report:
    request = CompileRequest(spec=spec.as_json(), program=spec.programs[0], depth=depth, work_dir=str(directory / depth))
    limits = ChildLimits(wall_seconds=1800, rss_bytes=8 << 30)
    return ChildCompiler(directory / "capacity.json")(request, limits=limits, on_event=lambda event: None, is_cancelled=lambda: False)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_both_depths_agree_to_the_byte_in_every_family(tmp_path: Path, spec: dict[str, Any]) -> None:
    parsed = parse_spec(spec)
    memory, full = (weigh(parsed, tmp_path, depth) for depth in ("memory", "full"))
    assert memory.status is ReportStatus.OK, memory.failure
    assert {name: getattr(memory, name) for name in COMPARED} == {name: getattr(full, name) for name in COMPARED}
    # At depth full the child has also held these bytes against the compiler's own statistics.
    assert full.code_bytes is not None
    assert memory.classes == full.classes
    assert sum(memory.classes.values()) == memory.peak_bytes
    assert memory.toolchain is not None
    assert full.toolchain is not None
    assert toolchain_fingerprint(memory.toolchain) == toolchain_fingerprint(full.toolchain)


def test_a_model_too_large_for_its_chips_states_what_it_needs_as_the_compiler_does(tmp_path: Path) -> None:
    spec = yaml.safe_load((EXAMPLES / "deepseek-v3-671b-v5p-256.yaml").read_text())
    spec["mesh"] = {"topology": "v5p-32", "fsdp": 4, "expert": 4}
    report = weigh(parse_spec(spec), tmp_path, "memory")
    assert report.status is ReportStatus.DOES_NOT_FIT
    assert report.compiler_message is not None
    bounds = stated_hbm_bytes(report.compiler_message)
    assert bounds is not None
    assert report.capacity_bytes is not None
    assert bounds[0] <= report.capacity_bytes <= bounds[1]
    assert report.allocated_bytes is not None
    needed = float(report.compiler_message.partition("temporaries (")[2].partition("G)")[0])
    assert abs(needed - report.allocated_bytes / 2**30) <= 0.005
    assert report.headroom_bytes == report.capacity_bytes - report.allocated_bytes < 0
    assert len(report.buffers) > 20
    assert report.timeline is not None


@pytest.mark.parametrize("name", ["deepseek-v3-671b-v5p-512", "deepseek-v3-671b-v5p-256"])
def test_the_671b_examples_fit_and_stay_under_two_gigabytes_of_host_memory(tmp_path: Path, name: str) -> None:
    report = weigh(load_spec((EXAMPLES / f"{name}.yaml").read_text()), tmp_path, "memory")
    assert report.status in (ReportStatus.OK, ReportStatus.DOES_NOT_FIT), report.failure
    assert report.num_parameters == 671_026_404_352
    assert report.child_peak_rss_bytes is not None
    assert report.child_peak_rss_bytes < 2 << 30
