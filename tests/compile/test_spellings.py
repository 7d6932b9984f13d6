"""Every way the compiler writes a collective is read alike: hand-made variants, parsed by XLA's own parser."""

from __future__ import annotations

import pytest

from service.compile.collective_report import Links, group_collectives, sum_collectives
from service.compile.collectives import CollectiveInstance, is_collective_result
from service.errors import AnalysisError
from tests.compile.hlo_text import collectives_in, program_from_text, recorded

AXES = {"fsdp": 2, "expert": 2, "context": 2}

SUM = """%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}
"""


def read(entry: str, *, before: str = "", axes: dict[str, int] | None = None, num_slices: int = 1) -> list[CollectiveInstance]:
    """The collectives of a module with these computations before the entry and these lines in it."""
    program = program_from_text(f"HloModule m, num_partitions=8\n\n{SUM}\n{before}\nENTRY %e {{\n{entry}\n}}\n")
    return collectives_in(program, axes or AXES, num_slices=num_slices)


def facts(instances: list[CollectiveInstance]) -> list[tuple[str, tuple[str, ...] | None, int | None]]:
    return [(instance.kind, instance.reach.axes, instance.payload_bytes) for instance in instances]


GATHERED = 3 * 5 * 4 * 2

GATHERS = {
    "synchronous": """  %p = f32[3,5] parameter(0)
  ROOT %g = f32[6,5] all-gather(%p), channel_id=1, replica_groups={{0,2},{1,3},{4,6},{5,7}}, dimensions={0}, use_global_device_ids=true""",
    "start and done": """  %p = f32[3,5] parameter(0)
  %s = (f32[3,5], f32[6,5]) all-gather-start(%p), channel_id=1, replica_groups={{0,2},{1,3},{4,6},{5,7}}, dimensions={0}
  ROOT %g = f32[6,5] all-gather-done(%s)""",
    "iota groups": """  %p = f32[3,5] parameter(0)
  ROOT %g = f32[6,5] all-gather(%p), channel_id=1, replica_groups=[4,2]<=[2,2,2]T(0,2,1), dimensions={0}, use_global_device_ids=true""",
    "groups by mesh axis": """  %p = f32[3,5] parameter(0)
  ROOT %g = f32[6,5] all-gather(%p), channel_id=1, replica_groups=mesh['a'=2,'b'=2,'c'=2] {'b'}, dimensions={0}""",
    "groups by part of a mesh axis": """  %p = f32[3,5] parameter(0)
  ROOT %g = f32[6,5] all-gather(%p), channel_id=1, replica_groups=mesh['all'=8] {'all':(2)2}, dimensions={0}, use_global_device_ids=true""",
}


@pytest.mark.parametrize("spelling", GATHERS)
def test_spelling_of_an_all_gather_is_one_collective_with_the_results_bytes(spelling: str) -> None:
    assert facts(read(GATHERS[spelling])) == [("all-gather", ("expert",), GATHERED)]


WRAPPED = {
    "async-start": (
        """%wrapped (w: f32[3,5]) -> f32[6,5] {
  %w = f32[3,5] parameter(0)
  ROOT %g = f32[6,5] all-gather(%w), channel_id=1, replica_groups=[4,2]<=[8], dimensions={0}, use_global_device_ids=true
}""",
        """  %p = f32[3,5] parameter(0)
  %s = ((f32[3,5]), f32[6,5], u32[]) async-start(%p), calls=%wrapped
  %u = ((f32[3,5]), f32[6,5], u32[]) async-update(%s)
  ROOT %d = f32[6,5] async-done(%u)""",
    ),
    "fusion": (
        """%fused (w: f32[3,5]) -> f32[6,5] {
  %w = f32[3,5] parameter(0)
  %g = f32[6,5] all-gather(%w), channel_id=1, replica_groups=[4,2]<=[8], dimensions={0}, use_global_device_ids=true
  ROOT %n = f32[6,5] negate(%g)
}""",
        """  %p = f32[3,5] parameter(0)
  ROOT %f = f32[6,5] fusion(%p), kind=kCustom, calls=%fused""",
    ),
}


@pytest.mark.parametrize("spelling", WRAPPED)
def test_wrapped_collective_is_found_once(spelling: str) -> None:
    before, entry = WRAPPED[spelling]
    assert facts(read(entry, before=before)) == [("all-gather", ("context",), GATHERED)]


def test_chain_of_fusions_that_share_a_gather_counts_it_once() -> None:
    config = 'backend_config={"async_collective_fusion_config":{"flag_start":"%s","flag_end":"%s"}}'
    gather = "f32[6,5] all-gather(%w), channel_id=7, replica_groups=[4,2]<=[8], dimensions={0}, use_global_device_ids=true, "
    before = "\n".join(
        f"""%part{part} (w: f32[3,5]) -> (f32[3,5], f32[6,5]) {{
  %w = f32[3,5] parameter(0)
  %g = {gather}{config % flags}
  ROOT %t = (f32[3,5], f32[6,5]) tuple(%w, %g)
}}"""
        for part, flags in enumerate(((-1, -1), (2, 15), (2, 15)))
    )
    chain = """  %p = f32[3,5] parameter(0)
  %async-collective-start = (f32[3,5], f32[6,5]) fusion(%p), kind=kCustom, calls=%part0
  %x0 = f32[3,5] get-tuple-element(%async-collective-start), index=0
  %middle = (f32[3,5], f32[6,5]) fusion(%x0), kind=kCustom, calls=%part1
  %x1 = f32[3,5] get-tuple-element(%middle), index=0
  %async-collective-done = (f32[3,5], f32[6,5]) fusion(%x1), kind=kCustom, calls=%part2
  ROOT %r = f32[6,5] get-tuple-element(%async-collective-done), index=1"""
    found = read(chain, before=before)
    assert [(instance.name, *fact) for instance, fact in zip(found, facts(found), strict=True)] == [
        ("async-collective-start", "all-gather", ("context",), GATHERED)
    ]


def test_start_of_a_permute_counts_its_operand_not_its_tuple() -> None:
    pairs = "source_target_pairs={{0,1},{2,3},{4,5},{6,7}}"
    found = read(
        f"""  %p = bf16[2,9,40] parameter(0)
  %s = (bf16[2,9,40], bf16[2,9,40], u32[], u32[]) collective-permute-start(%p), channel_id=1, {pairs}
  ROOT %d = bf16[2,9,40] collective-permute-done(%s)"""
    )
    assert facts(found) == [("collective-permute", ("context",), 2 * 9 * 40 * 2)]
    assert found[0].wire_bytes == 2 * 9 * 40 * 2


def test_permute_that_moves_nothing_sends_nothing() -> None:
    found = read(
        """  %p = f32[7] parameter(0)
  ROOT %r = f32[7] collective-permute(%p), channel_id=1, source_target_pairs={{0,0},{1,1}}"""
    )
    assert (found[0].reach.axes, found[0].wire_bytes) == ((), 0)


def test_all_reduce_of_several_tensors_sums_their_bytes() -> None:
    found = read(
        """  %p = f32[3,5] parameter(0)
  %q = f32[7] parameter(1)
  ROOT %r = (f32[3,5], f32[7]) all-reduce(%p, %q), channel_id=1, replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%sum"""
    )
    assert facts(found) == [("all-reduce", ("fsdp", "expert", "context"), (15 + 7) * 4)]
    assert found[0].wire_bytes == 2 * 7 / 8 * 22 * 4


def test_no_groups_means_every_device() -> None:
    found = read(
        """  %p = f32[7] parameter(0)
  ROOT %r = f32[7] all-reduce(%p), channel_id=1, replica_groups={}, use_global_device_ids=true, to_apply=%sum"""
    )
    assert found[0].reach.axes == ("fsdp", "expert", "context")


def rows_of_an_all_reduce(num_rows: int) -> list[CollectiveInstance]:
    """A fusion that sums f32[8,5] over pairs of devices and keeps the first rows."""
    return read(
        f"""  %p = f32[8,5] parameter(0)
  ROOT %f = f32[{num_rows},5] fusion(%p), kind=kCustom, calls=%keep""",
        before=f"""%keep (w: f32[8,5]) -> f32[{num_rows},5] {{
  %w = f32[8,5] parameter(0)
  %z = s32[] constant(0)
  %a = f32[8,5] all-reduce(%w), channel_id=1, replica_groups=[4,2]<=[8], use_global_device_ids=true, to_apply=%sum
  ROOT %d = f32[{num_rows},5] dynamic-slice(%a, %z, %z), dynamic_slice_sizes={{{num_rows},5}}
}}""",
    )


def test_plain_reduce_scatter_and_its_fusion_are_one_kind() -> None:
    plain = read(
        """  %p = f32[8,5] parameter(0)
  ROOT %r = f32[4,5] reduce-scatter(%p), channel_id=1, replica_groups=[4,2]<=[8], dimensions={0}, to_apply=%sum"""
    )
    fused = rows_of_an_all_reduce(4)
    assert facts(plain) == facts(fused) == [("reduce-scatter", ("context",), 8 * 5 * 4)]
    assert plain[0].wire_bytes == fused[0].wire_bytes == 80


def test_a_slice_that_is_not_its_members_share_leaves_an_all_reduce_what_it_is() -> None:
    found = rows_of_an_all_reduce(1)
    assert facts(found) == [("all-reduce", ("context",), 8 * 5 * 4)]
    assert found[0].wire_bytes == 160


def test_group_that_follows_no_axis_says_so() -> None:
    found = read(
        """  %p = f32[7] parameter(0)
  ROOT %r = f32[7] all-reduce(%p), channel_id=1, replica_groups={{0,3},{1,2},{4,7},{5,6}}, use_global_device_ids=true, to_apply=%sum"""
    )
    (record,) = group_collectives(found, Links("v5e", 1))
    assert (record.axes, record.group_size, record.payload_bytes) == (None, 2, 28)
    assert record.unknown_reason == "its groups of 2 follow no whole mesh axes"


def test_part_of_an_axis_is_not_the_axis() -> None:
    found = read(
        """  %p = f32[7] parameter(0)
  ROOT %r = f32[7] all-reduce(%p), channel_id=1, replica_groups={{0,1},{2,3},{4,5},{6,7}}, use_global_device_ids=true, to_apply=%sum""",
        axes={"fsdp": 2, "context": 4},
    )
    assert found[0].reach.axes is None


def test_groups_that_contradict_the_mesh_fail_the_analysis() -> None:
    text = """  %p = f32[7] parameter(0)
  ROOT %r = f32[7] all-reduce(%p), channel_id=1, replica_groups={{0,1},{2,3}}, use_global_device_ids=true, to_apply=%sum"""
    with pytest.raises(AnalysisError, match="has 8, each once"):
        read(text)


def test_collective_that_yields_what_its_groups_cannot_make_fails_the_analysis() -> None:
    program = recorded("v5e-2x4.all_gather_over_two_axes")
    gather = next(i for i in program.instructions.values() if i.opcode == "all-gather")
    gather.shape.dimensions[0] //= 2
    try:
        with pytest.raises(AnalysisError, match="is given 1048576 elements and yields 2097152 over groups of 4"):
            collectives_in(program, AXES)
    finally:
        gather.shape.dimensions[0] *= 2


def test_opcode_of_the_family_that_is_not_known_is_shown_as_unknown() -> None:
    program = recorded("v5e-2x4.all_gather_over_two_axes")
    gather = next(i for i in program.instructions.values() if i.opcode == "all-gather")
    program.instructions[gather.id] = gather._replace(opcode="all-juggle")
    try:
        found = collectives_in(program, AXES)
    finally:
        program.instructions[gather.id] = gather
    (record,) = group_collectives(found, Links("v5e", 1))
    assert (record.kind, record.is_known, record.static_count, record.per_step_count) == ("all-juggle", False, 1, 1)
    assert (record.payload_bytes, record.wire_bytes, record.link_seconds) == (None, None, None)
    assert "all-juggle is not known" in (record.unknown_reason or "")
    assert sum_collectives(found, Links("v5e", 1)).ici_wire_bytes is None


def test_instruction_with_groups_is_of_the_family_whatever_it_is_called() -> None:
    program = recorded("v5e-2x4.all_gather_over_two_axes")
    gather = next(i for i in program.instructions.values() if i.opcode == "all-gather")
    program.instructions[gather.id] = gather._replace(opcode="exchange-everything")
    try:
        assert [(i.kind, i.is_known) for i in collectives_in(program, AXES)] == [("exchange-everything", False)]
    finally:
        program.instructions[gather.id] = gather


def test_host_transfers_are_no_collectives() -> None:
    assert (
        read(
            """  %p = f32[7] parameter(0)
  %t = token[] after-all()
  %s = (f32[7], u32[], token[]) send(%p, %t), channel_id=1, is_host_transfer=true
  %d = token[] send-done(%s), channel_id=1, is_host_transfer=true
  ROOT %n = f32[7] negate(%p)"""
        )
        == []
    )


def test_collectives_between_slices_are_read_from_their_sends() -> None:
    axes = {"data": 2, "fsdp": 2, "context": 2}
    found = collectives_in(recorded("v5p-2x2x1x2.crossing_slices"), axes, num_slices=2)
    shard = 48 * 1024 * 4
    across = sorted((i.kind, i.reach.axes, i.payload_bytes) for i in found if i.reach.link == "dcn")
    assert across == [
        # Half of the sum over both axes: the other half is scattered over fsdp before, and gathered after.
        ("all-gather", ("data",), 2 * shard),
        ("all-reduce", ("data",), shard // 2),
        ("all-to-all", ("data",), shard),
        ("collective-permute", ("data",), shard),
        ("reduce-scatter", ("data",), shard),
    ]
    within = sorted((i.kind, i.reach.axes) for i in found if i.reach.link == "ici")
    assert within == [("all-gather", ("fsdp",)), ("reduce-scatter", ("fsdp",))]


def test_target_between_slices_that_cannot_be_read_fails_the_analysis() -> None:
    attributes = 'frontend_attributes={_xla_megascale_transfer_type="ALL_REDUCE",_xla_megascale_target="TARGET"}'
    text = f"""  %p = f32[7] parameter(0)
  %t = token[] after-all()
  ROOT %s = (f32[7], u32[], token[]) send(%p, %t), channel_id=1, is_host_transfer=true, {attributes}"""
    with pytest.raises(AnalysisError, match="no known spelling"):
        read(text.replace("TARGET", "everyone"), num_slices=2)
    with pytest.raises(AnalysisError, match="2 slices of 4 devices"):
        read(text.replace("TARGET", "{1,2,3}x{0:3}"), num_slices=2)


def test_wider_element_types_do_not_change_what_a_count_means() -> None:
    found = read(
        """  %p = s4[8,5]{1,0:E(4)} parameter(0)
  ROOT %r = s4[8,5]{1,0:E(4)} all-to-all(%p), channel_id=1, replica_groups=[4,2]<=[8], dimensions={0}"""
    )
    assert facts(found) == [("all-to-all", ("context",), 20)]


def test_only_the_output_that_a_collective_makes_came_over_the_links() -> None:
    """A fusion that carries a piece of a running all-gather beside its own matmul, as the compiler writes them."""
    program = program_from_text(
        f"""HloModule m, num_partitions=8

{SUM}
%piece (w: f32[3,5], x: f32[4,3]) -> (f32[4,5], f32[3,5], f32[5,6]) {{
  %w = f32[3,5] parameter(0)
  %x = f32[4,3] parameter(1)
  %d = f32[4,5] dot(%x, %w), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  %g = f32[6,5] all-gather(%w), channel_id=1, replica_groups=[4,2]<=[8], dimensions={{0}}, use_global_device_ids=true
  %t = f32[5,6] transpose(%g), dimensions={{1,0}}
  ROOT %r = (f32[4,5], f32[3,5], f32[5,6]) tuple(%d, %w, %t)
}}

%half (w: f32[3,5]) -> f32[6,5] {{
  %w = f32[3,5] parameter(0)
  %g = f32[6,5] all-gather(%w), channel_id=2, replica_groups=[4,2]<=[8], dimensions={{0}}, use_global_device_ids=true
  ROOT %c = f32[6,5] custom-call(%g), custom_call_target="AsyncCollectiveStart"
}}

ENTRY %e {{
  %p = f32[3,5] parameter(0)
  %q = f32[4,3] parameter(1)
  %f = (f32[4,5], f32[3,5], f32[5,6]) fusion(%p, %q), kind=kOutput, calls=%piece
  %h = f32[6,5] fusion(%p), kind=kCustom, calls=%half
  ROOT %n = f32[3,5] negate(%p)
}}
"""
    )
    by_name = {instruction.name: instruction.id for instruction in program.instructions.values()}
    assert [is_collective_result(program, (by_name["f"], (output,))) for output in range(3)] == [False, False, True]
    assert is_collective_result(program, (by_name["h"], ()))
    assert not is_collective_result(program, (by_name["n"], ()))
