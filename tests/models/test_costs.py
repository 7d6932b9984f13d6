"""The closed forms against published sizes, the model's real arrays, and the TPU compiler."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import jax
import pytest

from service.models import experts
from service.models.axes import make_mesh, spec
from service.models.config import (
    PRESETS,
    DroplessConfig,
    MeshAxes,
    MoeConfig,
    MtpConfig,
    StepConfig,
    TrainConfig,
    deepseek_custom,
    deepseek_v2_16b,
    deepseek_v3_671b,
    tiny,
    v4_1_scale,
)
from service.models.costs import (
    argument_bytes,
    count_parameters,
    moe_receive_bytes,
    moe_receive_rows,
    padded_bytes,
    parameter_arrays,
    receive_rows,
    saved_carry_bytes,
)
from service.models.train_step import build_train_program

ONE_DEVICE, DROPLESS = MeshAxes(), MoeConfig()


def step(model: Any = None, axes: MeshAxes = ONE_DEVICE, moe: MoeConfig = DROPLESS, **train: Any) -> StepConfig:
    return StepConfig(model=model or tiny(), train=TrainConfig(**{"seq_len": 64, "per_device_batch": 2, **train}), axes=axes, moe=moe)


def test_published_models_have_their_published_sizes() -> None:
    with_mtp = deepseek_v3_671b().model_copy(update={"mtp": MtpConfig(depth=1)})
    counts = count_parameters(with_mtp)
    assert round(counts.pop("mtp") / 1e9, 2) == 11.61
    assert round(sum(counts.values()) / 1e9, 2) == 671.03
    assert counts == count_parameters(deepseek_v3_671b())
    assert round(sum(count_parameters(deepseek_v2_16b()).values()) / 1e9, 2) == 15.71
    scale = count_parameters(v4_1_scale())
    assert round(scale["engram_table"] / 1e9, 1) == 196.6
    assert scale["engram_table"] == (384_006_168 + 384_016_682) * 256


@pytest.mark.parametrize("name", list(PRESETS))
@pytest.mark.parametrize("axes", [MeshAxes(), MeshAxes(fsdp=2, expert=2, context=2), MeshAxes(data=2, fsdp=2, tensor=2)])
def test_the_closed_form_names_every_array_of_the_model(name: str, axes: MeshAxes) -> None:
    config = step(PRESETS[name](), axes)
    mesh = make_mesh(axes, jax.devices()[: axes.num_devices])
    params = build_train_program(config, "dropless", mesh).abstract_state["params"]
    real = {tuple(key.key for key in path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]}
    closed = {array.path: array for array in parameter_arrays(config.model, axes)}
    assert {path: leaf.shape for path, leaf in real.items()} == {path: array.shape for path, array in closed.items()}
    assert {path: leaf.sharding.spec for path, leaf in real.items()} == {path: spec(*array.axes) for path, array in closed.items()}


@pytest.mark.parametrize("axes", [MeshAxes(), MeshAxes(fsdp=2, expert=2, context=2), MeshAxes(data=2, expert=2, tensor=2)])
def test_logical_argument_bytes_are_those_of_the_shards(axes: MeshAxes) -> None:
    config = step(tiny(), axes, param_dtype="bfloat16", moment_dtype="float32")
    mesh = make_mesh(axes, jax.devices()[: axes.num_devices])
    program = build_train_program(config, "dropless", mesh)

    def shard_bytes(tree: Any) -> int:
        leaves = jax.tree.leaves(tree)
        return sum(leaf.dtype.itemsize * int(jax.numpy.prod(jax.numpy.array(leaf.sharding.shard_shape(leaf.shape)))) for leaf in leaves)

    closed = argument_bytes(config, tiled=False)
    state = program.abstract_state
    assert closed.parameters == shard_bytes(state["params"])
    assert closed.first_moment == closed.second_moment == shard_bytes(state["mu"]) == shard_bytes(state["nu"])
    assert closed.router_bias == shard_bytes(state["router_bias"])
    assert closed.step == 4
    assert closed.batch == shard_bytes(program.abstract_batch)
    assert closed.total == shard_bytes(state) + shard_bytes(program.abstract_batch)


@pytest.mark.parametrize(
    ("shape", "itemsize", "expected"),
    [
        ((), 4, 512),
        ((7,), 4, 512),
        ((1000,), 2, 2048),
        ((1500,), 4, 8192),
        ((5, 3), 4, 2048),
        ((3, 5, 7), 4, 10240),
        ((58, 6, 24576), 4, 6 * 64 * 24576 * 4),
        ((58, 6, 128, 192), 4, 58 * 6 * 128 * 192 * 4),
        ((129280, 28), 4, 129280 * 32 * 4),
    ],
)
def test_padding_is_that_of_the_best_pair_of_dims(shape: tuple[int, ...], itemsize: int, expected: int) -> None:
    """Values are the TPU compiler's, libtpu 0.0.52."""
    assert padded_bytes(shape, itemsize) == expected


def test_argument_bytes_of_the_large_presets_are_those_the_compiler_gave() -> None:
    """As compiled for v5p with libtpu 0.0.52: 671B on 256 devices, deepseek-custom on 4."""
    large = step(deepseek_v3_671b(), MeshAxes(fsdp=16, expert=16), seq_len=4096, per_device_batch=1)
    assert argument_bytes(large).total == round(30093.16064453125 * 2**20)
    custom = step(deepseek_custom(), MeshAxes(fsdp=2, context=2), seq_len=1024, per_device_batch=2, param_dtype="bfloat16")
    assert argument_bytes(custom).total == round(6037.42333984375 * 2**20)


@pytest.mark.parametrize(
    ("factor", "expert", "program", "rows"),
    [
        (-1.0, 4, "candidate", 4 * 256),
        (0.3, 4, "candidate", 76),
        (9.0, 4, "candidate", 4 * 256),
        (0.3, 1, "candidate", 256),
        (0.3, 4, "dropless", 4 * 128),
    ],
)
def test_receive_rows_are_those_that_the_exchange_reserves(
    monkeypatch: pytest.MonkeyPatch, factor: float, expert: int, program: Any, rows: int
) -> None:
    """256 assignments on each rank, in two chunks when dropless; and what the traced step asks for is what is reported."""
    moe = MoeConfig(ragged_buffer_factor=factor, dropless=DroplessConfig(token_chunks=2))
    config = step(tiny(), MeshAxes(expert=expert), moe)
    assert moe_receive_rows(config, program) == rows
    assert moe_receive_bytes(config, program) == rows * 64 * 2
    asked: list[int] = []
    monkeypatch.setattr(experts, "receive_rows", lambda *sizes, **options: asked.append(receive_rows(*sizes, **options)) or asked[-1])
    mesh = make_mesh(config.axes, jax.devices()[:expert])
    built = build_train_program(config, program, mesh)
    with jax.set_mesh(mesh):
        jax.eval_shape(built.step, built.abstract_state, built.abstract_batch)
    assert set(asked) == {rows}


def test_saved_carries_are_a_copy_of_the_streams_for_each_layer() -> None:
    config = step(tiny(), MeshAxes(fsdp=2, context=2), seq_len=32, per_device_batch=3)
    assert saved_carry_bytes(config) == 4 * (6 * 16) * 2 * 64 * 2
    assert (
        saved_carry_bytes(step(deepseek_v3_671b(), MeshAxes(fsdp=16, expert=16), seq_len=4096, per_device_batch=1)) == 61 * 4096 * 7168 * 2
    )


COMPILED = """
import sys, jax
from jax.experimental import topologies
from service.models.axes import make_mesh
from service.models.config import MeshAxes, StepConfig, TrainConfig, tiny
from service.models.costs import argument_bytes
from service.models.train_step import build_train_program
axes = MeshAxes(fsdp=2, expert=2)
config = StepConfig(model=tiny(), train=TrainConfig(seq_len=64, param_dtype=sys.argv[1]), axes=axes)
mesh = make_mesh(axes, topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices)
program = build_train_program(config, "dropless", mesh)
with jax.set_mesh(mesh):
    compiled = program.jitted().lower(program.abstract_state, program.abstract_batch).compile()
measured, closed = compiled.memory_analysis(), argument_bytes(config)
print(measured.argument_size_in_bytes, closed.total, measured.alias_size_in_bytes, closed.state)
"""


@pytest.mark.tpu
@pytest.mark.slow
@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
def test_argument_and_alias_bytes_of_a_compiled_step_are_exact(param_dtype: str, tmp_path: Any) -> None:
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_LOG_DIR": str(tmp_path),
    }
    result = subprocess.run([sys.executable, "-c", COMPILED, param_dtype], env=environment, capture_output=True, text=True, check=True)
    argument, closed, alias, state = map(int, result.stdout.split())
    assert argument == closed
    assert alias == state
