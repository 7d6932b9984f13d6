"""Names that JAX leaves are read for module, phase and role; what the compiler made up is not mistaken for them."""

from __future__ import annotations

import pytest

from service.compile.scopes import parse_argument, parse_scope

SCOPES = [
    ("jit(step)/jvp(layers)/while/body/eval_jaxpr/mlp/dot_general", "layers/mlp", "forward"),
    ("jit(step)/transpose(jvp(layers))/while/body/eval_jaxpr/checkpoint/mlp/dot_general", "layers/mlp", "backward"),
    ("jit(step)/transpose(jvp(layers))/while/body/checkpoint/rematted_computation/mlp/dot_general", "layers/mlp", "remat"),
    ("jit(step)/transpose(jvp())/while/body/checkpoint/rematted_computation/moe/shard_map/all_gather", "moe", "remat"),
    ("jit(step)/optimizer/sub", "optimizer", "optimizer"),
    ("jit(step)/jvp(moe)/moe/router/reduce_sum", "moe/router", "forward"),
    ("jit(step)/jvp(loss)/jit(log_softmax)/sub", "loss", "forward"),
    ("jit(_step)/jvp(loss)/logits/brcd,dv->brcv/dot_general", "loss/logits", "forward"),
    ("jit(step)/jvp(layers)/while", "layers", "forward"),
    ("jit(step)/jvp(layers)/while/body/cond/branch_1_fun/mlp/add", "layers/mlp", "forward"),
    ("jit(step)/jvp(moe)/experts/ragged_dot_general/ragged-dot-none", "moe/experts", "forward"),
    ("jit(step)/jvp(mla)/shard_map/static_sparsity_splash/splash_mha_fwd_residuals/pallas_call", "mla", "forward"),
    ("jit(step)/jvp(loss)/mul", "loss", "forward"),
    ("jit(step)/convert_element_type", "", None),
    # Merged instructions carry several names; the first with a scope counts.
    ("jit(step)/add;jit(step)/optimizer/mul", "optimizer", "optimizer"),
    # Names of the compiler's own are no paths.
    ("broadcast.249", "", None),
    ("compare", "", None),
    ("", "", None),
]


@pytest.mark.parametrize(("op_name", "module", "phase"), SCOPES)
def test_scope_path_gives_module_and_phase(op_name: str, module: str, phase: str | None) -> None:
    scope = parse_scope(op_name)
    assert (scope.module, scope.phase, scope.role) == (module, phase, None)


ARGUMENTS = [
    ("state['params']['moe_layers_3_60']['attention']['q_up']", "moe_layers/mla", "parameters"),
    ("state['mu']['moe_layers_3_60']['moe']['expert_down']", "moe_layers/moe/experts", "optimizer_first_moment"),
    ("state['nu']['dense_layers_0_2']['mlp']['up']", "dense_layers/mlp", "optimizer_second_moment"),
    ("state['router_bias']['moe_layers_3_60']", "moe_layers", "router_bias"),
    ("state['params']['head']", "logits", "parameters"),
    ("state['params']['final_norm']['scale']", "norm", "parameters"),
    ("state['params']['mtp']['depths']['block']['moe']['shared']['down']", "mtp/moe/shared", "parameters"),
    ("state['params']['moe_layers_1_3']['feed_forward_connection']['alpha']", "moe_layers/mhc", "parameters"),
    ("state['params']['engram_1']['short_conv']['kernel']", "engram/short_conv", "parameters"),
    ("state['step']", "state", "other_arguments"),
    ("batch['tokens']", "batch", "batch"),
    # Other people's states: optax's, a list of layers, attributes.
    ("state.opt_state[0].mu['decoder']['w'].value", "decoder", "optimizer_first_moment"),
    ("state.params['layers'][3]['w']", "layers", "parameters"),
    ("batch.tokens", "batch", "batch"),
]


@pytest.mark.parametrize(("path", "module", "role"), ARGUMENTS)
def test_pytree_path_gives_module_and_role(path: str, module: str, role: str) -> None:
    scope = parse_argument(path)
    assert (scope.module, scope.phase, scope.role) == (module, "input", role)


def test_gathered_weight_keeps_its_pytree_path_as_its_name() -> None:
    assert parse_scope("state['params']['embed']").role == "parameters"
