"""Checks of single parts on the job's devices against references in NumPy that are written from the formulas, not by calling the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray

from service.models.axes import make_mesh, spec
from service.models.config import StepConfig
from service.models.data import synthetic_batch
from service.models.embed import Embed
from service.models.engram import ShortConv
from service.models.engram_table import TABLE_AXES, choose_cut, num_table_shards, read_rows
from service.models.halo import shift_left_in_time
from service.models.moe import Moe
from service.models.order import Order, resolve_order, to_array_order, to_time_order
from service.steps.checks import Check, CheckContext, Finding, NotApplicableError
from service.steps.config import CheckName

VALUE_TOLERANCE = 1e-5
"""Of the largest value: float32 sums against float64 ones."""

Array64 = NDArray[np.float64]


def halo_conv(context: CheckContext) -> Finding:
    """Output and input gradient of the Engram convolution with a kernel that is not zero, in training order over the context ranks."""
    config, model = context.config, context.config.model
    if model.engram is None:
        raise NotApplicableError("the model has no Engram layer")
    order, generator = _order(config), np.random.default_rng(context.steps.seed)
    shape = (config.global_batch, config.train.seq_len, model.mhc.num_streams, model.dim)
    x, cotangent = (generator.standard_normal(shape) for _ in range(2))
    kernel = generator.standard_normal((model.engram.kernel_size, *shape[2:])) / model.engram.kernel_size
    segments = _batch(config, context.steps.seed)["segment_ids"]
    with jax.set_mesh(_mesh(context)):
        conv = ShortConv(model, param_dtype="float32", rngs=nnx.Rngs(params=0))
        graph, state = nnx.split(conv)

        def with_kernel(kernel: Any) -> Any:
            return jax.tree.map_with_path(lambda path, leaf: kernel if "kernel" in jax.tree_util.keystr(path) else leaf, state)

        def apply(x: Any, kernel: Any, segments: Any) -> Any:
            return nnx.merge(graph, with_kernel(kernel))(x, segments, order=order)

        def both(x: Any, kernel: Any, segments: Any, cotangent: Any) -> Any:
            y, pull = jax.vjp(lambda x: apply(x, kernel, segments), x)
            return y, pull(cotangent)[0]

        y, dx = jax.jit(both)(_lay(config, x), jnp.asarray(kernel, jnp.float32), _lay(config, segments, jnp.int32), _lay(config, cotangent))
    documents = segments if model.engram.respect_documents else None
    want = _short_conv(x, kernel, dilation=model.engram.max_ngram, eps=model.norm_eps, documents=documents)
    deviation = largest_deviation(_in_time(config, y), want)
    # The gradient against a finite difference of the reference along one random direction.
    direction, step = generator.standard_normal(shape), 1e-5
    ahead, behind = (
        _short_conv(x + sign * step * direction, kernel, dilation=model.engram.max_ngram, eps=model.norm_eps, documents=documents)
        for sign in (1, -1)
    )
    slope = float(np.sum((ahead - behind) * cotangent) / (2 * step))
    terms = _in_time(config, dx) * direction
    gradient = abs(float(np.sum(terms)) - slope) / float(np.linalg.norm(terms))
    detail = (
        f"output within {deviation:.1e}, input gradient along a random direction within {gradient:.1e}, halo {model.engram.halo} tokens"
    )
    worst = max(deviation, gradient)
    return Finding(worst <= VALUE_TOLERANCE * 10, detail, worst, VALUE_TOLERANCE * 10)


def _short_conv(x: Array64, kernel: Array64, *, dilation: int, eps: float, documents: Any) -> Array64:
    """silu(sum over taps of kernel[tap] * norm(x)[t - (taps - 1 - tap) * dilation]), in time."""
    normed = x / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + eps)
    total = np.zeros_like(x)
    for tap in range(len(kernel)):
        distance = (len(kernel) - 1 - tap) * dilation
        for t in range(distance, x.shape[1]):
            term = kernel[tap] * normed[:, t - distance]
            if documents is not None:
                term = np.where((documents[:, t] == documents[:, t - distance])[:, None, None], term, 0)
            total[:, t] += term
    return total / (1 + np.exp(-total))


def mtp_shift(context: CheckContext) -> Finding:
    """Tokens, targets and segments shifted in time in training order, twice, against the shift in natural order."""
    config = context.config
    order = _order(config)
    batch = _batch(config, context.steps.seed)
    different = 0
    with jax.set_mesh(_mesh(context)):
        twice = jax.jit(lambda x: shift_left_in_time(shift_left_in_time(x, order=order), order=order))
        for name in ("tokens", "targets", "segment_ids"):
            found = _in_time(config, twice(_lay(config, batch[name], jnp.int32)))
            want = np.zeros_like(batch[name])
            want[:, :-2] = batch[name][:, 2:]
            different += int(np.sum(found != want))
    detail = f"{different} of {3 * batch['tokens'].size} ids differ from natural order after two shifts, order {order.value}"
    return Finding(different == 0, detail, float(different), 0.0)


def dense_reference(context: CheckContext) -> Finding:
    """Output and gradients of the dropless MoE layer over the mesh, against each expert applied to every token in float64."""
    config = context.config
    experts = config.model.experts
    if experts is None:
        raise NotApplicableError("the model has no experts")
    generator = np.random.default_rng(context.steps.seed + 1)
    shape = (config.global_batch, config.train.seq_len, config.model.dim)
    x, cotangent = (generator.standard_normal(shape) for _ in range(2))
    valid = _batch(config, context.steps.seed)["segment_ids"] != 0
    mesh = _mesh(context)
    with jax.set_mesh(mesh):
        made = Moe(experts, dim=config.model.dim, dtype="float32", param_dtype="float32", rngs=nnx.Rngs(params=3))
        graph, params, *rest = nnx.split(made, nnx.Param, ...)
        run = {
            "buffer_factor": -1.0,
            "token_chunks": config.moe.dropless.token_chunks,
            "use_ragged_all_to_all": mesh.devices.flat[0].platform == "tpu",
        }

        def apply(params: Any, x: Any, valid: Any) -> Any:
            y, metrics = nnx.merge(graph, params, *rest)(x, valid, **run)
            return y, metrics.expert_load

        def both(params: Any, x: Any, valid: Any, cotangent: Any) -> Any:
            y, pull, load = jax.vjp(lambda params, x: apply(params, x, valid), params, x, has_aux=True)
            return y, load, pull(cotangent)

        y, load, (dparams, dx) = jax.jit(both)(params, _lay(config, x), _lay(config, valid, jnp.bool_), _lay(config, cotangent))
    weights = {name: np.asarray(leaf, np.float64) for name, leaf in _named(nnx.to_pure_dict(params)).items()}
    want_y, want_dx, want_down, want_load = _dense_moe(experts, weights, x, valid, cotangent)
    found_down = np.asarray(_named(nnx.to_pure_dict(dparams))["expert_down"], np.float64)
    deviations = {
        "output": largest_deviation(_in_time(config, y), want_y),
        "input gradient": largest_deviation(_in_time(config, dx), want_dx),
        "expert_down gradient": largest_deviation(found_down, want_down),
    }
    same_load = bool(np.array_equal(np.asarray(load), want_load))
    worst, tolerance = max(deviations.values()), VALUE_TOLERANCE * 10
    said = ", ".join(f"{name} within {value:.1e}" for name, value in deviations.items())
    return Finding(worst <= tolerance and same_load, f"{said}; expert load {'equal' if same_load else 'differs'}", worst, tolerance)


def _dense_moe(
    experts: Any, weights: Mapping[str, Array64], x: Array64, valid: NDArray[np.bool_], cotangent: Array64
) -> tuple[Array64, Array64, Array64, NDArray[np.int64]]:
    """Output, input gradient, gradient of `expert_down` and load, one expert at a time, by the chain rule written out."""
    tokens, dy = x.reshape(-1, x.shape[-1]), cotangent.reshape(-1, x.shape[-1])
    is_valid = valid.reshape(-1)
    logits = tokens @ weights["router"]
    if experts.score_func == "sigmoid":
        scores = 1 / (1 + np.exp(-logits))
    else:
        scores = np.exp(logits - logits.max(axis=1, keepdims=True))
        scores /= scores.sum(axis=1, keepdims=True)
    chosen = _choose(experts, scores) & is_valid[:, None]
    picked = np.where(chosen, scores, 0)
    total = picked.sum(axis=1, keepdims=True) + 1e-20 if experts.normalize else np.ones((len(tokens), 1))
    gate_weights = picked / total * experts.scaling
    y, dx, dscores = np.zeros_like(tokens), np.zeros_like(tokens), np.zeros_like(scores)
    ddown = np.zeros_like(weights["expert_down"])
    dgate_weights = np.zeros_like(scores)
    for expert in range(experts.num_experts):
        # All three lie as [experts, width, dim].
        gate_w, up_w, down_w = weights["expert_gate"][expert].T, weights["expert_up"][expert].T, weights["expert_down"][expert]
        rows = chosen[:, expert]
        out, hidden, d_input = _swiglu(tokens[rows], gate_w, up_w, down_w, dy[rows] * gate_weights[rows, expert, None])
        y[rows] += gate_weights[rows, expert, None] * out
        dx[rows] += d_input
        ddown[expert] = hidden.T @ (dy[rows] * gate_weights[rows, expert, None])
        dgate_weights[rows, expert] = np.sum(dy[rows] * out, axis=1)
    if experts.normalize:
        mean = np.sum(dgate_weights * gate_weights, axis=1, keepdims=True) / experts.scaling
        dscores = np.where(chosen, (dgate_weights - mean) * experts.scaling / total, 0)
    else:
        dscores = np.where(chosen, dgate_weights * experts.scaling, 0)
    if experts.score_func == "sigmoid":
        dlogits = dscores * scores * (1 - scores)
    else:
        dlogits = scores * (dscores - np.sum(dscores * scores, axis=1, keepdims=True))
    dx += dlogits @ weights["router"].T
    if experts.num_shared_experts:
        out, _, d_input = _swiglu(tokens, weights["shared.gate"], weights["shared.up"], weights["shared.down"].T, dy)
        y, dx = y + out, dx + d_input
    return y.reshape(x.shape), dx.reshape(x.shape), ddown, chosen.sum(axis=0)


def _choose(experts: Any, scores: Array64) -> NDArray[np.bool_]:
    """The k best experts of the best groups, for each token; the bias starts at zero."""
    num_groups = experts.num_groups
    usable = scores
    if num_groups > 1:
        grouped = scores.reshape(len(scores), num_groups, -1)
        of_group = np.sort(grouped, axis=-1)[:, :, -2:].sum(axis=-1)
        worst_kept = np.sort(of_group, axis=-1)[:, -experts.num_groups_per_token, None]
        usable = np.where((of_group >= worst_kept)[:, :, None], grouped, -np.inf).reshape(scores.shape)
    kept = np.sort(usable, axis=-1)[:, -experts.num_experts_per_token, None]
    return usable >= kept


def _swiglu(x: Array64, gate_w: Array64, up_w: Array64, down_w: Array64, dy: Array64) -> tuple[Array64, Array64, Array64]:
    """down(silu(gate x) * up x), the hidden rows, and the input gradient for the output gradient `dy`."""
    gate, up = x @ gate_w, x @ up_w
    sigmoid = 1 / (1 + np.exp(-gate))
    hidden = gate * sigmoid * up
    dhidden = dy @ down_w.T
    dgate = dhidden * up * sigmoid * (1 + gate * (1 - sigmoid))
    return hidden @ down_w, hidden, dgate @ gate_w.T + (dhidden * gate * sigmoid) @ up_w.T


def table_gradients(context: CheckContext) -> Finding:
    """Gradients of the token embedding and of an Engram table, over the mesh, against rows added one by one in float64."""
    config, model = context.config, context.config.model
    generator = np.random.default_rng(context.steps.seed + 2)
    batch = _batch(config, context.steps.seed)
    deviations: dict[str, float] = {}
    with jax.set_mesh(_mesh(context)):
        embed = Embed(model.vocab_size, model.dim, dtype="float32", param_dtype="float32", rngs=nnx.Rngs(params=5))
        graph, state = nnx.split(embed)
        cotangent = generator.standard_normal((*batch["tokens"].shape, model.dim))

        def pull_embedding(state: Any, tokens: Any, cotangent: Any) -> Any:
            return jax.vjp(lambda state: nnx.merge(graph, state)(tokens), state)[1](cotangent)[0]

        gradient = jax.jit(pull_embedding)(state, _lay(config, batch["tokens"], jnp.int32), _lay(config, cotangent))
        found = np.asarray(jax.tree.leaves(gradient)[0], np.float64)
        deviations["embedding"] = largest_deviation(found, _add_rows(model.vocab_size, batch["tokens"], cotangent))
        if model.engram is not None:
            rows = 8 * 131  # few, so that many tokens read each; a multiple of the shards
            shards = num_table_shards()
            rows += -rows % shards
            cut = choose_cut(model.engram.head_dim, shards)
            hashes = model.engram.num_heads * model.engram.num_orders
            ids = generator.integers(0, rows, (*batch["tokens"].shape, hashes))
            cotangent = generator.standard_normal((*ids.shape, model.engram.head_dim))
            table = jax.device_put(
                jnp.asarray(generator.standard_normal((rows, model.engram.head_dim)), jnp.float32),
                NamedSharding(_mesh(context), spec(*TABLE_AXES[cut])),
            )

            def pull_table(table: Any, ids: Any, cotangent: Any) -> Any:
                return jax.vjp(lambda table: read_rows(table, ids, cut, "float32"), table)[1](cotangent)[0]

            found = np.asarray(jax.jit(pull_table)(table, _lay(config, ids, jnp.int32), _lay(config, cotangent)), np.float64)
            deviations["engram table"] = largest_deviation(found, _add_rows(rows, ids, cotangent))
    worst = max(deviations.values())
    said = ", ".join(f"{name} within {value:.1e}" for name, value in deviations.items())
    return Finding(worst <= VALUE_TOLERANCE, said, worst, VALUE_TOLERANCE)


def _add_rows(num_rows: int, ids: NDArray[np.integer], gradient: Array64) -> Array64:
    """Zeros, with each token's gradient added to the row it read, in float64."""
    total = np.zeros((num_rows, gradient.shape[-1]))
    np.add.at(total, ids.reshape(-1), gradient.reshape(-1, gradient.shape[-1]))
    return total


def largest_deviation(found: Any, want: Any) -> float:
    """The largest absolute difference over the largest absolute value that is wanted."""
    return float(np.max(np.abs(found - want)) / max(np.max(np.abs(want)), 1e-30))


def _order(config: StepConfig) -> Order:
    return resolve_order(config.context, cp=config.axes.context, mode="train", has_engram=config.model.engram is not None)


def _mesh(context: CheckContext) -> Mesh:
    return make_mesh(context.config.axes, list(context.candidate.mesh.devices.flat))


def _batch(config: StepConfig, seed: int) -> dict[str, NDArray[np.int32]]:
    """A packed batch in time."""
    made = synthetic_batch(
        batch=config.global_batch,
        seq_len=config.train.seq_len,
        vocab_size=config.model.vocab_size,
        packing=config.train.packing,
        seed=seed,
    )
    return {name: np.asarray(getattr(made, name)) for name in made._fields}


def _lay(config: StepConfig, x: Any, dtype: Any = jnp.float32) -> jax.Array:
    """[batch, seq, ...] in time, put on the mesh that is set as training input lies."""
    mesh = jax.sharding.get_mesh()
    ordered = to_array_order(np.asarray(x), cp=config.axes.context, order=_order(config))
    parts = spec("batch", "seq")
    return jax.device_put(np.asarray(ordered, dtype), NamedSharding(mesh, PartitionSpec(*parts, *(None,) * (ordered.ndim - 2))))


def _in_time(config: StepConfig, x: Any) -> Any:
    """The inverse of `_lay`, in NumPy; floats as float64."""
    array = np.asarray(x)
    array = array.astype(np.float64) if array.dtype.kind == "f" else array
    return to_time_order(array, cp=config.axes.context, order=_order(config))


def _named(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted path to array."""
    named: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            named |= _named(value, f"{prefix}{name}.")
        else:
            named[f"{prefix}{name}"] = value
    return named


PART_CHECKS: Mapping[CheckName, tuple[str, Check]] = {
    "halo_conv": ("the Engram convolution across context ranks = natural order", halo_conv),
    "mtp_shift": ("the MTP shift across context ranks = natural order, id for id", mtp_shift),
    "dense_reference": ("dropless experts over the mesh = every expert on every token", dense_reference),
    "table_gradients": ("embedding and Engram table gradients = rows added one by one", table_gradients),
}
