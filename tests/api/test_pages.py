"""Pages and static files over HTTP, and the geometry and contexts that they are drawn from."""

from __future__ import annotations

import gzip
import itertools
import json
import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from fastapi.testclient import TestClient

from service.api import charts
from service.api.compare_context import compare_context
from service.api.job_context import job_context
from service.api.pages import precise_seconds, render
from service.api.phase_words import failure_title, phase_words, words_of
from service.api.program_context import json_for_script, program_view
from service.api.static_files import static_url
from service.records import BUFFER_CLASSES, Collective, Event, Failure, FailureKind, JobStatus, Peak, Report, ReportStatus
from service.resources import resource_directory
from service.steps.interface import PHASES
from service.storage.interface import WorkerStatus
from service.storage.store import SqlStore
from tests.browser.samples import NUM_POINTS, PEAK_INDEX, make_job, make_report
from tests.browser.stored import add, claim, queue, start

CSS = (resource_directory("web") / "static" / "site.css").read_text()


def page_of(report: Report, **job: object) -> str:
    return bytes(render("job.html", job_context(make_job(**job), [report], program=None, events=[], artifacts=[])).body).decode()


def test_every_buffer_class_has_a_colour_of_its_own_in_light_and_dark() -> None:
    light, _, dark = CSS.partition("@media (prefers-color-scheme: dark)")
    dark = dark.partition(".c-parameters {")[0]
    for theme in (light, dark):
        colours = [re.search(rf"--{charts.class_css(name)}: (#[0-9a-f]{{6}});", theme) for name in BUFFER_CLASSES]
        assert all(colours), [name for name, colour in zip(BUFFER_CLASSES, colours, strict=True) if not colour]
        assert len({colour.group(1) for colour in colours if colour}) == len(BUFFER_CLASSES)
    for name in BUFFER_CLASSES:
        assert f".{charts.class_css(name)} {{ --c: var(--{charts.class_css(name)}); }}" in CSS


def test_neighbouring_classes_stay_apart_for_readers_without_red_or_green() -> None:
    light, _, dark = CSS.partition("@media (prefers-color-scheme: dark)")
    # The classes that take real shares, in the order of the gauge.
    shown = [name for name in BUFFER_CLASSES if name not in ("router_bias", "batch", "other_arguments", "constants", "outputs")]
    for theme in (light, dark):
        colours = []
        for name in shown:
            match = re.search(rf"--{charts.class_css(name)}: #([0-9a-f]{{6}});", theme)
            assert match
            colours.append([int(match.group(1)[i : i + 2], 16) / 255 for i in (0, 2, 4)])
        for (a, left), (b, right) in zip(zip(shown, colours, strict=True), list(zip(shown, colours, strict=True))[1:], strict=False):
            for deficiency in ("protan", "deutan"):
                assert distance(simulate(left, deficiency), simulate(right, deficiency)) > 0.12, (a, b, deficiency)


def simulate(srgb: list[float], deficiency: str) -> list[float]:
    """Linear colour as seen without one cone type (Machado, Oliveira, Fernandes 2009, severity 1.0)."""
    matrices = {
        "protan": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
        "deutan": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    }
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in srgb]
    return [max(0.0, sum(row[i] * linear[i] for i in range(3))) for row in matrices[deficiency]]


def distance(left: list[float], right: list[float]) -> float:
    """Distance in Oklab (Ottosson 2020), where about 0.02 is just noticeable."""

    def oklab(rgb: list[float]) -> list[float]:
        r, g, b = rgb
        cones = (
            0.4122214708 * r + 0.5363325363 * g + 0.0514459929 * b,
            0.2119034982 * r + 0.6806995451 * g + 0.1073969566 * b,
            0.0883024619 * r + 0.2817188376 * g + 0.6299787005 * b,
        )
        x, y, z = (cone ** (1 / 3) for cone in cones)
        return [
            0.2104542553 * x + 0.7936177850 * y - 0.0040720468 * z,
            1.9779984951 * x - 2.4285922050 * y + 0.4505937099 * z,
            0.0259040371 * x + 0.7827717662 * y - 0.8086757660 * z,
        ]

    return float(sum((a - b) ** 2 for a, b in zip(oklab(left), oklab(right), strict=True)) ** 0.5)


def test_the_segments_of_the_gauge_sum_to_the_allocated_bytes() -> None:
    report = make_report()
    gauge = charts.gauge(report)
    assert gauge is not None
    assert sum(segment.num_bytes for segment in gauge.segments) == report.allocated_bytes
    assert gauge.over_width == 0
    assert gauge.segments[-1].start + gauge.segments[-1].width == pytest.approx(gauge.allocated_position, abs=0.01)
    assert gauge.capacity_position == pytest.approx(100 / 1.04, abs=0.001)


def test_what_is_beyond_the_capacity_stands_apart() -> None:
    report = make_report(scale=4)
    gauge = charts.gauge(report)
    assert gauge is not None
    assert gauge.capacity_position is not None
    assert report.headroom_bytes is not None
    assert report.allocated_bytes is not None
    assert gauge.over_width == pytest.approx(100 * -report.headroom_bytes / (report.allocated_bytes * 1.04), abs=0.001)
    assert gauge.capacity_position + gauge.over_width == pytest.approx(gauge.allocated_position, abs=0.01)


@pytest.mark.parametrize("full", [3.0, 1023.0, 5e5, 7.3e8, 102_786_657_280.0, 9e13])
def test_a_scale_has_round_ticks_that_stay_inside(full: float) -> None:
    ticks = charts.scale_ticks(full)
    assert 3 <= len(ticks) <= 9
    assert ticks[0].position == 0
    assert ticks[-1].position <= 100
    gaps = {round(b.position - a.position, 2) for a, b in itertools.pairwise(ticks)}
    assert len(gaps) <= 2


def test_the_script_draws_the_same_peak_that_the_server_drew() -> None:
    report = make_report()
    data, drawing = charts.timeline_data(report), charts.draw_timeline(report)
    assert data is not None
    assert drawing is not None
    assert data["peak"]["x"] == PEAK_INDEX
    assert max(data["y"]) == data["peak"]["y"]
    assert drawing.peak_x == pytest.approx(100 * PEAK_INDEX / (NUM_POINTS - 1), abs=0.001)
    assert drawing.path.count("H") == NUM_POINTS


def test_a_lifetime_is_never_too_short_to_see_nor_beyond_the_end() -> None:
    timeline = make_report().timeline
    assert charts.lifetime(0, NUM_POINTS - 1, timeline) == (0.0, 100.0)
    start_at, width = charts.lifetime(NUM_POINTS - 1, NUM_POINTS - 1, timeline)
    assert (start_at, width) == (99.0, 1.0)


def test_nothing_in_the_data_can_end_its_script_element() -> None:
    text = json_for_script({"instruction": "</script><script>alert(1)</script>"})
    assert "<" not in text
    assert json.loads(text) == {"instruction": "</script><script>alert(1)</script>"}


def test_what_others_wrote_is_text_on_the_page() -> None:
    failure = Failure(kind=FailureKind.COMPILER, message="<b>bold</b>", log_tail="<img src=x onerror=alert(1)>")
    html = page_of(Report(program="candidate", status=ReportStatus.FAILED, depth="memory", failure=failure))
    assert "&lt;b&gt;bold&lt;/b&gt;" in html
    assert "<img src=x" not in html


def test_a_report_without_figures_says_unknown_and_not_zero() -> None:
    report = make_report().model_copy(update={"code_bytes": None, "host_bytes": None})
    figures = {figure.label: figure.num_bytes for figure in program_view(report).figures}
    assert figures["Program code"] is None
    html = page_of(report)
    assert re.search(r"<dt>Program code</dt><dd[^>]*>unknown</dd>", html)


def test_a_collective_of_unknown_size_comes_first() -> None:
    def collective(kind: str, wire_bytes: int | None) -> Collective:
        return Collective(
            kind=kind, is_known=wire_bytes is not None, axes=("fsdp", "expert"), group_size=6, link="ici", module="moe", phase="forward",
            is_compiler_made=False, static_count=2, per_step_count=None if wire_bytes is None else 10, payload_bytes=wire_bytes,
            wire_bytes=wire_bytes, wire_factor="(n-1)/n", link_seconds=None, names=("x",),
        )  # fmt: skip

    report = make_report().model_copy(
        update={"collectives": (collective("all-gather", 5), collective("all-new", None), collective("all-reduce", 9))}
    )
    rows = program_view(report).collectives
    assert [(row.entry.kind, row.axes, row.width) for row in rows] == [
        ("all-new", "fsdp × expert", 0.0),
        ("all-reduce", "fsdp × expert", 100.0),
        ("all-gather", "fsdp × expert", 55.556),
    ]


def test_the_next_peaks_are_told_by_how_far_they_stand_below() -> None:
    peaks = tuple(
        Peak(index=i, live_bytes=live, instruction="f", module="moe", phase=None, drop_bytes=3, largest=())
        for i, live in ((9, 70), (4, 51))
    )
    rows = program_view(make_report().model_copy(update={"peaks": peaks})).peaks
    assert [(row.rank, row.below_bytes, row.phase) for row in rows] == [(1, 0, "unknown"), (2, 19, "unknown")]


def test_the_program_that_decides_is_shown_unless_another_is_asked_for() -> None:
    reports = [make_report(), make_report("dropless", scale=1.7)]
    shown = [job_context(make_job(), reports, program=name, events=[], artifacts=[]).program for name in (None, "candidate", "no-such")]
    assert [view.report.program for view in shown if view] == ["dropless", "candidate", "dropless"]


def test_a_comparison_says_what_makes_up_the_difference() -> None:
    base, head = make_report(), make_report(scale=1.5)
    context = compare_context(base=(make_job(1), [base]), head=(make_job(2), [head]), program=None, recent=[])
    difference = context.difference
    assert difference is not None
    assert base.peak_bytes is not None
    assert head.peak_bytes is not None
    assert difference.headline == "The peak grew by 13.68 GiB (+50.00 %)"
    assert sum(row.delta_bytes or 0 for row in difference.classes) == head.peak_bytes - base.peak_bytes
    assert sum(row.entry.delta_bytes for row in difference.buffers) == head.peak_bytes - base.peak_bytes
    left, right = (side.gauge for side in context.sides)
    assert left is not None
    assert right is not None
    assert left.capacity_position == right.capacity_position
    assert {row.name: row.css_class for row in difference.totals}["headroom"] == "more"


def test_bars_of_a_comparison_grow_to_either_side_of_the_middle() -> None:
    base = make_report()
    classes = dict(base.classes) | {"logits": base.classes["logits"] - 40, "gradients": base.classes["gradients"] + 40}
    head = base.model_copy(update={"classes": classes})
    difference = compare_context(base=(make_job(1), [base]), head=(make_job(2), [head]), program=None, recent=[]).difference
    assert difference is not None
    assert difference.headline == "The peak is the same, to the byte"
    assert [(row.name, row.start, row.width, row.css_class) for row in difference.classes] == [
        ("gradients", 50.0, 50.0, "more"),
        ("logits", 0.0, 50.0, "less"),
    ]


def test_what_cannot_be_compared_is_said_in_words() -> None:
    failed = Report(program="candidate", status=ReportStatus.FAILED, depth="memory")
    context = compare_context(base=(make_job(1), [failed]), head=(make_job(2), [make_report()]), program=None, recent=[])
    assert context.difference is None
    assert context.notice == "Nothing was measured in the base job, so there is nothing to compare."


def test_a_pair_stands_on_the_page_of_a_spec_that_retries() -> None:
    spec = dict(make_job().spec) | {"moe": {"retry_when_tokens_dropped": True}}
    reports = [make_report(), make_report("dropless", scale=1.7)]
    context = job_context(make_job(spec=spec), reports, program=None, events=[], artifacts=[])
    assert context.pair is not None
    assert (context.pair.worse_program, context.pair.headroom_bytes) == ("dropless", reports[1].headroom_bytes)
    html = bytes(render("job.html", context).body).decode()
    assert "dropless, with 48.06 GiB of head-room" in html
    assert job_context(make_job(), reports, program=None, events=[], artifacts=[]).pair is None
    capacity = reports[0].capacity_bytes
    assert capacity is not None
    full = [report.model_copy(update={"allocated_bytes": capacity - 1, "headroom_bytes": 1}) for report in reports]
    html = bytes(render("job.html", job_context(make_job(spec=spec), full, program=None, events=[], artifacts=[])).body).decode()
    assert "which does not fit; with <code>steps.look_ahead: 0</code> the pair does." in html


def test_measured_times_say_what_retrying_costs_and_nonsense_is_ignored(client: TestClient, store: SqlStore) -> None:
    job_id = queue(store, "retries", ("candidate", "dropless"), moe={"retry_when_tokens_dropped": True})
    lease = claim(store, job_id)
    for report in (make_report(), make_report("dropless", scale=1.7)):
        store.save_report(lease, report)
    store.finish_job(lease, JobStatus.SUCCEEDED)
    html = client.get(f"/jobs/{job_id}?candidate_seconds=3&dropless_seconds=4").text
    assert "here <strong>25.0 %</strong>" in html
    costs = re.findall(r'data-label="([0-9.]+) % of the steps overflow">([^<]+)</td>', html)
    assert {"0.0": "3.00 s", "1.0": "3.04 s", "10.0": "3.40 s", "100.0": "7.00 s"}.items() <= dict(costs).items()
    assert re.search(r'name="candidate_seconds"[^>]* value="3"', html)
    for nonsense in ("", "abc", "0", "-3", "nan", "inf", "1e999", "3 s", "<b>"):
        answer = client.get(f"/jobs/{job_id}", params={"candidate_seconds": nonsense, "dropless_seconds": "4"})
        assert answer.status_code == 200
        assert "Cost of retrying" in answer.text
        assert "step-costs" not in answer.text
        assert re.search(r'name="candidate_seconds"[^>]* value=""', answer.text), nonsense


@pytest.mark.parametrize(
    ("seconds", "text"), [(3.04, "3.04 s"), (0.0123, "12.3 ms"), (123.4, "123 s"), (4567.0, "4,567 s"), (2e-5, "20.0 µs")]
)
def test_step_times_keep_three_digits(seconds: float, text: str) -> None:
    assert precise_seconds(seconds) == text


def test_templates_compute_nothing() -> None:
    for path in (resource_directory("web") / "templates").glob("*.html"):
        for expression in re.findall(r"\{\{(.*?)\}\}|\{%(.*?)%\}", path.read_text()):
            code = re.sub(r"'[^']*'", "", "".join(expression)).strip().strip("-")
            assert not re.search(r"[*/+]|\s-\s|\|\s*(round|sum|int|float|filesizeformat)\b", code), f"{path.name}: {code}"


def test_no_page_holds_script_text_or_names_another_site() -> None:
    for path in (resource_directory("web") / "templates").glob("*.html"):
        text = path.read_text()
        assert not re.search(r"<script(?![^>]*(src=|application/json))", text), path.name
        assert not re.search(r"\son[a-z]+=|javascript:", text), path.name
        assert not re.search(r"https?://", text), path.name


def test_static_files_are_compressed_kept_for_a_year_and_not_sent_twice(client: TestClient) -> None:
    url = static_url("plotly.min.js")
    answer = client.get(url, headers={"Accept-Encoding": "gzip"})
    assert answer.headers["content-encoding"] == "gzip"
    assert int(answer.headers["content-length"]) < 1_600_000
    assert "immutable" in answer.headers["cache-control"]
    plain = client.get(url, headers={"Accept-Encoding": "identity"})
    assert plain.content == answer.content
    assert len(gzip.compress(plain.content)) < len(plain.content)
    again = client.get(url, headers={"If-None-Match": answer.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize("name", ["..%2Ftemplates%2Fbase.html", "base.html", "site.css.map", "%2Fetc%2Fpasswd"])
def test_only_files_of_the_static_folder_are_sent(client: TestClient, name: str) -> None:
    assert client.get(f"/static/{name}").status_code == 404


def test_an_address_without_the_right_hash_is_asked_for_again(client: TestClient) -> None:
    assert client.get("/static/site.css?v=old").headers["cache-control"] == "no-cache"


def test_errors_are_pages_for_people_and_problems_for_programs(client: TestClient) -> None:
    page, problem = client.get("/jobs/absent"), client.get("/api/v1/jobs/absent")
    assert (page.status_code, page.headers["content-type"].partition(";")[0]) == (404, "text/html")
    assert (problem.status_code, problem.headers["content-type"]) == (404, "application/problem+json")
    assert "<h1>Not found</h1>" in page.text


def test_a_page_that_calls_a_job_running_has_not_seen_its_end(client: TestClient, store: SqlStore, monkeypatch: pytest.MonkeyPatch) -> None:
    job_id, lease = start(store, "ends-while-the-page-is-made")

    def then_ends(read: Callable[..., Any]) -> Callable[..., Any]:
        def read_and_end(*arguments: Any) -> Any:
            seen = read(*arguments)
            monkeypatch.undo()
            store.finish_job(lease, JobStatus.SUCCEEDED)
            return seen

        return read_and_end

    # Whichever is read first, the job ends right after it.
    monkeypatch.setattr(store, "get_job", then_ends(store.get_job))
    monkeypatch.setattr(store, "list_events", then_ends(store.list_events))
    page = client.get(f"/jobs/{job_id}").text
    (finished,) = [event for event in store.list_events(job_id) if event.name == "finished"]
    after = re.search(r'data-after="(\d+)"', page)
    assert after is None or int(after.group(1)) < finished.sequence, "the page would wait for an event that it has"


def test_pages_answer_while_nothing_was_ever_weighed(client: TestClient) -> None:
    for path in ("/", "/jobs", "/catalog", "/submit", "/compare"):
        assert client.get(path).status_code == 200, path
    assert "Nothing has been weighed yet" in client.get("/").text


def test_a_job_leads_to_the_comparison_with_the_answer_before_it(client: TestClient, store: SqlStore) -> None:
    first, second = add(store, "wide", [make_report()]), add(store, "wide", [make_report(scale=1.5)])
    assert f'href="/compare?base={first}&amp;head={second}"' in client.get(f"/jobs/{second}").text
    assert "previous answer" not in client.get(f"/jobs/{first}").text


def test_a_waiting_job_says_that_no_worker_will_take_it(client: TestClient, store: SqlStore) -> None:
    job_id = queue(store, "waits", ("steps",), kind="steps")
    assert "No worker is running: this job waits" in client.get(f"/jobs/{job_id}").text
    now = datetime.now(UTC)
    worker = WorkerStatus(id="w", host="mill", pid=7, kinds=("compile",), slots=2, memory_bytes=9, started_at=now, seen_at=now)
    store.record_worker(worker)
    assert "No running worker takes jobs of kind steps: this job waits" in client.get(f"/jobs/{job_id}").text
    store.record_worker(worker.model_copy(update={"kinds": ("compile", "steps")}))
    assert "this job waits" not in client.get(f"/jobs/{job_id}").text
    store.record_worker(worker.model_copy(update={"kinds": ("steps",), "seen_at": now - timedelta(seconds=3600)}))
    assert "No worker is running: this job waits" in client.get(f"/jobs/{job_id}").text


def test_a_failed_job_says_so_first_with_the_phase_in_words(client: TestClient, store: SqlStore) -> None:
    job_id, lease = start(store, "broken", ("candidate", "dropless"))
    failure = Failure(kind=FailureKind.LOWERING, message="halo of 9 tokens exceeds the 8 in each chunk")
    store.save_report(lease, Report(program="candidate", status=ReportStatus.FAILED, depth="memory", failure=failure))
    store.append_event(lease, "progress", {"program": "dropless", "name": "analyse", "seconds": 9.0, "data": {}})
    store.save_report(lease, make_report("dropless"))
    store.finish_job(lease, JobStatus.FAILED, failure=failure)
    assert '<h2 id="failure">Failed: error while tracing candidate</h2>' in client.get(f"/jobs/{job_id}").text


def test_every_failure_has_words_and_a_cancelled_job_did_not_fail() -> None:
    titles = {kind: failure_title(Failure(kind=kind, message="m"), "compiling dropless") for kind in FailureKind}
    assert titles[FailureKind.CRASHED] == "Failed: crashed while compiling dropless"
    assert titles[FailureKind.CANCELLED] == "Cancelled while compiling dropless"
    assert failure_title(Failure(kind=FailureKind.LOST, message="m"), "") == "Failed: the worker was lost"


def test_the_phase_is_the_last_attempts_and_every_phase_of_steps_has_words() -> None:
    def event(number: int, name: str, data: Mapping[str, str] | None = None) -> Event:
        return Event(job_id="j", sequence=number, name=name, data=data or {}, created_at=datetime(2026, 3, 4, tzinfo=UTC))

    events = [
        event(1, "claimed"),
        event(2, "progress", {"program": "candidate", "name": "lower"}),
        event(3, "claimed"),
        event(4, "progress", {"program": "candidate", "name": "trace"}),
        event(5, "progress", {"program": "dropless", "name": "topology"}),
    ]
    assert phase_words(events) == "setting up the topology for dropless"
    assert phase_words(events, "candidate") == "tracing candidate"
    assert phase_words(events[:3]) == ""
    assert [phase for phase in PHASES if not words_of(phase, "steps")] == ["done"]


def test_a_finding_of_a_comparison_stands_on_its_page(client: TestClient, store: SqlStore) -> None:
    ids = []
    for save in ([], ["mla_q"]):
        ids.append(queue(store, "remat", train={"remat": {"policy": "full", "save": save}}))
        lease = claim(store, ids[-1])
        store.save_report(lease, make_report())
        store.finish_job(lease, JobStatus.SUCCEEDED)
    html = client.get(f"/compare?base={ids[0]}&head={ids[1]}").text
    assert "train.remat.save changed, and peak, allocated, host and saved bytes are the same to the byte" in html
    assert "name tensors that this model has" in html
    assert "Buffers that changed" not in html
    assert 'id="findings"' not in client.get(f"/compare?base={ids[0]}&head={ids[0]}").text


def test_a_wrong_spec_comes_back_with_its_text_and_every_problem(client: TestClient) -> None:
    text = "scenario: x\nmodel: {preset: nope}\ntrain: {seq_len: 0}\nmesh: {topology: v9-9}\n"
    answer = client.post("/submit", data={"spec": text.replace("\n", "\r\n"), "depth": "full"})
    assert answer.status_code == 422
    assert text.removesuffix("\n") in answer.text
    for path in ("model.preset", "train.seq_len", "mesh.topology"):
        assert f'<code class="path">{path}</code>' in answer.text
    assert re.search(r'value="full" checked', answer.text)


def test_a_spec_whose_text_no_encoding_can_write_comes_back_as_a_page(client: TestClient) -> None:
    answer = client.post("/submit", data={"spec": 'compiler_options: {"\\ud800": 1}'})
    assert answer.status_code == 422
    assert r'<code class="path">compiler_options.\ud800</code>' in answer.text


def test_a_sound_spec_is_queued_at_the_depth_that_was_chosen(client: TestClient, store: SqlStore) -> None:
    text = (resource_directory("examples") / "tiny-v5e-4.yaml").read_text()
    answer = client.post("/submit", data={"spec": text, "depth": "full"}, follow_redirects=False)
    assert answer.status_code == 303
    job = store.get_job(answer.headers["location"].removeprefix("/jobs/"))
    assert (job.status, job.spec["depth"], job.scenario) == (JobStatus.QUEUED, "full", "tiny-v5e-4")
