"""Every example is weighed by the real compiler: what fits, what does not, parts that sum to the whole; slow but for the smallest."""

from __future__ import annotations

from pathlib import Path

import pytest

from service.compile.interface import ChildLimits, CompileRequest
from service.compile.runner import ChildCompiler
from service.records import Report, ReportStatus
from service.spec import load_spec

pytestmark = pytest.mark.tpu

EXAMPLES = Path(__file__).parents[2] / "examples"
FITS, TOO_LARGE = ReportStatus.OK, ReportStatus.DOES_NOT_FIT

# Parameters are closed forms: 671.03 B for the main model of V3 and 11.61 B for its MTP module, rounded as published.
WEIGHED = [
    ("tiny-v5e-4", "candidate", FITS, None),
    pytest.param("deepseek-custom-v5p-8", "candidate", FITS, None, marks=pytest.mark.slow),
    pytest.param("deepseek-custom-v5p-8", "dropless", FITS, None, marks=pytest.mark.slow),
    pytest.param("deepseek-v3-671b-v5p-512", "candidate", FITS, 671.03, marks=pytest.mark.slow),
    pytest.param("deepseek-v3-671b-v5p-256", "candidate", FITS, 671.03, marks=pytest.mark.slow),
    pytest.param("deepseek-v3-671b-v5p-128", "candidate", TOO_LARGE, 671.03, marks=pytest.mark.slow),
    pytest.param("deepseek-v3-671b-flash-v5p-512", "candidate", FITS, 682.64, marks=pytest.mark.slow),
    pytest.param("deepseek-v3-671b-flash-16k-v5p-512", "candidate", FITS, 682.64, marks=pytest.mark.slow),
    pytest.param("v4.1-scale-v5p-512", "candidate", FITS, None, marks=pytest.mark.slow),
    pytest.param("v4.1-scale-v5p-512", "dropless", FITS, None, marks=pytest.mark.slow),
    pytest.param("v4.1-scale-v5p-128", "candidate", TOO_LARGE, None, marks=pytest.mark.slow),
]


def weigh(name: str, program: str, directory: Path) -> Report:
    spec = load_spec((EXAMPLES / f"{name}.yaml").read_text())
    request = CompileRequest(spec=spec.as_json(), program=program, depth="memory", work_dir=str(directory / "work"))
    return ChildCompiler(directory / "capacity.json")(
        request, limits=ChildLimits(wall_seconds=1800), on_event=lambda event: None, is_cancelled=lambda: False
    )


@pytest.mark.parametrize(("name", "program", "status", "billions"), WEIGHED)
def test_each_example_gets_its_answer_with_parts_that_sum(
    tmp_path: Path, name: str, program: str, status: ReportStatus, billions: float | None
) -> None:
    report = weigh(name, program, tmp_path)
    assert report.status is status, report.failure
    assert sum(report.classes.values()) == report.peak_bytes
    assert sum(report.modules.values()) == report.peak_bytes
    assert report.classes.get("unattributed", 0) + report.modules.get("unattributed", 0) < 0.03 * report.peak_bytes
    assert report.allocated_bytes - report.peak_bytes == report.fragmentation_bytes >= 0
    assert report.headroom_bytes == report.capacity_bytes - report.allocated_bytes
    assert (report.headroom_bytes >= 0) is (status is FITS)
    assert all(row.verdict == "equal" for row in report.halo), report.halo
    if billions is not None:
        assert round(report.num_parameters / 1e9, 2) == billions
