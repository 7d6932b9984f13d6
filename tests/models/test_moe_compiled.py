"""What the TPU compiler makes of MoE layers: exchanges, collectives and peak memory, against counts and bounds known by construction."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from service.compile.catalog import find_topology
from service.compile.environment import child_environment, log_dir, temporary_dir

_COMPILE_FOR_TPU = """
import json, re, sys
import jax, jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from service.compile.catalog import find_topology
from service.compile.topology import mock_devices
from service.models.axes import make_mesh, spec
from service.models.config import ExpertsConfig, MeshAxes
from service.models.moe import Moe

case = json.loads(sys.argv[1])
experts = ExpertsConfig(**case["experts"])
axes = MeshAxes(**case["axes"])
batch, seq, dim, layers = axes.num_devices, case["seq"], case["dim"], 2
answers = {}
mesh = make_mesh(axes, mock_devices(find_topology(case["topology"])))


def sharded(shape, dtype, partition):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, partition))


with jax.set_mesh(mesh):
    abstract = jax.eval_shape(lambda: Moe(experts, dim=dim, dtype="bfloat16", param_dtype="float32", rngs=nnx.Rngs(0)))
    graph, state = nnx.split(abstract)
    leaves, tree = jax.tree.flatten(state)
    variables = jax.tree.leaves(state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
    stacked = tree.unflatten(
        sharded((layers, *leaf.shape), leaf.dtype, PartitionSpec(None, *spec(*variable.axes)))
        for leaf, variable in zip(leaves, variables, strict=True)
    )
    x = sharded((batch, seq, dim), jnp.bfloat16, spec("batch", "seq", "dim"))
    valid = sharded((batch, seq), jnp.bool_, spec("batch", "seq"))
    for name, (factor, chunks) in case["runs"].items():

        def total(state, x, valid):
            @jax.checkpoint
            def layer(x, state):
                moe = nnx.merge(graph, state)
                y, metrics = moe(x, valid, buffer_factor=factor, token_chunks=chunks, use_ragged_all_to_all=True)
                return x + y, metrics.balance_loss

            y, losses = jax.lax.scan(layer, x, state)
            return jnp.mean(y.astype(jnp.float32) ** 2) + jnp.sum(losses)

        compiled = jax.jit(jax.value_and_grad(total, argnums=(0, 1))).trace(stacked, x, valid).lower().compile()
        memory, text = compiled.memory_analysis(), compiled.as_text()

        def shapes(opcode):
            found = []
            for line in text.splitlines():
                match = re.search(r" = (.*?) " + opcode + r"(-start)?\\(", line)
                if match:
                    # A start yields (inputs, output, ...): the first array is what is sent.
                    found.append(re.search(r"\\w+\\[[\\d,]*\\]", match.group(1)).group(0))
            return sorted(found)

        answers[name] = {
            "peak": memory.peak_memory_in_bytes,
            "live_through": memory.argument_size_in_bytes + memory.output_size_in_bytes,
            "ragged_all_to_all": shapes("ragged-all-to-all"),
            "all_gather": shapes("all-gather"),
            "reduce_scatter": shapes("reduce-scatter"),
        }
print(json.dumps(answers))
"""


def compile_for_tpu(tmp_path: Path, case: dict[str, Any]) -> dict[str, Any]:
    for directory in (temporary_dir(tmp_path), log_dir(tmp_path)):
        directory.mkdir()
    run = subprocess.run(
        [sys.executable, "-c", _COMPILE_FOR_TPU, json.dumps(case)],
        env=child_environment(find_topology(case["topology"]), tmp_path),
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout)


@pytest.mark.tpu
@pytest.mark.parametrize("topology", ["v5p:2x2x2", pytest.param("v5e:2x4", marks=pytest.mark.slow)])
def test_a_compiled_layer_exchanges_seven_times_and_holds_three_row_buffers(tmp_path: Path, topology: str) -> None:
    num_experts, chosen, width, seq, dim, ranks = 16, 4, 256, 2048, 512, 4
    case = {
        "topology": topology,
        "axes": {"fsdp": 2, "expert": ranks},
        "seq": seq,
        "dim": dim,
        "experts": {"num_experts": num_experts, "num_experts_per_token": chosen, "expert_dim": width},
        "runs": {"dropless": (-1.0, 1), "chunked": (-1.0, 4), "candidate": (0.25, 1)},
    }
    compiled = compile_for_tpu(tmp_path, case)
    weight_gather = f"{num_experts // ranks},{width},{dim}]"
    for program in compiled.values():
        # Forward: rows there and back. Backward: rows, cotangents and weights there, the gradients of rows and weights back. None of them
        # twice, although the layer is rematerialised.
        assert len(program["ragged_all_to_all"]) == 7
        assert len(program["reduce_scatter"]) == 3
        gathers = {shape for shape in program["all_gather"] if shape.endswith(weight_gather)}
        assert gathers
        assert all(shape.startswith("bf16") for shape in gathers), "weights are cast before they are gathered"
    assignments = seq * chosen
    row_buffer = assignments * ranks * dim * 2
    sorted_rows = assignments * dim * 2
    weights = 3 * (num_experts // ranks) * width * dim * 2
    temporary = {name: program["peak"] - program["live_through"] for name, program in compiled.items()}
    # Received rows, and their cotangents in the layout of the links and in that of the matmul; the sorted rows of both and the
    # activations beside them; gathered weights and their gradients.
    assert 2 * row_buffer < temporary["dropless"] < 3 * row_buffer + 4 * sorted_rows + 2 * weights
    assert temporary["candidate"] < temporary["chunked"] < temporary["dropless"] / 2
