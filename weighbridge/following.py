"""Follows a job of a server in the shell until it has ended."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console

from service.compile.interface import ProgressEvent
from weighbridge.client import Client
from weighbridge.exits import terminated_as_interrupted
from weighbridge.progress import Progress
from weighbridge.steps import tell

NO_WORKER = "no worker is running on the server; the job waits until one is started: `weighbridge worker`"


def follow(client: Client, job: Mapping[str, Any], programs: tuple[str, ...], page: str, errors: Console) -> None:
    """Show a job's events on `errors` until it has ended.

    Raises:
        KeyboardInterrupt: on Ctrl-C, SIGTERM and SIGHUP; the job goes on.
        ClientError: the server does not answer any more.
    """
    with terminated_as_interrupted(), Progress(programs, errors, waiting="queued") as progress:
        progress.note(f"job {job['id']}  {page}")
        if job["status"] == "queued" and client.num_workers() == 0:
            progress.note(NO_WORKER)
        for event in client.events(job["id"]):
            if event.name == "progress" and job["kind"] == "steps":
                tell(progress, ProgressEvent.model_validate({key: event.data[key] for key in ProgressEvent.model_fields}))
            elif event.name == "progress":
                progress.phase(event.data["program"], event.data["name"], event.data["seconds"])
            elif event.name == "report":
                progress.finished(event.data.get("program", "steps"), event.data["status"].replace("_", " "))
