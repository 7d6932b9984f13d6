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

from service.resources import resource_directory
from service.settings import PREFIX, Settings
from service.spec import load_spec
from service.verdict_text import TITLES, verdict_sentence
from weighbridge.client import Client, ClientError

_START_SECONDS = 60.0
_LOG = "demo.log"


def run_demo(settings: Settings, *, example: str, leave: bool) -> int:
    """Weigh `example`, print where its page is, and serve on until interrupted unless `leave`; the exit code.

    Raises:
        ClientError: no such example, the service did not start, or it refused the spec.
    """
    from weighbridge.cli import follow

    console = Console(highlight=False)
    path = _example(example)
    spec = load_spec(path.read_text())
    port = _free_port(settings.host, settings.port)
    url = f"http://{settings.host}:{port}"
    with _service(settings, port, url) as service, Client(url) as client:
        console.print(f"Weighbridge runs at {url}, its data in {settings.data_dir}", soft_wrap=True)
        job = client.submit(spec.as_json())
        page = f"{url}/jobs/{job['id']}"
        reports = follow(client, job, spec.programs, page)
        for report in reports.values():
            console.print(f"{spec.scenario}, {report.program}: {TITLES[report.status].lower()}, {verdict_sentence(report)}", soft_wrap=True)
        console.print(f"\n  {page}\n", style="bold", soft_wrap=True)
        if leave:
            return 0 if reports else 1
        console.print("Open it in a browser; Ctrl-C stops the service.")
        try:
            service.wait()
        except KeyboardInterrupt:
            return 0
        raise ClientError(f"the service ended with exit code {service.returncode}; its log is {settings.data_dir / _LOG}")


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
    }
    settings.data_dir.mkdir(parents=True, exist_ok=True)
    log_path = settings.data_dir / _LOG
    with log_path.open("wb") as log:
        # A session of its own, so that Ctrl-C reaches this process alone, which then stops the service in order.
        process = subprocess.Popen(
            [sys.executable, "-m", "service", "serve"], env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            _wait_until_ready(process, url, log_path)
            yield process
        finally:
            process.terminate()
            try:
                process.wait(timeout=20)
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
