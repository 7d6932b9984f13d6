"""What the partitioner says of a tensor it gathers whole is read in every spelling, and what it does not say stays unknown."""

from __future__ import annotations

import pytest

from service.compile.resharding import find_reshardings


def warning(before: str, operation: str = "%add.4 = bf16[1,6,4,10]{3,2,1,0} add(%a, %b)", scope: str = "jit(step)/jvp(mhc)/add") -> str:
    metadata = f', metadata={{op_name="{scope}" stack_frame_id=3}}' if scope else ""
    return (
        "W1130 08:07:23.98 9882 spmd_partitioner.cc:797] [SPMD] Involuntary full rematerialization. The compiler cannot go from sharding "
        f"{{{before}}} to {{mesh['fsdp'=2,'context'=3], [{{}}, {{}}, {{'fsdp', 'context'}}]}} efficiently for HLO operation {operation}"
        f"{metadata}. As the last resort, SPMD will replicate the tensor and then partition it, which is inefficient.\n"
    )


PIECE_BYTES = 6 * 4 * 10 * 2
NAMED = "mesh['data'=1,'fsdp'=2,'context'=3], [{'fsdp'}, {'context'}, {}, {}]"


@pytest.mark.parametrize(
    ("before", "pieces"),
    [
        (NAMED, 6),
        ("mesh['data'=1,'fsdp'=2,'context'=3], [{}, {'fsdp', 'context'}, {}, {}]", 6),
        ("mesh['fsdp'=4,'context'=3], [{'fsdp':(1)2}, {}, {}, {}]", 2),
        ("mesh['fsdp'=2,'context'=3], [{}, {}, {}, {}]", 1),
        ("devices=[2,3,1,1]<=[6]", 6),
        ("devices=[1,3,1,1,2]<=[2,3]T(1,0) last_tile_dim_replicate", 3),
        ("maximal device=0", None),
    ],
)
def test_gathered_bytes_are_the_piece_times_the_pieces(before: str, pieces: int | None) -> None:
    (found,) = find_reshardings(warning(before))
    assert (found.operation, found.piece, found.module) == ("add.4", "bf16[1,6,4,10]", "mhc")
    assert found.gathered_bytes == (None if pieces is None else pieces * PIECE_BYTES)


def test_an_operation_is_told_once_and_others_beside_it() -> None:
    other = warning(NAMED, "%reduce = pred[7]{0} reduce(%c)", scope="")
    first, second = find_reshardings("unrelated\n" + warning(NAMED) + other + warning(NAMED))
    assert (first.operation, second.operation) == ("add.4", "reduce")
    assert (second.gathered_bytes, second.op_name, second.module) == (6 * 7, None, None)


def test_what_the_warning_does_not_say_is_unknown() -> None:
    (unknown_type,) = find_reshardings(warning(NAMED, "%add.4 = f7[3]{0} add(%a, %b)", scope="jit(step)/transpose(jvp())/reduce_sum"))
    assert (unknown_type.gathered_bytes, unknown_type.module) == (None, None)
    (bare,) = find_reshardings("[SPMD] Involuntary full rematerialization. Something new\n")
    assert (bare.operation, bare.piece, bare.gathered_bytes, bare.op_name, bare.module) == (None, None, None, None, None)
