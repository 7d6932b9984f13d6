"""MLA against NumPy written from the formulas; order, packing, context ranks and blocks of heads change nothing; the flash mask."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from service.models import attention, flash
from service.models.attention import Mla, Places, heads_per_block, make_places
from service.models.axes import make_mesh
from service.models.config import MeshAxes, MlaConfig, ModelConfig, YarnConfig, tiny
from service.models.order import Order, time_index

B, S = 2, 16


@pytest.fixture(autouse=True)
def _exact_matmuls() -> Any:
    with jax.default_matmul_precision("highest"):
        yield


def model(**changes: Any) -> ModelConfig:
    sizes = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 20} | changes
    return tiny().model_copy(update={"mla": MlaConfig(**sizes), "yarn": YarnConfig(factor=4, original_seq_len=10)})


def build(config: ModelConfig, *, use_flash: bool = False) -> Mla:
    return Mla(config, flash=use_flash, dtype="float32", param_dtype="float32", rngs=nnx.Rngs(4))


def packed(batch: int = B, seq: int = S) -> tuple[np.ndarray, np.ndarray]:
    """Positions and segment ids: documents of different lengths in each row, padding at the end."""
    positions, segments = np.zeros((batch, seq), np.int32), np.zeros((batch, seq), np.int32)
    for row in range(batch):
        start = 0
        for document, length in enumerate((seq // 3 + row, seq // 2 - 2, 1), start=1):
            positions[row, start : start + length] = np.arange(length)
            segments[row, start : start + length] = document
            start += length
    return positions, segments


def reference(mla: Mla, config: ModelConfig, x: np.ndarray, positions: np.ndarray, segments: np.ndarray) -> np.ndarray:
    """DeepSeek-V2, section 2.1.2, one head and one query at a time in float64."""
    sizes, heads, yarn = config.mla, config.num_heads, config.yarn
    w = {
        name: np.asarray(getattr(mla, name)[...], np.float64)
        for name in ("q_down", "q_up", "kv_down", "kv_up", "out")
        if hasattr(mla, name)
    }
    norm = lambda t: t / np.sqrt((t**2).mean(-1, keepdims=True) + config.norm_eps)  # noqa: E731
    nope, rope, v_dim = sizes.qk_nope_head_dim, sizes.qk_rope_head_dim, sizes.v_head_dim
    assert yarn is not None
    is_stretched = x.shape[1] > yarn.original_seq_len
    pairs = np.arange(rope // 2)
    frequency = config.rope_theta ** (-2 * pairs / rope)
    turns = [
        rope / 2 * np.log(yarn.original_seq_len / (n * 2 * np.pi)) / np.log(config.rope_theta) for n in (yarn.beta_fast, yarn.beta_slow)
    ]
    low, high = max(np.floor(turns[0]), 0), min(np.ceil(turns[1]), rope - 1)
    share = np.clip((pairs - low) / max(high - low, 0.001), 0, 1)
    frequency = frequency * (1 - share) + frequency / yarn.factor * share if is_stretched else frequency
    scale = ((0.1 * yarn.mscale * np.log(yarn.factor) + 1) ** 2 if is_stretched else 1) / np.sqrt(nope + rope)

    def turn(t: np.ndarray, position: int) -> np.ndarray:
        turned = (t[0::2] + 1j * t[1::2]) * np.exp(1j * position * frequency)
        return np.stack([turned.real, turned.imag], -1).reshape(-1)

    out = np.zeros(x.shape)
    for row in range(len(x)):
        q = (norm(x[row] @ w["q_down"]) if "q_down" in w else x[row]) @ w["q_up"]
        down = x[row] @ w["kv_down"]
        up = norm(down[:, : sizes.kv_lora_rank]) @ w["kv_up"]
        joined = np.zeros((x.shape[1], heads * v_dim))
        for head in range(heads):
            qs, ups = q[:, head * (nope + rope) :][:, : nope + rope], up[:, head * (nope + v_dim) :][:, : nope + v_dim]
            for t in range(x.shape[1]):
                query = np.concatenate([qs[t, :nope], turn(qs[t, nope:], positions[row, t])])
                keys = [
                    s for s in range(x.shape[1]) if segments[row, s] == segments[row, t] != 0 and positions[row, s] <= positions[row, t]
                ]
                if keys:
                    k_rope = [turn(down[s, sizes.kv_lora_rank :], positions[row, s]) for s in keys]
                    scores = np.array([query @ np.concatenate([ups[s, :nope], r]) for s, r in zip(keys, k_rope, strict=True)]) * scale
                    weights = np.exp(scores - scores.max())
                    joined[t, head * v_dim : (head + 1) * v_dim] = (weights / weights.sum()) @ ups[keys, nope:]
        out[row] = joined @ w["out"].T
    return out


def inputs(config: ModelConfig, batch: int = B, seq: int = S) -> tuple[jax.Array, np.ndarray, np.ndarray]:
    return jax.random.normal(jax.random.key(1), (batch, seq, config.dim)), *packed(batch, seq)


def places(config: ModelConfig, positions: np.ndarray, segments: np.ndarray, order: Order = Order.NATURAL) -> Places:
    return make_places(config, jnp.asarray(positions), jnp.asarray(segments), order=order)


@pytest.mark.parametrize("q_lora_rank", [24, None])
def test_mla_is_what_the_formulas_say(q_lora_rank: int | None) -> None:
    config = model(q_lora_rank=q_lora_rank)
    x, positions, segments = inputs(config)
    mla = build(config)
    out = mla(x, places(config, positions, segments))
    real = segments != 0
    np.testing.assert_allclose(
        out[real], reference(mla, config, np.asarray(x, np.float64), positions, segments)[real], rtol=1e-4, atol=2e-5
    )
    assert np.isfinite(out).all()


def test_one_model_object_serves_both_sides_of_yarns_original_length() -> None:
    config = model()
    mla = build(config)
    assert config.yarn is not None
    for seq in (config.yarn.original_seq_len, config.yarn.original_seq_len + 7):
        x, positions, segments = inputs(config, seq=seq)
        out, real = mla(x, places(config, positions, segments)), segments != 0
        expected = reference(mla, config, np.asarray(x, np.float64), positions, segments)
        np.testing.assert_allclose(out[real], expected[real], rtol=1e-4, atol=2e-5)


def test_the_order_of_tokens_in_the_array_changes_nothing() -> None:
    config = model()
    x, positions, segments = inputs(config)
    shuffle = np.random.default_rng(3).permutation(S)
    mla = build(config)
    expected = mla(x, places(config, positions, segments))[:, shuffle]
    np.testing.assert_allclose(
        mla(x[:, shuffle], places(config, positions[:, shuffle], segments[:, shuffle])), expected, rtol=1e-5, atol=1e-6
    )


def test_a_document_sees_neither_another_nor_padding() -> None:
    config = model()
    x, positions, segments = inputs(config)
    mla, at = build(config), places(config, positions, segments)
    others = jnp.asarray(segments != 2)[..., None]
    changed = mla(jnp.where(others, x + 3.0, x), at)
    np.testing.assert_array_equal(changed[segments == 2], mla(x, at)[segments == 2])


@pytest.mark.parametrize("axes", [MeshAxes(fsdp=2, context=4), MeshAxes(expert=2, context=2, tensor=2)])
def test_context_ranks_and_tensor_ranks_change_neither_value_nor_gradient(axes: MeshAxes) -> None:
    config = model()
    x, positions, segments = inputs(config)
    graph, state = nnx.split(build(config))

    def run(state: nnx.State, x: jax.Array) -> Any:
        def loss(state: nnx.State, x: jax.Array) -> jax.Array:
            out = nnx.merge(graph, state)(x, places(config, positions, segments))
            return jnp.sum(jnp.sin(out) * (segments != 0)[..., None])

        return jax.value_and_grad(loss, argnums=(0, 1))(state, x)

    alone = jax.jit(run)(state, x)
    with jax.set_mesh(make_mesh(axes)):
        together = jax.jit(run)(state, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5), alone, together)


def test_blocks_of_heads_change_neither_value_nor_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    config = model()
    x, positions, segments = inputs(config)
    mla = build(config)
    run = lambda x: jnp.sum(jnp.sin(mla(x, places(config, positions, segments))))  # noqa: E731
    whole = jax.value_and_grad(run)(x)
    monkeypatch.setattr(attention, "SCORE_BLOCK_BYTES", 2 * B * S * S * 4)
    blocks = jax.value_and_grad(run)(x)
    assert "while" in jax.jit(run).lower(x).as_text()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), whole, blocks)


def test_a_block_is_the_largest_divisor_of_the_heads_within_the_bound() -> None:
    bound = attention.SCORE_BLOCK_BYTES
    assert heads_per_block(128, bytes_per_head=4096 * 4096 * 4) == 8  # 64 MiB a head
    assert heads_per_block(12, bytes_per_head=bound // 5) == 4
    assert heads_per_block(7, bytes_per_head=bound // 6) == 1
    assert heads_per_block(6, bytes_per_head=2 * bound) == 1
    assert heads_per_block(6, bytes_per_head=1) == 6


@pytest.mark.parametrize("order", list(Order))
def test_the_flash_mask_is_causal_in_time_for_queries_in_any_order(order: Order) -> None:
    times = time_index(24, 3, order)
    mask = flash.TimeMask(times)[:, :]
    np.testing.assert_array_equal(mask, [[key <= time for key in range(24)] for time in times])


@pytest.mark.slow
@pytest.mark.parametrize(("cp", "order"), [(1, Order.NATURAL), (2, Order.NATURAL), (2, Order.DUAL_CHUNK_SWAP)])
def test_flash_equals_dot_product(monkeypatch: pytest.MonkeyPatch, cp: int, order: Order) -> None:
    """The kernel interpreted on CPU, since it compiles for TPU only."""
    make = flash.splash.make_splash_mha
    monkeypatch.setattr(flash.splash, "make_splash_mha", lambda *args, **kwargs: make(*args, interpret=True, **kwargs))
    seq = 512
    config = model()
    x, positions, segments = inputs(config, seq=seq)
    time = time_index(seq, cp, order)
    x, positions, segments = x[:, time], positions[:, time], segments[:, time]
    with jax.set_mesh(make_mesh(MeshAxes(context=cp), jax.devices()[:cp])):
        outs = [
            jax.jit(lambda x, use_flash=use_flash: build(config, use_flash=use_flash)(x, places(config, positions, segments, order)))(x)
            for use_flash in (False, True)
        ]
    np.testing.assert_allclose(outs[0][segments != 0], outs[1][segments != 0], rtol=1e-4, atol=1e-4)


def test_flash_refuses_a_shard_that_is_no_multiple_of_a_lane_row() -> None:
    assert [flash.block_size(n) for n in (4096, 768, 384)] == [512, 256, 128]
    with pytest.raises(ValueError, match="blocks of 128 tokens and a device has 96"):
        flash.block_size(96)
