"""The list of jobs and the overview: what each row says, which answers are shown, and how two jobs are chosen."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

import pytest
from fastapi.testclient import TestClient

from service.api.list_contexts import job_line, jobs_context, overview_context
from service.api.pages import render
from service.records import Failure, FailureKind, GitFacts, Job, JobStatus, Report, ReportStatus
from service.steps_records import StepsReport, StepsStatus
from service.storage.interface import ReportSummary, WorkerStatus
from service.storage.store import SqlStore
from tests.browser.samples import make_job, make_report
from tests.browser.stored import add, claim, queue, start

CRASH = Failure(kind=FailureKind.CRASHED, message="the child ended by signal 11")


def test_a_list_is_live_while_a_job_in_it_is_on_its_way() -> None:
    done, running = make_job(1), make_job(2, status=JobStatus.RUNNING, finished_at=None)
    assert jobs_context([running, done], {}, filters={}, next_cursor=None).is_live
    assert not jobs_context([done], {}, filters={}, next_cursor=None).is_live


def test_older_jobs_keep_the_filter() -> None:
    context = jobs_context([make_job()], {}, filters={"status": "failed", "scenario": "a b"}, next_cursor="c/1")
    assert context.next_href == "/jobs?status=failed&scenario=a+b&cursor=c%2F1"


def test_the_overview_shows_the_newest_answer_of_each_scenario(client: TestClient, store: SqlStore) -> None:
    add(store, "first", [make_report(scale=4)])
    newest = add(store, "second", [make_report()])
    running, _ = start(store, "third")
    html = client.get("/").text
    assert f'href="/jobs/{newest}"' in html
    assert "112.15 GiB" in html
    assert running not in html


def test_no_newer_job_hides_an_answer_and_the_newest_is_named_beside_it(client: TestClient, store: SqlStore) -> None:
    answer = add(store, "wide", [make_report(scale=4)])
    failed = add(store, "wide", [Report(program="candidate", status=ReportStatus.FAILED, depth="memory", failure=CRASH)], failure=CRASH)

    def row() -> str:
        (found,) = re.findall(rf'<a class="cover" href="/jobs/{answer}">.*?</tr>', client.get("/").text, re.DOTALL)
        return str(found)

    assert "112.15 GiB" in row()
    assert f'a newer job: <a href="/jobs/{failed}">Failed</a>' in row()
    waiting = queue(store, "wide")
    assert f'a newer job: <a href="/jobs/{waiting}">Queued</a>' in row()
    store.request_cancel(waiting)
    assert f'a newer job: <a href="/jobs/{waiting}">Cancelled</a>' in row()


def test_a_scenario_without_an_answer_is_shown_as_it_ended() -> None:
    failed, queued = make_job(1, status=JobStatus.FAILED, failure=CRASH), make_job(2, status=JobStatus.QUEUED, finished_at=None)
    context = overview_context(counts={}, newest=[queued, failed], summaries={}, workers=[], now=datetime.now(UTC), lease_seconds=60)
    assert [(line.id, line.newer.href if line.newer else None) for line in context.scenarios] == [(failed.id, f"/jobs/{queued.id}")]


def test_real_steps_and_other_projects_have_answers_of_their_own(client: TestClient, store: SqlStore) -> None:
    compiled = add(store, "wide", [make_report()])
    stepped = queue(store, "wide", ("steps",), kind="steps", steps={"devices": "cpu:8"})
    lease = claim(store, stepped, "steps")
    store.save_steps_report(lease, StepsReport(status=StepsStatus.OK, phase="done"))
    store.finish_job(lease, JobStatus.SUCCEEDED)
    html = client.get("/").text
    assert f'href="/jobs/{compiled}"' in html
    assert f'href="/jobs/{stepped}"' in html
    jobs = [make_job(2, git=GitFacts(project="mills")), make_job(1, git=GitFacts(project="looms"))]
    context = overview_context(counts={}, newest=jobs, summaries={}, workers=[], now=datetime.now(UTC), lease_seconds=60)
    assert [line.project for line in context.scenarios] == ["mills", "looms"]


def test_a_list_says_what_is_true_of_jobs_without_a_program(client: TestClient, store: SqlStore) -> None:
    stepped = queue(store, "stepped", ("steps",), kind="steps", steps={"devices": "cpu:8"})
    lease = claim(store, stepped, "steps")
    store.save_steps_report(lease, StepsReport(status=StepsStatus.OK, phase="done"))
    store.finish_job(lease, JobStatus.SUCCEEDED)
    cancelled = queue(store, "cancelled")
    store.request_cancel(cancelled)
    waiting = queue(store, "waiting")
    html = client.get("/jobs").text
    cells = {
        job: re.search(rf"<code>{job}</code>.*?<td class=\"programs\">(.*?)</td>", html, re.DOTALL) for job in (stepped, cancelled, waiting)
    }
    texts = {job: " ".join(re.sub(r"<[^>]+>", " ", cell.group(1)).split()) for job, cell in cells.items() if cell}
    assert texts == {stepped: "Passed 0 steps", cancelled: "no report", waiting: "no report yet"}


def test_a_job_in_a_list_keeps_its_id_beside_its_commit() -> None:
    git = GitFacts(project="looms", commit_sha="c0ffee" * 6, branch="wider")
    html = bytes(render("jobs.html", jobs_context([make_job(git=git)], {}, filters={}, next_cursor=None)).body).decode()
    for text in ("<code>job00000001</code>", "<code>c0ffeec0ff</code>", "on wider", "looms"):
        assert text in html


def summary_of(report: Report, job: Job) -> ReportSummary:
    names = set(ReportSummary.model_fields) & set(Report.model_fields)
    fields = {name: getattr(report, name) for name in names}
    return ReportSummary(job_id=job.id, failure_kind=None, total_seconds=None, **fields | {"topology": None})


@pytest.mark.parametrize(("scale", "fill", "limit"), [(1.0, 100 * 28.04 / (1.2 * 95.73), 100 / 1.2), (5.8, 100.0, 100 * 95.73 / 162.62)])
def test_the_bar_of_a_list_ends_where_the_program_does_and_marks_the_capacity(scale: float, fill: float, limit: float) -> None:
    job = make_job()
    (line,) = job_line(job, [summary_of(make_report(scale=scale), job)]).programs
    assert (line.fill, line.limit) == (pytest.approx(fill, abs=0.02), pytest.approx(limit, abs=0.02))


def test_a_list_tells_no_time_where_no_attempt_took_any() -> None:
    lost = Failure(kind=FailureKind.LOST, message="the worker died")
    jobs = [make_job(), make_job(failure=lost, status=JobStatus.FAILED), make_job(answered_from="job0"), make_job(started_at=None)]
    assert [job_line(job, []).seconds for job in jobs] == [10.0, None, None, None]


def test_two_jobs_of_the_list_are_ticked_and_the_older_is_the_base(client: TestClient, store: SqlStore) -> None:
    older, newer, waiting = add(store, "wide", [make_report()]), add(store, "wide", [make_report(scale=1.5)]), queue(store, "wide")
    html = client.get("/jobs").text
    assert re.findall(r'<input type="checkbox" name="job" value="(\w+)"', html) == [newer, older]
    assert waiting not in re.findall(r'value="(\w+)"', html)
    for chosen in ([newer, older], [older, newer]):
        answer = client.get("/compare", params={"job": chosen}, follow_redirects=False)
        assert (answer.status_code, answer.headers["location"]) == (303, f"/compare?base={older}&head={newer}")
    assert "Two jobs can be compared, and 1 was chosen." in client.get("/compare", params={"job": [older]}).text
    assert "Two jobs can be compared, and 3 were chosen." in client.get("/compare", params={"job": [older, newer, waiting]}).text
    assert client.get("/compare", params={"job": ["nothing", older]}).status_code == 404


def test_a_filter_that_was_not_understood_is_said_to_be(client: TestClient) -> None:
    html = client.get("/jobs?status=bogus").text
    assert "No job has a state &#39;bogus&#39;, so jobs of any state are shown. States: queued, running" in html
    for query in ("", "?status=", "?status=failed"):
        assert "any state are shown" not in client.get(f"/jobs{query}").text


def test_a_worker_that_is_silent_for_longer_than_a_lease_is_marked() -> None:
    now = datetime(2026, 3, 4, 12, tzinfo=UTC)

    def worker(name: str, seconds_ago: int) -> WorkerStatus:
        seen = now - timedelta(seconds=seconds_ago)
        return WorkerStatus(id=name, host=name, pid=7, kinds=("compile",), slots=2, memory_bytes=3 << 30, started_at=seen, seen_at=seen)

    context = overview_context(
        counts={}, newest=[], summaries={}, workers=[worker("here", 59), worker("gone", 61)], now=now, lease_seconds=60
    )
    assert [(line.host, line.is_silent) for line in context.workers] == [("here", False), ("gone", True)]
