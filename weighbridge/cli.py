"""The `weighbridge` command. Each command loads what it needs when it runs, so that `--help` needs neither the service nor JAX."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from weighbridge.address import DEFAULT_URL, PROJECT_VARIABLE, TOKEN_VARIABLE, URL_VARIABLE
from weighbridge.exits import EXIT_BAD_SPEC, EXIT_FAILED, EXIT_INTERRUPTED, Commands, NoAnswerError, terminated_as_interrupted

if TYPE_CHECKING:
    from rich.console import Console

    from service.records import JobKind, Report
    from service.spec import Spec
    from service.steps_records import StepsReport

_EXIT_CODES = """\b
Exit codes:
  0  every program fits
  1  a program does not fit, or the pair of a step that retries
  2  the spec or the command line is wrong
  3  no answer: a program failed, or is too close to the capacity to tell before code generation
  5  timed out
"""
_STEPS_EXIT_CODES = "0 every check passed; 1 a check failed, or the devices are too small; 2 wrong spec; 3 failed; 5 timed out"
_VARIABLES = f"""\b
Variables:
  {URL_VARIABLE}      the server that submit and compare talk to; otherwise {DEFAULT_URL}
  {TOKEN_VARIABLE}    the token it asks for, where it asks for one
  {PROJECT_VARIABLE}  the project that submitted jobs belong to
README.md lists those of serve, worker and compile.
"""

_SPEC = click.Path(allow_dash=True, path_type=Path)
_server_option = click.option("--server", metavar="URL", help=f"The server; otherwise {URL_VARIABLE}, otherwise {DEFAULT_URL}.")
_set_option = click.option("--set", "assignments", multiple=True, metavar="PATH=VALUE", help="Change the spec: --set train.seq_len=8192.")
_program_option = click.option("--program", "programs", multiple=True, metavar="NAME", help="Weigh only this program. Repeatable.")
_depth_option = click.option(
    "--depth", type=click.Choice(["memory", "full"]), help="memory stops at buffer assignment; full goes on through code generation."
)
_json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON alone on stdout.")
_buffers_option = click.option(
    "--buffers", "num_buffers", type=click.IntRange(0, 200), default=12, show_default=True, help="Buffers to list."
)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110}, epilog=_VARIABLES)
@click.version_option(package_name="weighbridge")
def main() -> None:
    """Weigh a training step before it trains: exact peak HBM on a mocked TPU topology, and what it is made of."""


@main.command(
    "compile", epilog=_EXIT_CODES + "  130  interrupted; nothing is left running\n", short_help="Weigh a spec here, without a server."
)
@click.argument("spec_file", metavar="SPEC", type=_SPEC)
@_depth_option
@_program_option
@_set_option
@_json_option
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Save the JSON here, for `weighbridge compare`.")
@click.option("--keep", type=click.Path(file_okay=False, path_type=Path), help="Keep the optimised HLO and the like here.")
@click.option("--wall-limit", type=click.FloatRange(min=1), metavar="SECONDS", help="Kill a compile after this long.")
@click.option("--parallel", type=click.IntRange(min=1), help="Programs compiled at once; otherwise as many as there are cores.")
@click.option(
    "--step-seconds",
    type=(click.FloatRange(min=0, min_open=True), click.FloatRange(min=0, min_open=True)),
    metavar="CANDIDATE DROPLESS",
    help="Measured step times of both programs of a retrying spec: what retrying costs, and where it stops paying.",
)
@_buffers_option
def compile_command(
    spec_file: Path,
    depth: str | None,
    programs: tuple[str, ...],
    assignments: tuple[str, ...],
    as_json: bool,
    out: Path | None,
    keep: Path | None,
    wall_limit: float | None,
    parallel: int | None,
    step_seconds: tuple[float, float] | None,
    num_buffers: int,
) -> None:
    """Weigh SPEC (a YAML or JSON file, - for stdin) here, without a server."""
    from weighbridge.extras import require

    require("compile", "compile")
    from service.compile.runner import ChildCompiler
    from weighbridge.local import weigh
    from weighbridge.progress import Progress, outcome_of

    spec, _ = _read_spec(spec_file, assignments, kind="compile", programs=programs, depth=depth)
    settings = _settings(child_wall_seconds=wall_limit)
    if keep is not None:
        _make_writable("--keep", keep)
    errors = _stderr()
    try:
        with terminated_as_interrupted(), Progress(spec.programs, errors) as progress:
            reports = weigh(
                spec,
                ChildCompiler(settings.capacity_cache, wall_setting="--wall-limit"),
                limits=settings.child_limits,
                on_event=lambda program, event: progress.phase(program, event.name, event.seconds),
                on_report=lambda report: progress.finished(report.program, outcome_of(report)),
                parallel=parallel or os.cpu_count() or 1,
                artifact_dir=keep,
            )
    except KeyboardInterrupt:
        errors.print("interrupted; the compile was stopped")
        sys.exit(EXIT_INTERRUPTED)
    _answer(spec, reports, as_json=as_json, out=out, num_buffers=num_buffers, step_seconds=step_seconds)


@main.command(
    epilog=_EXIT_CODES + "  130  interrupted; the job goes on on the server\n\n"
    f"Of real steps: {_STEPS_EXIT_CODES}. Without --wait: 0 once the job is accepted.",
    short_help="Send a spec to a server, which weighs it.",
)
@click.argument("spec_file", metavar="SPEC", type=_SPEC)
@_server_option
@click.option("--wait", is_flag=True, help="Follow the job, then print its report and exit as `compile` or `steps` does.")
@click.option(
    "--kind",
    type=click.Choice(["compile", "steps"]),
    help="Whether to compile SPEC or to run its steps; otherwise it is compiled where it names a topology.",
)
@_depth_option
@_program_option
@_set_option
@click.option("--force", is_flag=True, help="Measure again, even if this spec and toolchain have an answer.")
@click.option("--project", envvar=PROJECT_VARIABLE, help=f"The project the job belongs to; otherwise {PROJECT_VARIABLE}.")
@_json_option
@_buffers_option
def submit(
    spec_file: Path,
    server: str | None,
    wait: bool,
    kind: JobKind | None,
    depth: str | None,
    programs: tuple[str, ...],
    assignments: tuple[str, ...],
    force: bool,
    project: str | None,
    as_json: bool,
    num_buffers: int,
) -> None:
    """Send SPEC to a server, which weighs it in its queue; the commit and branch of the checkout go with it."""
    from service.records import Report
    from service.steps_records import StepsReport
    from weighbridge.client import Client
    from weighbridge.documents import to_json
    from weighbridge.following import follow
    from weighbridge.git import read_git_facts

    spec, kind = _read_spec(spec_file, assignments, kind=kind, programs=programs, depth=depth, undone="nothing was sent")
    errors = _stderr()
    git = read_git_facts(Path.cwd() if str(spec_file) == "-" else spec_file.resolve().parent) | ({"project": project} if project else {})
    with _client_errors(), Client(server) as client:
        job = client.submit(spec.as_json(), kind=kind, git=git, force=force)
        page = f"{client.url}/jobs/{job['id']}"
        if not wait:
            click.echo(to_json(job) if as_json else f"{job['id']}  {job['status']}  {page}", nl=not as_json)
            return
        try:
            follow(client, job, ("steps",) if kind == "steps" else spec.programs, page, errors)
        except KeyboardInterrupt:
            errors.print(f"no longer following; job {job['id']} goes on, see {page}", soft_wrap=True)
            sys.exit(EXIT_INTERRUPTED)
        if kind == "steps":
            _answer_steps(spec, StepsReport.model_validate(client.steps(job["id"])), as_json=as_json, out=None)
        reports = {report["program"]: Report.model_validate(report) for report in client.reports(job["id"])}
    if not reports:
        raise NoAnswerError(f"job {job['id']} ended with nothing measured; see {page}")
    _answer(spec, reports, as_json=as_json, out=None, num_buffers=num_buffers)


@main.command(
    "steps",
    short_help="Run real train steps on the devices at hand.",
    epilog=f"Exit codes: {_STEPS_EXIT_CODES}; 130 interrupted, and nothing is left running.",
)
@click.argument("spec_file", metavar="SPEC", type=_SPEC)
@_set_option
@_json_option
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Save the JSON here.")
@click.option("--wall-limit", type=click.FloatRange(min=1), metavar="SECONDS", help="Kill the run after this long.")
def steps_command(spec_file: Path, assignments: tuple[str, ...], as_json: bool, out: Path | None, wall_limit: float | None) -> None:
    """Run real train steps of SPEC on the devices at hand, and check what a compile alone cannot prove."""
    from weighbridge.extras import require

    require("compile", "steps")
    from service.steps.runner import ChildSteps
    from weighbridge import steps

    spec, _ = _read_spec(spec_file, assignments, kind="steps", undone="nothing was run")
    settings = _settings(child_wall_seconds=wall_limit)
    errors = _stderr()
    try:
        with terminated_as_interrupted():
            runner = ChildSteps(wall_setting="--wall-limit")
            report = steps.run_steps(spec, runner, limits=settings.child_limits, errors=errors)
    except KeyboardInterrupt:
        errors.print("interrupted; the run was stopped")
        sys.exit(EXIT_INTERRUPTED)
    _answer_steps(spec, report, as_json=as_json, out=out)


@main.command(
    epilog="Exit code: 0 once both were read, whatever the difference; 2 when they cannot be compared.",
    short_help="Say what grew between two reports.",
)
@click.argument("base", metavar="BASE")
@click.argument("head", metavar="HEAD")
@click.option("--program", help="Compare only this program; otherwise every one that both have.")
@_server_option
@_json_option
def compare(base: str, head: str, program: str | None, server: str | None, as_json: bool) -> None:
    """Say what grew from BASE to HEAD: each a report saved by `compile --out`, or the id of a job on the server."""
    from weighbridge.comparison import compare_reports

    with _client_errors():
        compare_reports(_stdout(), base, head, program=program, server=server, as_json=as_json)


@main.command()
@click.argument("what", type=click.Choice(["presets", "topologies"]), required=False)
@_json_option
def catalog(what: str | None, as_json: bool) -> None:
    """List the model presets and the topologies that a spec can name."""
    from weighbridge.catalog import print_catalog

    print_catalog(what, as_json=as_json)


@main.command()
@click.option("--host", help="Address to listen on; anything but loopback needs tokens.")
@click.option("--port", type=click.IntRange(0, 65535), help="Port; 0 takes a free one.")
@click.option("--data-dir", type=click.Path(file_okay=False, path_type=Path), help="Where the database and the artifacts live.")
@click.option("--worker/--no-worker", "with_worker", default=True, help="Whether to run a worker beside the server.")
def serve(host: str | None, port: int | None, data_dir: Path | None, with_worker: bool) -> None:
    """Run the API, the pages and one worker."""
    from weighbridge.extras import require

    require("service", "serve")
    if with_worker:
        require("compile", "serve")
    from service.api.server import run_server

    sys.exit(run_server(_settings(host=host, port=port, data_dir=data_dir), with_worker=with_worker))


@main.command()
@click.option("--data-dir", type=click.Path(file_okay=False, path_type=Path), help="Where the database and the artifacts live.")
def worker(data_dir: Path | None) -> None:
    """Run one more worker on the database that a server uses."""
    from weighbridge.extras import require

    require("service", "worker")
    require("compile", "worker")
    from service.worker.loop import run_worker_process

    sys.exit(run_worker_process(_settings(data_dir=data_dir)))


@main.command(short_help="Start the service and weigh an example on it.")
@click.option("--port", type=click.IntRange(0, 65535), default=8090, show_default=True, help="Port; where it is in use, a free one.")
@click.option("--example", default="deepseek-v3-671b-v5p-512", show_default=True, help="Which of the examples to weigh.")
@click.option("--data-dir", type=click.Path(file_okay=False, path_type=Path), help="Where the database and the artifacts live.")
@click.option("--exit", "leave", is_flag=True, help="Stop the service once the answer is there, instead of serving on.")
def demo(port: int, example: str, data_dir: Path | None, leave: bool) -> None:
    """Start the service, weigh a real example on it, and print the address of its page."""
    from weighbridge.extras import require

    require("service", "demo")
    require("compile", "demo")
    from weighbridge.demo import run_demo

    with _client_errors():
        sys.exit(run_demo(_settings(port=port, data_dir=data_dir), example=example, leave=leave))


def _stderr() -> Console:
    from rich.console import Console

    return Console(stderr=True, highlight=False)


def _stdout() -> Console:
    from rich.console import Console

    console = Console(highlight=False)
    # A pipe or a log has no width of its own; this one holds every table without folding.
    return console if console.is_terminal else Console(highlight=False, width=140)


def _settings(**overrides: Any) -> Any:
    """The service's settings from the environment and the command line; a wrong one ends the command with exit code 2."""
    from service.settings import Settings, SettingsError

    try:
        return Settings.from_environment(**overrides)
    except SettingsError as error:
        raise click.UsageError(str(error)) from error


def _read_spec(
    path: Path,
    assignments: tuple[str, ...],
    *,
    kind: JobKind | None,
    programs: tuple[str, ...] = (),
    depth: str | None = None,
    undone: str = "nothing was compiled",
) -> tuple[Spec, JobKind]:
    """The spec and its kind, as `weighbridge.spec_file` reads them; a wrong one ends the command with exit code 2."""
    from service.errors import SpecError
    from weighbridge.render import print_problems
    from weighbridge.spec_file import read_spec

    try:
        return read_spec(path, assignments, kind=kind, programs=programs, depth=depth)
    except SpecError as error:
        print_problems(_stderr(), str(path), error.problems, undone=undone)
        sys.exit(EXIT_BAD_SPEC)


def _answer(
    spec: Spec,
    reports: Mapping[str, Report],
    *,
    as_json: bool,
    out: Path | None,
    num_buffers: int,
    step_seconds: tuple[float, float] | None = None,
) -> NoReturn:
    """Print the reports as asked and end with their exit code."""
    from service.retry import weigh_retry
    from weighbridge.documents import document, exit_code, to_json
    from weighbridge.render import print_reports

    pair = weigh_retry(spec.as_json(), tuple(reports.values()), step_seconds=step_seconds)
    text = to_json(document(reports, pair, spec.as_json()))
    with _saved(text, out):
        if as_json:
            click.echo(text, nl=False)
        else:
            print_reports(_stdout(), spec.scenario, reports, pair=pair, num_buffers=num_buffers)
    sys.exit(exit_code(reports, pair))


def _answer_steps(spec: Spec, report: StepsReport, *, as_json: bool, out: Path | None) -> NoReturn:
    """Print what the steps showed as asked and end with its exit code."""
    from weighbridge.documents import to_json
    from weighbridge.steps import exit_code, print_steps

    text = to_json(report.model_dump(mode="json"))
    with _saved(text, out):
        if as_json:
            click.echo(text, nl=False)
        else:
            print_steps(_stdout(), spec.scenario, report)
    sys.exit(exit_code(report))


def _make_writable(option: str, directory: Path) -> None:
    """Make a directory that is written to in the end; raises click.UsageError now where that cannot be."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise click.UsageError(f"{option} {directory} cannot be written to: {error.strerror or error}; name another directory") from error


@contextmanager
def _saved(text: str, path: Path | None) -> Iterator[None]:
    """Save first, so that a reader who closes the pipe loses no file; tell a failure last, so that the answer is still seen.

    Raises:
        NoAnswerError: the file cannot be written.
    """
    failure: OSError | None = None
    if path is not None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        except OSError as error:
            failure = error
    yield
    if failure is not None:
        raise NoAnswerError(f"{path} cannot be written: {failure.strerror or failure}")


@contextmanager
def _client_errors() -> Iterator[None]:
    """Turn what a server refuses into a message and the documented exit code: 2 for a wrong request, 3 for a service that fails."""
    from service.errors import Problem
    from weighbridge.client import ClientError
    from weighbridge.render import print_problems

    try:
        yield
    except ClientError as error:
        if error.problems:
            problems = [Problem(p["path"], p["value"], p["message"], p["legal"]) for p in error.problems]
            print_problems(_stderr(), "spec", problems, undone="the server queued nothing")
        else:
            _stderr().print(f"Error: {error}", soft_wrap=True, markup=False)
        refused = error.status is not None and 400 <= error.status < 500
        sys.exit(EXIT_BAD_SPEC if refused else EXIT_FAILED)
