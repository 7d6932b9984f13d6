"""The routed experts over the mesh: tokens sent to their experts' ranks, a grouped SwiGLU, sent back, combined; and its gradient.

The gradient is written out because what it keeps decides the memory of a MoE step. Its residuals are the inputs alone (activations and
the sharded weights), so no receive buffer and no gathered weight outlives the layer, whatever the remat policy around it, and a remat
policy recomputes nothing twice. The weights of the combination are applied on the experts' side, where their gradient is a product
of two hidden rows; the backward pass therefore needs neither the down projection's output nor its way back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.lax import RaggedDotDimensionNumbers
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from service.models.axes import axis_size, spec
from service.models.config import AXIS_NAMES
from service.models.costs import receive_rows
from service.models.dispatch import EXPERT_AXIS, Plan, group_sizes, make_plan, return_rows, send_rows
from service.models.rules import RULES

# Over these the width of an expert is cut at rest and gathered for use; over `tensor` it stays cut.
_GATHERED_AXES = tuple(name for name in RULES["expert_mlp"] if name != "tensor")
_TOKEN_AXES = (*RULES["batch"], *RULES["seq"])
# Ranks that hold the same experts and see other tokens, beside those the width is gathered over.
_REPLICA_AXES = tuple(name for name in _TOKEN_AXES if name not in (*_GATHERED_AXES, EXPERT_AXIS))
_ACTIVATION = spec("batch", "seq", None)
WEIGHT_AXES = ("experts", "expert_mlp", "expert_embed")
"""Of all three projections. The width, which is cut, is not the last dim: the last is padded to 128 on TPU, and a reduce-scatter over it
is compiled to an all-reduce of the whole (libtpu 0.0.52)."""

# x[rows, a] by w[group, b, a] to [rows, b]: a grouped matmul by the transposed weight, without a transposed copy of it.
_TRANSPOSED = RaggedDotDimensionNumbers(dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0])
# x[rows, a] and y[rows, b] to [group, a, b]: the gradient of a grouped matmul's weight.
_PER_GROUP = RaggedDotDimensionNumbers(dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[])


@dataclass(frozen=True)
class ExpertRun:
    """How a layer's routed experts are run; static under jit."""

    num_experts: int
    buffer_factor: float
    token_chunks: int
    use_ragged_all_to_all: bool


class ExpertWeights(NamedTuple):
    """Gate, up and down projection of all experts, with axes `WEIGHT_AXES`; gate and up are applied transposed."""

    gate: Float[Array, "experts width dim"]
    up: Float[Array, "experts width dim"]
    down: Float[Array, "experts width dim"]


_WEIGHTS = spec(*WEIGHT_AXES)
_WIDTH = WEIGHT_AXES.index("expert_mlp")


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def apply_experts(
    run: ExpertRun,
    x: Float[Array, "batch seq dim"],
    indices: Int[Array, "batch seq chosen"],
    weights: Float[Array, "batch seq chosen"],
    experts: ExpertWeights,
) -> tuple[Float[Array, "batch seq dim"], Int[Array, ""], Bool[Array, ""]]:
    """The weighted sum of each token's chosen experts, how many assignments were dropped over all devices, and whether any was.

    An index of `run.num_experts` marks padding: no expert sees it and its output is zero. Global shapes; the mesh is the one set. The flag
    is reduced over every mesh axis, so that each device, and with it each host, holds the same value.

    Raises:
        ValueError: the shapes do not divide over the mesh, or the tokens of a rank do not divide into the chunks.
    """
    return _over_mesh(
        partial(_forward_local, run),
        in_specs=(_ACTIVATION, _ACTIVATION, _ACTIVATION, _WEIGHTS),
        out_specs=(_ACTIVATION, PartitionSpec(), PartitionSpec()),
    )(x, indices, weights, experts)


def _save_inputs(run: ExpertRun, *inputs: Any) -> tuple[Any, Any]:
    return apply_experts(run, *inputs), inputs


def _gradients(run: ExpertRun, inputs: Any, cotangents: Any) -> tuple[Any, ...]:
    dx, dweights, dexperts = _over_mesh(
        partial(_backward_local, run),
        in_specs=(_ACTIVATION, _ACTIVATION, _ACTIVATION, _WEIGHTS, _ACTIVATION),
        out_specs=(_ACTIVATION, _ACTIVATION, _WEIGHTS),
    )(*inputs, cotangents[0])
    return dx, None, dweights, dexperts


apply_experts.defvjp(_save_inputs, _gradients)


def _over_mesh(local: Callable[..., Any], *, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """`local` on every device of the mesh that is set, all axes manual; as it is where none is set."""
    if jax.sharding.get_abstract_mesh().empty:
        return local
    # Replication is not inferred (check_vma): collectives over axes of size 1 are left out, and the gradient is written by hand.
    return jax.shard_map(local, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def check_shapes(run: ExpertRun, *, batch: int, seq: int, width: int) -> None:
    """Refuse sizes that do not divide over the mesh that is set.

    Raises:
        ValueError: with the size, the mesh axes and what to change.
    """
    sizes = (
        (batch, RULES["batch"], "sequences"),
        (seq, RULES["seq"], "positions of a sequence"),
        (run.num_experts, RULES["experts"], "experts"),
        (width, RULES["expert_mlp"], "hidden dims of an expert"),
    )
    for size, mesh_axes, what in sizes:
        shards = axis_size(*mesh_axes)
        if size % shards:
            raise ValueError(
                f"{size} {what} do not divide over the {shards} shards of mesh axes {', '.join(mesh_axes)}; change one of them"
            )
    tokens = (batch // axis_size(*RULES["batch"])) * (seq // axis_size(*RULES["seq"]))
    if tokens % run.token_chunks:
        raise ValueError(f"{tokens} tokens on each device do not divide into token_chunks {run.token_chunks}; use a divisor of {tokens}")


def _forward_local(
    run: ExpertRun,
    x: Float[Array, "batch_local seq_local dim"],
    indices: Int[Array, "batch_local seq_local chosen"],
    weights: Float[Array, "batch_local seq_local chosen"],
    experts: ExpertWeights,
) -> tuple[Float[Array, "batch_local seq_local dim"], Int[Array, ""], Bool[Array, ""]]:
    gathered = _gather_width(experts, x.dtype)

    def one_chunk(_: None, chunk: Any) -> tuple[None, Any]:
        x, indices, weights = chunk
        with jax.named_scope("dispatch"):
            plan, rows = _plan(run, indices)
            received = send_rows(_take_sorted(x, plan, indices), plan, rows=rows, use_ragged_all_to_all=run.use_ragged_all_to_all)
        with jax.named_scope("experts"):
            sizes = group_sizes(plan)
            gate = jax.lax.ragged_dot_general(received, gathered.gate, sizes, _TRANSPOSED)
            up = jax.lax.ragged_dot_general(received, gathered.up, sizes, _TRANSPOSED)
            hidden = (jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)).astype(x.dtype)
            out = jax.lax.ragged_dot(hidden, gathered.down, sizes)
        with jax.named_scope("combine"):
            out = return_rows(out, plan, use_ragged_all_to_all=run.use_ragged_all_to_all)
            y = _sum_chosen(out, plan, indices, weights)
        return None, (y.astype(x.dtype), plan.num_dropped)

    # A scan, so that a chunk's buffers are gone before the next chunk's stand and the program does not grow with the chunks.
    _, (y, dropped) = _scan(one_chunk, None, (x, indices, weights), run.token_chunks)
    with jax.named_scope("combine"):
        y = _psum(y, ("tensor",))
    # Over every axis, tensor too, where all ranks count the same: no device may hold another value of the flag than its neighbours.
    dropped = _psum(jnp.sum(dropped), AXIS_NAMES) // axis_size("tensor")
    return y.reshape(x.shape), dropped, dropped > 0


def _backward_local(
    run: ExpertRun,
    x: Float[Array, "batch_local seq_local dim"],
    indices: Int[Array, "batch_local seq_local chosen"],
    weights: Float[Array, "batch_local seq_local chosen"],
    experts: ExpertWeights,
    dy: Float[Array, "batch_local seq_local dim"],
) -> tuple[Float[Array, "batch_local seq_local dim"], Float[Array, "batch_local seq_local chosen"], ExpertWeights]:
    gathered = _gather_width(experts, x.dtype)

    def one_chunk(total: ExpertWeights | None, chunk: Any) -> tuple[ExpertWeights, Any]:
        # Phases with barriers between, so that few buffers of [rows, dim] stand at once and the scheduler is not left to find that out.
        # Both exchanges come first: on arrival a buffer stands twice, in the layout of the links and in that of the matmul, and
        # nothing of [rows, width] is to stand beside it then.
        (x, indices, weights, dy), total = jax.lax.optimization_barrier((chunk, total))
        send = partial(send_rows, use_ragged_all_to_all=run.use_ragged_all_to_all)
        back = partial(return_rows, use_ragged_all_to_all=run.use_ragged_all_to_all)
        with jax.named_scope("dispatch"):
            plan, rows = _plan(run, indices)
            received = send(_take_sorted(x, plan, indices), plan, rows=rows)
        with jax.named_scope("combine"):
            weight_rows = send(weights.reshape(-1, 1)[plan.order], plan, rows=rows)
            received, dy = jax.lax.optimization_barrier((received, dy))
            dy_rows = send(_take_sorted(dy, plan, indices), plan, rows=rows)
        received, dy_rows = jax.lax.optimization_barrier((received, dy_rows))
        with jax.named_scope("experts"):
            sizes = group_sizes(plan)
            gate = jax.lax.ragged_dot_general(received, gathered.gate, sizes, _TRANSPOSED)
            up = jax.lax.ragged_dot_general(received, gathered.up, sizes, _TRANSPOSED)
            unweighted = jax.lax.ragged_dot_general(dy_rows, gathered.down, sizes, _TRANSPOSED).astype(jnp.float32)
            gate32, up32 = gate.astype(jnp.float32), up.astype(jnp.float32)
            sigmoid = jax.nn.sigmoid(gate32)
            hidden = gate32 * sigmoid * up32
            dweight_rows = jnp.sum(unweighted * hidden, axis=-1, keepdims=True)
            dhidden = unweighted * weight_rows
            dgate = (dhidden * up32 * sigmoid * (1 + gate32 * (1 - sigmoid))).astype(x.dtype)
            dup = (dhidden * gate32 * sigmoid).astype(x.dtype)
            ddown = jax.lax.ragged_dot_general((hidden * weight_rows).astype(x.dtype), dy_rows, sizes, _PER_GROUP)
        ddown, dgate, dup, received = jax.lax.optimization_barrier((ddown, dgate, dup, received))
        with jax.named_scope("experts"):
            dtotal = ExpertWeights(
                gate=jax.lax.ragged_dot_general(dgate, received, sizes, _PER_GROUP),
                up=jax.lax.ragged_dot_general(dup, received, sizes, _PER_GROUP),
                down=ddown,
            )
            total = dtotal if total is None else jax.tree.map(jnp.add, total, dtotal)
        total, dgate, dup = jax.lax.optimization_barrier((total, dgate, dup))
        with jax.named_scope("experts"):
            dreceived = jax.lax.ragged_dot(dgate, gathered.gate, sizes) + jax.lax.ragged_dot(dup, gathered.up, sizes)
        with jax.named_scope("dispatch"):
            dx = _sum_chosen(back(dreceived, plan), plan, indices, None)
            dweights = back(dweight_rows, plan)[plan.position].reshape(weights.shape)
        return total, (dx.astype(x.dtype), dweights)

    zeros = None if run.token_chunks == 1 else jax.tree.map(jnp.zeros_like, gathered)
    total, (dx, dweights) = _scan(one_chunk, zeros, (x, indices, weights, dy), run.token_chunks)
    dx, dweights = _psum(dx, ("tensor",)), _psum(dweights, ("tensor",))
    dexperts = jax.tree.map(lambda g, w: g.astype(w.dtype), _reduce_width(total), experts)
    return dx.reshape(x.shape), dweights.reshape(weights.shape), dexperts


def _plan(run: ExpertRun, indices: Int[Array, "tokens chosen"]) -> tuple[Plan, int]:
    """The exchange of one chunk of tokens, and the rows of its receive buffer."""
    num_tokens, num_chosen = indices.shape
    num_ranks = axis_size(EXPERT_AXIS)
    rows = receive_rows(
        num_tokens, num_chosen=num_chosen, num_experts=run.num_experts, num_ranks=num_ranks, buffer_factor=run.buffer_factor
    )
    return make_plan(indices, num_experts=run.num_experts, num_ranks=num_ranks, rows=rows), rows


def _take_sorted(x: Float[Array, "tokens dim"], plan: Plan, indices: Int[Array, "tokens chosen"]) -> Float[Array, "assignments dim"]:
    """Each token's row once for each of its assignments, sorted by expert."""
    return x[plan.order // indices.shape[1]]


def _sum_chosen(
    rows: Float[Array, "assignments dim"],
    plan: Plan,
    indices: Int[Array, "tokens chosen"],
    weights: Float[Array, "tokens chosen"] | None,
) -> Float[Array, "tokens dim"]:
    """The (weighted) sum of each token's rows in float32: a gather by the inverse permutation, where a scatter-add would serialise."""
    chosen = rows[plan.position].reshape(*indices.shape, rows.shape[1]).astype(jnp.float32)
    return jnp.sum(chosen if weights is None else chosen * weights[..., None], axis=1)


def _scan(body: Callable[[Any, Any], tuple[Any, Any]], carry: Any, xs: Any, num_chunks: int) -> tuple[Any, Any]:
    """`body` over the local tokens cut in chunks; outputs are joined again along the tokens. One chunk needs no loop."""
    xs = jax.tree.map(lambda a: a.reshape(-1, a.shape[-1]), xs)
    if num_chunks == 1:
        return body(carry, xs)
    xs = jax.tree.map(lambda a: a.reshape(num_chunks, -1, a.shape[-1]), xs)
    carry, ys = jax.lax.scan(body, carry, xs)
    return carry, jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), ys)


def _gather_width(experts: ExpertWeights, dtype: Any) -> ExpertWeights:
    """This rank's experts at the width it computes with, in the compute dtype.

    Cast before the gather, so that half the bytes cross the links. With `tensor` above one the gathered columns are not neighbours in the
    whole; a SwiGLU does not mind in which order its hidden dims stand, as long as all three projections agree.
    """
    with jax.named_scope("experts"):
        cast = jax.tree.map(lambda w: w.astype(dtype), experts)
        names = _present(_GATHERED_AXES)
        if not names:
            return cast
        return jax.tree.map(partial(jax.lax.all_gather, axis_name=names, axis=_WIDTH, tiled=True), cast)


def _reduce_width(gradients: ExpertWeights) -> ExpertWeights:
    """The transpose of `_gather_width`: gradients summed over all ranks with these experts, each rank keeping its cut."""
    with jax.named_scope("experts"):
        names = _present(_GATHERED_AXES)
        if names:
            gradients = jax.tree.map(partial(jax.lax.psum_scatter, axis_name=names, scatter_dimension=_WIDTH, tiled=True), gradients)
        return jax.tree.map(partial(_psum, names=_REPLICA_AXES), gradients)


def _present(names: tuple[str, ...]) -> tuple[str, ...]:
    """Those of the mesh axes that have more than one rank."""
    return tuple(name for name in names if axis_size(name) > 1)


def _psum(x: Array, names: tuple[str, ...]) -> Array:
    names = _present(names)
    return jax.lax.psum(x, names) if names else x
