"""The MoE layer on eight devices against one expert at a time on one, in value and gradient, and what overflows."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from service.models.axes import make_mesh
from service.models.config import ExpertsConfig, MeshAxes
from service.models.moe import Moe, MoeMetrics
from service.models.router import RouterBias, route

B, S, D, E, K, F = 8, 10, 16, 12, 3, 24
CONFIG = ExpertsConfig(num_experts=E, num_experts_per_token=K, expert_dim=F, num_groups=4, num_groups_per_token=2, balance_loss_weight=0.05)
MESHES = {
    "none": None,
    "fsdp4_tensor2": MeshAxes(fsdp=4, tensor=2),
    "fsdp2_expert2_context2": MeshAxes(fsdp=2, expert=2, context=2),
    "data2_expert2_tensor2": MeshAxes(data=2, expert=2, tensor=2),
    "expert4_context2": MeshAxes(expert=4, context=2),
}


@pytest.fixture(autouse=True)
def _exact_matmuls() -> Any:
    with jax.default_matmul_precision("highest"):
        yield


def build(config: ExpertsConfig = CONFIG, dim: int = D) -> Moe:
    return nnx.clone(_built(config, dim))


@cache
def _built(config: ExpertsConfig, dim: int) -> Moe:
    moe = Moe(config, dim=dim, dtype="float32", param_dtype="float32", rngs=nnx.Rngs(1))
    if moe.bias is not None:
        moe.bias[...] = 0.2 * jax.random.normal(jax.random.key(2), moe.bias[...].shape)
    return moe


def inputs() -> tuple[jax.Array, jax.Array]:
    x = jax.random.normal(jax.random.key(0), (B, S, D))
    return x, jax.random.uniform(jax.random.key(1), (B, S)) > 0.2


def dense_reference(moe: Moe, x: jax.Array, valid: jax.Array, kept: np.ndarray | None = None) -> jax.Array:
    """Every expert on every token, one expert at a time, weighted; `kept` leaves assignments out."""
    logits = x @ moe.router[...]
    routing = route(logits, None if moe.bias is None else moe.bias[...], moe.config)
    weights = routing.weights * valid[..., None] * (1 if kept is None else kept)
    y = jnp.zeros_like(x)
    for expert in range(moe.config.num_experts):
        hidden = jax.nn.silu(x @ moe.expert_gate[...][expert].T) * (x @ moe.expert_up[...][expert].T)
        weight = jnp.sum(jnp.where(routing.indices == expert, weights, 0), axis=-1, keepdims=True)
        y += weight * (hidden @ moe.expert_down[...][expert])
    return y + (0 if moe.shared is None else moe.shared(x))


def value_and_gradients(moe: Moe, apply: Callable[[Moe, jax.Array], tuple[jax.Array, Any]], x: jax.Array, axes: MeshAxes | None) -> Any:
    """`apply`'s outputs and the gradients of a random projection of the first, by parameter and input, jitted on the mesh."""
    graph, state = nnx.split(moe)
    direction = jax.random.normal(jax.random.key(7), x.shape)

    def total(state: Any, x: jax.Array) -> tuple[jax.Array, Any]:
        y, other = apply(nnx.merge(graph, state), x)
        return jnp.sum(y * direction), (y, other)

    step = jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True))
    if axes is None:
        (_, out), gradients = step(state, x)
    else:
        with jax.set_mesh(make_mesh(axes)):
            (_, out), gradients = step(state, x)
    return out, {jax.tree_util.keystr(path): np.asarray(g) for path, g in jax.tree_util.tree_leaves_with_path(gradients)}


def apply_moe(moe: Moe, x: jax.Array, valid: jax.Array, *, factor: float = -1.0, chunks: int = 1) -> tuple[jax.Array, MoeMetrics]:
    return moe(x, valid, buffer_factor=factor, token_chunks=chunks, use_ragged_all_to_all=False)


def assert_same_gradients(gradients: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert gradients.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(gradients[name], value, rtol=1e-4, atol=1e-5 * np.abs(value).max() + 1e-12, err_msg=name)


@pytest.fixture(scope="module")
def dense() -> Any:
    """Value and gradients of the dense reference on one device."""
    with jax.default_matmul_precision("highest"):
        x, valid = inputs()
        (y, _), gradients = value_and_gradients(build(), lambda moe, x: (dense_reference(moe, x, valid), None), x, None)
    return np.asarray(y), gradients


@pytest.mark.parametrize(
    ("mesh", "chunks"),
    [
        ("none", 1),
        ("none", 2),
        ("fsdp4_tensor2", 1),
        ("fsdp2_expert2_context2", 1),
        ("fsdp2_expert2_context2", 2),
        ("data2_expert2_tensor2", 5),
        ("expert4_context2", 1),
    ],
)
def test_dropless_equals_one_expert_at_a_time_in_value_and_gradient(mesh: str, chunks: int, dense: Any) -> None:
    x, valid = inputs()
    (y, metrics), gradients = value_and_gradients(build(), lambda m, x: apply_moe(m, x, valid, chunks=chunks), x, MESHES[mesh])
    np.testing.assert_allclose(y, dense[0], rtol=1e-5, atol=2e-6)
    assert_same_gradients(gradients, dense[1])
    assert not metrics.overflow
    assert metrics.dropped_fraction == 0


@pytest.mark.parametrize("mesh", ["fsdp2_expert2_context2", "expert4_context2"])
def test_candidate_equals_dropless_when_nothing_overflows(mesh: str, dense: Any) -> None:
    x, valid = inputs()
    (y, metrics), gradients = value_and_gradients(build(), lambda m, x: apply_moe(m, x, valid, factor=1.75), x, MESHES[mesh])
    assert not metrics.overflow, "the case is meant to have room"
    np.testing.assert_allclose(y, dense[0], rtol=1e-5, atol=2e-6)
    assert_same_gradients(gradients, dense[1])


def numpy_kept(indices: np.ndarray, axes: MeshAxes, *, num_experts: int, factor: float, chunks: int) -> np.ndarray:
    """Which assignments travel: in each group of expert ranks, a receiver is filled by one sender after another, each in expert order."""
    _, seq, chosen = indices.shape
    flat = np.arange(indices.size).reshape(axes.data * axes.fsdp, axes.expert, -1, axes.context, seq // axes.context, chosen)
    groups = flat.transpose(0, 3, 1, 2, 4, 5).reshape(axes.data * axes.fsdp * axes.context, axes.expert, chunks, -1)
    owned = num_experts // axes.expert
    kept = np.zeros(indices.size, bool)
    for group in groups:
        for chunk in range(chunks):
            for receiver in range(axes.expert):
                room = int(group.shape[-1] * factor)
                for sender in range(axes.expert):
                    for expert in range(receiver * owned, (receiver + 1) * owned):
                        for assignment in group[sender, chunk]:
                            if indices.reshape(-1)[assignment] == expert:
                                kept[assignment] = room > 0
                                room -= room > 0
    return kept.reshape(indices.shape)


@pytest.mark.parametrize(("mesh", "chunks"), [("fsdp2_expert2_context2", 1), ("data2_expert2_tensor2", 2), ("expert4_context2", 1)])
def test_what_overflows_is_dropped_by_the_rule_in_value_gradient_and_fraction(mesh: str, chunks: int) -> None:
    x, valid = inputs()
    axes = MESHES[mesh]
    assert axes is not None
    moe = build()
    routing = route(x @ moe.router[...], moe.bias[...], CONFIG)
    indices = np.where(np.asarray(valid)[..., None], routing.indices, E)
    kept = numpy_kept(indices, axes, num_experts=E, factor=0.6, chunks=chunks)
    (y, metrics), gradients = value_and_gradients(moe, lambda m, x: apply_moe(m, x, valid, factor=0.6, chunks=chunks), x, axes)
    (expected, _), expected_gradients = value_and_gradients(moe, lambda m, x: (dense_reference(m, x, valid, kept), None), x, None)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=2e-6)
    assert_same_gradients(gradients, expected_gradients)
    num_valid = int(np.asarray(valid).sum()) * K
    dropped = num_valid - int(kept.sum())
    assert 0 < dropped < num_valid
    assert metrics.overflow
    assert float(metrics.dropped_fraction) == pytest.approx(dropped / num_valid, rel=1e-6)


@pytest.mark.parametrize(
    ("axes", "row", "position"),
    [
        (MeshAxes(data=2, fsdp=2, expert=2), 0, 0),  # the token lies on data 0, fsdp 0
        (MeshAxes(data=2, fsdp=2, expert=2), 7, 3),  # data 1, fsdp 1
        (MeshAxes(data=2, expert=2, context=2), 1, 3),  # context 1
        (MeshAxes(expert=2, context=2, tensor=2), 4, 1),
    ],
)
def test_one_dropped_assignment_raises_the_flag_on_every_device(axes: MeshAxes, row: int, position: int) -> None:
    config = ExpertsConfig(num_experts=4, num_experts_per_token=2, expert_dim=8, num_shared_experts=0, bias=False)
    moe = build(config, dim=6)
    moe.router[...] = 8 * jnp.eye(6, 4)
    # Every token wants one expert of each rank, which fills factor-1 buffers to the last row; then one token wants two of rank 0.
    x = np.tile(np.array([1, -1, 1, -1, 0.3, 0.7], np.float32), (8, 4, 1))
    valid = jnp.ones((8, 4), bool)

    def flags(x: np.ndarray) -> tuple[list[bool], float]:
        with jax.set_mesh(make_mesh(axes)):
            _, metrics = jax.jit(partial(apply_moe, moe, factor=1.0))(jnp.asarray(x), valid)
        shards = metrics.overflow.addressable_shards
        assert len(shards) == 8
        return [bool(shard.data) for shard in shards], float(metrics.dropped_fraction)

    assert flags(x) == ([False] * 8, 0.0)
    x[row, position, :4] = [1, 1, -1, -1]
    assert flags(x) == ([True] * 8, pytest.approx(1 / (8 * 4 * 2)))


def test_padding_gets_no_routed_output_no_load_and_no_room() -> None:
    x, valid = inputs()
    axes = MeshAxes(fsdp=2, expert=2, context=2)
    moe = build()
    with jax.set_mesh(make_mesh(axes)):
        y, metrics = jax.jit(partial(apply_moe, moe))(x, valid)
    shared = moe.shared(x)
    pads = ~np.asarray(valid)
    np.testing.assert_allclose(np.asarray(y)[pads], np.asarray(shared)[pads], rtol=1e-5, atol=1e-6)
    indices = np.asarray(route(x @ moe.router[...], moe.bias[...], CONFIG).indices)
    np.testing.assert_array_equal(metrics.expert_load, np.bincount(indices[~pads].ravel(), minlength=E))
    # All tokens alike, and all but one position padding: what is left fits the smallest buffer.
    alike = jnp.broadcast_to(x[:1, :1], x.shape)
    only_first = jnp.zeros_like(valid).at[:, 0].set(True)
    with jax.set_mesh(make_mesh(axes)):
        assert not jax.jit(partial(apply_moe, moe, factor=1.0))(alike, only_first)[1].overflow
        assert jax.jit(partial(apply_moe, moe, factor=1.0))(alike, jnp.ones_like(valid))[1].overflow


def test_balance_loss_and_its_gradient_are_the_same_on_any_mesh() -> None:
    x, valid = inputs()
    moe = build()

    def loss_of(axes: MeshAxes | None) -> tuple[float, np.ndarray]:
        def loss(router: jax.Array) -> jax.Array:
            copy = nnx.clone(moe)
            copy.router[...] = router
            return apply_moe(copy, x, valid)[1].balance_loss

        with jax.set_mesh(make_mesh(axes or MeshAxes(), jax.devices()[: (axes or MeshAxes()).num_devices])):
            value, gradient = jax.jit(jax.value_and_grad(loss))(moe.router[...])
        return float(value), np.asarray(gradient)

    value, gradient = loss_of(None)
    assert value > 0.05, "perfect balance would cost the weight"
    spread_value, spread_gradient = loss_of(MeshAxes(fsdp=2, expert=2, context=2))
    assert spread_value == pytest.approx(value, rel=1e-6)
    assert np.abs(gradient).max() > 1e-5
    np.testing.assert_allclose(spread_gradient, gradient, rtol=1e-4, atol=1e-8)


def test_layers_made_by_vmap_run_under_scan_and_remat_like_one_after_another() -> None:
    x, valid = inputs()

    def make(key: jax.Array) -> Moe:
        return Moe(CONFIG, dim=D, dtype="float32", param_dtype="float32", rngs=nnx.Rngs(params=key))

    graph, _ = nnx.split(jax.eval_shape(make, jax.random.key(0)))
    keys = jax.random.split(jax.random.key(5), 3)
    states = jax.vmap(lambda key: nnx.state(make(key)))(keys)

    @jax.checkpoint
    def layer(x: jax.Array, state: Any) -> tuple[jax.Array, MoeMetrics]:
        y, metrics = apply_moe(nnx.merge(graph, state), x, valid, factor=0.5)
        return x + y, metrics

    with jax.set_mesh(make_mesh(MeshAxes(fsdp=2, expert=2, context=2))):

        def total(states: Any) -> tuple[jax.Array, MoeMetrics]:
            y, metrics = jax.lax.scan(layer, x, states)
            return jnp.mean(y**2) + jnp.sum(metrics.balance_loss), metrics

        (_, stacked), gradients = jax.jit(jax.value_and_grad(total, has_aux=True, allow_int=True))(states)
        one_by_one = []
        y = x
        for number in range(3):
            y, metrics = jax.jit(layer)(y, jax.tree.map(lambda a, n=number: a[n], states))
            one_by_one.append(metrics)
    expected = jax.tree.map(lambda *m: np.stack(m), *one_by_one)
    assert stacked.expert_load.shape == (3, E)
    np.testing.assert_array_equal(stacked.overflow, expected.overflow)
    np.testing.assert_array_equal(stacked.expert_load, expected.expert_load)
    np.testing.assert_allclose(stacked.dropped_fraction, expected.dropped_fraction, rtol=1e-6)
    np.testing.assert_allclose(stacked.balance_loss, expected.balance_loss, rtol=1e-5)
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(gradients))


def test_the_bias_is_state_of_its_own_class_and_gets_no_gradient(dense: Any) -> None:
    moe = build()
    assert isinstance(moe.bias, RouterBias)
    assert not isinstance(moe.bias, nnx.Param)
    bias_gradients = [gradient for name, gradient in dense[1].items() if "bias" in name]
    assert len(bias_gradients) == 1
    assert not bias_gradients[0].any()
    assert build(ExpertsConfig(num_experts=4, num_experts_per_token=1, expert_dim=8, bias=False)).bias is None


@pytest.mark.parametrize(
    ("axes", "chunks", "message"),
    [
        (MeshAxes(expert=8), 1, "12 experts do not divide over the 8 shards of mesh axes expert"),
        (MeshAxes(context=4), 1, "10 positions of a sequence do not divide over the 4 shards of mesh axes context"),
        (MeshAxes(data=5), 1, "8 sequences do not divide over the 5 shards of mesh axes data, fsdp, expert"),
        (MeshAxes(tensor=7), 1, "24 hidden dims of an expert do not divide over the 7 shards of mesh axes fsdp, context, tensor"),
        (MeshAxes(expert=2), 7, "40 tokens on each device do not divide into token_chunks 7; use a divisor of 40"),
    ],
)
def test_sizes_that_do_not_divide_are_refused_with_the_numbers(axes: MeshAxes, chunks: int, message: str) -> None:
    x, valid = inputs()
    moe = build()
    with jax.set_mesh(make_mesh(axes, jax.devices()[: axes.num_devices])), pytest.raises(ValueError, match=message):
        jax.eval_shape(partial(apply_moe, moe, chunks=chunks), x, valid)
