"""The command line: what it prints where, what it exits with, and what it never loads."""

from __future__ import annotations

import io
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from service.compile.interface import ChildLimits, CompileRequest, ProgressEvent
from service.compile.runner import ChildCompiler
from service.records import Failure, FailureKind, Report, ReportStatus
from service.settings import CLIENT_VARIABLES
from service.spec import parse_spec
from service.steps.runner import ChildSteps
from service.steps_records import MemoryComparison, StepsReport, StepsStatus
from tests.browser.samples import make_report
from weighbridge import documents, render
from weighbridge.cli import main
from weighbridge.local import weigh
from weighbridge.overrides import apply_overrides
from weighbridge.render import bar
from weighbridge.steps import print_steps

SPEC = """
scenario: two-programs
model: {preset: tiny}
train: {seq_len: 128, per_device_batch: 1}
mesh: {topology: v5e-4, fsdp: 2, expert: 2}
moe: {ragged_buffer_factor: 1.5, retry_when_tokens_dropped: true}
programs: [candidate, dropless]
"""


class FakeCompiler:
    """Answers each program with a prepared report, after one progress event."""

    def __init__(self, reports: dict[str, Report]) -> None:
        self.reports = reports
        self.requests: list[CompileRequest] = []

    def __call__(
        self,
        request: CompileRequest,
        *,
        limits: ChildLimits,
        on_event: Callable[[ProgressEvent], None],
        is_cancelled: Callable[[], bool],
    ) -> Report:
        self.requests.append(request)
        self.limits = limits
        on_event(ProgressEvent(name="trace", seconds=1.25))
        return self.reports[request.program]


Run = Callable[..., tuple[Result, FakeCompiler]]


@pytest.fixture
def spec_file(tmp_path: Path) -> Path:
    path = tmp_path / "spec.yaml"
    path.write_text(SPEC)
    return path


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Runs the command with a fake compiler in place of the real one."""
    monkeypatch.setenv("WEIGHBRIDGE_DATA_DIR", str(tmp_path / "data"))

    def run(*arguments: str, reports: dict[str, Report] | None = None, stdin: str | None = None) -> tuple[Result, FakeCompiler]:
        fake = FakeCompiler(reports or {"candidate": make_report(), "dropless": make_report("dropless", scale=1.7)})
        monkeypatch.setattr(ChildCompiler, "__call__", lambda self, request, **rest: fake(request, **rest))
        return CliRunner().invoke(main, list(arguments), input=stdin), fake

    return run


def failed(kind: FailureKind, program: str = "candidate") -> Report:
    return Report(
        program=program, status=ReportStatus.FAILED, depth="memory", failure=Failure(kind=kind, message="it broke", log_tail="last words")
    )


def test_help_and_import_load_neither_the_service_nor_jax() -> None:
    script = (
        "import sys, weighbridge\n"
        "from weighbridge.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {name.split('.')[0] for name in sys.modules} & {'service', 'fastapi', 'jax', 'libtpu', 'sqlalchemy', 'pydantic'}\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)


def test_json_of_one_program_is_its_report_alone_on_stdout(run: Run, spec_file: Path) -> None:
    result, _ = run("compile", str(spec_file), "--program", "candidate", "--json")
    assert result.exit_code == 0
    content = json.loads(result.stdout)
    assert content.pop("spec")["scenario"] == "two-programs"
    assert Report.model_validate(content) == make_report()
    assert "candidate: tracing (at 1.2 s)" in result.stderr


def test_json_of_two_programs_leads_with_the_most_allocated(run: Run, spec_file: Path) -> None:
    result, _ = run("compile", str(spec_file), "--json")
    content = json.loads(result.stdout)
    larger = make_report("dropless", scale=1.7)
    assert content["governing_program"] == "dropless"
    assert (content["status"], content["peak_bytes"], content["allocated_bytes"]) == ("ok", larger.peak_bytes, larger.allocated_bytes)
    assert content["capacity_bytes"] == larger.capacity_bytes
    assert {name: Report.model_validate(report) for name, report in content["programs"].items()} == {
        "candidate": make_report(),
        "dropless": larger,
    }


@pytest.mark.parametrize(
    ("second", "code"),
    [
        (make_report("dropless"), 0),
        (make_report("dropless", scale=4), 1),
        (failed(FailureKind.COMPILER, "dropless"), 3),
        (make_report("dropless").model_copy(update={"status": ReportStatus.UNKNOWN}), 3),
        (failed(FailureKind.KILLED_WALL, "dropless"), 5),
    ],
    ids=["fits", "does-not-fit", "failed", "too-close-to-tell", "timed-out"],
)
def test_exit_code_is_that_of_the_worst_program(run: Run, spec_file: Path, second: Report, code: int) -> None:
    result, _ = run("compile", str(spec_file), reports={"candidate": make_report(), "dropless": second})
    assert result.exit_code == code


def test_a_program_that_does_not_fit_is_told_with_needed_and_available_bytes_and_its_buffers(run: Run, spec_file: Path) -> None:
    result, _ = run("compile", str(spec_file), "--program", "candidate", reports={"candidate": make_report(scale=4)})
    assert "does not fit  needs 112.15 GiB, 95.73 GiB available per device: 16.42 GiB too much" in result.stdout
    assert "params.moe_layers.moe.w_up" in result.stdout
    assert "f32[58,16,7168,128]" in result.stdout


def test_a_failure_shows_its_message_and_the_end_of_the_log(run: Run, spec_file: Path) -> None:
    result, _ = run("compile", str(spec_file), "--program", "candidate", reports={"candidate": failed(FailureKind.CRASHED)})
    assert "it broke" in result.stdout
    assert "last words" in result.stdout


def test_every_problem_of_a_wrong_spec_is_listed_and_nothing_is_compiled(run: Run, spec_file: Path) -> None:
    result, fake = run("compile", str(spec_file), "--set", "mesh.fsdp=3", "--set", "train.dtype=int8", "--json")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "train.dtype" in result.stderr
    assert "int8" in result.stderr
    assert "mesh" in result.stderr
    assert "legal" in result.stderr
    assert fake.requests == []


def test_overrides_depth_and_limits_reach_the_child(run: Run, spec_file: Path) -> None:
    result, fake = run(
        "compile", str(spec_file), "--program", "dropless", "--depth", "full", "--set", "train.seq_len=256", "--wall-limit", "77", "--json"
    )
    assert result.exit_code == 0
    (request,) = fake.requests
    assert (request.program, request.depth, request.spec["train"]["seq_len"]) == ("dropless", "full", 256)
    assert fake.limits.wall_seconds == 77


def test_a_spec_can_come_from_standard_input(run: Run) -> None:
    result, fake = run("compile", "-", "--json", stdin=SPEC)
    assert result.exit_code == 0
    assert sorted(request.program for request in fake.requests) == ["candidate", "dropless"]


def test_a_missing_file_is_a_usage_error(run: Run, tmp_path: Path) -> None:
    result, _ = run("compile", str(tmp_path / "absent.yaml"))
    assert result.exit_code == 2
    assert "absent.yaml cannot be read: No such file or directory" in result.stderr


def test_a_saved_report_is_read_again_as_it_was(run: Run, spec_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "report.json"
    result, _ = run("compile", str(spec_file), "--out", str(out))
    assert result.exit_code == 0
    reports, spec = documents.read_document(out)
    assert reports == {"candidate": make_report(), "dropless": make_report("dropless", scale=1.7)}
    assert parse_spec(spec).scenario == "two-programs"


def test_two_saved_reports_are_compared_by_what_changed(run: Run, spec_file: Path, tmp_path: Path) -> None:
    base, head = tmp_path / "base.json", tmp_path / "head.json"
    for path, scale in ((base, 1.0), (head, 1.5)):
        run("compile", str(spec_file), "--program", "candidate", "--out", str(path), reports={"candidate": make_report(scale=scale)})
    before, after = make_report().peak_bytes, make_report(scale=1.5).peak_bytes
    assert before is not None
    assert after is not None
    result, _ = run("compare", str(base), str(head))
    assert result.exit_code == 0
    assert f"peak +{(after - before) / 2**30:.2f} GiB (27.35 GiB → 41.03 GiB, +50.00 %)" in result.stdout
    less, _ = run("compare", str(head), str(base))
    assert f"peak −{(after - before) / 2**30:.2f} GiB (41.03 GiB → 27.35 GiB, −33.33 %)" in less.stdout
    as_json, _ = run("compare", str(base), str(head), "--json")
    diff = json.loads(as_json.stdout)["programs"]["candidate"]
    assert sum(part["delta"] for part in diff["classes"]) == after - before


def test_saved_reports_of_two_specs_are_compared_with_the_fields_that_differ(run: Run, spec_file: Path, tmp_path: Path) -> None:
    base, head = tmp_path / "base.json", tmp_path / "head.json"
    for path, policy in ((base, "full"), (head, "minimal")):
        run("compile", str(spec_file), "--program", "candidate", "--set", f"train.remat={policy}", "--out", str(path))
    result, _ = run("compare", str(base), str(head))
    said = " ".join(result.stdout.split())
    assert "train.remat.policy: full → minimal" in said
    assert "train.remat.policy changed, and peak, allocated, host and saved bytes are the same to the byte" in said


def test_artifacts_are_kept_where_the_command_was_given(run: Run, spec_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _, fake = run("compile", str(spec_file), "--program", "candidate", "--keep", "kept")
    # The child runs in a directory of its own, where a relative path would lead elsewhere.
    assert [request.artifact_dir for request in fake.requests] == [str(tmp_path / "kept")]


def test_a_directory_for_keeping_is_made_before_anything_is_compiled_or_refused(run: Run, spec_file: Path, tmp_path: Path) -> None:
    # Nothing can be made below a file, whoever asks: the tests may run as root.
    result, fake = run("compile", str(spec_file), "--keep", str(spec_file / "kept"))
    assert result.exit_code == 2
    assert f"--keep {spec_file}/kept cannot be written to: Not a directory; name another directory" in result.stderr
    assert fake.requests == []
    run("compile", str(spec_file), "--keep", str(tmp_path / "deep" / "kept"))
    assert (tmp_path / "deep" / "kept").is_dir()


STEPS_SPEC = """
scenario: real-steps
model: {preset: tiny}
train: {seq_len: 64}
mesh: {fsdp: 2}
steps: {devices: "cpu:2"}
"""


@pytest.mark.parametrize(
    ("command", "spec", "problem", "way_out", "undone"),
    [
        ("compile", STEPS_SPEC, "mesh.topology  is missing: this is a spec for real steps", "`weighbridge steps ", "nothing was compiled"),
        (
            "steps",
            SPEC,
            "steps  is missing: this is a spec to compile",
            "--set steps.devices=cpu:4; `weighbridge compile ",
            "nothing was run",
        ),
    ],
)
def test_a_spec_of_the_other_kind_is_told_the_command_that_takes_it(
    run: Run, tmp_path: Path, command: str, spec: str, problem: str, way_out: str, undone: str
) -> None:
    path = tmp_path / "other.yaml"
    path.write_text(spec)
    result, fake = run(command, str(path))
    assert result.exit_code == 2
    for words in (problem, way_out, f"1 problem, {undone}"):
        assert words in result.stderr
    assert fake.requests == []


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("compile", "130  interrupted; nothing is left running"),
        ("submit", "130  interrupted; the job goes on on the server"),
        ("steps", "130 interrupted, and nothing is left running"),
    ],
)
def test_help_says_what_an_interrupt_leaves_running(command: str, words: str) -> None:
    assert words in " ".join(CliRunner().invoke(main, [command, "--help"]).stdout.replace("130  ", "130##").split()).replace("##", "  ")


def test_the_clients_variables_are_in_help_and_readme() -> None:
    help_text, readme = CliRunner().invoke(main, ["--help"]).stdout, (Path(__file__).parent.parent / "README.md").read_text()
    for name in CLIENT_VARIABLES:
        assert f"WEIGHBRIDGE_{name.upper()}" in help_text
        assert f"WEIGHBRIDGE_{name.upper()}" in readme


@pytest.mark.parametrize("command", ["compile", "steps"])
def test_the_limit_to_raise_is_the_option_of_the_command(run: Run, spec_file: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    named: list[str] = []

    def note(self: object, *_: object, wall_setting: str, **__: object) -> None:
        named.append(wall_setting)
        raise KeyboardInterrupt

    monkeypatch.setattr({"compile": ChildCompiler, "steps": ChildSteps}[command], "__init__", note)
    result, _ = run(command, str(spec_file), "--wall-limit", "3", *(("--set", "steps.devices=cpu:4") if command == "steps" else ()))
    assert result.exit_code == 130
    assert named == ["--wall-limit"]


def test_what_the_hosts_memory_grew_by_is_told_with_its_noise() -> None:
    memory = MemoryComparison(
        state_bytes=3 << 20,
        num_states_held=2,
        programs=(),
        predicted_bytes=7 << 20,
        measured_bytes=14 << 20,
        source="host_rss_growth",
        total_predicted_bytes=14 << 20,
        total_measured_bytes=28 << 20,
    )
    console = Console(record=True, width=300, file=io.StringIO())
    print_steps(console, "s", StepsReport(status=StepsStatus.OK, phase="done", memory=memory))
    shown = console.export_text()
    assert (
        "measured 14.00 MiB (growth of the child's resident memory over its devices: the host's own noise is in it), 2.000 of it" in shown
    )


def test_what_retrying_costs_is_told_of_measured_step_times(run: Run, spec_file: Path) -> None:
    result, _ = run("compile", str(spec_file), "--step-seconds", "8.63", "12.95")
    said = " ".join(result.stdout.split())
    assert "expected step time: candidate + overflow probability × dropless" in said
    assert "8.6 s at 0%, 8.8 s at 1%" in said
    assert "cheaper above 33.4% of overflowing steps" in said
    wrong, _ = run("compile", str(spec_file), "--step-seconds", "0", "12.95")
    assert wrong.exit_code == 2


def test_a_pair_that_does_not_fit_is_told_by_the_exit_code(run: Run, spec_file: Path) -> None:
    report = make_report()
    assert report.capacity_bytes is not None
    # Each fits alone; one step ahead the candidate has a second state beside it.
    nearly_full = {"allocated_bytes": report.capacity_bytes - 1, "headroom_bytes": 1}
    reports = {name: make_report(name).model_copy(update=nearly_full) for name in ("candidate", "dropless")}
    result, _ = run("compile", str(spec_file), reports=reports)
    assert "pair  ✗ do not fit" in result.stdout
    assert "which does not fit; without it the pair does [steps.look_ahead: 0]" in " ".join(result.stdout.split())
    assert result.exit_code == 1
    patient, _ = run("compile", str(spec_file), "--set", "steps.look_ahead=0", reports=reports)
    assert patient.exit_code == 0


def test_programs_that_have_no_counterpart_cannot_be_compared(run: Run, spec_file: Path, tmp_path: Path) -> None:
    both, one = tmp_path / "both.json", tmp_path / "one.json"
    run("compile", str(spec_file), "--out", str(both))
    run("compile", str(spec_file), "--program", "candidate", "--out", str(one))
    result, _ = run("compare", str(both), str(one), "--program", "dropless")
    assert result.exit_code == 2
    assert "no program dropless on both sides" in result.stderr
    absent, _ = run("compare", str(both), str(tmp_path / "absent.json"))
    assert absent.exit_code == 2
    assert "there is no file" in absent.stderr


def test_a_spec_that_retries_gets_its_pair(run: Run, spec_file: Path) -> None:
    result, _ = run("compile", str(spec_file), "--json")
    pair = json.loads(result.stdout)["pair"]
    larger = make_report("dropless", scale=1.7)
    assert (pair["worse_program"], pair["headroom_bytes"], pair["fits"]) == ("dropless", larger.headroom_bytes, True)
    shown, _ = run("compile", str(spec_file))
    assert "pair  ✓ fit  the worse is dropless, head-room 48.06 GiB" in shown.stdout
    plain, _ = run("compile", str(spec_file), "--set", "moe.retry_when_tokens_dropped=false", "--json")
    assert json.loads(plain.stdout)["pair"] is None


def test_a_file_that_is_no_report_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text('{"status": "ok"}')
    with pytest.raises(documents.DocumentError, match=r"other\.json holds no report"):
        documents.read_document(path)


def test_an_interrupt_cancels_every_child_before_it_goes_on() -> None:
    stopped: list[str] = []
    started = threading.Barrier(2)

    def compiler(request: CompileRequest, *, limits: ChildLimits, on_event: object, is_cancelled: Callable[[], bool]) -> Report:
        started.wait(timeout=30)
        if request.program == "candidate":
            raise KeyboardInterrupt
        while not is_cancelled():
            threading.Event().wait(0.005)
        stopped.append(request.program)
        return failed(FailureKind.CANCELLED, request.program)

    import yaml

    spec = parse_spec(yaml.safe_load(SPEC))
    with pytest.raises(KeyboardInterrupt):
        weigh(spec, compiler, limits=ChildLimits(), on_event=lambda *_: None, on_report=lambda _: None, parallel=2)
    assert stopped == ["dropless"]


def test_overrides_make_what_is_absent_and_keep_the_original() -> None:
    data = {"train": {"remat": "full", "seq_len": 8}}
    changed = apply_overrides(data, ["context.load_balance=false", "train.remat.save=[mla_q]", "train.seq_len=16"])
    assert changed == {
        "train": {"remat": {"policy": "full", "save": ["mla_q"]}, "seq_len": 16},
        "context": {"load_balance": False},
    }
    assert data == {"train": {"remat": "full", "seq_len": 8}}


@pytest.mark.parametrize("assignment", ["train.seq_len", "=3", "train..x=1", "train.seq_len.x=1", "a=[1"])
def test_an_unusable_override_is_refused_by_its_text(assignment: str) -> None:
    with pytest.raises(click.BadParameter, match=r"--set|not a mapping|path=value|not readable"):
        apply_overrides({"train": {"seq_len": 8}}, [assignment])


def test_a_bar_shows_anything_above_zero_and_never_more_than_its_width() -> None:
    assert bar(0.0, 5) == ""
    assert bar(1e-9, 5) == "▏"
    assert bar(0.5, 5) == "██▌"
    assert bar(7.0, 5) == "█████"


def test_a_defect_of_the_command_itself_is_no_verdict(run: Run, spec_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def break_down(*_: object, **__: object) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr("weighbridge.local.weigh", break_down)
    result, _ = run("compile", str(spec_file))
    assert result.exit_code == 3
    assert "RuntimeError: a defect" in result.stderr


def test_a_report_that_cannot_be_saved_is_said(run: Run, spec_file: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result, _ = run("compile", str(spec_file), "--out", str(tmp_path / "file" / "report.json"))
    assert result.exit_code == 3
    assert "report.json cannot be written" in result.stderr


@pytest.mark.parametrize("command", ["serve", "worker"])
@pytest.mark.parametrize("url", ["foo", "mysql://me:hidden@h/looms", "sqlite://"])
def test_a_database_that_cannot_be_used_is_one_line_and_a_usage_error(tmp_path: Path, command: str, url: str) -> None:
    code = f"from weighbridge.cli import main; main(['{command}', '--data-dir', {str(tmp_path)!r}])"
    environment = os.environ | {"WEIGHBRIDGE_DATABASE_URL": url}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")
    (line,) = ended.stderr.splitlines()
    assert line.startswith("weighbridge: WEIGHBRIDGE_DATABASE_URL is ")
    assert "hidden" not in line


def test_a_port_that_is_taken_is_told_with_both_ways_to_choose_another(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code = f"from weighbridge.cli import main; main(['serve', '--port', '{taken.getsockname()[1]}', '--data-dir', {str(tmp_path)!r}])"
        ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 2
    assert "free it, or choose another with WEIGHBRIDGE_PORT or `serve --port`" in ended.stderr


def test_the_catalogue_names_every_family_with_derived_counts() -> None:
    result = CliRunner().invoke(main, ["catalog", "topologies", "--json"])
    by_name = {topology["name"]: topology for topology in json.loads(result.stdout)["topologies"]}
    assert (by_name["v5p-512"]["num_chips"], by_name["v5p-512"]["num_devices"]) == (256, 256)
    assert by_name["v5e-16"]["num_chips"] == 16


def test_a_missing_extra_is_named_with_the_line_that_installs_it(monkeypatch: pytest.MonkeyPatch, spec_file: Path) -> None:
    from weighbridge import extras

    real = extras.importlib.util.find_spec
    monkeypatch.setattr(extras.importlib.util, "find_spec", lambda name, *rest: None if name == "libtpu" else real(name, *rest))
    result = CliRunner().invoke(main, ["compile", str(spec_file)])
    # 1 would say that the program does not fit.
    assert result.exit_code == 3
    assert "needs libtpu" in result.stderr
    assert "pip install 'weighbridge[compile]'" in result.stderr


def test_an_answer_is_saved_although_its_reader_has_closed_the_pipe(
    run: Run, spec_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed(*arguments: object, **options: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(render, "print_reports", closed)
    out = tmp_path / "report.json"
    run("compile", str(spec_file), "--out", str(out))
    reports, _ = documents.read_document(out)
    assert sorted(reports) == ["candidate", "dropless"]
