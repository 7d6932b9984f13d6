"""The rules from logical to mesh axes, and what is refused."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from service.models.axes import axis_size, check_divides, constrain, make_mesh, spec
from service.models.config import AXIS_NAMES, MeshAxes
from service.models.rules import RULES


def test_every_rule_names_mesh_axes() -> None:
    assert {mesh_axis for mesh_axes in RULES.values() for mesh_axis in mesh_axes} <= set(AXIS_NAMES)


def test_an_axis_without_a_rule_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"logical axis 'hedas' has no rule; known axes: .*heads"):
        spec("embed", "hedas")


def test_axes_that_collide_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'batch' and 'embed' are both cut over mesh axis 'fsdp'"):
        spec("batch", "embed")


def test_a_dim_that_does_not_divide_is_refused_with_the_number() -> None:
    with pytest.raises(ValueError, match=r"head: dim 'embed' of 90 does not divide over fsdp 4 \* expert 2 \* context 1 = 8"):
        check_divides("head", (90, 7), ("embed", None), MeshAxes(fsdp=4, expert=2).as_dict())


def test_state_is_cut_over_fsdp_expert_and_context_together() -> None:
    assert spec("embed", "heads") == PartitionSpec(("fsdp", "expert", "context"), ("tensor",))


def test_without_a_mesh_nothing_is_constrained() -> None:
    x = jnp.ones((3, 2))
    assert constrain(x, "batch", "seq") is x
    assert axis_size("context") == 1


def test_another_number_of_axes_than_dims_is_refused() -> None:
    with pytest.raises(ValueError, match=r"shape \(3, 2\) has 2 dims and 1 logical axes"):
        constrain(jnp.ones((3, 2)), "batch")


def test_a_mesh_needs_its_number_of_devices() -> None:
    with pytest.raises(ValueError, match="needs 6 devices and 8 are given"):
        make_mesh(MeshAxes(fsdp=6), jax.devices())
