"""What the real TPU compiler makes of Engram: which collectives move how many bytes, and what a table's read and gradient take in HBM."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding

from service.models import axes
from service.models.config import MeshAxes, deepseek_custom, v4_1_scale
from service.models.engram import ShortConv
from service.models.engram_table import TABLE_AXES, Cut, choose_cut, num_table_shards, read_rows
from service.models.halo import shift_left_in_time
from service.models.hashing import HashMapping
from service.models.order import Order, chunks_per_rank
from service.models.primes import num_padded_rows, num_table_rows
from service.models.tokenizer import identity_table

pytestmark = pytest.mark.tpu

WIDTHS = {"bf16": 2, "f32": 4, "s32": 4, "u32": 4, "pred": 1}
COLLECTIVE = re.compile(r" = \(?(\w+)\[([\d,]*)\][^=]*? (all-gather|all-reduce|all-to-all|reduce-scatter|collective-permute)(?:-start)?\(")


@pytest.fixture(scope="module", autouse=True)
def _compiler_without_a_tpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What libtpu reads when it is first loaded: no metadata server, no lock file, no log directory shared with others."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_WORKER_HOSTNAMES": "localhost"}.items():
            patch.setenv(name, value)
        patch.setenv("TPU_LOG_DIR", str(tmp_path_factory.mktemp("tpu")))
        yield


def mesh_on(topology: str, **sizes: int) -> Mesh:
    return axes.make_mesh(MeshAxes(**sizes), topologies.get_topology_desc(platform="tpu", topology_name=topology).devices)


def abstract(mesh: Mesh, shape: tuple[int, ...], dtype: Any, *logical: str | None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, axes.spec(*logical)))


def compile_on(mesh: Mesh, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    with jax.set_mesh(mesh):
        return jax.jit(function, **options).lower(*arguments).compile()


def collectives(compiled: Any) -> list[tuple[str, str, int]]:
    """(kind, dtype, bytes of the first operand or result) of each collective, as the program writes them."""
    found = []
    for dtype, shape, kind in COLLECTIVE.findall(compiled.as_text()):
        found.append((kind, dtype, math.prod(int(size) for size in shape.split(",") if size) * WIDTHS[dtype]))
    return found


@pytest.mark.parametrize("order", [Order.NATURAL, Order.DUAL_CHUNK_SWAP])
@pytest.mark.parametrize(("topology", "sizes"), [("v5e:2x4", {"fsdp": 2, "context": 4}), ("v5p:2x2x1", {"expert": 2, "context": 2})])
def test_the_convolution_sends_its_halo_and_gathers_nothing(topology: str, sizes: dict[str, int], order: Order) -> None:
    # Its convolution: 4 streams of 1024 and a halo of 9, here on shorter sequences.
    mesh, model = mesh_on(topology, **sizes), deepseek_custom()
    batch, seq_len, dim = 4, 256, model.dim
    graph, state = nnx.split(nnx.eval_shape(lambda: ShortConv(model, param_dtype="bfloat16", rngs=nnx.Rngs(0))))

    def loss(state: Any, x: jax.Array, weights: jax.Array) -> jax.Array:
        return jnp.sum(nnx.merge(graph, state)(x, order=order) * weights, dtype=jnp.float32)

    x = abstract(mesh, (batch, seq_len, 4, dim), jnp.bfloat16, "batch", "seq", "streams", "dim")
    replicated = jax.tree.map(lambda leaf: abstract(mesh, leaf.shape, leaf.dtype, *[None] * len(leaf.shape)), state)
    found = collectives(compile_on(mesh, jax.grad(loss, argnums=(0, 1)), replicated, x, x))
    permutes = [size for kind, _, size in found if kind == "collective-permute"]
    # Forward and backward, each direction of each: one halo of this device's sequences.
    halo_bytes = chunks_per_rank(order) * 9 * (batch // 2) * 4 * dim * 2
    assert sum(permutes) == 2 * halo_bytes
    assert not [kind for kind, _, _ in found if kind in ("all-gather", "all-to-all")]
    # What is left adds up the gradients of kernel and norm.
    assert all(size <= 5 * 4 * dim * 4 for kind, _, size in found if kind == "all-reduce")


def test_the_shift_sends_one_token_and_gathers_nothing() -> None:
    mesh = mesh_on("v5e:2x4", fsdp=2, context=4)
    ids = abstract(mesh, (6, 256), jnp.int32, "batch", "seq")
    for order in (Order.NATURAL, Order.DUAL_CHUNK_SWAP):
        found = collectives(compile_on(mesh, partial(shift_left_in_time, order=order), ids))
        assert {kind for kind, _, _ in found} == {"collective-permute"}
        assert sum(size for _, _, size in found) == chunks_per_rank(order) * 3 * 4


def test_hashing_gathers_int32_ids_alone() -> None:
    mesh, engram = mesh_on("v5p:2x2x1", fsdp=2, context=2), deepseek_custom().engram
    assert engram is not None
    mapping = HashMapping(engram, identity_table(129280))
    tokens = abstract(mesh, (4, 512), jnp.int32, "batch", "seq")
    found = collectives(compile_on(mesh, lambda tokens: mapping(tokens, order=Order.DUAL_CHUNK_SWAP), tokens))
    assert found == [("all-gather", "s32", 2 * 512 * 4)]


def table_step(mesh: Mesh, cut: Cut, *, rows: int, width: int, batch: int, seq_len: int, hashes: int) -> Any:
    """A donated step that reads a bfloat16 table, takes the gradient of what was read and applies it, compiled."""
    with jax.set_mesh(mesh):
        padded = num_padded_rows(rows, num_table_shards() if cut == "rows" else 1)

    def step(table: jax.Array, ids: jax.Array, weights: jax.Array) -> jax.Array:
        gradient = jax.grad(lambda table: jnp.sum(read_rows(table, ids, cut, "bfloat16") * weights, dtype=jnp.float32))(table)
        return table - gradient

    return compile_on(
        mesh,
        step,
        abstract(mesh, (padded, width), jnp.bfloat16, *TABLE_AXES[cut]),
        abstract(mesh, (batch, seq_len, hashes), jnp.int32, "batch", "seq", None),
        abstract(mesh, (width,), jnp.bfloat16, None),
        donate_argnums=0,
    )


@pytest.mark.parametrize("cut", ["rows", "columns"])
def test_no_table_or_gradient_is_gathered(cut: Cut) -> None:
    mesh = mesh_on("v5e:2x4", fsdp=2, expert=2, context=2)
    rows, width, tokens, hashes = 200_003, 1024, 2 * 32, 3
    found = collectives(table_step(mesh, cut, rows=rows, width=width, batch=4, seq_len=64, hashes=hashes))
    shards = 8
    assert found
    # At most what all shards read for one another: far below one shard of the table.
    assert max(size for _, _, size in found) <= shards * tokens * hashes * width * 2 < rows * width * 2 // shards


@pytest.mark.slow
def test_columns_take_less_than_rows_for_deepseek_custom() -> None:
    mesh, model = mesh_on("v5p:2x2x1", fsdp=2, context=2), deepseek_custom()
    assert model.engram is not None
    rows = num_table_rows(model.engram, 1)
    assert choose_cut(model.engram.head_dim, 4) == "columns"
    sizes = {"rows": rows, "width": 512, "batch": 8, "seq_len": 1024, "hashes": 16}
    beyond = {}
    for cut in ("rows", "columns"):
        memory = table_step(mesh, cut, **sizes).memory_analysis()
        beyond[cut] = memory.peak_memory_in_bytes - 2 * memory.alias_size_in_bytes
    tokens = 8 * 1024 // 4
    # The tokens' rows once by columns, once for every shard by rows; both with the ids beside.
    assert abs(beyond["columns"] - tokens * 16 * 512 * 2) < 4 << 20
    assert abs(beyond["rows"] - 4 * tokens * 16 * 512 * 2) < 8 << 20


@pytest.mark.slow
def test_a_table_of_384_million_rows_compiles_within_its_shards() -> None:
    mesh, model = mesh_on("v5p:4x8x8", fsdp=16, expert=8, context=2), v4_1_scale()
    assert model.engram is not None
    rows = num_table_rows(model.engram, 14)
    assert rows == 384_016_682
    assert choose_cut(256, 256) == "rows"
    memory = table_step(mesh, "rows", rows=rows, width=256, batch=256, seq_len=4096, hashes=24).memory_analysis()
    shard = num_padded_rows(rows, 256) // 256 * 256
    # Table and gradient in bfloat16, one float32 sum while the chunks add up, and the chunks' buffers.
    assert memory.peak_memory_in_bytes < shard * (2 + 4) + (1 << 30)


def test_numpy_is_all_that_a_mapping_holds() -> None:
    engram = deepseek_custom().engram
    assert engram is not None
    mapping = HashMapping(engram, identity_table(129280))
    arrays = [mapping.table, *mapping.moduli.values(), *mapping.multipliers.values(), mapping.offsets(1)]
    assert all(type(array) is np.ndarray and array.dtype == np.int32 for array in arrays)
