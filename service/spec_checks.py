"""What no single field of a spec can say: divisibility, sizes that must fit together, and the parts that exclude each other.

Each check reads the sections it needs and is passed over when one of them is unsound by itself, so that one answer tells all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from service.compile.catalog import Topology, find_topology
from service.compile.options import ALLOWED, legal_value
from service.errors import Problem
from service.models.config import AXIS_NAMES, REMAT_NAMES
from service.models.primes import INT32_MAX
from service.spec_engram import check_engram, check_engram_halo, check_engram_order, check_engram_padding, check_engram_row_ids
from service.spec_problems import nearest, shorten
from service.spec_sharding import check_sharding
from service.spec_sizes import check_dims, check_intermediates, check_parameters, check_tokens
from service.steps.config import MAX_CPU_DEVICES

Sections = Mapping[str, Any]
Checks = Sequence[tuple[tuple[str, ...], Callable[..., Iterator[Problem]]]]
"""The sections that each check needs, and the check."""


def check_spec(sections: Sections) -> list[Problem]:
    """Every problem that stands between the fields of the sections given."""
    return list(_run(_CHECKS, sections)) or list(_run(_PRODUCTS, sections))


def _run(checks: Checks, sections: Sections) -> Iterator[Problem]:
    for needs, check in checks:
        if all(name in sections for name in needs):
            yield from check(*(sections[name] for name in needs))


MISSING_TOPOLOGY = Problem("mesh.topology", None, "is missing", "a name like v5p-512 or a shape like v5p:4x8x8")


def _target(mesh: Any, steps: Any) -> Iterator[Problem]:
    if steps is None:
        if mesh.topology is None:
            yield MISSING_TOPOLOGY
        return
    if mesh.topology is None and mesh.slices > 1:
        yield Problem("mesh.slices", mesh.slices, "counts slices of a topology, and the spec names none", "1, or a mesh.topology")
    if steps.num_cpu_devices is not None and steps.num_cpu_devices != mesh.num_devices:
        yield Problem(
            "steps.devices",
            steps.devices,
            f"asks for {steps.num_cpu_devices} devices and the mesh axes multiply to {mesh.num_devices}",
            (f"cpu:{mesh.num_devices}, or " if mesh.num_devices <= MAX_CPU_DEVICES else "")
            + f"axes that multiply to {steps.num_cpu_devices}",
        )


def check_topology_name(name: str) -> Iterator[Problem]:
    """What is wrong with the name alone: told even where the rest of the mesh is unsound, and its axes cannot be multiplied."""
    try:
        find_topology(name)
    except ValueError as error:
        yield Problem("mesh.topology", name, str(error), "a name like v5p-512 or a shape like v5p:4x8x8")


def _topology(mesh: Any) -> Iterator[Problem]:
    if mesh.topology is None:
        return
    try:
        topology = find_topology(mesh.topology, mesh.slices)
    except ValueError:
        yield from check_topology_name(mesh.topology)
        return
    if mesh.num_devices != topology.num_devices:
        product = " × ".join(f"{name} {getattr(mesh, name)}" for name in AXIS_NAMES if getattr(mesh, name) > 1) or "every axis 1"
        yield Problem(
            "mesh",
            mesh.num_devices,
            f"the axes multiply to {mesh.num_devices} ({product}) and {_count(topology)}",
            _axis_that_fits(mesh, topology.num_devices) or f"axes that multiply to {topology.num_devices}",
        )
    if mesh.data % mesh.slices:
        yield Problem(
            "mesh.data",
            mesh.data,
            f"the data axis crosses slices, and {mesh.data} is no multiple of {mesh.slices} slices",
            f"a multiple of {mesh.slices}",
        )


def _count(topology: Topology) -> str:
    slices = f"{topology.num_slices} slices of " if topology.num_slices > 1 else ""
    return f"{slices}{topology.name} ({topology.shape} chips) has {topology.num_devices} devices"


def _axis_that_fits(mesh: Any, num_devices: int) -> str | None:
    rest = mesh.num_devices // mesh.fsdp
    return f"for example fsdp {num_devices // rest}" if num_devices % rest == 0 else None


def _batch(train: Any, mesh: Any) -> Iterator[Problem]:
    total = train.per_device_batch * mesh.num_devices
    if total != round(total):
        yield Problem(
            "train.per_device_batch",
            train.per_device_batch,
            f"the global batch is {total:g} sequences ({train.per_device_batch:g} × {mesh.num_devices} devices), not a whole number",
            f"a multiple of 1/{mesh.num_devices}",
        )
    elif round(total) % mesh.batch_shards:
        yield Problem(
            "train.per_device_batch",
            train.per_device_batch,
            f"the global batch of {round(total)} sequences does not divide over data × fsdp × expert = {mesh.batch_shards}",
            f"a global batch that is a multiple of {mesh.batch_shards}",
        )


def _sequence(train: Any, mesh: Any, context: Any) -> Iterator[Problem]:
    if train.seq_len % mesh.context:
        yield Problem(
            "train.seq_len",
            train.seq_len,
            f"does not divide over the {mesh.context} ranks of the context axis",
            f"a multiple of {mesh.context}",
        )
    elif mesh.context > 1 and context.load_balance and train.seq_len % (2 * mesh.context):
        yield Problem(
            "train.seq_len",
            train.seq_len,
            f"load balance cuts it in 2 × {mesh.context} = {2 * mesh.context} chunks, and it does not divide",
            f"a multiple of {2 * mesh.context}, or context.load_balance false",
        )
    local = train.seq_len // mesh.context
    if local % train.vocab_chunks:
        yield Problem(
            "train.vocab_chunks",
            train.vocab_chunks,
            f"the {local} positions on each device do not divide in {train.vocab_chunks} pieces",
            f"a divisor of {local}",
        )
    if train.attention == "flash" and local % 128:
        yield Problem(
            "train.attention",
            "flash",
            f"the flash kernel works in blocks of 128 positions, and each device has {local}",
            "a seq_len of a multiple of 128 per context rank, or dot_product",
        )


def _experts(model: Any, mesh: Any) -> Iterator[Problem]:
    experts = model.experts
    if experts is None:
        return
    if experts.num_experts_per_token > experts.num_experts:
        yield Problem(
            "model.experts.num_experts_per_token",
            experts.num_experts_per_token,
            f"a token cannot choose {experts.num_experts_per_token} of {experts.num_experts} experts",
            f"at most {experts.num_experts}",
        )
    if experts.num_experts % experts.num_groups:
        yield Problem(
            "model.experts.num_groups",
            experts.num_groups,
            f"{experts.num_experts} experts do not divide in {experts.num_groups} groups",
            f"a divisor of {experts.num_experts}",
        )
    elif experts.num_groups > 1:
        size = experts.num_experts // experts.num_groups
        if size < 2:
            yield Problem(
                "model.experts.num_groups",
                experts.num_groups,
                "a group's score is the sum of its two best, and each has one expert",
                "groups of two or more",
            )
        if experts.num_groups_per_token > experts.num_groups:
            yield Problem(
                "model.experts.num_groups_per_token",
                experts.num_groups_per_token,
                f"cannot choose {experts.num_groups_per_token} of {experts.num_groups} groups",
                f"at most {experts.num_groups}",
            )
        elif experts.num_groups_per_token * size < experts.num_experts_per_token:
            yield Problem(
                "model.experts.num_groups_per_token",
                experts.num_groups_per_token,
                f"{experts.num_groups_per_token} groups of {size} hold fewer than the {experts.num_experts_per_token} experts of a token",
                "more groups per token",
            )
    if experts.num_experts % mesh.expert:
        yield Problem(
            "mesh.expert",
            mesh.expert,
            f"{experts.num_experts} experts do not divide over {mesh.expert} ranks",
            f"a divisor of {experts.num_experts}",
        )


def _architecture(model: Any) -> Iterator[Problem]:
    if model.first_num_dense_layers > model.num_layers:
        yield Problem(
            "model.first_num_dense_layers",
            model.first_num_dense_layers,
            f"exceeds the {model.num_layers} layers there are",
            f"at most {model.num_layers}",
        )
    if model.first_num_dense_layers and model.mlp_dim is None:
        yield Problem("model.mlp_dim", None, f"{model.first_num_dense_layers} dense layers need a width", "a positive whole number")
    if model.num_moe_layers > 0 and model.experts is None:
        yield Problem(
            "model.experts", None, f"{model.num_moe_layers} layers are MoE and there are no experts", "experts, or every layer dense"
        )
    if model.mla.qk_rope_head_dim % 2:
        yield Problem(
            "model.mla.qk_rope_head_dim", model.mla.qk_rope_head_dim, "rope turns pairs of dims, and this is odd", "an even number"
        )


def _order(context: Any) -> Iterator[Problem]:
    if not context.load_balance and context.order != "auto":
        yield Problem(
            "context.order",
            context.order,
            "is an order of load balance, and context.load_balance is false: the sequence lies in natural order",
            "auto",
        )


def _token_chunks(train: Any, mesh: Any, moe: Any) -> Iterator[Problem]:
    local = round(train.per_device_batch * mesh.num_devices) // mesh.batch_shards * (train.seq_len // mesh.context)
    if local and local % moe.dropless.token_chunks:
        yield Problem(
            "moe.dropless.token_chunks",
            moe.dropless.token_chunks,
            f"the {local} tokens on each device do not divide in {moe.dropless.token_chunks} chunks",
            f"a divisor of {local}",
        )


def _programs(model: Any, programs: Any) -> Iterator[Problem]:
    names = list(programs)
    if len(set(names)) != len(names):
        yield Problem("programs", names, "names a program twice", "each of candidate, dropless at most once")
    if "dropless" in names and model.experts is None:
        yield Problem("programs", names, "a model without experts drops nothing, so it has no dropless program", "[candidate]")


def _forced_overflow(model: Any, mesh: Any, moe: Any, steps: Any) -> Iterator[Problem]:
    if steps is None or steps.force_overflow == "none":
        return
    path, asked = "steps.force_overflow", steps.force_overflow
    if model.experts is None:
        yield Problem(path, asked, "a model without experts has no buffer to overflow", "none")
    elif mesh.expert == 1:
        yield Problem(
            path, asked, "with all experts on one rank every assignment has its row, and nothing overflows", "mesh.expert of 2 or more"
        )
    elif asked == "skewed_router" and not model.experts.bias:
        yield Problem(path, asked, "the router is skewed through its bias, and this model's has none", "none, small_factor")
    elif asked == "skewed_router" and not 0 < moe.ragged_buffer_factor <= mesh.expert / 2:
        yield Problem(
            path,
            asked,
            f"a router skewed to one rank sends it up to {mesh.expert} times the mean, "
            f"and ragged_buffer_factor {moe.ragged_buffer_factor:g} has room for that",
            f"a factor above 0 and at most {mesh.expert / 2:g}, or small_factor",
        )


def _remat(train: Any) -> Iterator[Problem]:
    for field in ("save", "offload"):
        for name in getattr(train.remat, field):
            if name not in REMAT_NAMES:
                close = nearest(name, REMAT_NAMES)
                hint = f"; did you mean {close}?" if close else ""
                yield Problem(f"train.remat.{field}", shorten(name), f"the model names no such tensor{hint}", ", ".join(REMAT_NAMES))
    both = sorted(set(train.remat.save) & set(train.remat.offload))
    if both:
        yield Problem("train.remat.offload", both, "is also to be saved on the device", "each tensor saved or offloaded, not both")


def _compiler_options(options: Any) -> Iterator[Problem]:
    for name, value in options.items():
        path = f"compiler_options.{shorten(name)}"
        if name not in ALLOWED:
            close = nearest(str(name), ALLOWED)
            hint = f"; did you mean {close}?" if close else ""
            yield Problem(path, shorten(value), f"is not an option a spec may set{hint}", ", ".join(ALLOWED))
        elif not legal_value(name, value) or value > INT32_MAX:
            yield Problem(
                path,
                shorten(value),
                f"{shorten(value)!r} is not what the option takes",
                "true or false" if ALLOWED[name] is bool else f"a whole number from 0 to {INT32_MAX:,}",
            )


_CHECKS: Checks = (
    (("mesh", "steps"), _target),
    (("mesh",), _topology),
    (("train", "mesh"), _batch),
    (("train", "mesh"), check_tokens),
    (("train", "mesh", "context"), _sequence),
    (("model",), _architecture),
    (("model", "mesh"), _experts),
    (("model", "mesh"), check_sharding),
    (("model", "mesh"), check_dims),
    (("model",), check_engram),
    (("model", "mesh"), check_engram_padding),
    (("model", "train", "mesh"), check_engram_row_ids),
    (("context",), _order),
    (("model", "context"), check_engram_order),
    (("model", "train", "mesh", "context"), check_engram_halo),
    (("train", "mesh", "moe"), _token_chunks),
    (("model", "programs"), _programs),
    (("model", "mesh", "moe", "steps"), _forced_overflow),
    (("train",), _remat),
    (("compiler_options",), _compiler_options),
)
_PRODUCTS: Checks = (
    (("model", "mesh"), check_parameters),
    (("model", "train", "mesh", "context", "moe"), check_intermediates),
)
"""Closed forms, of sizes that fit together: looked at where the checks above found nothing."""
