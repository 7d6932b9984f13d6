"""Probes receive the gradients of stacked layers, in the dtype they are computed in, and change no value."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from service.models.config import RematConfig
from service.models.gradients import attach, make_probes
from service.models.layer import scan_stacked, stack
from service.models.primitives import SwiGlu

LAYERS, D, F = 3, 4, 6


class Block(nnx.Module):
    """Weights of all kinds: cast for use, a router's, a vector."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.mlp = SwiGlu(D, F, dtype="bfloat16", param_dtype="float32", rngs=rngs)
        self.router = nnx.Param(jnp.eye(D), axes=("embed", "router_experts"))
        self.scale = nnx.Param(jnp.ones(D), axes=("norm",))

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.mlp((x * self.scale[...]).astype(jnp.bfloat16)).astype(jnp.float32)
        return x + y @ self.router[...]


def loss(stacked: Block, probes: object) -> jax.Array:
    x = jax.random.normal(jax.random.key(1), (2, 5, D))
    return jnp.sum(jnp.sin(scan_stacked(stacked, lambda block, x: (block(x), None), x, remat=RematConfig(), probes=probes)[0]))


def test_gradients_of_cast_weights_are_the_plain_ones_rounded_and_others_are_whole() -> None:
    graph, params = nnx.split(stack(Block, LAYERS, rngs=nnx.Rngs(0)))
    value, plain = jax.value_and_grad(lambda params: loss(nnx.merge(graph, params), None))(params)
    plain = nnx.to_pure_dict(plain)
    probes = make_probes(params, nnx.to_pure_dict(params), "bfloat16")
    probed_value, probed = jax.value_and_grad(lambda probes: loss(nnx.merge(graph, params), probes))(probes)
    assert float(probed_value) == float(value)
    assert {name: leaf.dtype.name for name, leaf in probed["mlp"].items()} == dict.fromkeys(("gate", "up", "down"), "bfloat16")
    assert probed["router"].dtype == probed["scale"].dtype == jnp.float32
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a.astype(b.dtype), b), plain, probed)
    assert all(np.abs(leaf.astype(jnp.float32)).max() > 0 for leaf in jax.tree.leaves(probed))


def test_attaching_rounds_to_the_precision_of_use() -> None:
    weight = jax.random.normal(jax.random.key(2), (7, 5))
    rounded = attach(weight, jnp.zeros((7, 5), jnp.bfloat16))
    assert rounded.dtype == jnp.float32
    np.testing.assert_array_equal(rounded, weight.astype(jnp.bfloat16).astype(jnp.float32))
    assert attach(weight, jnp.zeros((7, 5))) is weight
