"""Pages that follow what happens: the progress of a job, the list of jobs; and the way of a spec from the form into the queue."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

from service.records import JobStatus
from service.storage.store import open_store
from tests.browser.conftest import Visit
from tests.browser.samples import make_report
from tests.browser.stored import add, claim, queue, start

pytestmark = pytest.mark.browser


def test_a_running_job_tells_its_phases_and_turns_into_its_report(visit: Visit) -> None:
    store = open_store(visit.site.settings)
    job_id, lease = start(store, "watched")
    page = visit.open(f"/jobs/{job_id}")
    expect(page.get_by_role("heading", name="Running")).to_be_visible()
    store.append_event(lease, "progress", {"program": "candidate", "name": "code_generation", "seconds": 7.5, "data": {}})
    expect(page.locator("[data-steps]")).to_contain_text("code generation candidate · 7.5 s")
    store.save_report(lease, make_report())
    store.finish_job(lease, JobStatus.SUCCEEDED)
    store.close()
    expect(page.get_by_role("region", name="Verdict")).to_contain_text("needs 28.04 GiB")
    expect(page.get_by_role("heading", name="Running")).to_have_count(0)


def test_the_headline_follows_a_job_from_the_queue_through_its_phases(visit: Visit) -> None:
    store = open_store(visit.site.settings)
    job_id = queue(store, "followed")
    page = visit.open(f"/jobs/{job_id}")
    headline = page.locator("#progress")
    expect(headline).to_have_text(re.compile("Queued"), use_inner_text=True)
    expect(page.get_by_text("No worker is running")).to_be_visible()
    lease = claim(store, job_id)
    expect(headline).to_have_text(re.compile(r"^\s*Running\s*$"), use_inner_text=True)
    expect(page.get_by_text("No worker is running")).to_have_count(0)
    expect(page.locator(".facts").get_by_text("Running")).to_be_visible()
    store.append_event(lease, "progress", {"program": "candidate", "name": "compile", "seconds": 3.5, "data": {}})
    expect(headline).to_have_text(re.compile(r"Running\s+compiling candidate"), use_inner_text=True)
    store.request_cancel(job_id)
    expect(headline).to_have_text(re.compile("cancelling"), use_inner_text=True)
    store.release_job(lease, reason="the worker was told to stop")
    store.close()
    expect(page.get_by_text("Cancelled").first).to_be_visible()


def test_a_job_whose_worker_was_lost_is_queued_again_in_its_headline(visit: Visit) -> None:
    store = open_store(visit.site.settings)
    job_id, lease = start(store, "dropped")
    page = visit.open(f"/jobs/{job_id}")
    headline = page.locator("#progress")
    expect(headline).to_have_text(re.compile(r"Running\s+tracing candidate"), use_inner_text=True)
    store.release_job(lease, reason="the worker was told to stop")
    expect(headline).to_have_text(re.compile(r"^\s*Queued\s*$"), use_inner_text=True)
    store.request_cancel(job_id)
    store.close()


@pytest.mark.parametrize("visit", [{}, {"java_script_enabled": False}, {"viewport": {"width": 390, "height": 844}}], indirect=True)
def test_two_jobs_ticked_in_the_list_are_compared(visit: Visit) -> None:
    page = visit.open("/jobs")
    for name in ("later", "fits"):
        page.get_by_role("checkbox", name=re.compile(visit.site.jobs[name])).check()
    page.get_by_role("button", name="Compare the two ticked").click()
    expect(page.get_by_label("Base")).to_have_value(visit.site.jobs["fits"])
    expect(page.get_by_role("region", name="Verdict")).to_contain_text("The peak grew by 5.47 GiB")


def test_what_was_ticked_stays_so_when_the_list_changes(visit: Visit) -> None:
    page = visit.open("/jobs")
    box = page.get_by_role("checkbox", name=re.compile(visit.site.jobs["fits"]))
    box.check()
    store = open_store(visit.site.settings)
    add(store, "arrives-meanwhile", [make_report()])
    store.close()
    expect(page.get_by_role("link", name="arrives-meanwhile")).to_be_visible()
    expect(box).to_be_checked()
    expect(box).to_be_focused()


def test_a_wrong_spec_is_shown_again_beside_everything_that_is_wrong(visit: Visit) -> None:
    page = visit.open("/submit?example=tiny-v5e-4")
    area = page.get_by_role("textbox", name="Spec")
    area.fill(area.input_value().replace("fsdp: 2", "fsdp: 3").replace("bfloat16", "int8"))
    page.get_by_role("button", name="Weigh", exact=True).click()
    alert = page.get_by_role("alert")
    expect(alert).to_contain_text("train.dtype")
    expect(alert).to_contain_text("mesh")
    expect(area).to_have_value(re.compile("fsdp: 3"))
    # The browser itself logs the 422 of the form that was sent.
    visit.complaints.clear()


def test_a_sound_spec_becomes_a_queued_job(visit: Visit) -> None:
    page = visit.open("/submit?example=tiny-v5e-4")
    page.get_by_role("button", name="Weigh", exact=True).click()
    expect(page.get_by_role("heading", level=1)).to_have_text("tiny-v5e-4")
    expect(page.get_by_role("heading", name="Queued")).to_be_visible()
    page.get_by_role("button", name="Cancel").click()
    expect(page.get_by_text("Cancelled").first).to_be_visible()


def test_the_list_of_jobs_takes_up_new_jobs_by_itself(visit: Visit) -> None:
    page = visit.open("/jobs")
    expect(page.get_by_role("link", name="arrives-later")).to_have_count(0)
    store = open_store(visit.site.settings)
    add(store, "arrives-later", [make_report()])
    store.close()
    expect(page.get_by_role("link", name="arrives-later")).to_be_visible()


def test_jobs_are_filtered_by_state(visit: Visit) -> None:
    page = visit.open("/jobs")
    page.get_by_label("State").select_option(JobStatus.FAILED.value)
    page.get_by_role("button", name="Show").click()
    expect(page.get_by_role("link", name="broken-v5p-8")).to_be_visible()
    expect(page.get_by_role("link", name="deepseek-v3-671b-v5p-512")).to_have_count(0)


def test_two_jobs_are_chosen_and_compared(visit: Visit) -> None:
    page = visit.open(f"/jobs/{visit.site.jobs['later']}")
    page.get_by_role("link", name="Compare", exact=True).last.click()
    page.get_by_label("Base").fill(visit.site.jobs["fits"])
    page.get_by_role("button", name="Compare").click()
    expect(page.get_by_role("region", name="Verdict")).to_contain_text("The peak grew by 5.47 GiB (+11.76 %)")
    page.get_by_label("Program").select_option("candidate")
    page.get_by_role("button", name="Compare").click()
    expect(page.get_by_role("region", name="Verdict")).to_contain_text("Peak 27.35 GiB → 30.64 GiB")
