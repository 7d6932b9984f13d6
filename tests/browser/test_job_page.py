"""The job page as a person meets it: what it says, what can be done with it, and how it looks in the dark and on a phone."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Page, expect

from service.records import Collective, CollectiveTotals, JobStatus
from service.steps.findings import Findings
from service.storage.store import open_store
from tests.api.test_steps_page import step as make_step
from tests.browser.conftest import Visit
from tests.browser.samples import PEAK_INDEX, make_report
from tests.browser.stored import add, claim, queue

pytestmark = pytest.mark.browser

DARK = {"color_scheme": "dark"}
PHONE = {"viewport": {"width": 390, "height": 844}}
WITHOUT_SCRIPTS = {"java_script_enabled": False}


def sizes(page: Page) -> list[int]:
    return [int(row.get_attribute("data-size") or 0) for row in page.locator("#buffer-table tbody tr").all()]


def test_the_verdict_names_needed_and_available_bytes(visit: Visit) -> None:
    page = visit.open(f"/jobs/{visit.site.jobs['over']}")
    headline = page.get_by_role("region", name="Verdict")
    expect(headline).to_contain_text("Does not fit")
    expect(headline).to_contain_text("needs 112.15 GiB, 95.73 GiB available per device: 16.42 GiB too much")


def test_the_timeline_is_drawn_with_the_peak_marked_where_it_stands(visit: Visit) -> None:
    page = visit.open(f"/jobs/{visit.site.jobs['fits']}")
    plot = page.locator("[data-timeline] .plot")
    expect(plot.locator(".scatterlayer .trace")).to_have_count(2)
    expect(plot.locator(".annotation-text", has_text="peak 46.50 GiB")).to_be_visible()
    drawn = page.evaluate(
        "() => { const d = document.querySelector('[data-timeline] .plot').data; return [d[0].x.length, d[1].x[0], d[1].y[0]]; }"
    )
    peak = make_report("dropless", scale=1.7).peak_bytes
    assert peak is not None
    assert drawn == [400, PEAK_INDEX, pytest.approx(peak / 2**30, abs=1e-5)]
    expect(page.locator("[data-timeline] .drawing")).to_be_hidden()


@pytest.mark.parametrize("visit", [WITHOUT_SCRIPTS], indirect=True)
def test_everything_can_be_read_without_scripts(visit: Visit) -> None:
    page = visit.open(f"/jobs/{visit.site.jobs['fits']}")
    expect(page.get_by_role("img", name=re.compile("the peak of 46.50 GiB stands at point 261"))).to_be_visible()
    expect(page.locator("[data-timeline] circle.peak")).to_be_visible()
    expect(page.get_by_text("params.moe_layers.moe.w_up")).to_be_visible()
    expect(page.locator(".filter")).to_be_hidden()
    assert sizes(page) == sorted(sizes(page), reverse=True)


def test_buffers_are_sorted_by_keyboard_and_say_so(visit: Visit) -> None:
    page = visit.open(f"/jobs/{visit.site.jobs['fits']}")
    size = page.get_by_role("columnheader", name="Size")
    size.get_by_role("button").focus()
    page.keyboard.press("Enter")
    expect(size).to_have_attribute("aria-sort", "ascending")
    assert sizes(page) == sorted(sizes(page))
    page.keyboard.press("Tab")
    page.keyboard.press("Space")
    expect(page.get_by_role("columnheader", name="Padding")).to_have_attribute("aria-sort", "descending")
    expect(size).to_have_attribute("aria-sort", "none")
    wasted = [int(row.get_attribute("data-padding") or -1) for row in page.locator("#buffer-table tbody tr").all()]
    assert wasted == sorted(wasted, reverse=True)


def test_the_filter_keeps_rows_that_hold_every_word(visit: Visit) -> None:
    page = visit.open(f"/jobs/{visit.site.jobs['fits']}")
    page.get_by_label("Filter").fill("second moment w_gate")
    expect(page.locator("#buffer-table tbody tr:visible")).to_have_count(1)
    expect(page.locator("[data-filter-count]")).to_have_text("1 of 43")
    expect(page.get_by_text("No buffer matches.")).to_be_hidden()
    page.get_by_label("Filter").fill("second moment of nothing")
    expect(page.locator("#buffer-table tbody tr:visible")).to_have_count(0)
    expect(page.get_by_text("No buffer matches.")).to_be_visible()


def test_a_buffer_shows_its_lifetime_on_the_timeline(visit: Visit) -> None:
    page = visit.open(f"/jobs/{visit.site.jobs['fits']}")
    button = page.get_by_role("button", name=re.compile("Show the lifetime of fusion.13, points 200 to 390"))
    button.focus()
    page.keyboard.press("Enter")
    expect(button).to_have_attribute("aria-pressed", "true")
    shapes = page.evaluate("() => document.querySelector('[data-timeline] .plot').layout.shapes.map(s => [s.x0, s.x1])")
    assert [200, 390] in shapes


def test_each_program_has_a_page_of_its_own(visit: Visit) -> None:
    page = visit.open(f"/jobs/{visit.site.jobs['fits']}")
    tabs = page.get_by_role("navigation", name="Programs")
    expect(tabs.locator("[aria-current]")).to_contain_text("dropless")
    tabs.get_by_role("link", name=re.compile("candidate")).click()
    expect(page.get_by_role("region", name="Verdict")).to_contain_text("needs 28.04 GiB")


def test_a_failure_shows_its_kind_and_its_log_as_text(visit: Visit) -> None:
    page = visit.open(f"/jobs/{visit.site.jobs['failed']}")
    expect(page.get_by_role("heading", name="Failed: crashed while tracing candidate")).to_be_visible()
    expect(page.get_by_text("F0000 Check <failed>: x > y")).to_be_visible()


def edges(page: Page, selector: str) -> tuple[float, float]:
    """Upper and lower edge of the first element that matches, in pixels of the page."""
    box = page.locator(selector).first.bounding_box()
    assert box is not None
    return box["y"], box["y"] + box["height"]


def test_the_highest_label_of_a_curve_stands_below_its_title(visit: Visit) -> None:
    store = open_store(visit.site.settings)
    job_id = queue(store, "curves", ("steps",), kind="steps")
    lease = claim(store, job_id, "steps")
    findings = Findings()
    # Steps of half a second each are drawn between 0.495 s and 0.505 s, and both are lines of the scale: the edges of the drawing.
    findings.apply("step", {"steps": [make_step(index, 5.0) for index in range(3)]})
    store.save_steps_report(lease, findings.report())
    store.finish_job(lease, JobStatus.SUCCEEDED)
    store.close()
    page = visit.open(f"/jobs/{job_id}")
    for number in range(page.locator("figure.curve").count()):
        figure = f"figure.curve >> nth={number}"
        labels = page.locator(figure).locator("svg text").all()
        highest = min(box["y"] for label in labels if (box := label.bounding_box()))
        assert edges(page, f"{figure} >> figcaption")[1] <= highest


def test_the_bar_of_a_collective_keeps_clear_of_its_caption(visit: Visit) -> None:
    collective = Collective(
        kind="all-gather", is_known=True, axes=("fsdp",), group_size=16, link="ici", module="moe", phase="forward", is_compiler_made=False,
        static_count=1, per_step_count=58, payload_bytes=7 << 30, wire_bytes=3 << 30, wire_factor="(n-1)/n", link_seconds=0.5, names=("x",),
    )  # fmt: skip
    totals = CollectiveTotals(static_count=1, per_step_count=58, ici_wire_bytes=3 << 30, dcn_wire_bytes=0, link_seconds=0.5)
    store = open_store(visit.site.settings)
    job_id = add(store, "links", [make_report().model_copy(update={"collectives": (collective,), "collective_totals": totals})])
    store.close()
    page = visit.open(f"/jobs/{job_id}")
    assert edges(page, "td.wire .sub")[0] - edges(page, "td.wire .bar")[1] >= 4


@pytest.mark.parametrize("visit", [DARK], indirect=True)
def test_text_stands_out_from_its_ground_in_the_dark(visit: Visit) -> None:
    page = visit.open(f"/jobs/{visit.site.jobs['over']}")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(14, 20, 24)"
    assert weakest_contrast(page) >= 4.5


def test_text_stands_out_from_its_ground_in_the_light(visit: Visit) -> None:
    page = visit.open(f"/jobs/{visit.site.jobs['over']}")
    assert weakest_contrast(page) >= 4.5


def weakest_contrast(page: Page) -> float:
    """The lowest contrast ratio (WCAG 2.2, 1.4.3) of any visible text against the nearest opaque ground behind it."""
    ratio: float = page.evaluate(
        """() => {
          const parse = (text) => text.match(/[\\d.]+/g).map(Number);
          const light = ([r, g, b]) => {
            const [x, y, z] = [r, g, b].map((v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
            return 0.2126 * x + 0.7152 * y + 0.0722 * z;
          };
          let weakest = 21;
          for (const element of document.querySelectorAll('main *, header *, footer *')) {
            if (![...element.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim())) continue;
            if (!element.checkVisibility() || element.closest('.plot, script, .unseen')) continue;
            const isSvg = element instanceof SVGElement;
            const colour = parse(getComputedStyle(element)[isSvg ? 'fill' : 'color']);
            let ground = element;
            while (ground && (parse(getComputedStyle(ground).backgroundColor)[3] ?? 1) < 1) ground = ground.parentElement;
            const [a, b] = [light(colour), light(parse(getComputedStyle(ground ?? document.body).backgroundColor))];
            weakest = Math.min(weakest, (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05));
          }
          return weakest;
        }"""
    )
    return ratio


@pytest.mark.parametrize("visit", [PHONE], indirect=True)
@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/jobs",
        "/jobs/{fits}",
        "/jobs/{over}",
        "/jobs/{failed}",
        "/jobs/{running}",
        "/jobs/{retries}?candidate_seconds=3&dropless_seconds=4",
        "/catalog",
        "/submit",
        "/compare",
        "/compare?base={fits}&head={later}",
        "/none",
    ],
)
def test_nothing_scrolls_sideways_on_a_phone(visit: Visit, path: str) -> None:
    page = visit.page
    answer = page.goto(visit.site.url + path.format(**visit.site.jobs))
    assert answer is not None
    expect(page.get_by_role("heading", level=1)).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    if path == "/none":
        # The browser itself logs the 404 of the page that was asked for.
        visit.complaints.clear()
