"""One decoder layer, and how a run of equal layers is built, stacked, scanned and rematerialised."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
from flax import nnx
from jaxtyping import Array, Float

from service.models.attention import Mla, Places
from service.models.config import ProgramName, RematConfig, StepConfig
from service.models.gradients import attach
from service.models.hashing import HashMapping
from service.models.mhc import HyperConnection
from service.models.moe import Moe, MoeMetrics
from service.models.order import Mode, Order, resolve_order
from service.models.primitives import RmsNorm, SwiGlu


@dataclass(frozen=True)
class Program:
    """What is compiled: the step's configuration, which of its two programs, and for what kind of device."""

    config: StepConfig
    name: ProgramName
    platform: str
    """`tpu`, `cpu` or `gpu`: decides which kernels and collectives exist."""
    mapping: HashMapping | None = None
    """From tokens to Engram's table rows; None where the model has no Engram."""

    @property
    def order(self) -> Order:
        """The array order of training input."""
        return self.order_of("train")

    def order_of(self, mode: Mode) -> Order:
        """The array order of the input of a call."""
        return resolve_order(self.config.context, cp=self.config.axes.context, mode=mode, has_engram=self.config.model.engram is not None)

    @property
    def moe_run(self) -> dict[str, Any]:
        """How this program runs its experts: the candidate with the configured buffer, dropless with the worst case in token chunks."""
        moe = self.config.moe
        dropless = self.name == "dropless"
        return {
            "buffer_factor": -1.0 if dropless else moe.ragged_buffer_factor,
            "token_chunks": moe.dropless.token_chunks if dropless else 1,
            "use_ragged_all_to_all": self.platform == "tpu",
        }

    @property
    def remat(self) -> RematConfig:
        """The dropless program beside a candidate runs under full remat: its worst-case buffers leave no room for more."""
        return RematConfig() if self.name == "dropless" and self.config.retries else self.config.train.remat


class Layer(nnx.Module):
    """RMSNorm, attention, RMSNorm, feed-forward, each sub-layer connected to the residual streams."""

    def __init__(self, program: Program, kind: Literal["dense", "moe"], *, rngs: nnx.Rngs) -> None:
        model, train = program.config.model, program.config.train
        dtypes = {"dtype": train.dtype, "param_dtype": train.param_dtype}
        norm: dict[str, Any] = {"eps": model.norm_eps, "param_dtype": train.param_dtype, "rngs": rngs}
        self.attention_norm = RmsNorm(model.dim, **norm)
        self.attention = Mla(model, flash=train.attention == "flash" and program.platform == "tpu", **dtypes, rngs=rngs)
        self.feed_forward_norm = RmsNorm(model.dim, **norm)
        if kind == "dense":
            if model.mlp_dim is None:
                raise ValueError(
                    f"mlp_dim is null and {model.first_num_dense_layers} layers are dense; give the dense layers' hidden width"
                )
            self.mlp = SwiGlu(model.dim, model.mlp_dim, **dtypes, rngs=rngs)
        else:
            if model.experts is None:
                raise ValueError(f"experts is null and {model.num_moe_layers} layers are MoE; give the experts' sizes")
            self.moe = Moe(model.experts, dim=model.dim, **dtypes, rngs=rngs)
        self.attention_connection = HyperConnection(model, **dtypes, rngs=rngs)
        self.feed_forward_connection = HyperConnection(model, **dtypes, rngs=rngs)
        self.kind, self.moe_run = kind, program.moe_run

    def __call__(
        self, streams: Float[Array, "batch seq streams dim"], places: Places
    ) -> tuple[Float[Array, "batch seq streams dim"], MoeMetrics | None]:
        """The streams after this layer, and what its experts report (None for a dense layer)."""

        def attend(x: Array) -> tuple[Array, None]:
            with jax.named_scope("mla"):
                return self.attention(self.attention_norm(x), places), None

        def feed_forward(x: Array) -> tuple[Array, MoeMetrics | None]:
            x = self.feed_forward_norm(x)
            if self.kind == "moe":
                return self.moe(x, places.segment_ids != 0, **self.moe_run)
            with jax.named_scope("mlp"):
                return self.mlp(x), None

        streams, _ = self.attention_connection(streams, attend)
        return self.feed_forward_connection(streams, feed_forward)


def stack(make: Callable[..., nnx.Module], count: int, *, rngs: nnx.Rngs) -> nnx.Module:
    """`count` modules `make(rngs=...)` as one, every parameter with a leading dim for them; the body is traced once."""
    return nnx.vmap(lambda rngs: make(rngs=rngs), in_axes=0, out_axes=0)(rngs.split(count))


def scan_stacked(
    stacked: nnx.Module, body: Callable[[Any, Any], tuple[Any, Any]], carry: Any, *, remat: RematConfig, probes: Any = None
) -> tuple[Any, Any]:
    """`carry, out = body(module, carry)` for each of the stacked modules in turn; outs are stacked. One module needs no loop.

    With `probes` (`gradients.make_probes`, a tree like the stack's parameters) the parameters' gradients go to them.
    """
    graph, *states = nnx.split(stacked, nnx.Param, ...)
    params, rest = states
    tree = jax.tree.structure(params)
    xs = (jax.tree.leaves(params), None if probes is None else jax.tree.leaves(probes), rest)

    def step(carry: Any, x: Any) -> tuple[Any, Any]:
        weights, probes, rest = x
        if probes is not None:
            weights = [attach(*pair) for pair in zip(weights, probes, strict=True)]
        return body(nnx.merge(graph, jax.tree.unflatten(tree, weights), rest), carry)

    if xs[0][0].shape[0] == 1:
        carry, out = rematerialise(step, remat, in_scan=False)(carry, jax.tree.map(lambda leaf: leaf[0], xs))
        return carry, jax.tree.map(lambda leaf: leaf[None], out)
    return jax.lax.scan(rematerialise(step, remat, in_scan=True), carry, xs)


def rematerialise[**P, T](function: Callable[P, T], remat: RematConfig, *, in_scan: bool) -> Callable[P, T]:
    """`function` with `jax.checkpoint` by policy.

    `full` keeps only its inputs, `minimal` also the results of matmuls with weights, `none` keeps all. Beside that, the tensors named
    in `save` stay on the device and those in `offload` go to pinned host memory.
    """
    if remat.policy == "none" and not (remat.save or remat.offload):
        return function
    policies = jax.checkpoint_policies
    base = {
        "full": policies.nothing_saveable,
        "minimal": policies.dots_with_no_batch_dims_saveable,
        "none": policies.everything_saveable,
    }[remat.policy]
    named = policies.save_and_offload_only_these_names(
        names_which_can_be_saved=list(remat.save),
        names_which_can_be_offloaded=list(remat.offload),
        offload_src="device",
        offload_dst="pinned_host",
    )

    def policy(primitive: Any, *args: Any, **params: Any) -> Any:
        # `checkpoint_name` marks a tensor by a primitive of its own, called "name".
        return (named if primitive.name == "name" else base)(primitive, *args, **params)

    # Inside a scan the loop's edge already keeps the two computations apart; a barrier would only cost.
    return jax.checkpoint(function, policy=policy, prevent_cse=not in_scan)
