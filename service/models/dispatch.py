"""How token rows travel to the ranks of their experts and back: the plan of an exchange, and the exchange itself.

Runs inside a `shard_map` that is manual over every mesh axis; shapes are per device. Each rank of the `expert` axis holds
`experts // ranks` consecutive experts. An assignment is one (token, chosen expert) pair. A rank sorts its assignments by expert
and sends each run to the expert's rank, where rows land grouped by expert and, within an expert, by sending rank: what the grouped
matmul needs, with no permutation of the receive buffer.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

EXPERT_AXIS = "expert"


class Plan(NamedTuple):
    """One exchange as every rank sees it from the counts of all; int32. `peers` is the expert axis, `owned` the experts of a rank."""

    order: Int[Array, " assignments"]
    """Sorted position to assignment."""
    position: Int[Array, " assignments"]
    """Assignment to sorted position: the inverse of `order`."""
    expert: Int[Array, " assignments"]
    """Sorted position to expert; `experts` for the assignments of padding, which sort last and travel nowhere."""
    sorted_start: Int[Array, "peers experts"]
    """Where a sending rank's run for an expert starts among its sorted assignments."""
    kept: Int[Array, "peers peers owned"]
    """Rows that travel, by sending rank, receiving rank and the receiver's expert."""
    row_start: Int[Array, "peers peers owned"]
    """Where those rows start in the receiving rank's buffer."""
    num_dropped: Int[Array, ""]
    """Assignments of this rank that do not travel for want of room."""


def make_plan(indices: Int[Array, "tokens chosen"], *, num_experts: int, num_ranks: int, rows: int) -> Plan:
    """Plan the exchange of this rank's assignments; an index of `num_experts` marks padding.

    Where more rows head for a rank than its buffer holds, senders are served in rank order, each in the order of its sorted assignments: a
    prefix sum over the senders before decides what fits. Every rank computes the same cut from the same counts, so that no
    row is written outside a buffer or over another. Cost on the links: one all-gather of `experts` int32 counts over the expert axis.
    """
    flat = indices.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    counts = jnp.sum(flat[:, None] == jnp.arange(num_experts), axis=0, dtype=jnp.int32)
    counts = jax.lax.all_gather(counts, EXPERT_AXIS) if num_ranks > 1 else counts[None]
    owned = counts.reshape(num_ranks, num_ranks, num_experts // num_ranks)  # [sender, receiver, expert of the receiver]
    per_sender = jnp.sum(owned, axis=2)
    room = jnp.clip(rows - _before(per_sender, axis=0), 0, per_sender)
    kept = jnp.clip(room[:, :, None] - _before(owned, axis=2), 0, owned)
    by_expert = kept.transpose(1, 2, 0).reshape(num_ranks, -1)  # [receiver, (expert, sender)]: the order of the buffer
    row_start = _before(by_expert, axis=1).reshape(num_ranks, -1, num_ranks).transpose(2, 0, 1)
    rank = _rank(num_ranks)
    return Plan(
        order=order,
        position=jnp.argsort(order),
        expert=flat[order],
        sorted_start=_before(counts, axis=1),
        kept=kept,
        row_start=row_start,
        num_dropped=jnp.sum(counts[rank]) - jnp.sum(kept[rank]),
    )


def _before(x: Int[Array, ...], axis: int) -> Int[Array, ...]:
    """Exclusive prefix sums."""
    return jnp.cumsum(x, axis=axis, dtype=jnp.int32) - x


def _rank(num_ranks: int) -> Int[Array, ""]:
    return jax.lax.axis_index(EXPERT_AXIS) if num_ranks > 1 else jnp.int32(0)


def group_sizes(plan: Plan) -> Int[Array, " owned"]:
    """Rows of this rank's receive buffer that belong to each of its experts, in order; rows after them hold nothing."""
    return jnp.sum(plan.kept[:, _rank(plan.kept.shape[0])], axis=0)


def send_rows(x: Float[Array, "assignments dim"], plan: Plan, *, rows: int, use_ragged_all_to_all: bool) -> Float[Array, "{rows} dim"]:
    """This rank's receive buffer, from everyone's rows in sorted order. Rows where nothing arrives are zero.

    Cost on the links: the rows themselves where `use_ragged_all_to_all`; otherwise, for backends that lack it, an all-gather of all rows
    over the expert axis, of which each rank keeps its own.
    """
    num_ranks = plan.kept.shape[0]
    if num_ranks == 1:
        return x
    rank = _rank(num_ranks)
    starts = plan.sorted_start.reshape(plan.kept.shape)
    if use_ragged_all_to_all:
        return _ragged_exchange(x, rows, starts[rank], plan.kept[rank], plan.row_start[rank], plan.kept[:, rank])
    everyone = jax.lax.all_gather(x, EXPERT_AXIS, tiled=True)
    # Runs in buffer order, (expert, sender). An empty run shares its start with the next, which the search then finds.
    run_start = plan.row_start[:, rank].T.reshape(-1)
    row = jnp.arange(rows, dtype=jnp.int32)
    run = jnp.searchsorted(run_start, row, side="right") - 1
    sender = run % num_ranks
    source = sender * x.shape[0] + starts[:, rank].T.reshape(-1)[run] + row - run_start[run]
    arrived = row < jnp.sum(plan.kept[:, rank])
    return jnp.where(arrived[:, None], everyone[jnp.where(arrived, source, 0)], 0)


def return_rows(y: Float[Array, "rows dim"], plan: Plan, *, use_ragged_all_to_all: bool) -> Float[Array, "assignments dim"]:
    """The way back of `send_rows`: what the experts made of this rank's rows, in sorted order; zero for rows that did not travel."""
    num_ranks = plan.kept.shape[0]
    num_assignments = plan.order.shape[0]
    owned = plan.kept.shape[2]
    rank = _rank(num_ranks)
    starts = plan.sorted_start.reshape(plan.kept.shape)
    if num_ranks == 1:
        # Rows of padding were multiplied with no expert: what a grouped matmul leaves in them is not defined.
        return jnp.where((plan.expert < owned)[:, None], y, 0)
    if use_ragged_all_to_all:
        return _ragged_exchange(y, num_assignments, plan.row_start[:, rank], plan.kept[:, rank], starts[:, rank], plan.kept[rank])
    everyone = jax.lax.all_gather(y, EXPERT_AXIS, tiled=True)
    expert = jnp.minimum(plan.expert, num_ranks * owned - 1)
    receiver, local = expert // owned, expert % owned
    within = jnp.arange(num_assignments, dtype=jnp.int32) - plan.sorted_start[rank, expert]
    travelled = (plan.expert < num_ranks * owned) & (within < plan.kept[rank, receiver, local])
    source = receiver * y.shape[0] + plan.row_start[rank, receiver, local] + within
    return jnp.where(travelled[:, None], everyone[jnp.where(travelled, source, 0)], 0)


def _ragged_exchange(
    x: Float[Array, "rows_in dim"],
    rows_out: int,
    input_start: Int[Array, "peers owned"],
    send_sizes: Int[Array, "peers owned"],
    output_start: Int[Array, "peers owned"],
    recv_sizes: Int[Array, "peers owned"],
) -> Float[Array, "{rows_out} dim"]:
    """One ragged all-to-all with several runs for each peer, laid out peer by peer."""
    # Empty runs may start at the very end of a buffer; at zero they are inside it.
    input_start = jnp.where(send_sizes > 0, input_start, 0)
    output_start = jnp.where(send_sizes > 0, output_start, 0)
    return jax.lax.ragged_all_to_all(
        x,
        jnp.zeros((rows_out, x.shape[1]), x.dtype),
        input_start.reshape(-1),
        send_sizes.reshape(-1),
        output_start.reshape(-1),
        recv_sizes.reshape(-1),
        axis_name=EXPERT_AXIS,
    )
