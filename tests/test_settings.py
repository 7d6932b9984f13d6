"""Settings come from the environment once, are refused with what would be legal, and importing them changes nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from service.settings import Settings, SettingsError


def test_each_field_is_read_from_its_own_variable() -> None:
    settings = Settings.from_environment(
        {"WEIGHBRIDGE_PORT": "0", "WEIGHBRIDGE_LEASE_SECONDS": "2.5", "WEIGHBRIDGE_CHILD_RSS_LIMIT_BYTES": "3000000000"}
    )
    assert (settings.port, settings.lease_seconds, settings.child_limits.rss_bytes) == (0, 2.5, 3_000_000_000)


def test_options_win_over_variables_and_absent_ones_do_not() -> None:
    environ = {"WEIGHBRIDGE_PORT": "1234", "WEIGHBRIDGE_HOST": "::1"}
    settings = Settings.from_environment(environ, port=4321, host=None)
    assert (settings.port, settings.host) == (4321, "::1")


def test_paths_follow_the_data_directory_and_are_absolute() -> None:
    settings = Settings.from_environment({"WEIGHBRIDGE_DATA_DIR": "some/where"})
    assert settings.data_dir == Path.cwd() / "some" / "where"
    assert settings.resolved_database_url == f"sqlite:///{settings.data_dir}/weighbridge.sqlite"
    assert {settings.artifact_dir.parent, settings.work_dir.parent, settings.capacity_cache.parent} == {settings.data_dir}
    assert Settings().data_dir.is_absolute()


def test_every_wrong_value_is_told_in_one_answer() -> None:
    with pytest.raises(SettingsError) as refusal:
        Settings.from_environment({"WEIGHBRIDGE_PORT": "ninety", "WEIGHBRIDGE_MAX_ATTEMPTS": "0"})
    assert "WEIGHBRIDGE_PORT is 'ninety'" in str(refusal.value)
    assert "WEIGHBRIDGE_MAX_ATTEMPTS is '0'" in str(refusal.value)


def test_a_misspelt_variable_is_refused_and_the_clients_own_are_not() -> None:
    with pytest.raises(SettingsError, match=r"WEIGHBRIDGE_CHILD_WALL_SECOND is '60'.*WEIGHBRIDGE_CHILD_WALL_SECONDS"):
        Settings.from_environment({"WEIGHBRIDGE_CHILD_WALL_SECOND": "60"})
    Settings.from_environment({"WEIGHBRIDGE_URL": "http://localhost", "WEIGHBRIDGE_TOKEN": "t", "WEIGHBRIDGE_PROJECT": "p"})


@pytest.mark.parametrize(
    ("host", "required"), [("127.0.0.1", False), ("localhost", False), ("::1", False), ("0.0.0.0", True), ("10.1.2.3", True)]
)
def test_tokens_are_needed_everywhere_but_on_loopback(host: str, required: bool) -> None:
    assert Settings(host=host).tokens_required is required
    assert Settings(host=host, require_tokens=True).tokens_required


def test_importing_reads_nothing_and_creates_nothing(tmp_path: Path) -> None:
    code = "import os; before = dict(os.environ); import service.settings; assert dict(os.environ) == before"
    environment = {"PYTHONPATH": str(Path(__file__).parent.parent), "WEIGHBRIDGE_PORT": "not a port"}
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, check=True)
    assert list(tmp_path.iterdir()) == []
