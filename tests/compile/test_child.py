"""The compile child against the real compiler: what it answers, when it stops, and that both depths say the same to the byte."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from service.compile.analyse import read
from service.compile.child import CODE_BAND_BYTES, compare_with_compiler
from service.compile.interface import ChildLimits, CompileRequest, ProgressEvent
from service.compile.runner import CHILD_COMMAND, ChildCompiler
from service.errors import AnalysisError
from service.records import Depth, FailureKind, Report, ReportStatus

pytestmark = pytest.mark.tpu

SIZED = (sys.executable, "-P", str(Path(__file__).with_name("sized_child.py")))
CAPACITY = (16 << 30) - (258 << 20) - 4 * 512
"""Of v5e-4; tests/compile/test_capacity.py finds it."""

TINY = {
    "scenario": "tiny",
    "model": {"preset": "tiny", "num_layers": 1, "experts": None, "engram": None, "mtp": {"depth": 0}, "mhc": {"num_streams": 1}},
    "train": {"seq_len": 64, "per_device_batch": 1},
    "mesh": {"topology": "v5e-4", "fsdp": 4},
}


@dataclass
class Weigher:
    """Weighs with the real child, remembering capacities between the runs of one test module."""

    directory: Path
    cache: Path

    def __call__(self, spec: dict[str, Any], depth: Depth = "memory", *, command: tuple[str, ...] = SIZED, name: str = "one") -> Report:
        self.events: list[ProgressEvent] = []
        request = CompileRequest(
            spec=spec, program="candidate", depth=depth, work_dir=str(self.directory / name), artifact_dir=str(self.directory / "kept")
        )
        limits = ChildLimits(wall_seconds=300, rss_bytes=4 << 30)
        report = ChildCompiler(self.cache, command=command)(request, limits=limits, on_event=self.events.append, is_cancelled=lambda: False)
        assert not (self.directory / name).exists()
        return report

    @property
    def phases(self) -> list[str]:
        return [event.name for event in self.events]


@pytest.fixture
def weigh(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Weigher:
    return Weigher(tmp_path, tmp_path_factory.getbasetemp() / "capacity.json")


def sized(kind: str, state_bytes: int) -> dict[str, Any]:
    assert state_bytes % 512 == 0
    return TINY | {"scenario": f"{kind}.{state_bytes}"}


def test_memory_depth_answers_before_code_generation_and_with_the_exact_bytes(weigh: Weigher) -> None:
    report = weigh(sized("fits", 12345 * 512))
    assert (report.status, report.depth) == (ReportStatus.OK, "memory")
    assert report.peak_bytes == report.allocated_bytes == report.argument_bytes == report.alias_bytes == 12345 * 512
    assert report.capacity_bytes == CAPACITY
    assert report.headroom_bytes == CAPACITY - 12345 * 512
    assert report.code_bytes is None
    assert report.num_devices == 4
    assert weigh.phases == ["topology", "build", "trace", "lower", "compile", "analyse"]
    assert weigh.events[-1].data == {"peak_bytes": 12345 * 512, "allocated_bytes": 12345 * 512, "capacity_bytes": CAPACITY}


def test_timings_sum_to_the_total_and_the_child_says_what_it_held(weigh: Weigher) -> None:
    report = weigh(sized("fits", 512))
    timings = report.timings.model_dump(exclude={"total_seconds"}, exclude_none=True)
    assert set(timings) == {
        f"{phase}_seconds" for phase in ("start", "topology", "build", "trace", "lower", "buffer_assignment", "analysis")
    }
    assert all(seconds >= 0 for seconds in timings.values())
    assert report.timings.total_seconds is not None
    assert sum(timings.values()) == pytest.approx(report.timings.total_seconds)
    assert report.child_peak_rss_bytes is not None
    assert 100 << 20 < report.child_peak_rss_bytes < 2 << 30
    assert report.toolchain is not None
    assert report.toolchain.topology_arguments == {"topology_name": "v5e:2x2"}


def test_a_program_just_outside_the_band_is_answered_without_code(weigh: Weigher) -> None:
    report = weigh(sized("fits", CAPACITY - CODE_BAND_BYTES))
    assert (report.status, report.depth, report.code_bytes) == (ReportStatus.OK, "memory", None)


def test_a_program_in_the_band_is_called_fitting_only_after_code_generation(weigh: Weigher) -> None:
    report = weigh(sized("fits", CAPACITY - CODE_BAND_BYTES + 512))
    assert (report.status, report.depth) == (ReportStatus.OK, "full")
    assert weigh.phases[-1] == "code_generation"
    assert report.code_bytes is not None
    assert report.code_bytes > 0


def test_a_program_whose_code_alone_is_too_much_does_not_fit(weigh: Weigher) -> None:
    # Its bytes equal the capacity: the check before code generation passes, and every dump file is written.
    report = weigh(sized("fits", CAPACITY))
    assert weigh.phases[-1] == "code_generation"
    assert (report.status, report.depth) == (ReportStatus.DOES_NOT_FIT, "full")
    assert report.allocated_bytes == CAPACITY
    assert report.headroom_bytes == 0
    assert report.compiler_message is not None
    assert "Ran out of memory in memory space hbm" in report.compiler_message
    assert report.failure is None


def test_a_program_that_does_not_fit_gets_as_full_a_report(weigh: Weigher) -> None:
    fits, too_large = weigh(sized("fits", 1024)), weigh(sized("fits", CAPACITY + 512))
    assert too_large.status is ReportStatus.DOES_NOT_FIT
    assert too_large.failure is None
    assert too_large.compiler_message is not None
    assert "exceeds available HBM (15.75G)" in too_large.compiler_message
    assert (too_large.allocated_bytes, too_large.headroom_bytes) == (CAPACITY + 512, -512)
    missing = {name for name, value in too_large.model_dump().items() if value is None or value in ((), {})}
    assert missing - {name for name, value in fits.model_dump().items() if value is None or value in ((), {})} == set()
    assert too_large.buffers[0].padded_bytes == CAPACITY + 512


def test_a_limit_the_spec_sets_is_the_capacity_it_is_judged_by(weigh: Weigher) -> None:
    spec = sized("fits", 1401 << 20) | {"compiler_options": {"xla_tpu_max_hbm_size_mib": 1400}}
    report = weigh(spec)
    assert (report.status, report.capacity_bytes) == (ReportStatus.DOES_NOT_FIT, 1400 << 20)


def test_exhausted_vmem_is_a_failure_of_its_own_kind_with_what_was_measured(weigh: Weigher) -> None:
    report = weigh(sized("exhausts-vmem", 512), "full")
    assert report.status is ReportStatus.FAILED
    assert report.failure is not None
    assert report.failure.kind is FailureKind.VMEM
    assert "space=vmem" in report.failure.message
    assert report.peak_bytes is not None


def test_what_the_partitioner_warns_of_is_found_in_libtpus_own_log(weigh: Weigher) -> None:
    report = weigh(sized("reshards", 6 * 10 * 512 * 4 // 4) | {"mesh": {"topology": "v5e-4", "fsdp": 2, "context": 2}})
    assert report.status is ReportStatus.OK, report.failure
    assert "involuntary_rematerialisation" in {finding.kind for finding in report.findings}


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("cannot-be-built", "3 rows do not divide over 2 devices; change fsdp"),
        ("cannot-be-traced", "TypeError: unsupported operand"),
    ],
)
def test_what_cannot_be_lowered_is_told_in_the_models_words(weigh: Weigher, kind: str, message: str) -> None:
    report = weigh(sized(kind, 512))
    assert report.status is ReportStatus.FAILED
    assert report.failure is not None
    assert report.failure.kind is FailureKind.LOWERING
    assert report.failure.message.startswith(message)
    assert "Traceback" in report.failure.log_tail
    assert report.topology["name"] == "v5e-4"


@pytest.mark.parametrize("state_bytes", [1024, CAPACITY + 512], ids=["fits", "does not fit"])
def test_of_a_dump_that_does_not_add_up_nothing_is_reported_but_the_compilers_word(weigh: Weigher, state_bytes: int) -> None:
    report = weigh(sized("cannot-be-analysed", state_bytes))
    assert report.status is ReportStatus.FAILED
    assert report.failure is not None
    assert (report.failure.kind, report.failure.message) == (FailureKind.ANALYSIS, "the replay ends 3 bytes above the allocation")
    assert (report.peak_bytes, report.allocated_bytes, report.headroom_bytes, report.buffers) == (None, None, None, ())
    assert report.capacity_bytes == CAPACITY
    assert ("exceeds available HBM" in (report.compiler_message or "")) is (state_bytes > CAPACITY)


@pytest.mark.parametrize("state_bytes", [1024, CAPACITY + 512], ids=["fits", "does not fit"])
def test_a_dump_that_differs_from_the_compilers_second_copy_is_refused(weigh: Weigher, state_bytes: int) -> None:
    report = weigh(sized("damaged", state_bytes))
    assert (report.status, report.peak_bytes) == (ReportStatus.FAILED, None)
    assert report.failure is not None
    assert report.failure.kind is FailureKind.ANALYSIS
    assert "and the compiler's second copy of it" in report.failure.message


def test_both_depths_of_a_real_spec_agree_in_every_figure(weigh: Weigher) -> None:
    memory, full = (weigh(TINY, depth, command=CHILD_COMMAND) for depth in ("memory", "full"))
    assert (memory.status, full.status) == (ReportStatus.OK, ReportStatus.OK)
    assert (memory.depth, full.depth) == ("memory", "full")
    apart = {"depth", "code_bytes", "timings", "child_peak_rss_bytes"}
    assert memory.model_dump(exclude=apart) == full.model_dump(exclude=apart)
    assert memory.code_bytes is None
    assert full.code_bytes is not None
    # The child has held peak, allocated, argument and alias bytes against the compiler's own before it said so.
    assert full.timings.code_generation_seconds is not None
    assert memory.peak_bytes is not None
    kept = weigh.directory / "kept"
    assert read((kept / "candidate.hlo_proto.pb").read_bytes()).memory.peak_bytes == memory.peak_bytes
    assert {path.name for path in kept.iterdir()} >= {"candidate.hlo_proto.pb", "candidate.lifetimes.json"}


def test_files_that_cannot_be_kept_are_a_warning_beside_the_whole_answer(weigh: Weigher) -> None:
    kept = weigh.directory / "kept"
    # Nothing can be made below a file, whoever asks: the tests may run as root.
    kept.write_text("a file")
    report = weigh(sized("fits", 777 * 512))
    assert (report.status, report.failure, report.peak_bytes) == (ReportStatus.OK, None, 777 * 512)
    assert report.warnings == (f"the compiler's files were not kept in {kept}: File exists",)


def test_half_of_what_was_to_be_kept_is_not_left(weigh: Weigher) -> None:
    blocked = weigh.directory / "kept" / "candidate.lifetimes.json"
    blocked.mkdir(parents=True)
    report = weigh(sized("fits", 778 * 512))
    assert report.status is ReportStatus.OK
    assert [warning.rpartition(": ")[2] for warning in report.warnings] == ["Is a directory"]
    assert list(blocked.parent.iterdir()) == [blocked]


def test_two_children_at_once_both_succeed_without_a_known_capacity(tmp_path: Path) -> None:
    reports: dict[str, Report] = {}
    ready = threading.Barrier(2)

    def run(name: str, rows: int) -> None:
        ready.wait()
        weigher = Weigher(tmp_path / name, tmp_path / name / "capacity.json")
        reports[name] = weigher(sized("fits", rows * 512), name=name)

    threads = [threading.Thread(target=run, args=pair) for pair in (("first", 3000), ("second", 7000))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {name: report.peak_bytes for name, report in reports.items()} == {"first": 3000 * 512, "second": 7000 * 512}
    assert {report.capacity_bytes for report in reports.values()} == {CAPACITY}


def statistics_of(memory: Any, **changes: int) -> Any:
    names = ("peak_memory_in_bytes", "total_allocation_bytes", "argument_size_in_bytes", "alias_size_in_bytes")
    values = dict(zip(names, (11, 13, 5, 3), strict=True)) | {"generated_code_size_in_bytes": 17} | changes
    return type("Statistics", (), values)


MEASURED = type("Measured", (), {"memory_analysis_peak_bytes": 11, "allocated_bytes": 13, "argument_bytes": 5, "alias_bytes": 3})


def test_code_bytes_are_the_compilers_where_everything_else_agrees() -> None:
    compare: Callable[..., int | None] = compare_with_compiler
    assert compare(MEASURED, statistics_of(MEASURED)) == 17
    assert compare(MEASURED, statistics_of(MEASURED, generated_code_size_in_bytes=0)) is None
    assert compare(MEASURED, statistics_of(MEASURED, generated_code_size_in_bytes=-1)) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peak_memory_in_bytes": 12}, "peak 11 and 12"),
        ({"total_allocation_bytes": 0}, "allocated 13 and 0"),
        ({"argument_size_in_bytes": -1}, "argument 5 and -1"),
        ({"alias_size_in_bytes": 4}, "alias 3 and 4"),
    ],
)
def test_a_byte_of_difference_from_the_compiler_fails_the_analysis(changes: dict[str, int], message: str) -> None:
    with pytest.raises(AnalysisError, match=message):
        compare_with_compiler(MEASURED, statistics_of(MEASURED, **changes))  # type: ignore[arg-type]


def test_a_compiler_without_statistics_fails_the_analysis() -> None:
    with pytest.raises(AnalysisError, match="no memory statistics"):
        compare_with_compiler(MEASURED, None)  # type: ignore[arg-type]
