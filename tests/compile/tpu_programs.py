"""Small programs whose collectives and memory are known by construction, compiled by the real TPU compiler in a process of its own.

Run as `python -m tests.compile.tpu_programs TOPOLOGY OUT NAME...`: leaves in OUT/NAME the compiler's dump and `memory_analysis.json`, or
`error.txt` with the compiler's words where it refuses.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.compile import finding_programs

STATISTICS = ("peak_memory_in_bytes", "total_allocation_bytes", "argument_size_in_bytes", "output_size_in_bytes", "alias_size_in_bytes")

MESHES = {
    "v5e:2x4": {"fsdp": 2, "expert": 2, "context": 2},
    "v5p:2x2x2": {"fsdp": 2, "expert": 2, "context": 2},
    "v5e:2x2": {"fsdp": 2, "context": 2},
    "v5p:2x2x1": {"fsdp": 2, "context": 2},
    "v6e:2x2": {"fsdp": 2, "context": 2},
    "tpu7x:2x2x1": {"fsdp": 4, "context": 2},
    "v5p:2x2x1*2": {"data": 2, "fsdp": 2, "context": 2},
}
"""Mesh of each topology the programs are compiled for; `*2` is two slices."""


def make_programs(mesh: Any) -> dict[str, Callable[[], Any]]:
    """Name to a function that lowers the program on `mesh`."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    def array(shape: tuple[int, ...], dtype: Any, *spec: Any) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))

    def manual(function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)

    f32, bf16, i32 = jnp.float32, jnp.bfloat16, jnp.int32
    rows = array((64, 8192), f32, "fsdp", "context")
    local = P("fsdp", "context")

    def scan_of_6_with_3_halos() -> Any:
        def body(x: Any, _: None) -> tuple[Any, None]:
            for _ in range(3):
                x = jnp.sin(x + jax.lax.ppermute(x[:, -9:], "context", [(0, 1)]).sum())
            return x, None

        return jax.jit(manual(lambda x: jax.lax.scan(body, x, None, length=6)[0], local, local)).lower(rows)

    def nested_scans_7_by_5() -> Any:
        def inner(x: Any, _: None) -> tuple[Any, None]:
            return jnp.sin(jax.lax.psum(x, "expert")), None

        def outer(x: Any, _: None) -> tuple[Any, None]:
            x, _ = jax.lax.scan(inner, x, None, length=5)
            return jnp.cos(jax.lax.ppermute(x, "context", [(0, 1), (1, 0)])), None

        return jax.jit(manual(lambda x: jax.lax.scan(outer, x, None, length=7)[0], local, local)).lower(rows)

    def combined_all_reduce() -> Any:
        arrays = [array((2048, 1024), f32, "fsdp"), array((1024, 512), f32, "fsdp"), array((4096, 256), bf16, "fsdp")]
        return jax.jit(manual(lambda *x: jax.lax.psum(x, "fsdp"), P("fsdp"), P())).lower(*arrays)

    def all_gather_over_two_axes() -> Any:
        gather = manual(lambda x: jax.lax.all_gather(x, ("fsdp", "context"), tiled=True), P(("fsdp", "context")), P())
        return jax.jit(gather).lower(array((4096, 1024), f32, ("fsdp", "context")))

    def reduce_scatter() -> Any:
        def product(a: Any, b: Any) -> Any:
            return jax.lax.psum_scatter(a @ b, "context", scatter_dimension=0, tiled=True)

        specs = (P(None, "context"), P("context", None))
        return jax.jit(manual(product, specs, P("context"))).lower(
            array((4096, 8192), bf16, None, "context"), array((8192, 4096), bf16, "context", None)
        )

    def all_to_all() -> Any:
        exchange = manual(lambda x: jax.lax.all_to_all(x, "expert", 0, 1, tiled=True), P(None, "expert"), P("expert"))
        return jax.jit(exchange).lower(array((1024, 4096), f32, None, "expert"))

    def ragged_all_to_all() -> Any:
        exchange = manual(lambda *x: jax.lax.ragged_all_to_all(*x, axis_name="expert"), P("expert"), P("expert"))
        sizes = [array((4,), i32, "expert")] * 4
        return jax.jit(exchange).lower(array((4096, 512), f32, "expert"), array((8192, 512), f32, "expert"), *sizes)

    def loop_with_bound_from_data() -> Any:
        def loop(x: Any, bound: Any) -> Any:
            def body(state: Any) -> Any:
                return state[0] + 1, jnp.sin(jax.lax.psum(state[1], "expert"))

            return jax.lax.while_loop(lambda state: state[0] < bound, body, (0, x))[1]

        return jax.jit(manual(loop, (local, P()), local)).lower(rows, array((), i32))

    def loop_that_counts_down_by_3() -> Any:
        def loop(x: Any) -> Any:
            def body(state: Any) -> Any:
                return state[0] - 3, jnp.sin(jax.lax.psum(state[1], "expert"))

            return jax.lax.while_loop(lambda state: state[0] >= 2, body, (17, x))[1]

        return jax.jit(manual(loop, local, local)).lower(rows)

    def branch_with_all_reduce() -> Any:
        def choose(x: Any, flag: Any) -> Any:
            return jax.lax.cond(flag[0] > 0, lambda x: jax.lax.psum(x, "expert"), jnp.sin, x)

        return jax.jit(manual(choose, (local, P()), local)).lower(rows, array((1,), i32))

    def offload_to_host() -> Any:
        from jax.ad_checkpoint import checkpoint_name

        policy = jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[], names_which_can_be_offloaded=["kept"], offload_src="device", offload_dst="pinned_host"
        )

        def layer(x: Any, w: Any) -> tuple[Any, None]:
            return jnp.sin(checkpoint_name(x @ w, "kept")), None

        def loss(w: Any, x: Any) -> Any:
            return jax.lax.scan(jax.checkpoint(layer, policy=policy), x, w)[0].sum()

        return jax.jit(jax.grad(loss)).lower(array((6, 1024, 1024), f32, None, None, "context"), array((8192, 1024), f32, "fsdp", None))

    def mean_over_slices() -> Any:
        gradient = array((4096, 2048), f32, ("fsdp", "context"))
        return jax.jit(manual(lambda x: jax.lax.psum(x, "data"), P(("fsdp", "context")), P(("fsdp", "context")))).lower(gradient)

    def crossing_slices() -> Any:
        def cross(x: Any) -> Any:
            return (
                jax.lax.psum(jnp.sin(x), ("data", "fsdp")),
                jax.lax.all_gather(x, "data", tiled=True),
                jax.lax.ppermute(x, "data", [(0, 1)]),
                jax.lax.psum_scatter(x, "data", tiled=True),
                jax.lax.all_to_all(x, "data", 0, 0, tiled=True),
            )

        everywhere = P(("data", "fsdp", "context"))
        return jax.jit(manual(cross, everywhere, everywhere)).lower(array((8 * 48, 1024), f32, ("data", "fsdp", "context")))

    def train_step(tokens: int, dim: int, *, batch_size: int = 8, donate: bool = True) -> Callable[[], Any]:
        return lambda: lower_train_step(mesh, batch_size=batch_size, tokens=tokens, dim=dim, donate=donate)

    programs: dict[str, Callable[[], Any]] = {
        "scan_of_6_with_3_halos": scan_of_6_with_3_halos,
        "nested_scans_7_by_5": nested_scans_7_by_5,
        "combined_all_reduce": combined_all_reduce,
        "all_gather_over_two_axes": all_gather_over_two_axes,
        "reduce_scatter": reduce_scatter,
        "all_to_all": all_to_all,
        "ragged_all_to_all": ragged_all_to_all,
        "loop_with_bound_from_data": loop_with_bound_from_data,
        "loop_that_counts_down_by_3": loop_that_counts_down_by_3,
        "branch_with_all_reduce": branch_with_all_reduce,
        "offload_to_host": offload_to_host,
        "mean_over_slices": mean_over_slices,
        "crossing_slices": crossing_slices,
        "train_step": train_step(4096, 1024),
        "train_step_in_vmem": train_step(1024, 512, batch_size=4),
        "train_step_undonated": train_step(4096, 1024, donate=False),
        "train_step_too_large": train_step(65536, 4096, batch_size=64),
    }
    return programs


TRAIN_LAYERS, TRAIN_VOCAB = 6, 8192


def lower_train_step(mesh: Any, *, batch_size: int, tokens: int, dim: int, donate: bool) -> Any:
    """A train step of six scanned layers with a halo exchange each, rematerialised, with both moments of its optimizer."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    def array(shape: tuple[int, ...], dtype: Any, *spec: Any) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))

    activations = P("fsdp", "context", None)

    def exchange(x: Any) -> Any:
        before = jax.lax.ppermute(x[:, -9:], "context", [(0, 1)])
        after = jax.lax.ppermute(x[:, :9], "context", [(1, 0)])
        return x.at[:, :9].add(before).at[:, -9:].add(after)

    def layer(x: Any, w: Any) -> tuple[Any, None]:
        with jax.named_scope("mlp"):
            y = jax.nn.silu(x @ w["up"]) @ w["down"]
        with jax.named_scope("halo"):
            y = jax.shard_map(exchange, mesh=mesh, in_specs=activations, out_specs=activations)(y)
        return x + y, None

    def loss(params: Any, batch: Any) -> Any:
        with jax.named_scope("embed"):
            x = jax.lax.with_sharding_constraint(params["embed"][batch["tokens"]], NamedSharding(mesh, activations))
        with jax.named_scope("layers"):
            x, _ = jax.lax.scan(jax.checkpoint(layer), x, params["layers"])
        with jax.named_scope("logits"):
            logits = (x @ params["head"]).astype(jnp.float32)
        with jax.named_scope("loss"):
            return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), batch["targets"][..., None], -1))

    def step(state: Any, batch: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(state["params"], batch)
        with jax.named_scope("optimizer"):
            mu = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["mu"], gradients)
            nu = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g * g, state["nu"], gradients)
            params = jax.tree.map(lambda p, m, n: p - 1e-3 * m / (jnp.sqrt(n) + 1e-8), state["params"], mu, nu)
        return {"params": params, "mu": mu, "nu": nu, "step": state["step"] + 1}, value

    both = ("fsdp", "context")
    params = {
        "embed": array((TRAIN_VOCAB, dim), jnp.float32, both, None),
        "head": array((dim, TRAIN_VOCAB), jnp.float32, both, None),
        "layers": {
            "up": array((TRAIN_LAYERS, dim, 4 * dim), jnp.float32, None, "fsdp", "context"),
            "down": array((TRAIN_LAYERS, 4 * dim, dim), jnp.float32, None, "fsdp", "context"),
        },
    }
    state = {"params": params, "mu": params, "nu": params, "step": array((), jnp.int32)}
    batch = {name: array((batch_size, tokens), jnp.int32, "fsdp", "context") for name in ("tokens", "targets")}
    return jax.jit(step, donate_argnums=(0,) if donate else ()).lower(state, batch)


def main(topology: str, out: Path, names: list[str]) -> None:
    import jax
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import AxisType, Mesh

    name, _, slices = topology.partition("*")
    options = {"num_slices": int(slices)} if slices else {}
    devices = topologies.get_topology_desc(platform="tpu", topology_name=name, **options).devices
    axes = MESHES[topology]
    mesh = Mesh(np.array(devices).reshape(tuple(axes.values())), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))
    programs = make_programs(mesh)
    if "expert" in axes:
        programs |= finding_programs.make_programs(mesh)
    for program in names:
        directory = out / program
        directory.mkdir(parents=True)
        lowered = programs[program]()
        try:
            compiled = lowered.compile(compiler_options={"xla_dump_to": str(directory), "xla_dump_hlo_as_proto": True})
        except jax.errors.JaxRuntimeError as error:
            (directory / "error.txt").write_text(str(error))
            continue
        statistics = compiled.memory_analysis()
        (directory / "memory_analysis.json").write_text(json.dumps({key: getattr(statistics, key) for key in STATISTICS}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
