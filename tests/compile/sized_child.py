"""The real compile child over small programs made to size, chosen by the spec's scenario. Run by tests/compile/test_child.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from service.compile.child import main
from service.compile.interface import CompileRequest
from service.spec import parse_spec

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from service.compile.catalog import Topology
    from service.compile.lower import BuiltProgram
    from service.models.config import MeshAxes

ROW_BYTES = 512


@dataclass(frozen=True)
class SizedProgram:
    """x + 1 over float32[rows, 1, 128] with x donated: rows * 512 bytes per device and not one more."""

    topology: Topology
    axes: MeshAxes
    compiler_options: Mapping[str, bool | int | str]
    kind: str
    state_bytes: int
    step_config: None = None

    def build(self, mesh: Mesh) -> BuiltProgram:
        import jax
        import jax.numpy as jnp
        from jax.experimental import pallas
        from jax.sharding import NamedSharding
        from jax.sharding import PartitionSpec as P

        from service.compile.lower import BuiltProgram

        if self.kind == "cannot-be-built":
            raise ValueError("3 rows do not divide over 2 devices; change fsdp")
        sharding = NamedSharding(mesh, P(mesh.axis_names))
        rows = self.state_bytes // ROW_BYTES * mesh.size

        def step(state: Any) -> Any:
            if self.kind == "cannot-be-traced":
                return {} + state
            if self.kind == "exhausts-vmem":
                double = pallas.pallas_call(_double, out_shape=jax.ShapeDtypeStruct((8192, 8192), jnp.float32))
                total = jax.shard_map(
                    lambda: double(jnp.zeros((8192, 8192))).sum(), mesh=mesh, in_specs=(), out_specs=P(), check_vma=False
                )()
                return state + total
            if self.kind == "reshards":
                by_rows = jax.lax.with_sharding_constraint(jnp.cos(state.reshape(6, 10, 512)), NamedSharding(mesh, P(("fsdp", "context"))))
                otherwise = jax.lax.with_sharding_constraint(jnp.sin(by_rows), NamedSharding(mesh, P(None, "fsdp", "context")))
                return state + jnp.sum(otherwise)
            return state + 1

        state = jax.ShapeDtypeStruct((rows, 1, ROW_BYTES // 4), jnp.float32, sharding=sharding)
        return BuiltProgram(jax.jit(step, donate_argnums=0), (state,), state_donated=True, num_parameters=None)


def _double(x: Any, out: Any) -> None:
    out[...] = x[...] * 2


def load(request: CompileRequest) -> SizedProgram:
    """The program a scenario like `fits.4096` names: what it does, and its bytes per device."""
    spec = parse_spec(request.spec)
    kind, _, size = spec.scenario.partition(".")
    if kind == "cannot-be-analysed":
        from service.compile import analyse
        from service.errors import AnalysisError

        def refuse(reading: object, *, context: object) -> None:
            raise AnalysisError("the replay ends 3 bytes above the allocation")

        analyse.analyse = refuse  # type: ignore[assignment]
    if kind == "damaged":
        _damage_what_is_read()
    return SizedProgram(spec.topology, spec.mesh.axes(), spec.compiler_options, kind, int(size))


def _damage_what_is_read() -> None:
    """One bit of the module's first name flips on the way from the disk; the compiler's second copy is whole."""
    read_bytes = Path.read_bytes

    def read_damaged(path: Path) -> bytes:
        content = bytearray(read_bytes(path))
        if path.name.endswith("after_optimizations.hlo.pb"):
            content[content.index(b"jit_step")] ^= 1
        return bytes(content)

    Path.read_bytes = read_damaged  # type: ignore[method-assign]


if __name__ == "__main__":
    main(load)
