"""What is installed from the wheel works without the checkout, and a client install brings neither the server nor the compiler."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

_ASK_FOR_A_PAGE = """
import json, service, sys
from fastapi.testclient import TestClient
from service.api.app import create_app
from service.settings import Settings
with TestClient(create_app(Settings(data_dir=sys.argv[1])), base_url="http://127.0.0.1") as client:
    pages = {path: client.get(path) for path in ("/", "/submit", "/static/plotly.min.js", "/api/v1/catalog/presets", "/readyz")}
print(json.dumps({"package": service.__file__, "statuses": {path: page.status_code for path, page in pages.items()},
                  "submit": pages["/submit"].text}))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the checkout and unpacked."""
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(out)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (built,) = out.glob("*.whl")
    zipfile.ZipFile(built).extractall(out / "site")
    return out / "site"


def run(wheel: Path, *arguments: str, cwd: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(wheel)}
    return subprocess.run([sys.executable, *arguments], cwd=cwd, env=environment, check=True, capture_output=True, text=True).stdout


def test_an_installed_wheel_serves_its_pages_outside_the_checkout(wheel: Path, tmp_path: Path) -> None:
    answer = json.loads(run(wheel, "-c", _ASK_FOR_A_PAGE, str(tmp_path / "data"), cwd=tmp_path))
    assert Path(answer["package"]).is_relative_to(wheel)
    assert set(answer["statuses"].values()) == {200}, answer["statuses"]
    assert "tiny-v5e-4" in answer["submit"], "the examples ship in the wheel"


def test_the_wheel_carries_the_migrations_and_the_model(wheel: Path) -> None:
    names = {path.relative_to(wheel).as_posix() for path in wheel.rglob("*") if path.is_file()}
    assert {"service/web/templates/job.html", "service/models/train_step.py", "service/examples/tiny-v5e-4.yaml"} <= names
    assert any(name.startswith("service/storage/migrations/versions/") for name in names)
    assert not [name for name in names if name.startswith(("tests/", "bench/"))]


def test_a_client_install_asks_for_neither_server_nor_compiler(wheel: Path) -> None:
    (metadata,) = wheel.glob("weighbridge-*.dist-info/METADATA")
    requirements = Parser().parsestr(metadata.read_text()).get_all("Requires-Dist") or []
    plain = {requirement.split(">")[0].split("<")[0].strip() for requirement in requirements if "extra ==" not in requirement}
    assert plain == {"click", "httpx", "pydantic", "pyyaml", "rich"}


def test_the_clients_help_loads_neither_server_nor_compiler(wheel: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from click.testing import CliRunner; from weighbridge.cli import main; "
        "assert CliRunner().invoke(main, ['compile', '--help']).exit_code == 0; "
        "heavy = {'service', 'fastapi', 'sqlalchemy', 'jax', 'flax', 'libtpu', 'numpy'}; "
        "print([name for name in sys.modules if name.split('.')[0] in heavy])"
    )
    assert run(wheel, "-c", code, cwd=tmp_path).strip() == "[]"
