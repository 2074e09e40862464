"""Tests of the report in a real browser: it has no errors, needs no network, fits a phone, and opens quickly for any run."""

import math

import pytest

from ddlf import events as e
from ddlf.monitor.runs import folder, report
from tests.monitor.dashboard.browser import chromium, opened
from tests.monitor.dashboard.made_up import with_peers
from tests.monitor.runs.made import BEGAN, events_of, record, run

pytestmark = pytest.mark.slow

OPENED_S = 1.0
"""Most processor seconds of the page's thread until it is open. Other programs do not change this time."""


async def seconds_of(page, url):
    """Open a page, and return the seconds that its thread has computed."""
    devtools = await page.context.new_cdp_session(page)
    await devtools.send("Performance.enable", {"timeDomain": "threadTicks"})
    await page.goto(url)
    metrics = (await devtools.send("Performance.getMetrics"))["metrics"]
    return next(metric["value"] for metric in metrics if metric["name"] == "TaskDuration")


async def test_every_report_opens_without_an_error_and_without_requests(tmp_path):
    lost = [(BEGAN + 3, e.WorkerLost(round=2, worker=2, slot=2, why="worker 2: cut"))]
    nan = [(BEGAN + 90, e.Committed(record=record(21, metrics={"loss": math.nan})))]
    stale = [(BEGAN + 90, e.Committed(record=record(21, slot=1, staleness=n))) for n in (0, 3)]
    cases = {
        "usual": (events_of(20) + lost, 5),
        "one round": (events_of(1), 5),
        "no number": (events_of(20) + nan, 5),
        "asynchronous": (events_of(20) + stale, 6),
        "failed": (events_of(0), 0),
        "long": (events_of(2 * report.MOST_POINTS, test={"loss": 0.5}), 5),
        "peers": ([*with_peers(12, 60, at=BEGAN)], 7),
    }
    async with chromium() as browser:
        for name, (events, charts) in cases.items():
            path = run(tmp_path, name, events, "failed" if name == "failed" else "finished", "no" * (name == "failed"))
            for width, scheme in ((390, "light"), (1920, "dark"))[: 2 if name in ("usual", "peers") else 1]:
                async with opened(browser, "about:blank", width=width, color_scheme=scheme) as page:
                    took = await seconds_of(page, (path / folder.REPORT).as_uri())
                    assert await page.locator(".chart canvas").count() == charts, name
                    assert 0 < took < OPENED_S, name
                    assert await page.evaluate("document.documentElement.scrollWidth") <= width, name
                    assert (page.wrong, page.hosts) == ([], {""}), name


async def test_a_report_shows_values_under_the_pointer_hides_curves_and_copies_tables(tmp_path):
    path = run(tmp_path, "a", events_of(20))
    async with chromium() as browser, opened(browser, (path / folder.REPORT).as_uri()) as page:
        chart = page.locator(".chart").first
        assert (await chart.locator(".key").all_inner_texts()) == ["train\n0.0500"]
        await chart.locator(".u-over").hover(position={"x": 2, "y": 20})
        assert "round 1" in await chart.locator(".at").inner_text()
        await chart.locator("label").first.click()
        assert not await chart.locator("input").first.is_checked()
        await page.get_by_role("button", name="LaTeX").first.click()
        assert await page.get_by_role("button", name="copied").count() == 1
        await page.get_by_text("Settings and their origins").click()
        assert await page.get_by_text("batch_size", exact=True).is_visible()
        assert page.wrong == []
