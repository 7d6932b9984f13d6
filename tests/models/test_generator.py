"""The generator of initial weights: normal, independent by key, and the same whatever the mesh and the padding."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from service.models.axes import make_mesh
from service.models.config import MeshAxes
from service.models.generator import make_key


def test_values_are_normal_and_uncorrelated() -> None:
    x = np.asarray(jax.random.normal(make_key(3), (400, 251)))
    y = np.asarray(jax.random.normal(jax.random.fold_in(make_key(3), 1), (400, 251)))
    n = x.size
    assert abs(x.mean()) < 5 / np.sqrt(n)
    assert abs(x.std() - 1) < 5 / np.sqrt(2 * n)
    assert abs((x > 1).mean() - 0.158655) < 5 * np.sqrt(0.1335 / n)
    for a, b in ((x, y), (x[1:], x[:-1]), (x[:, 1:], x[:, :-1])):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 5 / np.sqrt(n)


def test_keys_of_other_seeds_and_splits_give_other_values() -> None:
    keys = [make_key(0), make_key(1), *jax.random.split(make_key(0), 3), jax.random.fold_in(make_key(0), 0)]
    assert len({float(jax.random.normal(key)) for key in keys}) == len(keys)


def test_rows_that_pad_an_array_change_no_other() -> None:
    whole = jax.random.normal(make_key(5), (13, 3))
    np.testing.assert_array_equal(jax.random.normal(make_key(5), (11, 3)), whole[:11])


def test_a_mesh_changes_no_value() -> None:
    mesh = make_mesh(MeshAxes(fsdp=4, context=2))
    sharding = NamedSharding(mesh, PartitionSpec("fsdp", "context"))
    cut = jax.jit(lambda: jax.random.normal(make_key(7), (8, 6)), out_shardings=sharding)()
    np.testing.assert_array_equal(cut, jax.jit(lambda: jax.random.normal(make_key(7), (8, 6)))())


def test_no_loop_stands_in_the_program_for_an_array_that_is_drawn() -> None:
    ours, threefry = (
        jax.jit(lambda key: jax.random.normal(key, (5, 3))).lower(key).as_text().count("stablehlo.while")
        for key in (make_key(0), jax.random.key(0))
    )
    assert ours == 0
    assert threefry == 1


def test_other_widths_are_refused() -> None:
    with pytest.raises(ValueError, match="32 bits at a time and 16 were asked for"):
        jax.random.bits(make_key(0), (2,), "uint16")
