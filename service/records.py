"""What is passed between the parts and kept: reports, jobs and events, as frozen pydantic models.

Bytes are integers per device unless a name says `total_`. None always means "not known", and a field's description says when.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

REPORT_SCHEMA = 1
"""Version of the report's JSON; raised when a field changes its meaning or goes."""

Depth = Literal["memory", "full"]
JobKind = Literal["compile", "steps"]


class Record(BaseModel):
    """Base of every record: immutable, and strict about unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ReportStatus(StrEnum):
    """What the compiler said of a program."""

    OK = "ok"
    DOES_NOT_FIT = "does_not_fit"
    UNKNOWN = "unknown"
    """Measured, but within the band below the capacity where only code generation decides, and that was not run."""
    FAILED = "failed"


class FailureKind(StrEnum):
    """Why a program has no complete report."""

    LOWERING = "lowering"
    """The step could not be traced or lowered: the spec asks for something the model cannot be."""
    VMEM = "vmem_exhausted"
    """On-chip scoped memory, not HBM."""
    HOST_MEMORY = "host_memory_exhausted"
    DEVICE_MEMORY = "device_memory_exhausted"
    """Real steps: the devices ran out while they ran, whatever had been predicted."""
    NOT_FINITE = "not_finite"
    """Real steps: the loss became NaN or infinite."""
    COMPILER = "compiler_failure"
    ANALYSIS = "analysis_failure"
    """The dump could not be read, or did not add up."""
    CRASHED = "crashed"
    """The child ended by a signal or an abort of its own."""
    KILLED_RSS = "rss_limit"
    KILLED_WALL = "wall_limit"
    CANCELLED = "cancelled"
    UNSUPPORTED = "unsupported"
    LOST = "lost"
    """The worker died with the job three times."""


class Failure(Record):
    kind: FailureKind
    message: str
    log_tail: str = ""


class Toolchain(Record):
    """Everything that decides a result besides the spec and the model's source; part of every result's identity."""

    jax: str
    jaxlib: str
    libtpu: str
    flax: str
    optax: str = Field(default="not recorded", description="its AdamW is part of the train step")
    xprof: str | None = Field(description="null where it is not installed; nothing measured depends on it")
    extractor: str = Field(description="version of the code that turns the compiler's dump into a report")
    model_source: str = Field(description="SHA-256 over the files of service/models")
    compiler_options: Mapping[str, str | int | bool] = {}
    topology_arguments: Mapping[str, Any] = {}


class TimelinePoint(Record):
    """HBM in use at one program point."""

    index: int = Field(description="position in the compiler's schedule of allocations and frees")
    live_bytes: int
    instruction: str


class Timeline(Record):
    """HBM over the program, thinned so that every local maximum above 1 % of the peak survives."""

    num_points: int = Field(description="points before thinning")
    peak_index: int
    points: tuple[TimelinePoint, ...]
    spans: tuple[TimelineSpan, ...] = ()


class TimelineSpan(Record):
    """A stretch of the timeline worth a name: the body of a scan."""

    name: str
    start_index: int
    end_index: int


class Buffer(Record):
    """One buffer alive at the peak."""

    name: str = Field(description="defining instruction and, where it has several outputs, the index")
    class_: str = Field(alias="class", description="one of BUFFER_CLASSES")
    module: str
    module_inferred: bool = Field(default=False, description="the module was inferred from neighbours, not read from the instruction")
    phase: str | None = Field(description="forward, remat, backward, optimizer, input; null where it cannot be told")
    dtype: str
    shape: tuple[int, ...]
    layout: str
    logical_bytes: int | None = Field(description="elements times their width; null for opaque shapes")
    padded_bytes: int = Field(description="what it takes in HBM")
    scope: str = Field(description="JAX name scope path or pytree path; empty where the compiler dropped it")
    source: str | None = Field(description="file:line inside the model; null where the compiler dropped it")
    start_index: int = Field(description="first timeline index it is alive at; 0 for arguments")
    end_index: int = Field(description="last timeline index it is alive at")

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True, serialize_by_alias=True)


BUFFER_CLASSES = (
    "parameters",
    "optimizer_first_moment",
    "optimizer_second_moment",
    "router_bias",
    "batch",
    "other_arguments",
    "saved_activations",
    "rematerialised",
    "gradients",
    "parameter_copies",
    "collective_buffers",
    "moe_dispatch",
    "logits",
    "temporaries",
    "outputs",
    "constants",
    "unattributed",
)
"""Every byte at the peak belongs to exactly one.

The first six, `outputs` and `constants` are what the allocation says. Among temporaries: `saved_activations` are made in the forward pass
and alive when the backward pass begins; `rematerialised` are made by the forward pass run again; `gradients` reach the optimizer;
`parameter_copies` are parameters cast, cut or laid out anew; `collective_buffers` came over the links (gathered weights among them);
`moe_dispatch` is what MoE layers send and receive; `logits` is the logits' and the loss's own; `unattributed` has no scope at all.
"""


STATE_CLASSES = ("parameters", "optimizer_first_moment", "optimizer_second_moment", "router_bias")
"""The classes that make up the training state, but for its step counter."""


class Peak(Record):
    """A maximum of the timeline that stands out: what is left to fix once the higher ones are."""

    index: int = Field(description="timeline index")
    live_bytes: int
    instruction: str
    module: str
    phase: str | None
    drop_bytes: int = Field(description="how far usage falls before it rises higher: its prominence")
    largest: tuple[Buffer, ...] = Field(description="the largest buffers alive there that are not arguments")


class Collective(Record):
    """Collectives of one kind over the same devices in the same module and phase, taken together; bytes are per device."""

    kind: str = Field(description="all-gather, all-reduce, reduce-scatter, …; the opcode itself where it is not known")
    is_known: bool = Field(description="false for an opcode of the family that the analysis does not know: its bytes are null")
    axes: tuple[str, ...] | None = Field(
        description="mesh axes it spans, as a set in mesh order; null where its groups follow no whole axes"
    )
    group_size: int = Field(description="devices that exchange with each other; 2 for a permute's links")
    link: Literal["ici", "dcn"]
    module: str
    phase: str | None
    is_compiler_made: bool | None = Field(description="no line of the program asks for it; null where the compiler kept no name to tell by")
    static_count: int = Field(description="how many stand in the program")
    per_step_count: int | None = Field(description="how many run in one step; null where a loop's trip count cannot be derived")
    payload_bytes: int | None = Field(description="per step; what the operation is given or, for a gather, yields")
    wire_bytes: int | None = Field(description="per step; what the busiest device sends")
    wire_factor: str = Field(description="share of the payload that is sent")
    link_seconds: float | None = Field(description="lower bound per step from published bandwidth; null where none is published")
    unknown_reason: str | None = Field(default=None, description="why a number is null")
    names: tuple[str, ...] = Field(description="the first of its instructions")


class CollectiveTotals(Record):
    """All collectives of one program per step and device; null where any part is not known."""

    static_count: int
    per_step_count: int | None
    ici_wire_bytes: int | None
    dcn_wire_bytes: int | None
    link_seconds: float | None = Field(description="lower bound: each link's bytes over its bandwidth, the two overlapping")


class HaloUse(Record):
    """One exchange of neighbouring tokens between context ranks, in one phase, beside its closed form."""

    name: str = Field(description="engram_conv, engram_segments, engram_ids, loss_shift or mtp_shift")
    phase: str | None
    static_count: int
    per_step_count: int | None
    payload_bytes: int | None = Field(description="measured, per step and device")
    wire_bytes: int | None = Field(description="measured, per step, the busiest device")
    total_wire_bytes: int | None = Field(description="measured, per step, over all devices: end ranks send one halo where others send two")
    expected_payload_bytes: int | None = Field(description="closed form of what the phase sends; null where the spec has none")
    verdict: str = Field(description="equal, or the reason why measured and closed form differ")
    gather_bytes: int | None = Field(description="what gathering the sequence instead would have yielded, per step and device")


class Finding(Record):
    """Something about the program that a person would want to know, with what to change."""

    kind: str
    message: str
    module: str | None = None
    buffer: str | None = None
    bytes: int | None = None
    spec_field: str | None = Field(default=None, description="path of the spec's field to change; null where none would help")
    suggestion: str


class StepCost(Record):
    """What a step that retries takes on average, at one overflow probability."""

    overflow_probability: float
    seconds: float


class Pair(Record):
    """The two programs of a step that retries when tokens are dropped, weighed together; bytes per device."""

    fits: bool | None = Field(description="both fit in the mode the steps job uses; null where neither is known not to and one is unknown")
    candidate_fits: bool | None
    dropless_fits: bool | None
    state_bytes: int | None = Field(description="the state neither program donates")
    worse_program: str | None = Field(description="the one that needs more")
    headroom_bytes: int | None = Field(description="capacity less the allocated bytes of the worse program")
    lookahead_allocated_bytes: int | None = Field(
        description="what the pair needs when the candidate runs a step ahead, the state before beside it; the dropless one runs alone"
    )
    fits_with_lookahead: bool | None
    retry_cost: str = Field(description="expected step time as a formula")
    break_even: str = Field(description="overflow probability above which running dropless always is cheaper, as a formula")
    candidate_seconds: float | None = Field(default=None, description="measured step time; null where none was given")
    dropless_seconds: float | None = Field(default=None, description="measured step time; null where none was given")
    break_even_probability: float | None = Field(default=None, description="`break_even` of the measured times; null without them")
    step_costs: tuple[StepCost, ...] = Field(default=(), description="`retry_cost` of the measured times; empty without them")

    @property
    def only_lookahead_is_too_much(self) -> bool:
        """Both programs fit, and the pair does not where the loop looks ahead."""
        return bool(self.candidate_fits and self.dropless_fits and not self.fits)


class Timings(Record):
    """Wall seconds of each phase of the child, in order; a phase that was not run is null."""

    start_seconds: float | None = Field(default=None, description="process start to JAX imported")
    topology_seconds: float | None = None
    build_seconds: float | None = Field(default=None, description="abstract state and batch")
    trace_seconds: float | None = None
    lower_seconds: float | None = None
    buffer_assignment_seconds: float | None = Field(default=None, description="compile until the dump was complete")
    analysis_seconds: float | None = None
    code_generation_seconds: float | None = Field(default=None, description="null at depth memory")
    total_seconds: float | None = Field(default=None, description="process start to report")


class Report(Record):
    """What was measured of one program."""

    report_schema: int = REPORT_SCHEMA
    program: str
    status: ReportStatus
    depth: Depth = Field(description="how far this compile went: memory stops at buffer assignment")
    failure: Failure | None = None
    compiler_message: str | None = Field(default=None, description="the compiler's own words when it refused the program")
    topology: Mapping[str, Any] = {}
    num_devices: int | None = None
    num_parameters: int | None = Field(default=None, description="total over all devices, as the closed form counts them")
    capacity_bytes: int | None = None
    peak_bytes: int | None = Field(default=None, description="most alive at once")
    allocated_bytes: int | None = Field(default=None, description="reserved, with fragmentation: what is compared with the capacity")
    argument_bytes: int | None = None
    output_bytes: int | None = None
    alias_bytes: int | None = Field(default=None, description="outputs that reuse an argument's memory")
    temp_bytes: int | None = Field(default=None, description="allocated - argument - outputs that are not aliased")
    fragmentation_bytes: int | None = Field(default=None, description="allocated - peak: free space")
    padding_bytes: int | None = Field(default=None, description="at the peak, bytes taken by tile padding")
    host_bytes: int | None = None
    code_bytes: int | None = Field(default=None, description="known at depth full only")
    headroom_bytes: int | None = Field(default=None, description="capacity - allocated; negative when it does not fit")
    classes: Mapping[str, int] = Field(default={}, description="class to bytes at the peak; sums to peak_bytes")
    modules: Mapping[str, int] = Field(default={}, description="module to bytes at the peak; sums to peak_bytes")
    timeline: Timeline | None = None
    buffers: tuple[Buffer, ...] = Field(default=(), description="largest first, at most 200")
    num_buffers_at_peak: int | None = None
    module_inferred_bytes: int | None = Field(default=None, description="bytes at the peak whose module was inferred from neighbours")
    unattributed_bytes: int | None = Field(default=None, description="bytes at the peak without a module")
    peaks: tuple[Peak, ...] = Field(default=(), description="the maxima that stand out, highest first; the first is the peak itself")
    collectives: tuple[Collective, ...] = ()
    collective_totals: CollectiveTotals | None = None
    halo: tuple[HaloUse, ...] = ()
    findings: tuple[Finding, ...] = ()
    timings: Timings = Timings()
    child_peak_rss_bytes: int | None = None
    toolchain: Toolchain | None = None
    warnings: tuple[str, ...] = ()


class JobStatus(StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    """Every program has a report; a program that does not fit is a result too."""
    FAILED = "failed"
    CANCELLED = "cancelled"


TERMINAL = frozenset({JobStatus.SUCCEEDED, JobStatus.FAILED, JobStatus.CANCELLED})


class GitFacts(Record):
    """Where a job comes from; all optional, so that a person at a shell needs none."""

    project: str | None = Field(default=None, max_length=200)
    commit_sha: str | None = Field(default=None, max_length=64)
    branch: str | None = Field(default=None, max_length=255)
    base_sha: str | None = Field(default=None, max_length=64)
    ancestors: tuple[Annotated[str, Field(max_length=64)], ...] = Field(default=(), max_length=100)
    pull_request: Annotated[int, Field(ge=1, lt=2**31)] | None = None


class Job(Record):
    """One request to weigh a spec."""

    id: str
    kind: JobKind
    status: JobStatus
    scenario: str
    spec: Mapping[str, Any] = Field(description="the spec as validated, defaults filled in")
    spec_hash: str
    identity: str = Field(description="hash of spec, model source and toolchain: equal identity, equal result")
    git: GitFacts = GitFacts()
    attempts: int = 0
    cancel_requested: bool = False
    answered_from: str | None = Field(default=None, description="id of the job whose reports answered this one; null when it was measured")
    failure: Failure | None = None
    created_at: datetime
    started_at: datetime | None = None
    finished_at: datetime | None = None


class Event(Record):
    """One step of a job's life, in the order it happened; `sequence` counts from 1 within the job."""

    job_id: str
    sequence: int
    name: str
    data: Mapping[str, Any] = {}
    created_at: datetime


Timeline.model_rebuild()
