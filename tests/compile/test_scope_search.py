"""A nameless value's scope is its nearest relative's, in a fixed order; its phase is that of what it is made of."""

from __future__ import annotations

from service.compile.hlo import Program
from service.compile.scope_search import FoundScope, ScopeSearch
from tests.compile.hlo_text import program_from_text

FORWARD = "jit(step)/jvp(layers)/while/body"
BACKWARD = "jit(step)/transpose(jvp(layers))/while/body/checkpoint"
REMAT = f"{BACKWARD}/rematted_computation"


def named(op_name: str) -> str:
    return f'metadata={{op_name="{op_name}"}}'


def find(program: Program, name: str, index: tuple[int, ...] = ()) -> FoundScope | None:
    instruction = next(i for i in program.instructions.values() if i.name == name)
    return ScopeSearch(program).find([(instruction.id, index)])


def phase(program: Program, name: str) -> str | None:
    instruction = next(i for i in program.instructions.values() if i.name == name)
    return ScopeSearch(program).phase_of([(instruction.id, ())])


def found(program: Program, name: str, index: tuple[int, ...] = ()) -> tuple[str, bool]:
    result = find(program, name, index)
    assert result is not None
    return result.scope.module, result.is_inferred


def test_own_name_is_taken_and_not_marked() -> None:
    program = program_from_text(f"""HloModule m

ENTRY %e {{
  %p = f32[7] parameter(0)
  ROOT %s = f32[7] sine(%p), {named(f"{FORWARD}/mlp/sin")}
}}""")
    assert found(program, "s") == ("layers/mlp", False)


def test_fused_computation_comes_before_users_and_operands() -> None:
    program = program_from_text(f"""HloModule m

%fused (a: f32[7]) -> f32[7] {{
  %a = f32[7] parameter(0)
  ROOT %n = f32[7] negate(%a), {named(f"{FORWARD}/inside/neg")}
}}

ENTRY %e {{
  %p = f32[7] parameter(0)
  %o = f32[7] sine(%p), {named(f"{FORWARD}/operand/sin")}
  %f = f32[7] fusion(%o), kind=kLoop, calls=%fused
  ROOT %u = f32[7] cosine(%f), {named(f"{FORWARD}/user/cos")}
}}""")
    assert found(program, "f") == ("layers/inside", True)


def test_output_of_a_fusion_is_what_makes_it() -> None:
    program = program_from_text(f"""HloModule m

%fused (a: f32[7]) -> (f32[7], f32[7]) {{
  %a = f32[7] parameter(0)
  %n = f32[7] negate(%a), {named(f"{FORWARD}/first/neg")}
  %s = f32[7] sine(%n), {named(f"{FORWARD}/second/sin")}
  ROOT %t = (f32[7], f32[7]) tuple(%n, %s)
}}

ENTRY %e {{
  %p = f32[7] parameter(0)
  ROOT %f = (f32[7], f32[7]) fusion(%p), kind=kLoop, calls=%fused
}}""")
    assert found(program, "f", (0,)) == ("layers/first", True)
    assert found(program, "f", (1,)) == ("layers/second", True)


def test_source_of_an_asynchronous_copy_comes_before_its_user() -> None:
    program = program_from_text(f"""HloModule m

ENTRY %e {{
  %p = f32[7] parameter(0)
  %o = f32[7] sine(%p), {named(f"{FORWARD}/source/sin")}
  %s = (f32[7], f32[7], u32[]) copy-start(%o)
  %d = f32[7] copy-done(%s)
  ROOT %u = f32[7] cosine(%d), {named(f"{FORWARD}/user/cos")}
}}""")
    assert found(program, "d") == ("layers/source", True)
    assert found(program, "s", (0,)) == ("layers/source", True)


def test_user_comes_before_operand() -> None:
    program = program_from_text(f"""HloModule m

ENTRY %e {{
  %p = f32[7] parameter(0)
  %o = f32[7] sine(%p), {named(f"{FORWARD}/operand/sin")}
  %n = f32[7] negate(%o)
  ROOT %u = f32[7] cosine(%n), {named(f"{FORWARD}/user/cos")}
}}""")
    assert found(program, "n") == ("layers/user", True)


def test_operand_is_the_last_resort_and_nothing_is_nothing() -> None:
    program = program_from_text(f"""HloModule m

ENTRY %e {{
  %p = f32[7] parameter(0)
  %o = f32[7] sine(%p), {named(f"{FORWARD}/operand/sin")}
  %n = f32[7] negate(%o)
  %lone = f32[3] parameter(1)
  %q = f32[3] negate(%lone)
  ROOT %t = (f32[7], f32[3]) tuple(%n, %q)
}}""")
    assert found(program, "n") == ("layers/operand", True)
    assert find(program, "q") is None


def test_value_that_a_loop_carries_is_what_its_body_makes() -> None:
    program = program_from_text(f"""HloModule m

%body (b: (s32[], f32[7])) -> (s32[], f32[7]) {{
  %b = (s32[], f32[7]) parameter(0)
  %i = s32[] get-tuple-element(%b), index=0
  %x = f32[7] get-tuple-element(%b), index=1
  %y = f32[7] sine(%x), {named(f"{FORWARD}/inside/sin")}
  ROOT %t = (s32[], f32[7]) tuple(%i, %y)
}}

%condition (c: (s32[], f32[7])) -> pred[] {{
  %c = (s32[], f32[7]) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  ROOT %l = pred[] compare(%i, %i), direction=LT
}}

ENTRY %e {{
  %p = (s32[], f32[7]) parameter(0)
  ROOT %w = (s32[], f32[7]) while(%p), condition=%condition, body=%body
}}""")
    assert found(program, "w", (1,)) == ("layers/inside", True)


def exchange(made_from: str) -> Program:
    """A permute without a name between a value of `made_from` and a user in the backward pass, as in a recomputed halo exchange."""
    return program_from_text(f"""HloModule m

ENTRY %e {{
  %p = f32[7] parameter(0)
  %o = f32[7] sine(%p), {named(f"{made_from}/short_conv/sin")}
  %slice = f32[7] copy(%o)
  %x = f32[7] collective-permute(%slice), source_target_pairs={{{{0,1}}}}
  ROOT %u = f32[7] cosine(%x), {named(f"{BACKWARD}/short_conv/add_any")}
}}""")


def test_phase_is_that_of_what_a_value_is_made_from_not_of_who_reads_it() -> None:
    assert phase(exchange(REMAT), "x") == "remat"
    assert phase(exchange(BACKWARD), "x") == "backward"


def test_moved_argument_is_of_the_phase_that_reads_it() -> None:
    program = program_from_text(f"""HloModule m

ENTRY %e {{
  %p = f32[7] parameter(0), {named("state['params']['layers']['w']")}
  %c = f32[7] convert(%p)
  ROOT %u = f32[7] cosine(%c), {named(f"{FORWARD}/mlp/cos")}
}}""")
    assert phase(program, "c") == "forward"
