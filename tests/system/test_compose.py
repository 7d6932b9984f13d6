"""What docker-compose.yml starts does start: its commands and variables, run here as processes over one directory."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from tests.system.sites import PATIENCE_SECONDS, Site, stop

pytestmark = pytest.mark.system

ROOT = Path(__file__).parent.parent.parent
TOKEN = "millstone"


@pytest.fixture
def containers(tmp_path: Path) -> Iterator[dict[str, subprocess.Popen[str]]]:
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    given = {"WEIGHBRIDGE_TOKEN_SHA256": hashlib.sha256(TOKEN.encode()).hexdigest()}
    running = {}
    for name, service in services.items():
        written = {key: value for key, value in service["environment"].items() if not value.startswith("${")}
        asked = {key: given.get(key, "") for key, value in service["environment"].items() if value.startswith("${")}
        # The volume and the published port are this machine's here.
        here = {"WEIGHBRIDGE_DATA_DIR": str(tmp_path)} | ({"WEIGHBRIDGE_PORT": "0"} if "WEIGHBRIDGE_PORT" in written else {})
        command = [sys.executable if word == "python" else word for word in service["command"]]
        running[name] = subprocess.Popen(command, env={**os.environ, **written, **asked, **here}, stdout=subprocess.PIPE, text=True)
    yield running
    for process in running.values():
        process.kill()
        process.communicate()


def test_server_and_worker_meet_over_one_volume_and_ask_for_the_token(containers: dict[str, subprocess.Popen[str]]) -> None:
    told = containers["server"].stdout.readline().strip()
    address = f"http://127.0.0.1:{told.rpartition(':')[2]}"
    with httpx.Client(base_url=address, timeout=PATIENCE_SECONDS) as client:
        Site.wait_until(lambda: client.get("/readyz").json()["num_workers"] == 1)
        assert client.get("/api/v1/jobs").status_code == 401
        assert client.get("/api/v1/jobs", headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 200
    assert [stop(process) for process in containers.values()] == [0, 0]


def test_the_image_installs_what_the_lock_names(tmp_path: Path) -> None:
    """The Dockerfile's own words, held against the project: extras and files that it copies exist."""
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    copied = {word for line in lines if line.startswith("COPY") for word in line.split()[1:-1]}
    ignored_but = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert copied == ignored_but
    assert all((ROOT / name).exists() for name in copied)
    lock = (ROOT / "requirements.lock").read_text()
    assert not {"[", "@"} & set(lock), "usable as constraints"
    (extras,) = re.findall(r"\.whl\)\[([\w,]+)\]", "\n".join(lines))
    offered = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    wanted = {re.split(r"[\[><=]", requirement)[0] for extra in extras.split(",") for requirement in offered[extra]}
    assert wanted - {line.partition("==")[0].lower() for line in lock.splitlines()} == set()
    assert "psycopg" in wanted, "docker-compose.yml passes the URL of any database on"
