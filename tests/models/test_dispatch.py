"""Which rows travel, where they land and how they come back, against a NumPy model that serves one sender after another."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from service.models.axes import make_mesh
from service.models.config import MeshAxes
from service.models.costs import receive_rows
from service.models.dispatch import group_sizes, make_plan, return_rows, send_rows

DIM = 3


def rows_for(ranks: int, factor: float, *, tokens: int = 21, chosen: int = 3, experts: int = 8) -> int:
    return receive_rows(tokens, num_chosen=chosen, num_experts=experts, num_ranks=ranks, buffer_factor=float(factor))


@pytest.mark.parametrize(
    ("ranks", "factor", "rows"),
    [
        (1, -1, 63),
        (1, 1, 63),
        (1, 1.5, 63),
        (1, 2, 63),
        (1, 0.125, 63),
        (4, -1, 168),
        (4, 1, 63),
        (4, 1.5, 94),
        (4, 2, 126),
        (4, 0.125, 7),
        (4, 1000, 168),
        (2, -1, 126),
    ],
)
def test_receive_rows_follow_the_closed_form(ranks: int, factor: float, rows: int) -> None:
    assert rows_for(ranks, factor) == rows


def test_the_worst_case_is_exact_where_a_float_quotient_is_not() -> None:
    assert int(9 * 3 * (13 / 3)) == 116
    assert rows_for(13, -1.0, tokens=9, chosen=3, experts=13) == 117


def test_worst_case_rows_of_the_671b_model_at_sixteen_ranks() -> None:
    assert receive_rows(4096, num_chosen=8, num_experts=256, num_ranks=16, buffer_factor=-1.0) == 32768 * 16
    assert receive_rows(4096, num_chosen=8, num_experts=256, num_ranks=64, buffer_factor=-1.0) == 32768 * 32


@settings(deadline=None)
@given(
    tokens=st.integers(1, 5000),
    owned=st.integers(1, 9),
    ranks=st.integers(1, 16),
    chosen=st.integers(1, 12),
    factors=st.lists(st.floats(0.01, 40), min_size=2, max_size=2),
)
def test_rows_grow_with_the_factor_up_to_the_most_that_can_arrive(
    tokens: int, owned: int, ranks: int, chosen: int, factors: list[float]
) -> None:
    chosen = min(chosen, owned * ranks)
    rows = partial(receive_rows, tokens, num_chosen=chosen, num_experts=owned * ranks, num_ranks=ranks)
    low, high = (rows(buffer_factor=factor) for factor in sorted(factors))
    # Each token of each rank sends one rank at most as many rows as it has choices, or the rank has experts.
    most = ranks * tokens * min(chosen, owned)
    assert 1 <= low <= high <= rows(buffer_factor=-1.0) == most


def numpy_kept(indices: np.ndarray, *, experts: int, rows: int) -> np.ndarray:
    """[ranks, tokens, chosen] bool: which assignments travel, when receivers are filled by one sender after another."""
    ranks = len(indices)
    owned = experts // ranks
    kept = np.zeros(indices.shape, bool)
    if ranks == 1:
        return indices < experts
    for receiver in range(ranks):
        room = rows
        for sender in range(ranks):
            for expert in range(receiver * owned, (receiver + 1) * owned):
                for token, choice in zip(*np.nonzero(indices[sender] == expert), strict=True):
                    kept[sender, token, choice] = room > 0
                    room -= room > 0
    return kept


def emulated_ragged_all_to_all(
    operand: Any, output: Any, input_offsets: Any, send_sizes: Any, output_offsets: Any, recv_sizes: Any, *, axis_name: str
) -> Any:
    """What XLA documents of a ragged all-to-all, for backends that lack it: update i for peer j stands at j * updates_per_peer + i.

    NaN everywhere where a caller breaks the rules: writes out of bounds, two writes to a row, or receive sizes that are not what is sent.
    """
    ranks = jax.lax.axis_size(axis_name)
    rank = jax.lax.axis_index(axis_name)
    gather = partial(jax.lax.all_gather, axis_name=axis_name)
    source, starts, sizes, targets = gather(operand), gather(input_offsets), gather(send_sizes), gather(output_offsets)
    per_peer = send_sizes.shape[0] // ranks
    row = jnp.arange(output.shape[0])
    writes = jnp.zeros(output.shape[0], jnp.int32)
    legal = jnp.array(True)
    for sender in range(ranks):
        for update in range(per_peer):
            size = sizes[sender, rank * per_peer + update]
            start = starts[sender, rank * per_peer + update]
            target = targets[sender, rank * per_peer + update]
            legal &= size == recv_sizes[sender * per_peer + update]
            legal &= (start >= 0) & (start + size <= operand.shape[0]) & (target >= 0) & (target + size <= output.shape[0])
            here = (row >= target) & (row < target + size)
            writes += here
            output = jnp.where(here[:, None], source[sender, jnp.clip(row - target + start, 0, operand.shape[0] - 1)], output)
    return jnp.where(legal & (writes.max() <= 1), output, jnp.nan)


def exchange(indices: np.ndarray, *, experts: int, rows: int, ragged: bool) -> dict[str, np.ndarray]:
    """Send every assignment of every rank under its own number, and back: what each rank receives and gets returned."""
    ranks, tokens, chosen = indices.shape
    numbers = np.arange(1, ranks * tokens * chosen + 1, dtype=np.float32).reshape(ranks, tokens * chosen)

    def local(indices: jax.Array, numbers: jax.Array) -> dict[str, jax.Array]:
        plan = make_plan(indices[0], num_experts=experts, num_ranks=ranks, rows=rows)
        x = jnp.broadcast_to(numbers[0][plan.order][:, None], (tokens * chosen, DIM))
        received = send_rows(x, plan, rows=rows, use_ragged_all_to_all=ragged)
        returned = return_rows(received, plan, use_ragged_all_to_all=ragged)[plan.position]
        out = {"received": received, "returned": returned, "sizes": group_sizes(plan), "dropped": plan.num_dropped}
        return jax.tree.map(lambda a: a[None], out)

    mesh = make_mesh(MeshAxes(expert=ranks), jax.devices()[:ranks])
    with jax.set_mesh(mesh):
        out = jax.jit(jax.shard_map(local, in_specs=P("expert"), out_specs=P("expert"), check_vma=False))(indices, numbers)
    return jax.tree.map(np.asarray, out) | {"numbers": numbers.reshape(indices.shape)}


@pytest.fixture(params=[False, True], ids=["gathered", "ragged"])
def ragged(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", emulated_ragged_all_to_all)
    return request.param


def assert_exchange_follows_the_rule(indices: np.ndarray, *, experts: int, rows: int, ragged: bool) -> None:
    ranks, owned = len(indices), experts // len(indices)
    out = exchange(indices, experts=experts, rows=rows, ragged=ragged)
    kept = numpy_kept(indices, experts=experts, rows=rows)
    # Dropped and padding rows come back as zero, all others as they went.
    expected = np.where(kept, out["numbers"], 0)
    for column in range(DIM):
        np.testing.assert_array_equal(out["returned"][..., column].reshape(indices.shape), expected)
    np.testing.assert_array_equal(out["dropped"], ((indices < experts) & ~kept).sum(axis=(1, 2)))
    for rank in range(ranks):
        # The buffer holds, for each expert in turn, the rows of each sender in turn, and then nothing.
        wanted = [
            out["numbers"][sender, token, choice]
            for expert in range(rank * owned, (rank + 1) * owned)
            for sender in range(ranks)
            for token, choice in zip(*np.nonzero((indices[sender] == expert) & kept[sender]), strict=True)
        ]
        np.testing.assert_array_equal(out["received"][rank, : len(wanted), 0], wanted)
        if ranks > 1:
            assert not out["received"][rank, len(wanted) :].any()
        assert out["sizes"][rank].sum() == len(wanted)
        np.testing.assert_array_equal(out["sizes"][rank], [((indices == e) & kept).sum() for e in range(rank * owned, (rank + 1) * owned)])


def random_indices(rng: np.random.Generator, *, ranks: int, tokens: int, chosen: int, experts: int, skew: float) -> np.ndarray:
    """Distinct experts for each token, low experts favoured by `skew`, a few tokens padding (index `experts`)."""
    noise = rng.gumbel(size=(ranks, tokens, experts)) - skew * np.arange(experts)
    indices = np.argsort(-noise, axis=-1)[..., :chosen].astype(np.int32)
    indices[rng.random((ranks, tokens)) < 0.15] = experts
    return indices


@settings(deadline=None, max_examples=6)
@given(
    sizes=st.sampled_from([(2, 7, 3, 6), (4, 5, 2, 8)]),
    factor=st.sampled_from([-1, 0.4, 1.0]),
    skew=st.sampled_from([0.0, 0.5, 3.0]),
    seed=st.integers(0, 10_000),
    use_ragged=st.booleans(),
)
def test_any_exchange_follows_the_rule(sizes: tuple[int, int, int, int], factor: float, skew: float, seed: int, use_ragged: bool) -> None:
    ranks, tokens, chosen, experts = sizes
    indices = random_indices(np.random.default_rng(seed), ranks=ranks, tokens=tokens, chosen=chosen, experts=experts, skew=skew)
    rows = receive_rows(tokens, num_chosen=chosen, num_experts=experts, num_ranks=ranks, buffer_factor=float(factor))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.lax, "ragged_all_to_all", emulated_ragged_all_to_all)
        assert_exchange_follows_the_rule(indices, experts=experts, rows=rows, ragged=use_ragged)


def test_an_overfull_rank_serves_senders_in_rank_order(ragged: bool) -> None:
    # Every token of every rank wants experts 2 and 3, both on rank 1: 2 * 5 rows from each of two ranks, and room for 13.
    indices = np.broadcast_to(np.array([3, 2], np.int32), (2, 5, 2)).copy()
    out = exchange(indices, experts=4, rows=13, ragged=ragged)
    assert out["dropped"].tolist() == [0, 7]
    # Rank 0 keeps all; rank 1 the first three of its assignments sorted by expert: tokens 0 to 2 at expert 2.
    returned = out["returned"][..., 0].reshape(2, 5, 2)
    assert (returned[0] > 0).all()
    np.testing.assert_array_equal(returned[1] > 0, np.array([[False, True]] * 3 + [[False, False]] * 2))
    assert out["sizes"].tolist() == [[0, 0], [8, 5]]
    assert_exchange_follows_the_rule(indices, experts=4, rows=13, ragged=ragged)


def test_the_worst_case_buffer_holds_the_worst_case(ragged: bool) -> None:
    # All four ranks send all they can to rank 0, whose two experts are among each token's three.
    rng = np.random.default_rng(1)
    indices = random_indices(rng, ranks=4, tokens=6, chosen=3, experts=8, skew=0.0)
    indices[..., 0], indices[..., 1], indices[..., 2] = 0, 1, 2 + rng.integers(0, 6, size=(4, 6))
    rows = receive_rows(6, num_chosen=3, num_experts=8, num_ranks=4, buffer_factor=-1.0)
    out = exchange(indices, experts=8, rows=rows, ragged=ragged)
    assert out["dropped"].tolist() == [0, 0, 0, 0]
    assert out["sizes"][0].sum() == rows == 48
    assert_exchange_follows_the_rule(indices, experts=8, rows=rows, ragged=ragged)
    # One row less and the last sender loses one.
    assert exchange(indices, experts=8, rows=rows - 1, ragged=ragged)["dropped"].tolist() == [0, 0, 0, 1]


def test_padding_takes_no_room(ragged: bool) -> None:
    indices = np.zeros((2, 4, 1), np.int32)
    indices[0, 1:] = 2  # three of rank 0's four tokens are padding (two experts, so 2 marks it)
    out = exchange(indices, experts=2, rows=5, ragged=ragged)
    assert out["dropped"].tolist() == [0, 0]
    assert out["sizes"].tolist() == [[5], [0]]
    assert_exchange_follows_the_rule(indices, experts=2, rows=5, ragged=ragged)


def test_one_rank_exchanges_nothing() -> None:
    indices = random_indices(np.random.default_rng(5), ranks=1, tokens=9, chosen=2, experts=5, skew=0.3)
    assert_exchange_follows_the_rule(indices, experts=5, rows=18, ragged=True)
    plan = make_plan(jnp.asarray(indices[0]), num_experts=5, num_ranks=1, rows=18)
    text = str(jax.make_jaxpr(partial(send_rows, plan=plan, rows=18, use_ragged_all_to_all=True))(jnp.zeros((18, DIM))))
    assert "all_to_all" not in text
    assert "all_gather" not in text
