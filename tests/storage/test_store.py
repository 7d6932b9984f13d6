"""What the store keeps of jobs, and what it answers from what was measured before."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from service.errors import ConflictError, NotFoundError
from service.records import Failure, FailureKind, Job, JobStatus, ReportStatus
from service.steps_records import StepsReport, StepsStatus
from service.storage.interface import Claim, CursorError, Idempotency, JobFilter, Lease, LeaseLostError, StepsSummary
from service.storage.store import SqlStore
from tests.storage.samples import Clock, new_job, report_of

Claiming = Callable[..., Claim]


def names(store: SqlStore, job_id: str) -> list[str]:
    events = store.list_events(job_id)
    assert [event.sequence for event in events] == list(range(1, len(events) + 1))
    return [event.name for event in events]


def measure(store: SqlStore, claim: Claiming, identity: str = "a", **fields: object) -> Job:
    """A job of one program, queued, claimed, reported and finished."""
    job = store.add_job(new_job(identity), **fields).job
    lease = claim().lease
    assert lease.job_id == job.id
    store.save_report(lease, report_of())
    return store.finish_job(lease, JobStatus.SUCCEEDED)


def test_a_job_comes_back_as_it_was_given(store: SqlStore, clock: Clock) -> None:
    new = new_job()
    job = store.add_job(new).job
    assert store.get_job(job.id) == job
    assert (job.spec, job.git, job.scenario, job.identity) == (new.spec, new.git, new.scenario, new.identity)
    assert (job.status, job.attempts, job.created_at, job.started_at) == (JobStatus.QUEUED, 0, clock.now, None)
    assert names(store, job.id) == ["queued"]


def test_what_does_not_exist_is_said_to_be_missing(store: SqlStore) -> None:
    job = store.add_job(new_job()).job
    for ask in (store.get_job, store.list_events, store.list_reports, store.list_artifacts, store.request_cancel):
        with pytest.raises(NotFoundError, match="no job 'nowhere'"):
            ask("nowhere")
    with pytest.raises(NotFoundError, match="which is queued, has no report of a program 'candidate'"):
        store.get_report(job.id, "candidate")
    with pytest.raises(NotFoundError, match=r"has no artifact '\.\./\.\./etc/passwd'"):
        store.open_artifact(job.id, "../../etc/passwd")


def test_pages_of_jobs_join_without_gap_or_repeat_while_new_ones_arrive(store: SqlStore) -> None:
    ids = [store.add_job(new_job(str(number))).job.id for number in range(7)]
    first = store.list_jobs(limit=3)
    store.add_job(new_job("later"))
    second = store.list_jobs(cursor=first.next_cursor, limit=3)
    third = store.list_jobs(cursor=second.next_cursor, limit=3)
    assert [job.id for page in (first, second, third) for job in page.jobs] == ids[::-1]
    assert third.next_cursor is None


def test_a_full_last_page_has_no_cursor(store: SqlStore) -> None:
    for number in range(4):
        store.add_job(new_job(str(number)))
    assert store.list_jobs(limit=4).next_cursor is None


def test_jobs_are_listed_by_each_filter(store: SqlStore, claim: Claiming) -> None:
    wide = store.add_job(new_job("w", scenario="wide", git={"project": "mills", "commit_sha": "beef"})).job
    store.add_job(new_job("n", scenario="narrow"))
    store.request_cancel(wide.id)
    for filters in (
        JobFilter(scenario="wide"),
        JobFilter(project="mills"),
        JobFilter(commit_sha="beef"),
        JobFilter(identity="w"),
        JobFilter(status=JobStatus.CANCELLED),
    ):
        assert [job.id for job in store.list_jobs(filters).jobs] == [wide.id]
    assert len(store.list_jobs(JobFilter(kind="compile")).jobs) == 2
    assert store.list_jobs(JobFilter(kind="steps")).jobs == ()
    assert store.count_jobs() == {("compile", JobStatus.CANCELLED): 1, ("compile", JobStatus.QUEUED): 1}


@pytest.mark.parametrize("cursor", ["", "-1", "one", "1" * 19, "٣"])
def test_a_cursor_from_elsewhere_is_refused(store: SqlStore, cursor: str) -> None:
    with pytest.raises(CursorError, match="start without a cursor"):
        store.list_jobs(cursor=cursor)


def test_one_idempotency_key_is_one_job(store: SqlStore) -> None:
    key = Idempotency(key="k", scope="looms", request_hash="h")
    first = store.add_job(new_job(), idempotency=key)
    again = store.add_job(new_job(), idempotency=key)
    assert (first.is_new, again.is_new, again.job) == (True, False, first.job)
    assert len(store.list_jobs().jobs) == 1
    with pytest.raises(ConflictError, match=f"'k' was used for another request .job {first.job.id}"):
        store.add_job(new_job("b"), idempotency=Idempotency(key="k", scope="looms", request_hash="other"))
    assert store.add_job(new_job(), idempotency=Idempotency(key="k", scope="mills", request_hash="other")).is_new


def test_an_identity_that_was_measured_is_answered_at_once(store: SqlStore, claim: Claiming) -> None:
    measured = measure(store, claim)
    answered = store.add_job(new_job()).job
    assert (answered.status, answered.answered_from, answered.attempts) == (JobStatus.SUCCEEDED, measured.id, 0)
    assert names(store, answered.id) == ["queued", "finished"]
    assert store.list_reports(answered.id) == store.list_reports(measured.id) == (report_of(),)
    assert store.get_report(answered.id, "candidate") == report_of()
    assert store.add_job(new_job("b")).job.status is JobStatus.QUEUED


def test_an_answer_never_leads_through_another_answer(store: SqlStore, claim: Claiming) -> None:
    measured = measure(store, claim)
    assert [store.add_job(new_job()).job.answered_from for _ in range(3)] == [measured.id] * 3


def test_force_measures_again_and_its_result_answers_from_then_on(store: SqlStore, claim: Claiming) -> None:
    measure(store, claim)
    forced = measure(store, claim, force=True)
    assert forced.answered_from is None
    assert store.add_job(new_job()).job.answered_from == forced.id


def test_a_failure_answers_nobody(store: SqlStore, claim: Claiming) -> None:
    store.add_job(new_job())
    failure = Failure(kind=FailureKind.CRASHED, message="signal 6", log_tail="…")
    failed = store.finish_job(claim().lease, JobStatus.FAILED, failure=failure)
    assert store.get_job(failed.id).failure == failure
    assert store.add_job(new_job()).job.status is JobStatus.QUEUED


def test_an_identical_job_waits_for_the_one_that_runs_and_is_answered_by_it(store: SqlStore, claim: Claiming) -> None:
    first, second = store.add_job(new_job()).job, store.add_job(new_job()).job
    lease = claim().lease
    assert claim("w2") is None
    store.save_report(lease, report_of())
    store.finish_job(lease, JobStatus.SUCCEEDED)
    assert store.get_job(second.id).answered_from == first.id
    assert names(store, second.id) == ["queued", "finished"]


def test_an_identical_job_is_measured_itself_when_the_first_fails(store: SqlStore, claim: Claiming) -> None:
    store.add_job(new_job())
    second = store.add_job(new_job()).job
    store.finish_job(claim().lease, JobStatus.FAILED, failure=Failure(kind=FailureKind.CRASHED, message="signal 11"))
    assert claim("w2").job.id == second.id


def test_a_forced_job_does_not_wait_for_an_identical_one(store: SqlStore, claim: Claiming) -> None:
    store.add_job(new_job())
    forced = store.add_job(new_job(), force=True).job
    claim()
    assert claim("w2").job.id == forced.id


def test_a_worker_with_another_toolchain_corrects_the_identity(store: SqlStore, claim: Claiming) -> None:
    measured = measure(store, claim, "worker's")
    job = store.add_job(new_job("server's")).job
    lease = claim().lease
    assert store.restate_identity(lease, "worker's").answered_from == measured.id
    with pytest.raises(LeaseLostError):
        store.save_report(lease, report_of())

    other = store.add_job(new_job("server's")).job
    lease = claim().lease
    assert store.restate_identity(lease, "new").status is JobStatus.RUNNING
    store.finish_job(lease, JobStatus.SUCCEEDED)
    assert store.get_job(other.id).identity == "new"
    assert job.id != other.id


def test_reports_stand_in_the_order_of_the_programs_and_lists_read_their_columns(store: SqlStore, claim: Claiming) -> None:
    job = store.add_job(new_job(programs=("dropless", "candidate"))).job
    lease = claim().lease
    candidate, dropless = report_of("candidate", peak_bytes=900), report_of("dropless", status=ReportStatus.DOES_NOT_FIT)
    store.save_report(lease, candidate)
    store.save_report(lease, dropless)
    store.finish_job(lease, JobStatus.SUCCEEDED)
    waiting = store.add_job(new_job("b")).job
    assert store.list_reports(job.id) == (dropless, candidate)
    summaries = store.list_report_summaries([job.id, waiting.id])
    assert summaries[waiting.id] == ()
    assert [(s.job_id, s.program, s.status, s.peak_bytes, s.headroom_bytes, s.topology) for s in summaries[job.id]] == [
        (job.id, "dropless", ReportStatus.DOES_NOT_FIT, 1_300, 15_689, "v5e-4"),
        (job.id, "candidate", ReportStatus.OK, 900, 16_089, "v5e-4"),
    ]
    assert "report" in names(store, job.id)


def test_the_previous_answer_is_of_the_same_scenario_and_another_measurement(store: SqlStore, claim: Claiming) -> None:
    first = measure(store, claim, "a")
    assert store.find_previous_answer(first.id) is None
    repeated = store.add_job(new_job("a")).job
    assert repeated.answered_from == first.id
    assert store.find_previous_answer(repeated.id) is None, "what it was answered from is the same answer"
    for other in (new_job("b", scenario="wide"), new_job("c", git={"project": "mills"}), new_job("d")):
        store.add_job(other)
        lease = claim().lease
        store.finish_job(lease, JobStatus.FAILED if other.identity == "d" else JobStatus.SUCCEEDED)
    changed = measure(store, claim, "e")
    previous = store.find_previous_answer(changed.id)
    assert previous == repeated
    with pytest.raises(NotFoundError, match="no job 'nowhere'"):
        store.find_previous_answer("nowhere")


def test_steps_reports_are_summed_up_from_their_columns(store: SqlStore, claim: Claiming) -> None:
    job, waiting = (store.add_job(new_job(identity, kind="steps")).job for identity in "ab")
    lease = claim(kinds=("steps",)).lease
    check = {"name": "replay", "status": "failed", "claim": "c"}
    store.save_steps_report(lease, StepsReport.model_validate({"status": "checks_failed", "phase": "done", "checks": [check]}))
    assert store.list_steps_summaries([job.id, waiting.id]) == {
        job.id: StepsSummary(job_id=job.id, status=StepsStatus.CHECKS_FAILED, num_steps=0, num_replays=0, num_checks_failed=1)
    }


def test_the_largest_child_of_a_scenario_is_remembered_by_depth(store: SqlStore, claim: Claiming) -> None:
    for identity, rss_bytes in (("a", 500), ("b", 900), ("c", 700)):
        store.add_job(new_job(identity, scenario="wide"))
        lease = claim().lease
        store.save_report(lease, report_of().model_copy(update={"child_peak_rss_bytes": rss_bytes}))
        store.finish_job(lease, JobStatus.SUCCEEDED)
    assert store.find_child_rss("wide", "memory") == 900
    assert store.find_child_rss("wide", "full") is None
    assert store.find_child_rss("narrow", "memory") is None


def test_equal_artifacts_are_kept_once_and_come_back_whole(store: SqlStore, claim: Claiming, tmp_path: Path) -> None:
    content = json.dumps({"rows": list(range(50_000))}).encode()
    (tmp_path / "module").write_bytes(content)
    written = []
    for identity in "ab":
        job = store.add_job(new_job(identity)).job
        lease = claim().lease
        store.save_report(lease, report_of(), artifacts={"candidate.hlo.pb": tmp_path / "module"})
        store.finish_job(lease, JobStatus.SUCCEEDED)
        written.append([(path, path.stat().st_ino) for path in (tmp_path / "artifacts").rglob("*.zst")])
    assert written[0] == written[1], "a reader of the first is not disturbed"
    (artifact,) = store.list_artifacts(job.id)
    assert (artifact.name, artifact.program, artifact.size_bytes) == ("candidate.hlo.pb", "candidate", len(content))
    assert 0 < artifact.stored_bytes < len(content) / 2
    assert b"".join(store.open_artifact(job.id, "candidate.hlo.pb").chunks()) == content
    files = [path for path in (tmp_path / "artifacts").rglob("*") if path.is_file()]
    assert [(path.name, path.stat().st_size) for path in files] == [(f"{artifact.sha256}.zst", artifact.stored_bytes)]


def test_an_answered_job_shows_the_artifacts_it_was_answered_from(store: SqlStore, claim: Claiming, tmp_path: Path) -> None:
    (tmp_path / "module").write_bytes(b"HLO")
    store.add_job(new_job())
    lease = claim().lease
    store.save_report(lease, report_of(), artifacts={"candidate.hlo.pb": tmp_path / "module"})
    store.finish_job(lease, JobStatus.SUCCEEDED)
    answered = store.add_job(new_job()).job
    assert b"".join(store.open_artifact(answered.id, "candidate.hlo.pb").chunks()) == b"HLO"


def test_a_refused_report_leaves_no_row_of_its_artifacts(store: SqlStore, claim: Claiming, tmp_path: Path) -> None:
    (tmp_path / "module").write_bytes(b"HLO")
    job = store.add_job(new_job()).job
    lease = claim().lease
    void = Lease(**{**lease.model_dump(), "token": "f" * 32})
    with pytest.raises(LeaseLostError):
        store.save_report(void, report_of(), artifacts={"candidate.hlo.pb": tmp_path / "module"})
    assert store.list_artifacts(job.id) == ()
    assert store.list_reports(job.id) == ()
