"""A comparison accounts for every byte between two peaks, matches buffers across compiles, and says what is not comparable."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.compile.diff import diff_reports
from service.diff_records import ReportDiff
from service.records import Buffer, Collective, HaloUse, Report, ReportStatus, Toolchain

CLASSES = ("parameters", "saved_activations", "temporaries")


def buffer(
    size: int, *, scope: str = "jit(step)/a", shape: tuple[int, ...] = (3, 5), class_: str = "temporaries", name: str = "fusion.1"
) -> Buffer:
    return Buffer(
        name=name,
        class_=class_,
        module=scope.rsplit("/", 1)[-1],
        phase="forward",
        dtype="f32",
        shape=shape,
        layout="{1,0}",
        logical_bytes=size,
        padded_bytes=size,
        scope=scope,
        source=None,
        start_index=1,
        end_index=2,
    )


def report(*buffers: Buffer, unlisted: int = 0, num_unlisted: int = 0, **fields: Any) -> Report:
    """A report whose classes and modules are those of its buffers; bytes that are in no listed buffer are temporaries."""
    classes: dict[str, int] = {"temporaries": unlisted} if unlisted else {}
    modules: dict[str, int] = {"unattributed": unlisted} if unlisted else {}
    for each in buffers:
        classes[each.class_] = classes.get(each.class_, 0) + each.padded_bytes
        modules[each.module] = modules.get(each.module, 0) + each.padded_bytes
    peak = sum(classes.values())
    measured = {"peak_bytes": peak, "num_buffers_at_peak": len(buffers) + num_unlisted, "allocated_bytes": peak + 64}
    given_fields = {"program": "candidate", "status": ReportStatus.OK, "depth": "memory", **measured, **fields}
    return Report(buffers=buffers, classes=classes, modules=modules, **given_fields)


def changes(diff: ReportDiff) -> list[tuple[str, str, int]]:
    return [(entry.change, entry.scope, entry.delta_bytes) for entry in diff.buffers if entry.change != "equal"]


buffers = st.lists(
    st.builds(
        buffer,
        st.integers(min_value=1, max_value=10**6),
        scope=st.sampled_from(["", "jit(step)/a", "jit(step)/b", "jit(step)/b/c"]),
        shape=st.sampled_from([(3, 5), (7,), (3, 9)]),
        class_=st.sampled_from(CLASSES),
    ),
    max_size=8,
)


@given(buffers, buffers, st.integers(0, 999), st.integers(0, 999))
def test_parts_sum_to_the_difference_of_the_peaks(left: list[Buffer], right: list[Buffer], left_rest: int, right_rest: int) -> None:
    base, head = report(*left, unlisted=left_rest), report(*right, unlisted=right_rest)
    diff = diff_reports(base, head)
    assert base.peak_bytes is not None
    assert head.peak_bytes is not None
    difference = head.peak_bytes - base.peak_bytes
    assert sum(part.delta or 0 for part in diff.classes) == difference
    assert sum(part.delta or 0 for part in diff.modules) == difference
    assert sum(entry.delta_bytes for entry in diff.buffers) == difference
    assert sum(entry.base_count for entry in diff.buffers) == len(left)
    assert sum(entry.head_count for entry in diff.buffers) == len(right)


def change_of(base: Report, head: Report, *, seq_len: int = 8, **remat: Any) -> list[str]:
    """The fields that the findings of a change of `remat` and `seq_len` name."""
    before: dict[str, Any] = {"policy": "full", "save": []}
    specs = [
        {"scenario": name, "train": {"seq_len": length, "remat": kept}}
        for name, length, kept in (("a", 8, before), ("b", seq_len, before | remat))
    ]
    return [finding.spec_field or "" for finding in diff_reports(base, head, base_spec=specs[0], head_spec=specs[1]).findings]


def test_a_policy_that_changes_no_byte_is_found_against_the_earlier_report() -> None:
    def saved(size: int) -> Report:
        return report(buffer(100, class_="parameters"), buffer(size, class_="saved_activations"))

    assert change_of(saved(30), saved(30), save=["mla_q"]) == ["train.remat.save"]
    assert change_of(saved(30), saved(20), save=["mla_q"]) == []
    assert change_of(saved(30), saved(30)) == []
    assert change_of(saved(30), saved(30), save=["mla_q"], seq_len=16) == []


@given(buffers, st.integers(0, 999))
def test_report_compared_with_itself_has_no_change(left: list[Buffer], rest: int) -> None:
    base = report(*left, unlisted=rest)
    diff = diff_reports(base, base)
    assert changes(diff) == []
    assert sum(entry.delta_bytes for entry in diff.buffers) == 0
    assert diff.is_comparable
    assert diff.collectives == ()


def test_buffer_is_known_again_under_another_instruction_name() -> None:
    diff = diff_reports(report(buffer(100, name="fusion.1")), report(buffer(100, name="fusion.77")))
    assert changes(diff) == []


def test_buffer_of_one_scope_grew() -> None:
    diff = diff_reports(report(buffer(60, shape=(3, 5))), report(buffer(108, shape=(3, 9))))
    assert changes(diff) == [("grew", "jit(step)/a", 48)]
    assert (diff.buffers[0].base_shape, diff.buffers[0].head_shape) == ((3, 5), (3, 9))
    assert changes(diff_reports(report(buffer(108, shape=(3, 9))), report(buffer(60)))) == [("shrank", "jit(step)/a", -48)]


def test_buffer_of_the_same_shape_moved_to_another_scope() -> None:
    diff = diff_reports(report(buffer(60, scope="jit(step)/a")), report(buffer(60, scope="jit(step)/b")))
    assert changes(diff) == [("moved", "jit(step)/b", 0)]


def test_buffers_appear_and_go() -> None:
    left = report(buffer(60), buffer(500, scope="jit(step)/old", shape=(125,)))
    right = report(buffer(60), buffer(700, scope="jit(step)/new", shape=(175,), class_="saved_activations"))
    assert changes(diff_reports(left, right)) == [("appeared", "jit(step)/new", 700), ("gone", "jit(step)/old", -500)]


def test_one_more_of_several_alike_buffers_counts_as_growth() -> None:
    diff = diff_reports(report(buffer(60)), report(buffer(60), buffer(60)))
    assert changes(diff) == [("grew", "jit(step)/a", 60)]
    assert (diff.buffers[0].base_count, diff.buffers[0].head_count) == (1, 2)


def test_buffers_below_the_lists_are_one_entry() -> None:
    diff = diff_reports(report(buffer(60), unlisted=30, num_unlisted=5), report(buffer(60), unlisted=42, num_unlisted=7))
    assert changes(diff) == [("unlisted", "", 12)]
    assert (diff.buffers[0].base_count, diff.buffers[0].head_count) == (5, 7)


def test_buffers_below_the_lists_that_only_became_more_are_told_too() -> None:
    diff = diff_reports(report(buffer(60), unlisted=30, num_unlisted=5), report(buffer(60), unlisted=30, num_unlisted=6))
    assert changes(diff) == [("unlisted", "", 0)]


def collective(**fields: Any) -> Collective:
    defaults = {
        "kind": "all-gather",
        "is_known": True,
        "axes": ("fsdp",),
        "group_size": 2,
        "link": "ici",
        "module": "layers/mlp",
        "phase": "forward",
        "is_compiler_made": True,
        "static_count": 1,
        "per_step_count": 6,
        "payload_bytes": 600,
        "wire_bytes": 300,
        "wire_factor": "(n-1)/n",
        "link_seconds": None,
        "names": ("all-gather.1",),
    }
    return Collective(**{**defaults, **fields})


def test_collectives_that_differ_are_listed_with_their_deltas() -> None:
    base = report(collectives=(collective(), collective(kind="all-reduce")))
    head = report(collectives=(collective(per_step_count=12, payload_bytes=1200, wire_bytes=600), collective(kind="all-reduce")))
    (diff,) = diff_reports(base, head).collectives
    assert (diff.kind, diff.per_step_count.delta, diff.wire_bytes.delta) == ("all-gather", 6, 300)


def test_collective_that_went_counts_down_to_nothing() -> None:
    (diff,) = diff_reports(report(collectives=(collective(),)), report()).collectives
    assert (diff.static_count.head, diff.wire_bytes.head, diff.wire_bytes.delta) == (0, 0, -300)


def test_unknown_count_stays_unknown() -> None:
    unknown = collective(per_step_count=None, payload_bytes=None, wire_bytes=None, unknown_reason="its bound is data")
    (diff,) = diff_reports(report(collectives=(collective(),)), report(collectives=(unknown,))).collectives
    assert (diff.per_step_count.head, diff.per_step_count.delta, diff.wire_bytes.delta) == (None, None, None)


def halo(payload: int | None, phase: str = "forward") -> HaloUse:
    return HaloUse(
        name="engram_conv",
        phase=phase,
        static_count=2,
        per_step_count=2,
        payload_bytes=payload,
        wire_bytes=payload,
        total_wire_bytes=payload,
        expected_payload_bytes=72,
        verdict="equal",
        gather_bytes=900,
    )


def test_halo_is_compared_by_phase() -> None:
    diff = diff_reports(report(halo=(halo(72), halo(72, "remat"))), report(halo=(halo(72), halo(144, "backward"))))
    assert [(part.name, part.delta) for part in diff.halo] == [
        ("engram_conv, forward", 0),
        ("engram_conv, remat", -72),
        ("engram_conv, backward", 144),
    ]


def toolchain(**fields: Any) -> Toolchain:
    versions = {"jax": "0.12.0.1", "jaxlib": "0.12.0.1", "libtpu": "0.0.52", "flax": "0.12.12", "xprof": None, "extractor": "1"}
    return Toolchain(**{**versions, "model_source": "aa", **fields})


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"toolchain": toolchain(libtpu="0.0.53")}, "toolchain.libtpu"),
        ({"toolchain": toolchain(extractor="2")}, "toolchain.extractor"),
        (
            {"toolchain": toolchain(compiler_options={"xla_tpu_max_hbm_size_mib": 1400})},
            "toolchain.compiler_options.xla_tpu_max_hbm_size_mib",
        ),
        ({"topology": {"jax_name": "v5p:4x4x8"}}, "topology.jax_name"),
        ({"program": "dropless"}, "program"),
        ({"depth": "full"}, "depth"),
    ],
)
def test_what_is_not_the_codes_makes_it_incomparable(fields: dict[str, Any], path: str) -> None:
    base = {"toolchain": toolchain(), "topology": {"jax_name": "v5p:4x8x8"}}
    diff = diff_reports(report(**base), report(**{**base, **fields}))
    assert not diff.is_comparable
    assert [field.path for field in diff.incomparable] == [path]


def test_changed_model_source_is_the_codes_change() -> None:
    assert diff_reports(report(toolchain=toolchain()), report(toolchain=toolchain(model_source="bb"))).is_comparable


def test_spec_fields_that_differ_are_named_by_path() -> None:
    left = {"train": {"seq_len": 1024, "remat": {"policy": "full"}}, "mesh": {"fsdp": 2}}
    right = {"train": {"seq_len": 2048, "remat": {"policy": "full", "save": ["mla_q"]}}, "mesh": {"fsdp": 2}}
    diff = diff_reports(report(), report(), base_spec=left, head_spec=right)
    assert [(field.path, field.base, field.head) for field in diff.spec] == [
        ("train.seq_len", 1024, 2048),
        ("train.remat.save", None, ["mla_q"]),
    ]


def test_report_that_measured_nothing_is_refused() -> None:
    failed = Report(program="candidate", status=ReportStatus.FAILED, depth="memory")
    with pytest.raises(ValueError, match=r"the head report of program 'candidate' has status failed and no peak"):
        diff_reports(report(), failed)
