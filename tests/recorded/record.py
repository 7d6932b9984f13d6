"""Records optimised HLO of real compiles as text, for tests that read it without compiling.

    python -m tests.recorded.record

compiles the programs of `tests/compile/tpu_programs.py` for the topologies below and writes `TOPOLOGY.PROGRAM.hlo` here. Each file's header
names the versions and this command; source paths are relative to the checkout.
"""

from __future__ import annotations

import tempfile
from importlib import metadata
from pathlib import Path

from jaxlib import _hlo  # type: ignore[attr-defined]  # XLA's own printer and parser; private, and used by tests alone

from service.compile.dump import parse_dump
from tests.compile.conftest import compile_programs

RECORDED = {
    "v5e:2x4": (
        "scan_of_6_with_3_halos",
        "nested_scans_7_by_5",
        "combined_all_reduce",
        "all_gather_over_two_axes",
        "reduce_scatter",
        "all_to_all",
        "ragged_all_to_all",
        "loop_with_bound_from_data",
        "branch_with_all_reduce",
    ),
    "v5p:2x2x1*2": ("crossing_slices",),
}


def record(directory: Path) -> None:
    root = f"{Path(__file__).parent.parent.parent}/"
    versions = ", ".join(f"{package} {metadata.version(package)}" for package in ("jax", "jaxlib", "libtpu"))
    for topology, names in RECORDED.items():
        with tempfile.TemporaryDirectory() as work_dir:
            compiled = compile_programs(topology, names, Path(work_dir))
        for name, result in compiled.items():
            module = _hlo.HloModule.from_serialized_hlo_module_proto(parse_dump(result.dump).hlo_module.SerializeToString())
            text = module.to_string().replace(root, "")
            header = f"// {versions}\n// python -m tests.recorded.record ({topology}, {name})\n"
            (directory / f"{topology.replace(':', '-').replace('*', 'x')}.{name}.hlo").write_text(header + text.rstrip() + "\n")


if __name__ == "__main__":
    record(Path(__file__).parent)
