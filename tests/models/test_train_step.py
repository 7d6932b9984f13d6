"""The train step: its state's names, shardings and refusals, AdamW against optax, and what init gives."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from service.models.axes import make_mesh
from service.models.config import PRESETS, MeshAxes, ModelConfig, MoeConfig, ProgramName, RematConfig, StepConfig, TrainConfig, tiny
from service.models.layer import Program
from service.models.train_step import TrainProgram, adamw_update, build_train_program, init_state

S = 32

ONE_DEVICE, DROPLESS = MeshAxes(), MoeConfig()


def config(axes: MeshAxes = ONE_DEVICE, model: ModelConfig | None = None, moe: MoeConfig = DROPLESS, **train: Any) -> StepConfig:
    settings = {"seq_len": S, "per_device_batch": 8 / axes.num_devices} | train
    return StepConfig(model=model or tiny(), train=TrainConfig(**settings), axes=axes, moe=moe)


def build(config: StepConfig, program: str = "dropless") -> TrainProgram:
    return build_train_program(config, program, make_mesh(config.axes, jax.devices()[: config.axes.num_devices]))


AXES = MeshAxes(fsdp=2, expert=2, context=2)


def test_paths_of_the_state_are_plain_words() -> None:
    state = build(config(AXES)).abstract_state
    paths = {jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(state)[0]}
    assert {
        "['params']['dense_layers_0_0']['attention']['q_up']",
        "['mu']['moe_layers_2_3']['moe']['expert_gate']",
        "['nu']['engram_1']['table']",
        "['router_bias']['moe_layers_1_1']['moe']['bias']",
        "['router_bias']['mtp']['depths']['block']['moe']['bias']",
        "['params']['mtp']['depths']['project_hidden']",
        "['step']",
    } <= paths


def test_state_and_batch_lie_where_the_rules_say() -> None:
    program = build(config(AXES))
    state, batch = program.abstract_state, program.abstract_batch
    assert state["params"]["moe_layers_2_3"]["moe"]["expert_up"].sharding.shard_shape((2, 8, 40, 64)) == (2, 4, 10, 64)
    assert state["mu"]["head"].sharding.shard_shape((64, 512)) == (8, 512)
    assert state["step"].sharding.spec == PartitionSpec()
    assert list(batch) == ["tokens", "targets", "segment_ids", "positions"]
    for array in batch.values():
        assert (array.shape, array.dtype) == ((8, S), jnp.int32)
        assert array.sharding.shard_shape(array.shape) == (2, S // 2)


def test_moments_take_their_own_dtype() -> None:
    state = build(config(param_dtype="float32", moment_dtype="bfloat16")).abstract_state
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state["params"])} == {"float32"}
    assert {leaf.dtype.name for leaf in jax.tree.leaves((state["mu"], state["nu"]))} == {"bfloat16"}
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state["router_bias"])} == {"float32"}


def test_a_step_that_may_be_replayed_donates_nothing() -> None:
    assert build(config()).donate_argnums == (0,)
    retry = MoeConfig(ragged_buffer_factor=0.5, retry_when_tokens_dropped=True)
    assert [build(config(moe=retry), program).donate_argnums for program in ("candidate", "dropless")] == [(), ()]


def test_a_step_without_experts_donates_even_where_retry_is_asked_for() -> None:
    dense = tiny().model_copy(update={"experts": None, "first_num_dense_layers": tiny().num_layers})
    retry = MoeConfig(ragged_buffer_factor=0.5, retry_when_tokens_dropped=True)
    assert build(config(model=dense, moe=retry), "candidate").donate_argnums == (0,)


def test_the_remat_that_is_asked_for_gives_way_only_in_the_dropless_program_of_a_step_that_retries() -> None:
    asked = RematConfig(policy="minimal")
    dense = tiny().model_copy(update={"experts": None, "first_num_dense_layers": tiny().num_layers})
    retry = MoeConfig(ragged_buffer_factor=0.5, retry_when_tokens_dropped=True)

    def remat(name: ProgramName, **changes: Any) -> RematConfig:
        return Program(config(remat=asked, **changes), name, "cpu").remat

    assert remat("dropless", moe=retry) == RematConfig(policy="full")
    assert remat("candidate", moe=retry) == remat("dropless") == remat("dropless", moe=retry, model=dense) == asked


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"axes": MeshAxes(fsdp=3)}, r"dim 'embed' of 64 does not divide over fsdp 3"),
        ({"axes": MeshAxes(tensor=5), "per_device_batch": 8}, "4 attention heads do not divide over tensor 5"),
        ({"axes": MeshAxes(data=4), "per_device_batch": 0.75}, r"batch: dim 'batch' of 3 does not divide over data 4"),
        ({"model": tiny().model_copy(update={"mlp_dim": None})}, "mlp_dim is null and 1 layers are dense"),
        ({"model": tiny().model_copy(update={"experts": None})}, "experts is null and 3 layers are MoE"),
    ],
)
def test_what_cannot_be_built_is_refused_by_name_with_the_number(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(config(**changes))


@pytest.mark.parametrize("moment_dtype", ["float32", "bfloat16"])
def test_adamw_is_optax_adamw(moment_dtype: str) -> None:
    train = TrainConfig(seq_len=1, learning_rate=3e-2, weight_decay=0.2, beta1=0.8, beta2=0.9, epsilon=1e-5)
    keys = jax.random.split(jax.random.key(0), 4)
    params = {"a": jax.random.normal(keys[0], (5, 3)), "b": jax.random.normal(keys[1], (7,))}
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, moment_dtype), params)
    reference = optax.adamw(3e-2, b1=0.8, b2=0.9, eps=1e-5, weight_decay=0.2)
    expected, state = params, reference.init(params)
    ours = (params, zeros, zeros, jnp.int32(0))
    for key in keys[2:]:
        gradients = jax.tree.map(lambda leaf, key=key: jax.random.normal(key, leaf.shape), params)
        updates, state = reference.update(gradients, state, expected)
        expected = optax.apply_updates(expected, updates)
        ours = adamw_update(train, ours[0], gradients, *ours[1:])
    tolerance = 1e-6 if moment_dtype == "float32" else 3e-3
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=tolerance), ours[0], expected)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(ours[1:3])} == {moment_dtype}
    assert int(ours[3]) == 2


def small(**changes: Any) -> ModelConfig:
    model = tiny().model_copy(update={"num_layers": 2, **changes})
    assert model.engram is not None
    return model.model_copy(update={"engram": model.engram.model_copy(update={"layers": (1,)})})


def test_a_fresh_state_is_the_same_on_every_mesh_but_for_pads() -> None:
    states = []
    for axes in (MeshAxes(), MeshAxes(fsdp=2, expert=2, context=2)):
        mesh = make_mesh(axes, jax.devices()[: axes.num_devices])
        state = init_state(config(axes, small()), mesh, seed=3)
        abstract = build(config(axes, small())).abstract_state
        layout = lambda leaf: (leaf.shape, leaf.dtype, leaf.sharding)  # noqa: E731
        assert jax.tree.map(layout, state) == jax.tree.map(layout, abstract)
        states.append(jax.device_get(state))
    alone, cut = states
    tables = [state["params"]["engram_1"].pop("table") for state in states]
    np.testing.assert_array_equal(tables[0], tables[1][: len(tables[0])])
    jax.tree.map(np.testing.assert_array_equal, alone["params"], cut["params"])
    assert all((leaf == 0).all() for leaf in jax.tree.leaves((alone["mu"], alone["nu"], alone["router_bias"])))
    assert float(np.std(alone["params"]["head"])) == pytest.approx(64**-0.5, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(PRESETS))
def test_no_table_or_lookup_array_bloats_the_program(name: str) -> None:
    axes = MeshAxes(fsdp=2, expert=2, context=2)
    settings = config(axes, PRESETS[name](), seq_len=256)
    with jax.set_mesh(make_mesh(axes)):
        program = build(settings)
        lowered = program.jitted().lower(program.abstract_state, program.abstract_batch)
    assert len(lowered.as_text()) < 10_000_000


@pytest.mark.slow
def test_the_program_does_not_grow_with_depth() -> None:
    axes = MeshAxes(fsdp=2, expert=2, context=2)
    sizes = []
    for num_layers in (8, 61):
        program = build(config(axes, PRESETS["deepseek-v3-671b"]().model_copy(update={"num_layers": num_layers}), seq_len=256))
        with jax.set_mesh(make_mesh(axes)):
            sizes.append(program.jitted().lower(program.abstract_state, program.abstract_batch).as_text().count("\n"))
    assert sizes[0] == sizes[1]
