"""Reports with the shape of real ones, made from a few numbers, for pages and the command line: every breakdown sums to its peak."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import Any

from service.records import Buffer, Job, JobStatus, Report, ReportStatus, Timeline, TimelinePoint, TimelineSpan, Timings, Toolchain

MIB = 1 << 20
GIB = 1 << 30
V5P_CAPACITY = 102_786_657_280
NUM_POINTS = 400
PEAK_INDEX = 261
CREATED = datetime(2026, 3, 4, 9, 30, tzinfo=UTC)

TOOLCHAIN = Toolchain(
    jax="0.12.0.1",
    jaxlib="0.12.0.1",
    libtpu="0.0.52",
    flax="0.12.12",
    xprof=None,
    extractor="1",
    model_source="9f" * 32,
    topology_arguments={"topology_name": "v5p:4x8x8"},
)

TOPOLOGY = {
    "name": "v5p-512",
    "family": "v5p",
    "shape": "4x8x8",
    "num_slices": 1,
    "num_chips": 256,
    "num_devices": 256,
    "devices_per_chip": 1,
    "wraps": [True, True, True],
}

# class, module, phase, dtype, shape, scope, MiB, first and last timeline index
_ROWS: tuple[tuple[str, str, str | None, str, tuple[int, ...], str, int, int, int], ...] = (
    ("parameters", "moe", "input", "bf16", (58, 16, 7168, 128), "params.moe_layers.moe.w_gate", 1624, 0, 399),
    ("parameters", "moe", "input", "bf16", (58, 16, 7168, 128), "params.moe_layers.moe.w_up", 1625, 0, 399),
    ("parameters", "moe", "input", "bf16", (58, 16, 128, 7168), "params.moe_layers.moe.w_down", 1626, 0, 399),
    ("parameters", "mla", "input", "bf16", (58, 28, 24576), "params.moe_layers.mla.q_up", 431, 0, 399),
    ("parameters", "embed", "input", "bf16", (129280, 28), "params.embed.table", 7, 0, 399),
    ("optimizer_first_moment", "moe", "input", "f32", (58, 16, 7168, 128), "opt.mu.moe_layers.moe.w_gate", 3248, 0, 399),
    ("optimizer_first_moment", "moe", "input", "f32", (58, 16, 7168, 128), "opt.mu.moe_layers.moe.w_up", 3249, 0, 399),
    ("optimizer_second_moment", "moe", "input", "f32", (58, 16, 7168, 128), "opt.nu.moe_layers.moe.w_gate", 3247, 0, 399),
    ("optimizer_second_moment", "moe", "input", "f32", (58, 16, 7168, 128), "opt.nu.moe_layers.moe.w_up", 3246, 0, 399),
    ("batch", "input", "input", "s32", (1, 4096), "batch.tokens", 1, 0, 120),
    ("saved_activations", "mla", "forward", "bf16", (58, 1, 4096, 7168), "jit(step)/layers/while/body/checkpoint", 3248, 40, 380),
    ("saved_activations", "mhc", "forward", "bf16", (58, 1, 4096, 2), "jit(step)/layers/while/body/mhc/streams", 232, 44, 380),
    ("rematerialised", "mla", "remat", "bf16", (1, 128, 4096, 192), "jit(step)/transpose(jvp())/while/body/rematted/mla/q", 192, 240, 272),
    ("gradients", "moe", "backward", "f32", (58, 16, 7168, 128), "jit(step)/transpose(jvp())/while/body/moe/w_gate", 4096, 200, 390),
    ("moe_dispatch", "moe", "backward", "bf16", (32768, 7168), "jit(step)/transpose(jvp())/while/body/moe/dispatch", 896, 250, 266),
    ("collective_buffers", "moe", "backward", "bf16", (16, 7168, 2048), "jit(step)/while/body/moe/all_gather", 448, 248, 262),
    ("logits", "logits", "forward", "f32", (1, 4096, 16160), "jit(step)/logits", 252, 190, 262),
    ("temporaries", "mla", "backward", "f32", (1, 128, 4096, 4), "jit(step)/transpose(jvp())/while/body/mla/scores", 256, 255, 264),
    ("temporaries", "engram", None, "bf16", (4096, 9), "", 17, 255, 264),
)


def make_report(program: str = "candidate", *, scale: float = 1.0, capacity: int = V5P_CAPACITY, extra_rows: int = 24) -> Report:
    """A report whose sizes are the table's times `scale`; it fits when scale is about 3 or less."""
    rows = list(_ROWS) + [
        ("temporaries", "optimizer", "optimizer", "f32", (3 + i, 128, 5), f"jit(step)/optimizer/update_{i}", 1 + i % 5, 230 + i, 280 + i)
        for i in range(extra_rows)
    ]
    buffers = sorted(
        (
            Buffer(
                name=f"fusion.{i}" if row[2] != "input" else f"param.{i}",
                **{"class": row[0]},
                module=row[1],
                module_inferred=row[5] == "",
                phase=row[2],
                dtype=row[3],
                shape=row[4],
                layout="{1,0:T(8,128)(2,1)}",
                logical_bytes=int(row[6] * MIB * scale) // (3 if row[4][-1] < 10 else 1),
                padded_bytes=int(row[6] * MIB * scale),
                scope=row[5],
                source=None if row[5] == "" else f"service/models/{row[1]}.py:{40 + i}",
                start_index=row[7],
                end_index=row[8],
            )
            for i, row in enumerate(rows)
        ),
        key=lambda buffer: -buffer.padded_bytes,
    )
    classes: Counter[str] = Counter()
    modules: Counter[str] = Counter()
    for buffer in buffers:
        classes[buffer.class_] += buffer.padded_bytes
        modules[buffer.module] += buffer.padded_bytes
    peak = sum(classes.values())
    argument = sum(classes[name] for name in ("parameters", "optimizer_first_moment", "optimizer_second_moment", "batch"))
    allocated = peak + int(700 * MIB * scale)
    fits = allocated <= capacity
    return Report(
        program=program,
        status=ReportStatus.OK if fits else ReportStatus.DOES_NOT_FIT,
        depth="memory",
        compiler_message=None if fits else "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM",
        topology=TOPOLOGY,
        num_devices=256,
        num_parameters=671_026_419_200,
        capacity_bytes=capacity,
        peak_bytes=peak,
        allocated_bytes=allocated,
        argument_bytes=argument,
        output_bytes=argument,
        alias_bytes=argument,
        temp_bytes=allocated - argument,
        fragmentation_bytes=allocated - peak,
        padding_bytes=sum(b.padded_bytes - (b.logical_bytes or 0) for b in buffers),
        host_bytes=0,
        headroom_bytes=capacity - allocated,
        classes=dict(classes),
        modules=dict(modules),
        timeline=_timeline(peak, argument),
        buffers=tuple(buffers),
        num_buffers_at_peak=len(buffers) + 83,
        timings=Timings(
            start_seconds=1.9,
            topology_seconds=0.08,
            build_seconds=0.4,
            trace_seconds=1.1,
            lower_seconds=0.6,
            buffer_assignment_seconds=4.3,
            analysis_seconds=0.7,
            total_seconds=9.1,
        ),
        child_peak_rss_bytes=761 * MIB,
        toolchain=TOOLCHAIN,
    )


def _timeline(peak: int, argument: int) -> Timeline:
    """Arguments all along, a forward ramp, two loop bodies that breathe, one peak, and the optimizer's descent."""
    points = []
    for index in range(NUM_POINTS):
        ramp = min(index, 150) / 150 if index < 300 else max(0.0, (NUM_POINTS - 1 - index) / 100)
        breath = 0.06 if 60 <= index < 150 and index % 10 < 4 else 0.09 if 200 <= index < 300 and index % 14 < 6 else 0.0
        live = argument + int((peak - argument) * min(0.97, 0.86 * ramp + breath))
        points.append(TimelinePoint(index=index, live_bytes=peak if index == PEAK_INDEX else live, instruction=f"fusion.{index}"))
    return Timeline(
        num_points=3 * NUM_POINTS,
        peak_index=PEAK_INDEX,
        points=tuple(points),
        spans=(
            TimelineSpan(name="forward layers (scan of 58)", start_index=60, end_index=149),
            TimelineSpan(name="backward layers (scan of 58)", start_index=200, end_index=299),
        ),
    )


def make_job(number: int = 1, **changes: Any) -> Job:
    """A finished job; `changes` replace fields."""
    created = CREATED + timedelta(minutes=number)
    fields: dict[str, Any] = {
        "id": f"job{number:08d}",
        "kind": "compile",
        "status": JobStatus.SUCCEEDED,
        "scenario": "deepseek-v3-671b-v5p-512",
        "spec": {
            "scenario": "deepseek-v3-671b-v5p-512",
            "model": {"preset": "deepseek-v3-671b"},
            "train": {"seq_len": 4096, "per_device_batch": 1.0},
            "mesh": {"topology": "v5p-512", "slices": 1, "fsdp": 16, "expert": 16},
            "programs": ["candidate", "dropless"],
            "depth": "memory",
        },
        "spec_hash": "ab" * 32,
        "identity": "cd" * 32,
        "created_at": created,
        "started_at": created + timedelta(seconds=1),
        "finished_at": created + timedelta(seconds=11),
    }
    return Job(**(fields | changes))
