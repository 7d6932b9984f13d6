"""Programs that raise one finding each, beside one that does the same work without it; compiled as those of `tpu_programs`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

GLOBAL_BATCH, SEQ_LEN, STREAMS, DIM, HALO = 12, 4096, 4, 1024, 9
"""Sizes the programs share with the configuration of `test_findings`; over fsdp 2, expert 2 and context 2 a device has [3, 2048, …]."""


def make_programs(mesh: Any) -> dict[str, Callable[[], Any]]:
    """Name to a function that lowers the program on `mesh`, whose axes are fsdp, expert and context."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    batch_axes = ("fsdp", "expert")
    activations = P(batch_axes, "context", None, None)

    def array(shape: tuple[int, ...], dtype: Any, *spec: Any) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))

    hidden = array((GLOBAL_BATCH, SEQ_LEN, STREAMS, DIM), jnp.bfloat16, *activations)

    def neighbours(exchange: Callable[[Any], Any]) -> Callable[[], Any]:
        """An Engram-like convolution that reads its neighbours by `exchange`, within shard_map."""

        def step(x: Any) -> Any:
            with jax.named_scope("engram"), jax.named_scope("short_conv"):
                return jax.shard_map(exchange, mesh=mesh, in_specs=activations, out_specs=activations, check_vma=False)(x)

        return lambda: jax.jit(step).lower(hidden)

    def by_gather(x: Any) -> Any:
        whole = jax.lax.all_gather(x, "context", axis=1, tiled=True)
        rank, length = jax.lax.axis_index("context"), x.shape[1]
        return x + jax.lax.dynamic_slice_in_dim(jnp.pad(whole, [(0, 0), (HALO, 0), (0, 0), (0, 0)]), rank * length, length, axis=1)

    def by_permutes(x: Any) -> Any:
        # Two chunks a rank, as under load balance: one halo each way.
        half = x.shape[1] // 2
        before = jax.lax.ppermute(x[:, half - HALO : half], "context", [(0, 1)])
        after = jax.lax.ppermute(x[:, -HALO:], "context", [(1, 0)])
        return x.at[:, :HALO].add(before).at[:, half : half + HALO].add(after)

    def beside_table() -> Any:
        """The convolution by permutes, and a gather of the same shape that is none of its: as a table's gradient makes it."""

        def exchange(x: Any) -> Any:
            with jax.named_scope("engram"):
                with jax.named_scope("short_conv"):
                    x = by_permutes(x)
                return x + jnp.sum(jax.lax.all_gather(x, "context"), axis=0)

        return jax.jit(jax.shard_map(exchange, mesh=mesh, in_specs=activations, out_specs=activations, check_vma=False)).lower(hidden)

    def layers(sequence_axis: str | None, *, batch: int = GLOBAL_BATCH, dim: int = DIM) -> Callable[[], Any]:
        """Gradients of four layers whose kept activations lie over `sequence_axis`."""
        pinned = NamedSharding(mesh, P(batch_axes, sequence_axis, None))

        def layer(x: Any, w: Any) -> tuple[Any, None]:
            with jax.named_scope("mlp"):
                return jax.lax.with_sharding_constraint(jnp.sin(x @ w), pinned), None

        def loss(w: Any, x: Any) -> Any:
            with jax.named_scope("layers"):
                return jnp.sum(jax.lax.scan(layer, jax.lax.with_sharding_constraint(x, pinned), w)[0].astype(jnp.float32))

        x = array((batch, SEQ_LEN, dim), jnp.bfloat16, batch_axes, "context", None)
        return lambda: jax.jit(jax.grad(loss)).lower(array((4, dim, dim), jnp.bfloat16), x)

    def update(*spec: Any, dtype: Any = jnp.float32, names: Sequence[str] = mesh.axis_names) -> Callable[[], Any]:
        """One donated weight, laid out by `spec` over a mesh whose axes are called `names`, and its new value in `dtype`."""
        renamed = Mesh(mesh.devices, names, axis_types=mesh.axis_types)

        def step(state: Any, batch: Any) -> Any:
            with jax.named_scope("optimizer"):
                return {"params": {"w": (state["params"]["w"] - 1e-3 * jnp.sum(batch["x"])).astype(dtype)}}

        def of(shape: tuple[int, ...], *spec: Any) -> Any:
            return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(renamed, P(*spec)))

        return lambda: jax.jit(step, donate_argnums=0).lower({"params": {"w": of((8192, 2048), *spec)}}, {"x": of((64,))})

    def rows_of(width: int) -> Callable[[], Any]:
        """An argument whose narrow dim lies minor-most, as it does in the layout that checkpoints and hosts use."""
        from jax.experimental.layout import Format, Layout

        rows = 1 << 24
        format_ = Format(Layout(major_to_minor=(0, 1)), NamedSharding(mesh, P((*batch_axes, "context"))))
        argument = array((rows // width, width), jnp.float32, (*batch_axes, "context"))
        return lambda: jax.jit(lambda streams: jnp.sum(jnp.sin(streams), axis=0), in_shardings=format_).lower(argument)

    def dispatch() -> Any:
        """Tokens sent between experts into a buffer of 131072 rows a device, beside 256 MiB of arguments."""

        def exchange(x: Any, *sizes: Any) -> Any:
            with jax.named_scope("moe"), jax.named_scope("dispatch"):
                received = jax.lax.ragged_all_to_all(x, jnp.zeros((131072, x.shape[1]), x.dtype), *sizes, axis_name="expert")
                return jnp.sum(jax.lax.optimization_barrier(received), axis=1)

        split = P((*batch_axes, "context"))
        sizes = [array((16,), jnp.int32, (*batch_axes, "context"))] * 4
        exchanged = jax.shard_map(exchange, mesh=mesh, in_specs=(split,) * 5, out_specs=split, check_vma=False)
        return jax.jit(exchanged).lower(array((8 * 65536, 1024), jnp.float32, (*batch_axes, "context")), *sizes)

    def nameless() -> Any:
        def step(x: Any, w: Any) -> Any:
            y = jax.lax.optimization_barrier(x @ w)
            return y @ w.T

        return jax.jit(step).lower(array((65536, 2048), jnp.float32, batch_axes), array((2048, 8192), jnp.float32))

    def resharded(*after: Any) -> Callable[[], Any]:
        """An activation cut by rows over two axes, and then as `after` says."""

        def step(x: Any) -> Any:
            with jax.named_scope("mla"):
                by_rows = jax.lax.with_sharding_constraint(jnp.cos(x), NamedSharding(mesh, P(batch_axes)))
                return jax.lax.with_sharding_constraint(jnp.sin(by_rows), NamedSharding(mesh, P(*after)))

        return lambda: jax.jit(step).lower(array((6, 10, 512), jnp.float32))

    everywhere = (*batch_axes, "context")
    return {
        "resharded": resharded(None, "fsdp", "expert"),
        "sharded_alike": resharded(batch_axes),
        "halo_by_gather": neighbours(by_gather),
        "halo_by_permutes": neighbours(by_permutes),
        "halo_beside_table": beside_table,
        "layers_whole": layers(None),
        "layers_cut": layers("context"),
        # One sequence a device, as long as the model is wide.
        "square_layers_whole": layers(None, batch=4, dim=SEQ_LEN),
        "square_layers_cut": layers("context", batch=4, dim=SEQ_LEN),
        "state_replicated": update(),
        "state_cut": update(everywhere),
        "state_whole_over_tensor": update(("fsdp", "expert"), names=("fsdp", "expert", "tensor")),
        "state_cut_over_tensor": update(("fsdp", "expert", "tensor"), names=("fsdp", "expert", "tensor")),
        "state_cut_by_other_names": update(("axis_0", "axis_1", "axis_2"), names=("axis_0", "axis_1", "axis_2")),
        "state_of_another_dtype": update(everywhere, dtype=jnp.bfloat16),
        "rows_of_4": rows_of(4),
        "rows_of_128": rows_of(128),
        "dispatch": dispatch,
        "nameless": nameless,
    }


NAMES = (
    "halo_by_gather",
    "halo_by_permutes",
    "halo_beside_table",
    "layers_whole",
    "layers_cut",
    "square_layers_whole",
    "square_layers_cut",
    "state_replicated",
    "state_cut",
    "state_whole_over_tensor",
    "state_cut_over_tensor",
    "state_cut_by_other_names",
    "state_of_another_dtype",
    "rows_of_4",
    "rows_of_128",
    "dispatch",
    "nameless",
)
