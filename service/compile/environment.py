"""A compile child's environment, built from nothing so that no variable of the host can change a result; no JAX here."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import service
from service.compile.catalog import FAMILIES, Topology

INHERITED = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "LD_LIBRARY_PATH", "SYSTEMROOT")
"""All a child gets from its parent: XLA_FLAGS, LIBTPU_INIT_ARGS, JAX_… would change results with no trace in their identity."""


def child_environment(topology: Topology, work_dir: Path, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Variables for a process that compiles for `topology` with no TPU, and writes only under `work_dir`."""
    environ = os.environ if environ is None else environ
    inherited = {name: environ[name] for name in INHERITED if name in environ}
    return inherited | {
        # The package is found where the parent found it, whether installed or a checkout.
        "PYTHONPATH": str(Path(service.__file__).parent.parent),
        # Sets of strings are iterated in the same order in every process: the same spec must trace to the same program.
        "PYTHONHASHSEED": "0",
        "HOME": str(work_dir),
        "TMPDIR": str(temporary_dir(work_dir)),
        "TPU_LOG_DIR": str(log_dir(work_dir)),
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        # Without these libtpu asks a metadata server, dies on its lock file when two processes load it, or warns of what is meant.
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_ACCELERATOR_TYPE": f"{topology.family}-{topology.chips_per_slice * FAMILIES[topology.family].name_counts_per_chip}",
        "TPU_WORKER_HOSTNAMES": "localhost",
    }


def temporary_dir(work_dir: Path) -> Path:
    """The child's TMPDIR."""
    return work_dir / "tmp"


def log_dir(work_dir: Path) -> Path:
    """Where libtpu writes its log files; its default directory is shared by every job of the host."""
    return work_dir / "log"


def warnings_log(work_dir: Path) -> Path:
    """The file libtpu writes its warnings to, the partitioner's among them; they do not reach stderr."""
    return log_dir(work_dir) / "tpu_driver.WARNING"


def dump_dir(work_dir: Path) -> Path:
    """Where the compiler dumps the program."""
    return work_dir / "dump"


def child_log(work_dir: Path) -> Path:
    """What the child prints on stderr."""
    return work_dir / "child.log"
