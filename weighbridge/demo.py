"""Shows the whole way of one job: a service is started, a real spec is weighed on it, and the address of its page printed."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from rich.console import Console

import service
from service.records import Report
from service.resources import resource_directory
from service.settings import PREFIX, Settings
from service.spec import load_spec
from service.verdict_text import TITLES, verdict_sentence
from weighbridge.client import Client, ClientError
from weighbridge.documents import exit_code
from weighbridge.exits import EXIT_FAILED, EXIT_INTERRUPTED, terminated_as_interrupted
from weighbridge.following import follow

_START_SECONDS = 60.0
_STOP_SECONDS = 25.0
"""What the service gets to stop in order: its open requests 3 s, its worker 15 s."""
_LOG = "demo.log"
_SERVICE_COMMAND = (sys.executable, "-P", "-m", "service", "serve", "--stop-on-eof")
"""-P: the working directory is not a place to import from."""


def run_demo(settings: Settings, *, example: str, leave: bool) -> int:
    """Weigh `example`, print where its page is, and serve on until interrupted unless `leave`; the exit code, which with `leave` is that
    of `compile`.

    Interrupted or terminated, it stops the service in order; however this process ends, the service does not outlive it.

    Raises:
        ClientError: no such example, the service did not start, or it refused the spec.
    """
    console = Console(highlight=False)
    try:
        with terminated_as_interrupted():
            return _run(settings, console, example=example, leave=leave)
    except KeyboardInterrupt:
        console.print("interrupted; the service was stopped")
        return EXIT_INTERRUPTED


def _run(settings: Settings, console: Console, *, example: str, leave: bool) -> int:
    path = _example(example)
    spec = load_spec(path.read_text())
    port = _free_port(settings.host, settings.port)
    url = f"http://{settings.host}:{port}"
    with _service(settings, port, url) as process, Client(url) as client:
        console.print(f"Weighbridge runs at {url}, its data in {settings.data_dir}", soft_wrap=True)
        job = client.submit(spec.as_json())
        page = f"{url}/jobs/{job['id']}"
        follow(client, job, spec.programs, page, Console(stderr=True, highlight=False))
        reports = {report["program"]: Report.model_validate(report) for report in client.reports(job["id"])}
        for report in reports.values():
            console.print(f"{spec.scenario}, {report.program}: {TITLES[report.status].lower()}, {verdict_sentence(report)}", soft_wrap=True)
        console.print(f"\n  {page}\n", style="bold", soft_wrap=True)
        if leave:
            return exit_code(reports) if reports else EXIT_FAILED
        try:
            console.print("Open it in a browser; Ctrl-C stops the service.")
            process.wait()
        except KeyboardInterrupt:
            return 0
        raise ClientError(f"the service ended with exit code {process.returncode}; its log is {settings.data_dir / _LOG}")


def _example(name: str) -> Path:
    directory = resource_directory("examples")
    path = directory / f"{Path(name).name.removesuffix('.yaml')}.yaml"
    if not path.is_file():
        names = ", ".join(sorted(entry.stem for entry in directory.glob("*.yaml")))
        raise ClientError(f"there is no example {name!r}; there are: {names}", status=400)
    return path


def _free_port(host: str, wanted: int) -> int:
    """`wanted`, or a free one where that is 0 or taken."""
    for port in (wanted, 0):
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise ClientError(f"no port of {host} can be listened on")


@contextmanager
def _service(settings: Settings, port: int, url: str) -> Iterator[subprocess.Popen[bytes]]:
    """The service in a process of its own, ready to answer; stopped, and waited for, at the end."""
    environment = os.environ | {
        f"{PREFIX}DATA_DIR": str(settings.data_dir),
        f"{PREFIX}HOST": settings.host,
        f"{PREFIX}PORT": str(port),
        # The package is found where this process found it, whether installed or a checkout.
        "PYTHONPATH": os.pathsep.join(filter(None, (str(Path(service.__file__).parent.parent), os.environ.get("PYTHONPATH", "")))),
    }
    settings.data_dir.mkdir(parents=True, exist_ok=True)
    log_path = settings.data_dir / _LOG
    with log_path.open("wb") as log:
        # A session of its own, so that Ctrl-C reaches this process alone, which then stops the service in order.
        # Its stdin closes with this process, by kill -9 too, and then it stops.
        process = subprocess.Popen(
            _SERVICE_COMMAND, env=environment, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            _wait_until_ready(process, url, log_path)
            yield process
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.terminate()
            try:
                process.wait(timeout=_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_until_ready(process: subprocess.Popen[bytes], url: str, log_path: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            tail = "\n".join(log_path.read_text(errors="replace").splitlines()[-15:])
            raise ClientError(f"the service ended at its start with exit code {process.returncode}; the end of {log_path}:\n{tail}")
        try:
            if httpx.get(f"{url}/readyz", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise ClientError(f"the service at {url} was not ready within {_START_SECONDS:.0f} s; its log is {log_path}")
