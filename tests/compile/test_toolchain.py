"""The toolchain is read without loading it, and its fingerprint changes with everything that decides a result."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from service.compile.catalog import find_topology
from service.compile.toolchain import compiler_fingerprint, hash_sources, read_toolchain, toolchain_fingerprint

ARGUMENTS = find_topology("v5e-4").arguments()


def test_versions_are_those_of_the_loaded_packages() -> None:
    import flax
    import jax
    import jaxlib
    import optax

    toolchain = read_toolchain(ARGUMENTS)
    assert (toolchain.jax, toolchain.jaxlib, toolchain.flax) == (jax.__version__, jaxlib.__version__, flax.__version__)
    assert toolchain.optax == optax.__version__
    assert toolchain.libtpu[0].isdigit()


def test_reading_the_toolchain_loads_neither_jax_nor_libtpu() -> None:
    code = (
        "import sys; from service.compile.toolchain import *; read_toolchain({});"
        "print([m for m in ('jax', 'jaxlib', 'libtpu', 'flax', 'optax', 'xprof', 'numpy') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


@pytest.mark.parametrize(
    "change",
    [
        {"jax": "0.0.1"},
        {"jaxlib": "0.0.1"},
        {"libtpu": "0.0.1"},
        {"optax": "0.0.1"},
        {"flax": "0.0.1"},
        {"extractor": "0"},
        {"model_source": "0" * 64},
        {"compiler_options": {"xla_tpu_max_hbm_size_mib": 1400}},
        {"topology_arguments": find_topology("v5p-8").arguments()},
    ],
    ids=lambda change: next(iter(change)),
)
def test_fingerprint_changes_with_each_part_that_decides_a_result(change: dict[str, object]) -> None:
    toolchain = read_toolchain(ARGUMENTS)
    assert toolchain_fingerprint(toolchain.model_copy(update=change)) != toolchain_fingerprint(toolchain)


def test_fingerprint_ignores_xprof_and_the_order_of_options() -> None:
    one = read_toolchain(ARGUMENTS, {"xla_tpu_rwb_fusion": True, "xla_tpu_max_hbm_size_mib": 1400})
    other = read_toolchain(ARGUMENTS, {"xla_tpu_max_hbm_size_mib": 1400, "xla_tpu_rwb_fusion": True}).model_copy(update={"xprof": "0.0.1"})
    assert toolchain_fingerprint(one) == toolchain_fingerprint(other)


def test_compiler_fingerprint_does_not_change_with_the_model() -> None:
    toolchain = read_toolchain(ARGUMENTS)
    assert compiler_fingerprint(toolchain.model_copy(update={"model_source": "0" * 64})) == compiler_fingerprint(toolchain)
    assert compiler_fingerprint(toolchain.model_copy(update={"libtpu": "0.0.1"})) != compiler_fingerprint(toolchain)


def test_source_hash_sees_names_contents_and_the_boundary_between_files(tmp_path: Path) -> None:
    def hash_of(files: dict[str, str]) -> str:
        root = tmp_path / str(len(list(tmp_path.iterdir())))
        for name, text in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
        return hash_sources(root)

    hashes = [
        hash_of({"a.py": "1", "b.py": "2"}),
        hash_of({"a.py": "2", "b.py": "1"}),
        hash_of({"a.py": "12", "b.py": ""}),
        hash_of({"a.py": "1", "inner/b.py": "2"}),
    ]
    assert len(set(hashes)) == 4
    assert hash_of({"a.py": "1", "b.py": "2", "notes.txt": "3"}) == hashes[0]
