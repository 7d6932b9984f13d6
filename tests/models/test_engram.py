"""Engram: the table's read and gradient under both cuts, the gate, ShortConv and documents, against NumPy and against natural order."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding

from service.models import axes, engram_table
from service.models.config import EngramConfig, MeshAxes, MhcConfig, ModelConfig, tiny
from service.models.engram import Engram, ShortConv
from service.models.engram_table import TABLE_AXES, choose_cut, read_rows
from service.models.hashing import HashMapping
from service.models.order import Order, chunks_per_rank, to_array_order, to_time_order
from service.models.tokenizer import identity_table

DTYPES = {"dtype": "float32", "param_dtype": "float32"}
CUTS = ["rows", "columns"]


@pytest.fixture(autouse=True)
def _highest_precision():
    with jax.default_matmul_precision("highest"):
        yield


def model_of(**engram: object) -> ModelConfig:
    """A small model whose sizes differ pairwise: 2 streams of 10, tables of width 6."""
    base = {"layers": (1, 2), "max_ngram": 3, "num_heads": 2, "head_dim": 6, "base_sizes": (29, 43), "kernel_size": 4}
    return tiny().model_copy(
        update={"dim": 10, "vocab_size": 97, "mhc": MhcConfig(num_streams=2), "engram": EngramConfig(**{**base, **engram})}  # type: ignore[arg-type]
    )


def mesh_of(cp: int) -> jax.sharding.Mesh:
    """All 8 CPU devices: `cp` context ranks, the rest shard the batch, as in training."""
    return axes.make_mesh(MeshAxes(fsdp=8 // cp, context=cp))


def on_mesh(mesh: jax.sharding.Mesh, x: np.ndarray, *logical: str | None) -> jax.Array:
    return jax.device_put(x, NamedSharding(mesh, axes.spec(*logical)))


def filled(module: nnx.Module, seed: int = 7) -> nnx.Module:
    """The module with every parameter drawn at random, so that no kernel is zero and no scale is one."""
    generator = np.random.default_rng(seed)
    graph, state = nnx.split(module)
    return nnx.merge(graph, jax.tree.map(lambda leaf: jnp.asarray(generator.normal(size=leaf.shape) * 0.5, leaf.dtype), state))


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


# The table


def table_case(cut: str, mesh: jax.sharding.Mesh) -> tuple[np.ndarray, np.ndarray, jax.Array, jax.Array]:
    """A table and the ids that read it, whole and as they lie on the mesh."""
    table = random(24, 16)
    # A third of the ids are one row, as common n-grams are.
    ids = np.random.default_rng(1).integers(0, 24, size=(8, 12, 5), dtype=np.int32)
    ids[:, ::3] = 3
    return table, ids, on_mesh(mesh, table, *TABLE_AXES[cut]), on_mesh(mesh, ids, "batch", "seq", None)


@pytest.mark.parametrize("mesh_axes", [{"fsdp": 8}, {"data": 2, "fsdp": 2, "context": 2}, {"expert": 2, "context": 2, "tensor": 2}])
@pytest.mark.parametrize("cut", CUTS)
def test_a_cut_table_reads_and_learns_as_a_whole_one(cut: str, mesh_axes: dict[str, int]) -> None:
    mesh = axes.make_mesh(MeshAxes(**mesh_axes))
    table, ids, cut_table, cut_ids = table_case(cut, mesh)
    weights = random(*ids.shape, 16, seed=2)
    with jax.set_mesh(mesh):
        read, back = jax.jit(lambda table, ids: jax.vjp(lambda table: read_rows(table, ids, cut, "float32"), table))(cut_table, cut_ids)
        (gradient,) = jax.jit(back)(on_mesh(mesh, weights, "batch", "seq", None, None))
    expected = np.zeros(table.shape)
    np.add.at(expected, ids, weights)
    np.testing.assert_array_equal(read, table[ids])
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-5)
    assert gradient.sharding.is_equivalent_to(cut_table.sharding, 2)


def test_row_cut_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = axes.make_mesh(MeshAxes(fsdp=2, context=2, expert=2))
    table, ids, cut_table, cut_ids = table_case("rows", mesh)
    weights = random(*ids.shape, 16, seed=2)
    # 12 local tokens; room for 4 of them from every shard.
    monkeypatch.setattr(engram_table, "CHUNK_BYTES", 8 * 4 * 5 * 16 * 4)
    with jax.set_mesh(mesh):
        assert "while" in jax.jit(lambda table, ids: read_rows(table, ids, "rows", "float32")).lower(cut_table, cut_ids).as_text()
        read, gradient = jax.jit(
            lambda table, ids, weights: (
                read_rows(table, ids, "rows", "float32"),
                jax.grad(lambda table: jnp.sum(read_rows(table, ids, "rows", "float32") * weights))(table),
            )
        )(cut_table, cut_ids, on_mesh(mesh, weights, "batch", "seq", None, None))
    expected = np.zeros(table.shape)
    np.add.at(expected, ids, weights)
    np.testing.assert_array_equal(read, table[ids])
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-5)


@settings(max_examples=10, deadline=None)
@given(rows=st.integers(1, 9), num_ids=st.integers(1, 40), seed=st.integers(0, 99))
def test_gradient_without_a_mesh_adds_up_what_lands_on_each_row(rows: int, num_ids: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    ids = generator.integers(0, rows, size=(1, num_ids, 1), dtype=np.int32)
    weights = generator.normal(size=(1, num_ids, 1, 3)).astype(np.float32)
    gradient = jax.jit(jax.grad(lambda table, ids: jnp.sum(read_rows(table, ids, "rows", "float32") * weights)))(jnp.zeros((rows, 3)), ids)
    expected = np.zeros((rows, 3))
    np.add.at(expected, ids, weights)
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cut", CUTS)
def test_bfloat16_gradient_is_the_exact_sum_rounded_once(cut: str) -> None:
    mesh = axes.make_mesh(MeshAxes(fsdp=4, context=2))
    ids = np.zeros((8, 512, 1), np.int32)
    ids[:, ::5] = 6
    weights = np.abs(random(8, 512, 1, 16)).astype(jnp.bfloat16)

    def loss(table: jax.Array, ids: jax.Array) -> jax.Array:
        return jnp.sum(read_rows(table, ids, cut, "bfloat16") * weights, dtype=jnp.float32)

    with jax.set_mesh(mesh):
        table = on_mesh(mesh, np.zeros((16, 16), jnp.bfloat16), *TABLE_AXES[cut])
        gradient = jax.jit(jax.grad(loss))(table, ids)
    assert gradient.dtype == jnp.bfloat16
    expected = np.zeros((16, 16))
    np.add.at(expected, ids, weights.astype(np.float64))
    # Half a unit in the last of 8 bits, where adding 3,276 numbers in bfloat16 would stop at the 256 th.
    np.testing.assert_allclose(np.asarray(gradient, np.float64), expected, rtol=2**-8)


def test_columns_are_cut_exactly_where_they_fill_lanes() -> None:
    assert choose_cut(512, 4) == "columns"
    assert choose_cut(512, 8) == "rows"
    assert choose_cut(256, 256) == "rows"
    assert choose_cut(128, 1) == "columns"
    assert choose_cut(96, 1) == "rows"


def test_rows_and_ids_beyond_int32_together_are_refused() -> None:
    table = jax.ShapeDtypeStruct((2**31 - 2, 1), jnp.bfloat16)
    ids = jax.ShapeDtypeStruct((2, 3, 1), jnp.int32)
    with pytest.raises(ValueError, match="2,147,483,646 table rows and 6 ids exceed int32 together"):
        jax.eval_shape(jax.grad(lambda table, ids: jnp.sum(read_rows(table, ids, "rows", "float32"))), table, ids)


def test_a_table_cut_by_columns_counts_the_ids_of_all_tokens_of_a_data_rank() -> None:
    ids = jax.ShapeDtypeStruct((16, 2**20, 24), jnp.int32)
    num_ids = 16 // 2 * 2**20 * 24

    def gradient(rows: int) -> None:
        table = jax.ShapeDtypeStruct((rows, 512), jnp.bfloat16)
        with jax.set_mesh(axes.make_mesh(MeshAxes(data=2, fsdp=2, context=2))):
            jax.eval_shape(jax.grad(lambda table, ids: jnp.sum(read_rows(table, ids, "columns", "float32"))), table, ids)

    gradient(2**31 - 1 - num_ids)
    with pytest.raises(ValueError, match=f"table rows and {num_ids:,} ids exceed int32 together"):
        gradient(2**31 - num_ids)


# ShortConv


def numpy_short_conv(
    x: np.ndarray, scale: np.ndarray, kernel: np.ndarray, *, dilation: int, eps: float, segments: np.ndarray | None = None
) -> np.ndarray:
    """[batch, seq, streams, dim] in float64, one token and one tap at a time."""
    x, scale, kernel = (array.astype(np.float64) for array in (x, scale, kernel))
    normed = x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps) * scale
    out = np.zeros_like(x)
    for b, t, tap in np.ndindex(x.shape[0], x.shape[1], kernel.shape[0]):
        source = t - (kernel.shape[0] - 1 - tap) * dilation
        if source >= 0 and (segments is None or segments[b, source] == segments[b, t]):
            out[b, t] += kernel[tap] * normed[b, source]
    return out / (1 + np.exp(-out))


def documents_of(*shape: int, seed: int = 3) -> np.ndarray:
    return np.cumsum(np.random.default_rng(seed).integers(0, 4, size=shape) == 0, axis=1).astype(np.int32) + 1


@settings(max_examples=12, deadline=None)
@given(
    kernel_size=st.integers(1, 4),
    max_ngram=st.integers(2, 3),
    extra=st.integers(0, 3),
    cp=st.sampled_from([1, 2, 4]),
    order=st.sampled_from([Order.NATURAL, Order.DUAL_CHUNK_SWAP]),
    documents=st.booleans(),
)
def test_short_conv_equals_the_formula(kernel_size: int, max_ngram: int, extra: int, cp: int, order: Order, documents: bool) -> None:
    model = model_of(kernel_size=kernel_size, max_ngram=max_ngram, base_sizes=(29, 41)[: max_ngram - 1], respect_documents=documents)
    conv = filled(nnx.eval_shape(lambda: ShortConv(model, param_dtype="float32", rngs=nnx.Rngs(0))))
    seq_len = cp * chunks_per_rank(order) * max(1, model.engram.halo + extra)
    x, segments = random(8, seq_len, 2, 10), documents_of(8, seq_len)
    expected = numpy_short_conv(
        x,
        np.asarray(conv.norm.scale[...]),
        np.asarray(conv.kernel[...]),
        dilation=max_ngram,
        eps=model.norm_eps,
        segments=segments if documents else None,
    )
    with jax.set_mesh(mesh_of(cp)):
        out = nnx.jit(lambda conv, x, segments: conv(x, segments, order=order))(
            conv, to_array_order(x, cp=cp, order=order), to_array_order(segments, cp=cp, order=order)
        )
    np.testing.assert_allclose(to_time_order(np.asarray(out), cp=cp, order=order), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kernel_size", [1, 4])
@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize("order", [Order.NATURAL, Order.DUAL_CHUNK_SWAP])
def test_short_conv_under_context_parallelism_equals_natural_order_in_value_and_gradient(cp: int, kernel_size: int, order: Order) -> None:
    model = model_of(kernel_size=kernel_size)
    conv = filled(nnx.eval_shape(lambda: ShortConv(model, param_dtype="float32", rngs=nnx.Rngs(0))))
    x, weights = random(8, 80, 2, 10), random(8, 80, 2, 10, seed=1)
    graph, state = nnx.split(conv)

    def run(mesh: jax.sharding.Mesh, order: Order, x: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
        def loss(state: nnx.State, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            out = nnx.merge(graph, state)(x, order=order)
            return jnp.sum(out * weights), out

        with jax.set_mesh(mesh):
            (by_state, by_x), out = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(
                state, on_mesh(mesh, x, "batch", "seq", None, None)
            )
        return np.asarray(out), np.asarray(by_x), [np.asarray(leaf) for leaf in jax.tree.leaves(by_state)]

    out, by_x, by_state = run(mesh_of(1), Order.NATURAL, x, weights)
    moved_out, moved_by_x, moved_by_state = run(
        mesh_of(cp), order, to_array_order(x, cp=cp, order=order), to_array_order(weights, cp=cp, order=order)
    )
    np.testing.assert_array_equal(to_time_order(moved_out, cp=cp, order=order), out)
    np.testing.assert_allclose(to_time_order(moved_by_x, cp=cp, order=order), by_x, rtol=0, atol=1e-6)
    for moved, expected in zip(moved_by_state, by_state, strict=True):
        np.testing.assert_allclose(moved, expected, rtol=1e-4, atol=1e-5)
        assert np.abs(expected).max() > 0.1


def test_short_conv_starts_silent() -> None:
    conv = ShortConv(model_of(), param_dtype="float32", rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(conv(jnp.asarray(random(2, 12, 2, 10))), 0)


# The layer


def numpy_engram(engram: Engram, model: ModelConfig, hidden: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """The whole layer in float64, written from the formulas."""
    value_of = {
        name: np.asarray(getattr(engram, name)[...], np.float64)
        for name in ("table", "key_kernel", "key_bias", "value_kernel", "value_bias")
    }
    norms = [np.asarray(norm.scale[...], np.float64) for norm in (engram.key_norm, engram.query_norm, engram.short_conv.norm)]

    def rms(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + model.norm_eps) * scale

    memory = value_of["table"][rows].reshape(*rows.shape[:2], -1)
    key = rms(np.tensordot(memory, value_of["key_kernel"], axes=(2, 0)) + value_of["key_bias"], norms[0])
    agreement = (key * rms(hidden.astype(np.float64), norms[1])).sum(-1) / np.sqrt(model.dim)
    gate = 1 / (1 + np.exp(-np.sign(agreement) * np.sqrt(np.maximum(np.abs(agreement), 1e-6))))
    gated = gate[..., None] * (memory @ value_of["value_kernel"] + value_of["value_bias"])[:, :, None]
    smoothed = numpy_short_conv(gated, norms[2], np.asarray(engram.short_conv.kernel[...]), dilation=3, eps=model.norm_eps)
    return gated + smoothed


def engram_and_mapping(model: ModelConfig, layer: int = 1) -> tuple[Engram, HashMapping]:
    mapping = HashMapping(model.engram, identity_table(model.vocab_size))
    return filled(nnx.eval_shape(lambda: Engram(model, layer, mapping=mapping, **DTYPES, rngs=nnx.Rngs(0)))), mapping


def test_engram_equals_the_formulas() -> None:
    model = model_of()
    engram, mapping = engram_and_mapping(model, layer=2)
    hidden = random(3, 14, 2, 10)
    rows = jax.jit(mapping)(jnp.asarray(np.random.default_rng(0).integers(0, 97, size=(3, 14), dtype=np.int32)))[2]
    expected = numpy_engram(engram, model, hidden, np.asarray(rows))
    out = nnx.jit(lambda engram, hidden, rows: engram(hidden, rows))(engram, hidden, rows)
    np.testing.assert_allclose(out, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("cp", [2, 4])
def test_engram_from_tokens_is_the_same_in_load_balanced_order(cp: int, documents: bool) -> None:
    model = model_of(respect_documents=documents)
    tokens = np.random.default_rng(0).integers(0, 97, size=(8, 80), dtype=np.int32)
    hidden, segments = random(8, 80, 2, 10), documents_of(8, 80)

    def run(mesh: jax.sharding.Mesh, order: Order) -> np.ndarray:
        cp = mesh.shape["context"]
        moved = [to_array_order(array, cp=cp, order=order) for array in (tokens, segments, hidden)]
        with jax.set_mesh(mesh):
            engram, mapping = engram_and_mapping(model)
            out = nnx.jit(
                lambda engram, tokens, segments, hidden: engram(hidden, mapping(tokens, segments, order=order)[1], segments, order=order)
            )(engram, *moved)
        return to_time_order(np.asarray(out), cp=cp, order=order)

    natural = run(mesh_of(1), Order.NATURAL)
    np.testing.assert_allclose(run(mesh_of(cp), Order.DUAL_CHUNK_SWAP), natural, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(run(mesh_of(cp), Order.NATURAL), natural, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("documents", [False, True])
def test_only_respect_documents_hides_the_document_before(documents: bool) -> None:
    model = model_of(respect_documents=documents)
    engram, mapping = engram_and_mapping(model)
    generator = np.random.default_rng(0)
    tokens = generator.integers(0, 97, size=(1, 30), dtype=np.int32)
    segments = jnp.asarray(np.repeat([[1, 2]], 15, axis=1), jnp.int32)
    hidden = jnp.asarray(random(1, 30, 2, 10))

    @nnx.jit
    def read(engram: Engram, tokens: jax.Array) -> jax.Array:
        return engram(hidden, mapping(tokens, segments)[1], segments)

    def second_document(first: np.ndarray) -> np.ndarray:
        packed = jnp.asarray(np.concatenate([first, tokens[:, 15:]], axis=1))
        return np.asarray(read(engram, packed))[:, 15:]

    with_one, with_another = second_document(tokens[:, :15]), second_document(np.flip(tokens[:, :15], axis=1))
    assert np.array_equal(with_one, with_another) == documents


def test_one_object_serves_calls_of_every_mode() -> None:
    model = model_of()
    tokens = np.random.default_rng(0).integers(0, 97, size=(8, 72), dtype=np.int32)
    hidden = random(8, 72, 2, 10)
    with jax.set_mesh(mesh_of(2)):
        engram, mapping = engram_and_mapping(model)

        def call(order: Order) -> np.ndarray:
            moved = [to_array_order(array, cp=2, order=order) for array in (hidden, tokens)]
            out = nnx.jit(lambda engram, hidden, tokens: engram(hidden, mapping(tokens, order=order)[1], order=order))(engram, *moved)
            return to_time_order(np.asarray(out), cp=2, order=order)

        np.testing.assert_allclose(call(Order.DUAL_CHUNK_SWAP), call(Order.NATURAL), rtol=1e-6, atol=1e-6)


def test_pads_are_stored_and_never_addressed() -> None:
    model = model_of()
    tokens = np.random.default_rng(0).integers(0, 97, size=(8, 24), dtype=np.int32)
    with jax.set_mesh(mesh_of(2)):
        engram, mapping = engram_and_mapping(model)
        assert engram.num_rows == mapping.num_rows(1) == sum(int(head) for head in mapping.moduli[1].reshape(-1))
        assert engram.num_padded_rows == engram.table[...].shape[0] == -(-engram.num_rows // 8) * 8 > engram.num_rows

        def loss(engram: Engram, hidden: np.ndarray, tokens: np.ndarray) -> jax.Array:
            return jnp.sum(engram(hidden, mapping(tokens)[1]) ** 2)

        gradient = nnx.jit(nnx.grad(loss))(engram, random(8, 24, 2, 10), tokens).table[...]
    np.testing.assert_array_equal(gradient[engram.num_rows :], 0)
    assert np.abs(gradient[: engram.num_rows]).max() > 0


def test_padding_for_a_mesh_leaves_the_named_rows_as_they_were() -> None:
    model = model_of()
    mapping = HashMapping(model.engram, identity_table(97))

    def table(mesh: jax.sharding.Mesh) -> np.ndarray:
        with jax.set_mesh(mesh):
            return np.asarray(Engram(model, 1, mapping=mapping, **DTYPES, rngs=nnx.Rngs(0)).table[...])

    alone, over_eight = table(axes.make_mesh(MeshAxes(), jax.devices()[:1])), table(mesh_of(4))
    assert len(over_eight) > len(alone) == mapping.num_rows(1)
    np.testing.assert_array_equal(over_eight[: len(alone)], alone)


def test_a_model_built_under_one_jit_runs_in_another() -> None:
    model = model_of()

    @nnx.jit
    def build() -> tuple[Engram, jax.Array]:
        mapping = HashMapping(model.engram, identity_table(97))
        built.append(mapping)
        engram = Engram(model, 1, mapping=mapping, **DTYPES, rngs=nnx.Rngs(0))
        return engram, engram(hidden, mapping(tokens)[1])

    built: list[HashMapping] = []
    hidden, tokens = jnp.asarray(random(2, 6, 2, 10)), jnp.asarray(np.arange(12, dtype=np.int32).reshape(2, 6))
    engram, first = build()
    second = nnx.jit(lambda engram, hidden, tokens: engram(hidden, built[0](tokens)[1]))(engram, hidden, tokens)
    np.testing.assert_allclose(first, second, rtol=1e-5)


def test_what_cannot_be_is_refused() -> None:
    model = model_of()
    mapping = HashMapping(model.engram, identity_table(97))
    with pytest.raises(ValueError, match="layer 3 has no Engram; layers that have one: \\[1, 2\\]"):
        Engram(model, 3, mapping=mapping, **DTYPES, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"model.engram is null"):
        Engram(model.model_copy(update={"engram": None}), 1, mapping=mapping, **DTYPES, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="respect_documents is true and no segment_ids are given"):
        ShortConv(model_of(respect_documents=True), param_dtype="float32", rngs=nnx.Rngs(0))(jnp.ones((1, 4, 2, 10)))
    conv = ShortConv(model, param_dtype="float32", rngs=nnx.Rngs(0))
    with jax.set_mesh(mesh_of(8)), pytest.raises(ValueError, match="halo of 9 tokens exceeds the 1 in each chunk"):
        jax.eval_shape(partial(conv, order=Order.DUAL_CHUNK_SWAP), jnp.ones((8, 16, 2, 10)))
