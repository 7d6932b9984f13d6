"""A real server process on a real SQLite file with stored reports, and a real browser to look at it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, expect, sync_playwright

from service.records import Failure, FailureKind, JobStatus, Report, ReportStatus
from service.settings import Settings
from service.storage.store import open_store
from tests.browser.samples import make_report
from tests.browser.stored import add, claim, queue, start

PATIENCE_MILLISECONDS = 60_000
"""For a page to open and to become as it should be. It takes a fraction of a second where nothing else runs; more is no failure."""

expect.set_options(timeout=PATIENCE_MILLISECONDS)


@dataclass
class Site:
    """The running server and the ids of the jobs it holds."""

    url: str
    settings: Settings
    jobs: dict[str, str] = field(default_factory=dict)


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    settings = Settings(data_dir=tmp_path_factory.mktemp("site"), port=0, poll_seconds=0.05)
    site = Site("", settings)
    store = open_store(settings)
    crash = Failure(kind=FailureKind.CRASHED, message="the child ended by signal 11", log_tail="E0000 before\nF0000 Check <failed>: x > y")
    failed = Report(program="candidate", status=ReportStatus.FAILED, depth="memory", failure=crash)
    site.jobs["fits"] = add(store, "deepseek-v3-671b-v5p-512", [make_report(), make_report("dropless", scale=1.7)])
    site.jobs["later"] = add(store, "deepseek-v3-671b-v5p-512", [make_report(scale=1.12), make_report("dropless", scale=1.9)])
    site.jobs["over"] = add(store, "deepseek-v3-671b-v5p-128", [make_report(scale=4)])
    site.jobs["failed"] = add(store, "broken-v5p-8", [failed], failure=crash)
    site.jobs["retries"] = queue(store, "retries-v5p-512", ("candidate", "dropless"), moe={"retry_when_tokens_dropped": True})
    lease = claim(store, site.jobs["retries"])
    for report in (make_report(), make_report("dropless", scale=1.7)):
        store.save_report(lease, report)
    store.finish_job(lease, JobStatus.SUCCEEDED)
    site.jobs["running"] = start(store, "a-scenario-with-quite-a-long-name-that-still-has-to-fit-a-narrow-screen")[0]
    store.close()
    environment = os.environ | {
        "WEIGHBRIDGE_DATA_DIR": str(settings.data_dir),
        "WEIGHBRIDGE_PORT": "0",
        "WEIGHBRIDGE_POLL_SECONDS": "0.05",
    }
    log = Path(settings.data_dir) / "server.log"
    with log.open("wb") as out:
        process = subprocess.Popen([sys.executable, "-m", "service", "api"], env=environment, stdout=out, stderr=out)
        try:
            site.url = _wait_for_address(process, log)
            yield site
        finally:
            process.terminate()
            process.wait(timeout=60)


def _wait_for_address(process: subprocess.Popen[bytes], log: Path) -> str:
    """Of a server that has taken a free port; connections to it are kept from then on until it answers."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()
        if told := re.search(r"Weighbridge is at (http://\S+)\n", log.read_text()):
            return told[1]
        time.sleep(0.05)
    pytest.fail(f"the server did not start: {log.read_text()}")


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    executable = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if executable is None:
        pytest.skip("no Chromium is installed")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@dataclass
class Visit:
    """One page in one browser context, and what went wrong or left the site while it was open."""

    page: Page
    site: Site
    complaints: list[str] = field(default_factory=list)

    def open(self, path: str) -> Page:
        self.page.goto(self.site.url + path)
        return self.page


@pytest.fixture
def visit(browser: Browser, site: Site, request: pytest.FixtureRequest) -> Iterator[Visit]:
    """A page that must stay without console errors and without requests to elsewhere; options by `indirect` parameter."""
    options = getattr(request, "param", {})
    context = browser.new_context(**({"viewport": {"width": 1280, "height": 900}} | options))
    context.set_default_timeout(PATIENCE_MILLISECONDS)
    visit = Visit(context.new_page(), site)

    def hear(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            visit.complaints.append(f"{message.type}: {message.text}")

    def watch(asked: Request) -> None:
        if urlsplit(asked.url).netloc not in ("", urlsplit(site.url).netloc):
            visit.complaints.append(f"request to elsewhere: {asked.url}")

    def lose(asked: Request) -> None:
        # Leaving a page ends its stream of events, which the browser calls aborted.
        if asked.failure != "net::ERR_ABORTED":
            visit.complaints.append(f"failed: {asked.url} {asked.failure}")

    visit.page.on("console", hear)
    visit.page.on("pageerror", lambda error: visit.complaints.append(f"script: {error}"))
    visit.page.on("request", watch)
    visit.page.on("requestfailed", lose)
    yield visit
    context.close()
    assert visit.complaints == []
