"""One train step as a pure function over a state of plain dicts, with the shapes and shardings to compile it without any data.

The state is {"params", "mu", "nu", "router_bias", "step"}: nested dicts in plain words, so that a compiler's parameter names read like
`state['params']['moe_layers_3_60']['attention']['q_up']`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from service.models.axes import check_divides, spec
from service.models.config import ProgramName, StepConfig, TrainConfig
from service.models.decoder import Decoder, Losses, stack_names
from service.models.generator import make_key
from service.models.gradients import make_probes
from service.models.hashing import HashMapping
from service.models.layer import Program
from service.models.router import RouterBias, update_router_bias
from service.models.tokenizer import identity_table

State = dict[str, Any]
Batch = dict[str, Any]
Metrics = dict[str, Any]

BATCH_ARRAYS = ("tokens", "targets", "segment_ids", "positions")


@dataclass(frozen=True)
class TrainProgram:
    """One of a configuration's train steps, ready to be traced under `jax.set_mesh(mesh)`."""

    step: Callable[[State, Batch], tuple[State, Metrics]]
    abstract_state: State
    """`jax.ShapeDtypeStruct`s with their `NamedSharding`s."""
    abstract_batch: Batch
    donate_argnums: tuple[int, ...]
    """() where a discarded step must leave its input state alive for the replay."""
    state_shardings: State
    metrics_sharding: NamedSharding
    """Metrics are replicated: every host reads the same overflow flag."""

    def jitted(self) -> Any:
        """`jax.jit` of the step, the new state sharded as the old one is."""
        return jax.jit(self.step, donate_argnums=self.donate_argnums, out_shardings=(self.state_shardings, self.metrics_sharding))


@dataclass(frozen=True)
class _Built:
    """A model without arrays, and how its state is laid out."""

    graph: nnx.GraphDef
    params: Any
    bias: Any

    def merge(self, params: Any, bias: Any) -> Decoder:
        """The model over these arrays; both trees have the leaves of the abstract ones in the same order."""
        states = (
            jax.tree.unflatten(jax.tree.structure(abstract), jax.tree.leaves(arrays))
            for abstract, arrays in ((self.params, params), (self.bias, bias))
        )
        return nnx.merge(self.graph, *states)


def build_train_program(config: StepConfig, program: ProgramName, mesh: Mesh, *, token_table: np.ndarray | None = None) -> TrainProgram:
    """The train step `program` of `config` over `mesh`, whose devices may be mocked: nothing is executed.

    `token_table` is Engram's int32[vocab] of compressed ids (`tokenizer.compression_table`); the identity where it is None.

    Raises:
        ValueError: the configuration cannot be sharded over the mesh, or the model cannot be; says what, with the numbers.
    """
    built = _build(_program(config, program, mesh, token_table), mesh)
    abstract_state = _abstract_state(config, built, mesh)
    return TrainProgram(
        step=partial(_step, config, built),
        abstract_state=abstract_state,
        abstract_batch=_abstract_batch(config, mesh),
        donate_argnums=() if config.retries else (0,),
        state_shardings=jax.tree.map(lambda leaf: leaf.sharding, abstract_state),
        metrics_sharding=NamedSharding(mesh, PartitionSpec()),
    )


def init_state(config: StepConfig, mesh: Mesh, seed: int) -> State:
    """A fresh state on the mesh's devices, each making its own shards; the same for every program, and for every mesh but for pads."""
    program = _program(config, "dropless", mesh, None)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, _abstract_state(config, _build(program, mesh), mesh))

    def make() -> State:
        _, *states = nnx.split(Decoder(program, rngs=nnx.Rngs(params=make_key(seed))), nnx.Param, RouterBias)
        params, bias = map(nnx.to_pure_dict, states)
        zeros = partial(jax.tree.map, lambda leaf: jnp.zeros(leaf.shape, _moment_dtype(config.train)))
        return _assemble(params, zeros(params), zeros(params), bias, jnp.int32(0))

    with jax.set_mesh(mesh):
        return jax.jit(make, out_shardings=shardings)()


def _assemble(params: Any, mu: Any, nu: Any, router_bias: Any, step: Any) -> State:
    return {"params": params, "mu": mu, "nu": nu, "router_bias": router_bias, "step": step}


def _moment_dtype(train: TrainConfig) -> str:
    return train.moment_dtype or train.param_dtype


def _program(config: StepConfig, name: ProgramName, mesh: Mesh, token_table: np.ndarray | None) -> Program:
    engram = config.model.engram
    table = identity_table(config.model.vocab_size) if token_table is None else token_table
    mapping = None if engram is None else HashMapping(engram, table)
    return Program(config, name, mesh.devices.flat[0].platform, mapping)


def _build(program: Program, mesh: Mesh) -> _Built:
    with jax.set_mesh(mesh):  # an Engram table's rows are padded to the mesh
        model = nnx.eval_shape(lambda: Decoder(program, rngs=nnx.Rngs(params=make_key(0))))
    return _Built(*nnx.split(model, nnx.Param, RouterBias))


def _abstract_state(config: StepConfig, built: _Built, mesh: Mesh) -> State:
    moment_dtype = jnp.dtype(_moment_dtype(config.train))

    def abstract(path: tuple[Any, ...], variable: nnx.Variable) -> jax.ShapeDtypeStruct:
        leaf = variable.get_value()
        # Stacked layers have one dim more than the axes of one layer name.
        axes = variable.axes if leaf.ndim == len(variable.axes) else ("layers", *variable.axes)
        check_divides("/".join(map(str, path)), leaf.shape, axes, mesh.shape)
        sharding = NamedSharding(mesh, spec(*axes))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    params, bias = (
        nnx.to_pure_dict(nnx.from_flat_state([(path, abstract(path, leaf)) for path, leaf in nnx.to_flat_state(state)]))
        for state in (built.params, built.bias)
    )
    moments = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, moment_dtype, sharding=leaf.sharding), params)
    step = jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(mesh, PartitionSpec()))
    return _assemble(params, moments, moments, bias, step)


def _abstract_batch(config: StepConfig, mesh: Mesh) -> Batch:
    shape = (config.global_batch, config.train.seq_len)
    axes = ("batch", "seq")
    check_divides("batch", shape, axes, mesh.shape)
    sharding = NamedSharding(mesh, spec(*axes))
    return {name: jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding) for name in BATCH_ARRAYS}


def _step(config: StepConfig, built: _Built, state: State, batch: Batch) -> tuple[State, Metrics]:
    """The new state and this step's metrics."""
    model, train = config.model, config.train

    def total_loss(trained: Any) -> tuple[Any, Losses]:
        params = trained | {name: state["params"][name] for name in probes}
        losses = built.merge(params, state["router_bias"])(**batch, probes={name: trained[name] for name in probes})
        return losses.main + model.mtp.loss_weight * losses.mtp + losses.balance, losses

    probes = {name: make_probes(built.params[name], state["params"][name], train.dtype) for name in stack_names(model)}
    (loss, losses), gradients = jax.value_and_grad(total_loss, has_aux=True)(state["params"] | probes)
    with jax.named_scope("optimizer"):
        params, mu, nu, step = adamw_update(train, state["params"], gradients, state["mu"], state["nu"], state["step"])
        router_bias = state["router_bias"]
        if router_bias and model.experts is not None:
            rate = model.experts.bias_update_rate
            router_bias = {
                run: jax.tree.map(lambda bias, load=losses.moe[run].expert_load: update_router_bias(bias, load, rate), biases)
                for run, biases in router_bias.items()
            }
    return _assemble(params, mu, nu, router_bias, step), _metrics(loss, losses)


def adamw_update(train: TrainConfig, params: Any, gradients: Any, mu: Any, nu: Any, step: Any) -> tuple[Any, Any, Any, Any]:
    """Parameters, moments and step after one AdamW update (arXiv 1711.05101), computed in float32 and stored in each tree's own dtype."""
    adam = optax.scale_by_adam(train.beta1, train.beta2, train.epsilon)
    wide = partial(jax.tree.map, lambda leaf: leaf.astype(jnp.float32))
    directions, adam_state = adam.update(wide(gradients), optax.ScaleByAdamState(count=step, mu=wide(mu), nu=wide(nu)))

    def move(param: Any, direction: Any) -> Any:
        old = param.astype(jnp.float32)
        return (old - train.learning_rate * (direction + train.weight_decay * old)).astype(param.dtype)

    stored = partial(jax.tree.map, lambda new, old: new.astype(old.dtype))
    return jax.tree.map(move, params, directions), stored(adam_state.mu, mu), stored(adam_state.nu, nu), adam_state.count


def _metrics(loss: Any, losses: Losses) -> Metrics:
    """Scalars of the step, and per MoE layer (MTP's last) the dropped share and the load of each expert."""
    metrics = {
        "loss": loss,
        "main_loss": losses.main,
        "mtp_loss": losses.mtp,
        "balance_loss": losses.balance,
        "tokens": losses.tokens,
        "has_moe_overflow": jnp.bool_(False),
    }
    if losses.moe:
        layers = jax.tree.map(lambda *runs: jnp.concatenate(runs), *losses.moe.values())
        metrics |= {
            "has_moe_overflow": jnp.any(layers.overflow),
            "dropped_fraction": layers.dropped_fraction,
            "expert_load": layers.expert_load,
        }
    return metrics
