"""The pages people read: routes that ask the store, build a typed context and hand it to a template."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields
from datetime import UTC, datetime
from functools import cache
from typing import Annotated, Any
from urllib.parse import parse_qs

from fastapi import APIRouter, FastAPI, Query, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape
from starlette.concurrency import run_in_threadpool

from service import units
from service.api import contexts, list_contexts, static_files
from service.api.compare_context import compare_context
from service.api.dependencies import SettingsDep, StoreDep
from service.api.job_context import job_context
from service.api.jobs import JobRequest, add_job
from service.api.steps_context import find_steps
from service.compile.capacity_cache import CapacityCache
from service.compile.catalog import FAMILIES, named_topologies
from service.compile.toolchain import read_toolchain
from service.errors import Problem, SpecError
from service.records import JobStatus
from service.resources import resource_directory
from service.spec import load_spec, parse_spec, require_kind
from service.storage.interface import JobFilter

router = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(resource_directory("web") / "templates"),
        undefined=StrictUndefined,
        autoescape=select_autoescape(default=True, default_for_string=True),
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        bytes=units.format_bytes,
        delta=units.format_delta,
        count=units.format_count,
        parameters=units.format_parameters,
        seconds=units.format_seconds,
        share=units.format_share,
        rate=lambda per_second: f"{per_second:,.0f}",
        ratio=lambda ratio: units.UNKNOWN if ratio is None else f"{ratio:.2f}×",
        number=lambda value: "" if value is None else str(value).removesuffix(".0"),
        precise_seconds=precise_seconds,
        words=lambda name: name.replace("_", " "),
    )
    environment.globals["static"] = static_files.static_url
    return environment


def precise_seconds(seconds: float) -> str:
    """Seconds with three digits that count: what a hundredth of the steps adds must not be rounded away."""
    factor, unit = next(((factor, unit) for factor, unit in ((1, "s"), (1e3, "ms")) if seconds * factor >= 1), (1e6, "µs"))
    return f"{seconds * factor:,.0f} {unit}" if seconds * factor >= 1000 else f"{seconds * factor:#.3g} {unit}".replace(". ", " ")


def render(name: str, context: Any, status: int = 200) -> HTMLResponse:
    """A page from its template and its context, whose fields are the template's only names."""
    values = {entry.name: getattr(context, entry.name) for entry in fields(context)}
    # Half of a surrogate pair, which a spec's text can spell as an escape, cannot be written as UTF-8.
    html = _environment().get_template(name).render(values).encode(errors="backslashreplace")
    return HTMLResponse(html, status_code=status, headers={"Cache-Control": "no-cache"})


@router.get("/")
def overview_page(store: StoreDep, settings: SettingsDep) -> Response:
    """What is weighed here, and the newest answer of each scenario."""
    newest = store.list_jobs(limit=200).jobs
    ids = [job.id for job in newest]
    context = list_contexts.overview_context(
        counts=store.count_jobs(),
        newest=newest,
        summaries=store.list_report_summaries(ids),
        steps=store.list_steps_summaries(ids),
        workers=store.list_workers(),
        now=datetime.now(UTC),
        lease_seconds=settings.lease_seconds,
    )
    return render("overview.html", context)


@router.get("/jobs")
def jobs_page(
    store: StoreDep, status: str = "", scenario: str = "", cursor: str = "", limit: Annotated[int, Query(ge=1, le=200)] = 50
) -> Response:
    """The jobs, newest first."""
    is_known = status in {value.value for value in JobStatus}
    filters = JobFilter(status=JobStatus(status) if is_known else None, scenario=scenario or None)
    page = store.list_jobs(filters, cursor=cursor or None, limit=limit)
    ids = [job.id for job in page.jobs]
    context = list_contexts.jobs_context(
        page.jobs,
        store.list_report_summaries(ids),
        steps=store.list_steps_summaries(ids),
        filters={"status": status if is_known else "", "scenario": scenario},
        unknown_status="" if is_known else status,
        next_cursor=page.next_cursor,
    )
    return render("jobs.html", context)


@router.get("/jobs/{job_id}")
def job_page(
    store: StoreDep, settings: SettingsDep, job_id: str, program: str = "", candidate_seconds: str = "", dropless_seconds: str = ""
) -> Response:
    """One job, with the report of one program; measured step times, where both are given, say what retrying costs."""
    # Before the job: a page that calls it running must not have seen its `finished`, or it would wait for that for ever.
    events = store.list_events(job_id)
    job = store.get_job(job_id)
    nobody = ""
    if job.status is JobStatus.QUEUED:
        now = datetime.now(UTC)
        nobody = list_contexts.why_nobody_takes(job.kind, store.list_workers(), now=now, lease_seconds=settings.lease_seconds)
    candidate, dropless = _positive(candidate_seconds), _positive(dropless_seconds)
    context = job_context(
        job,
        store.list_reports(job_id),
        program=program or None,
        events=events,
        artifacts=store.list_artifacts(job_id),
        real_steps=find_steps(store, job) if job.kind == "steps" else None,
        previous=store.find_previous_answer(job_id),
        nobody=nobody,
        step_seconds=None if candidate is None or dropless is None else (candidate, dropless),
    )
    return render("job.html", context)


@router.post("/jobs/{job_id}/cancel")
def cancel_job(store: StoreDep, job_id: str) -> Response:
    """Ask for a job to be stopped, then show it."""
    store.request_cancel(job_id)
    return RedirectResponse(f"/jobs/{job_id}", status_code=303)


@router.get("/compare")
def compare_page(
    store: StoreDep, base: str = "", head: str = "", program: str = "", job: Annotated[tuple[str, ...], Query(max_length=200)] = ()
) -> Response:
    """Two jobs side by side, or the choice of two where either is not named; of two chosen as `job`, the older is the base."""
    if len(job) == 2:
        older, newer = sorted((store.get_job(job_id) for job_id in job), key=lambda each: each.created_at)
        return RedirectResponse(f"/compare?base={older.id}&head={newer.id}", status_code=303)
    notice = ""
    if job:
        head = head or job[0]
        notice = f"Two jobs can be compared, and {len(job)} {'was' if len(job) == 1 else 'were'} chosen."
    sides = [(store.get_job(job_id), store.list_reports(job_id)) if job_id else None for job_id in (base.strip(), head.strip())]
    recent = store.list_jobs(JobFilter(status=JobStatus.SUCCEEDED, kind="compile"), limit=100).jobs
    return render("compare.html", compare_context(base=sides[0], head=sides[1], program=program or None, recent=recent, notice=notice))


@router.get("/catalog")
def catalog_page(settings: SettingsDep) -> Response:
    """The presets and topologies that a spec can name."""
    cache = CapacityCache(settings.capacity_cache)
    # One topology speaks for its family: HBM per device is a property of the chip.
    known = {name: [cache.find(read_toolchain(topology.arguments())) for topology in named_topologies(name)] for name in FAMILIES}
    capacities = {name: next(filter(None, values)) for name, values in known.items() if any(values)}
    return render("catalog.html", contexts.catalog_context(capacities=capacities))


@router.get("/submit")
def submit_page(example: str = "") -> Response:
    """A spec to edit and send, beginning with one of the examples."""
    examples = load_examples()
    text = next((entry.text for entry in examples if entry.name == example), examples[0].text if examples else "")
    return render("submit.html", contexts.SubmitContext(title="Weigh a spec", text=text, examples=examples))


@router.post("/submit")
async def submit_spec(request: Request, store: StoreDep) -> Response:
    """Queue what was sent and show the job; a wrong spec is shown again with everything that is wrong beside it."""
    fields = read_form(await request.body())
    text, depth = fields.get("spec", ""), fields.get("depth", "memory")
    try:
        spec = load_spec(text)
        if depth in ("memory", "full"):
            spec = parse_spec(spec.as_json() | {"depth": depth})
        require_kind(spec, "compile")
        job = await run_in_threadpool(add_job, store, spec, JobRequest(spec={}, force=fields.get("force") == "1"), None)
    except SpecError as error:
        context = contexts.SubmitContext(
            title="Weigh a spec",
            text=text,
            problems=error.problems,
            examples=load_examples(),
            depth=depth,
            force=fields.get("force") == "1",
        )
        return render("submit.html", context, status=error.status)
    return RedirectResponse(f"/jobs/{job.id}", status_code=303)


def read_form(body: bytes) -> dict[str, str]:
    """The fields of an URL-encoded form, the last of each name; browsers send line ends as CR LF, specs are kept with LF."""
    decoded = parse_qs(body.decode("utf-8", errors="replace"), keep_blank_values=True, max_num_fields=20)
    return {name: values[-1].replace("\r\n", "\n") for name, values in decoded.items()}


def load_examples() -> tuple[contexts.Example, ...]:
    """The spec files of examples/ that a compile job can take, the quickest first."""
    paths = sorted(resource_directory("examples").glob("*.yaml"), key=lambda path: (not path.stem.startswith("tiny"), path.stem))
    return tuple(contexts.Example(path.stem, path.read_text()) for path in paths if not path.stem.startswith("steps-"))


def error_page(request: Request, status: int, title: str, detail: str, problems: Sequence[Problem]) -> Response:
    """Any error of a page, in words."""
    return render("error.html", contexts.ErrorContext(title=title, status=status, detail=detail, problems=tuple(problems)), status=status)


def install_pages(app: FastAPI) -> None:
    """Add the pages and the static files to `app`, and let errors outside the API be pages too."""
    app.include_router(router)
    app.include_router(static_files.router)
    app.state.error_page = error_page


def _positive(text: str) -> float | None:
    """The positive number in a form's field; None where it holds none, as an empty one does."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 < value < math.inf else None
