"""Jobs over HTTP: post a spec, list, look, cancel, and read what was measured."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, cast
from urllib.parse import quote

from fastapi import APIRouter, Header, Query, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import Field, ValidationError
from starlette.concurrency import run_in_threadpool

from service.api.bodies import decode, read_json
from service.api.dependencies import StoreDep
from service.api.errors import MediaTypeError, RequestError, body_path, request_problems
from service.api.examples import JOB_REQUEST, JOB_REQUEST_YAML
from service.api.steps_report import find_steps_report
from service.errors import NotFoundError, Problem, SpecError
from service.identity import identify
from service.records import TERMINAL, Depth, GitFacts, Job, JobKind, JobStatus, Record, Report
from service.spec import Spec, load_spec, parse_spec, require_kind
from service.steps.interface import STEPS_PROGRAM
from service.steps_records import StepsReport
from service.storage.interface import MAX_PAGE, Artifact, Idempotency, JobFilter, JobPage, NewJob, Platform, Store

router = APIRouter(tags=["jobs"])

JSON_TYPES = frozenset({"application/json"})
YAML_TYPES = frozenset({"application/yaml", "application/x-yaml", "text/yaml"})

EXPECTED_CHILD_BYTES: dict[Depth, int] = {"memory": 2 << 30, "full": 6 << 30}
"""Resident memory that a compile child of an unknown scenario is expected to take, by depth."""
EXPECTED_STEPS_BYTES = 8 << 30
"""The same of a steps child: on CPU its devices' memory is the host's."""
_GROWTH = 1.25
"""How much more than its predecessors the next child of a scenario is expected to take."""


class JobRequest(Record):
    """What to weigh, and where it comes from."""

    spec: dict[str, Any] = Field(description="the spec, with the same keys as a spec file")
    kind: JobKind = "compile"
    git: GitFacts = GitFacts()
    force: bool = Field(default=False, description="measure again even where this spec and toolchain were measured already")
    depth: Depth | None = Field(default=None, description="overrides the spec's depth")


class YamlParameters(GitFacts):
    """What accompanies a spec that is sent as YAML, in the query; a JSON body carries the same beside its spec."""

    kind: JobKind = "compile"
    force: bool = False
    depth: Depth | None = None


class JobReports(Record):
    """A job with what was measured so far; of an answered job, what the job `answered_from` measured."""

    job: Job
    reports: tuple[Report, ...]


class JobSteps(Record):
    """A job of kind steps with what its steps showed."""

    job: Job
    is_final: bool = Field(description="false while it waits or runs: the report is as far as it came, and its status can still change")
    report: StepsReport


class ArtifactList(Record):
    artifacts: tuple[Artifact, ...]


@router.post(
    "/jobs",
    status_code=202,
    summary="Weigh a spec",
    response_description="The job, queued, or answered at once from an earlier one",
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {
                "application/json": {"schema": JobRequest.model_json_schema(), "examples": JOB_REQUEST},
                "application/yaml": {"schema": {"type": "string", "description": "the spec alone"}, "examples": JOB_REQUEST_YAML},
            },
        }
    },
)
async def post_job(
    request: Request,
    response: Response,
    store: StoreDep,
    parameters: Annotated[YamlParameters, Query()],
    idempotency_key: Annotated[str | None, Header(min_length=1, max_length=200)] = None,
) -> Job:
    """Queue a job for this spec, and answer it at once where the same spec was measured with the same toolchain before.

    The same `Idempotency-Key` with the same request gives the same job, however often it is sent; with another request it is a 409.
    A job whose spec is being measured right now is a job of its own: it waits, and is answered as soon as that one succeeds.
    """
    body = await request.body()
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type in JSON_TYPES:
        if request.query_params:
            given = ", ".join(request.query_params)
            raise RequestError([Problem("query", given, "the query accompanies a YAML body", "the same fields in the JSON body")])
        asked, spec = _read_request(body)
    elif media_type in YAML_TYPES:
        spec = load_spec(decode(body, "YAML"))
        if parameters.depth is not None:
            spec = parse_spec(spec.as_json() | {"depth": parameters.depth})
        git = GitFacts(**{name: getattr(parameters, name) for name in GitFacts.model_fields})
        asked = JobRequest(spec={}, kind=parameters.kind, git=git, force=parameters.force)
    else:
        raise MediaTypeError(f"the body is {media_type or 'of no named type'}; send application/json, or a spec alone as application/yaml")
    job = await run_in_threadpool(add_job, store, spec, asked, idempotency_key)
    response.headers["Location"] = str(request.url_for("get_job", job_id=job.id).path)
    return job


def add_job(store: Store, spec: Spec, asked: JobRequest, idempotency_key: str | None) -> Job:
    require_kind(spec, asked.kind)
    new = NewJob(
        kind=asked.kind,
        scenario=spec.scenario,
        spec=spec.as_json(),
        spec_hash=spec.canonical_hash(),
        identity=identify(spec, asked.kind),
        programs=(STEPS_PROGRAM,) if asked.kind == "steps" else spec.programs,
        child_memory_bytes=_expect_child_bytes(store, spec, asked.kind),
        platform=_platform_of(spec) if asked.kind == "steps" else None,
        git=asked.git,
    )
    idempotency = None
    if idempotency_key is not None:
        meaning = {"spec": new.spec, "kind": new.kind, "git": new.git.model_dump(mode="json"), "force": asked.force}
        request_hash = hashlib.sha256(json.dumps(meaning, sort_keys=True).encode()).hexdigest()
        idempotency = Idempotency(key=idempotency_key, scope=asked.git.project or "", request_hash=request_hash)
    # Steps are timed, and time is not the same twice.
    return store.add_job(new, force=asked.force or asked.kind == "steps", idempotency=idempotency).job


def _expect_child_bytes(store: Store, spec: Spec, kind: JobKind) -> int:
    if kind == "steps":
        return EXPECTED_STEPS_BYTES
    known_bytes = store.find_child_rss(spec.scenario, spec.depth)
    return EXPECTED_CHILD_BYTES[spec.depth] if known_bytes is None else int(known_bytes * _GROWTH)


def _platform_of(spec: Spec) -> Platform | None:
    """What the worker must have; None where the spec takes whatever is attached."""
    assert spec.steps is not None
    if spec.steps.devices == "auto":
        return None
    return "cpu" if spec.steps.num_cpu_devices is not None else cast(Platform, spec.steps.devices)


def _read_request(body: bytes) -> tuple[JobRequest, Spec]:
    """What a JSON body asks for, and its spec.

    Raises:
        SpecError: the spec alone is wrong.
        RequestError: what stands around the spec is wrong; carries the spec's problems too.
    """
    data, problems = read_json(body)
    asked = spec = None
    try:
        asked = JobRequest.model_validate(data)
    except ValidationError as error:
        found = request_problems(error.errors(include_url=False), JobRequest)
        problems += [replace(problem, path=body_path(problem.path.split(".") if problem.path else [])) for problem in found]
    plain = data.get("spec") if isinstance(data, Mapping) else None
    if isinstance(plain, Mapping):
        depth = asked.depth if asked is not None else None
        try:
            spec = parse_spec(plain if depth is None else {**plain, "depth": depth})
        except SpecError as error:
            if not problems:
                raise
            problems += [replace(problem, path=problem.path or "spec") for problem in error.problems]
    if problems:
        raise RequestError(problems)
    assert asked is not None
    assert spec is not None
    return asked, spec


@router.get("/jobs", summary="List jobs, newest first")
def list_jobs(
    store: StoreDep,
    status: JobStatus | None = None,
    scenario: Annotated[str | None, Query(max_length=200)] = None,
    kind: JobKind | None = None,
    project: Annotated[str | None, Query(max_length=200)] = None,
    commit_sha: Annotated[str | None, Query(max_length=64)] = None,
    cursor: Annotated[str | None, Query(description="`next_cursor` of the page before")] = None,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 50,
) -> JobPage:
    """Jobs that match every filter given. Pages join without gap or repeat, also while new jobs arrive."""
    filters = JobFilter(status=status, scenario=scenario, kind=kind, project=project, commit_sha=commit_sha)
    return store.list_jobs(filters, cursor=cursor, limit=limit)


@router.get("/jobs/{job_id}", summary="One job")
def get_job(store: StoreDep, job_id: str) -> Job:
    return store.get_job(job_id)


@router.post(
    "/jobs/{job_id}/cancel",
    status_code=202,
    summary="Stop a job",
    response_description="The job, cancelled, or about to be where it was running",
    responses={200: {"model": Job, "description": "The job, which had ended before: there was nothing to cancel"}},
)
def cancel_job(store: StoreDep, response: Response, job_id: str) -> Job:
    """A waiting job is cancelled at once; of a running one the child is killed within seconds; one that ended stays as it is."""
    if store.get_job(job_id).status in TERMINAL:
        response.status_code = 200
    return store.request_cancel(job_id)


@router.get("/jobs/{job_id}/report", summary="What was measured")
def get_report(
    store: StoreDep, job_id: str, program: Annotated[str | None, Query(max_length=64, description="of one program only")] = None
) -> JobReports:
    """The reports of all programs that have one, or of one program; 404 while that has none."""
    job = store.get_job(job_id)
    return JobReports(job=job, reports=store.list_reports(job_id) if program is None else (store.get_report(job_id, program),))


@router.get("/jobs/{job_id}/steps", summary="What real steps showed")
def get_steps(store: StoreDep, job_id: str) -> JobSteps:
    """Losses, times, checks and memory of a job of kind steps, as far as it came; 404 for a job of another kind."""
    job = store.get_job(job_id)
    if job.kind != "steps":
        raise NotFoundError(f"job {job_id} is of kind {job.kind} and ran no steps; see its report")
    report, is_final = find_steps_report(store, job)
    return JobSteps(job=job, is_final=is_final, report=report)


@router.get("/jobs/{job_id}/artifacts", summary="Files kept with a job")
def list_artifacts(store: StoreDep, job_id: str) -> ArtifactList:
    return ArtifactList(artifacts=store.list_artifacts(job_id))


@router.get(
    "/jobs/{job_id}/artifacts/{name}",
    summary="One file",
    response_class=StreamingResponse,
    responses={200: {"content": {"application/octet-stream": {}}, "description": "The file's content"}},
)
def get_artifact(store: StoreDep, request: Request, job_id: str, name: str) -> Response:
    """The content, uncompressed. Names are looked up among the job's own and never used as a path."""
    reader = store.open_artifact(job_id, name)
    etag = f'"{reader.artifact.sha256}"'
    headers = {"ETag": etag, "Cache-Control": "private, no-cache"}
    if request.headers.get("if-none-match") == etag:
        return Response(status_code=304, headers=headers)
    headers |= {
        "Content-Length": str(reader.artifact.size_bytes),
        "Content-Disposition": f"attachment; filename*=UTF-8''{quote(reader.artifact.name, safe='')}",
    }
    return StreamingResponse(reader.chunks(), headers=headers, media_type="application/octet-stream")
