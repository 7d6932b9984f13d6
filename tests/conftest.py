"""Sets the process-wide JAX environment before anything loads JAX, checks jaxtyping signatures, and leaves slow tests out by default."""

from __future__ import annotations

import os

os.environ["JAX_PLATFORMS"] = "cpu"
# Tests that load libtpu in this process must not fail because another run of the tests has it loaded, nor ask a metadata server.
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
os.environ["TPU_SKIP_MDS_QUERY"] = "1"
# On a busy machine the slowest of the devices may come late to a collective; 40 seconds, the default, then abort the whole run.
os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=8 --xla_cpu_collective_call_warn_stuck_timeout_seconds=120"
    " --xla_cpu_collective_call_terminate_timeout_seconds=600"
)
# Devices block threads of XLA's one pool in collectives and start independent ones in any order: 8 threads can all wait for each other.
os.environ["PJRT_NPROC"] = "32"

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run the slow tests too")


def pytest_configure(config: pytest.Config) -> None:
    # Every signature of service.models is checked at run time; the hook must stand before the modules are imported.
    from jaxtyping import install_import_hook

    install_import_hook("service.models", "beartype.beartype")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--all"):
        return
    skip = pytest.mark.skip(reason="slow; run with ./dev test --all")
    for item in items:
        if "slow" in item.keywords:
            item.add_marker(skip)
