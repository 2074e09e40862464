"""Make the screenshots of the page of a run and of its report: ``python docs/pictures``, with Debian's Chromium.

The run on them is made up.
"""

import asyncio
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

from PIL import Image  # noqa: E402  # matplotlib needs it, too

from ddlf import IApp  # noqa: E402
from ddlf import events as e  # noqa: E402
from ddlf.monitor.dashboard.server import Dashboard  # noqa: E402
from ddlf.monitor.runs import folder, report  # noqa: E402
from ddlf.monitor.runs.recording import FolderWriter  # noqa: E402
from tests.monitor.dashboard import made_up  # noqa: E402
from tests.monitor.dashboard.browser import chromium, opened  # noqa: E402

ROUNDS, DONE, WORKERS = 40, 23, 4
TEST = {"loss": 0.0453, "accuracy": 0.9861}
PICTURES = (
    ("dashboard-light", dict(width=1920, height=1080, color_scheme="light")),
    ("dashboard-dark", dict(width=1920, height=1080, color_scheme="dark")),
    ("dashboard-phone", dict(width=390, height=844, color_scheme="dark")),
)
REPORTS = (
    ("report-light", dict(width=1600, height=1180, color_scheme="light")),
    ("report-dark", dict(width=1600, height=1180, color_scheme="dark")),
    ("report-phone", dict(width=390, height=844, color_scheme="light")),
)


class MnistCNN(IApp):
    """The app of the report."""

    batch_size = 64


async def look() -> list[dict]:
    return made_up.answers(WORKERS)


async def picture(browser, name: str, options: dict) -> None:
    """Take a screenshot in the middle of a round."""
    about = dict(title="lab", cluster="lab, cluster.yaml (4 workers)")
    async with Dashboard(look, port=0, stop=lambda: True, **about) as dashboard:
        began = time.time() - DONE - 2
        events = [*made_up.beginning(rounds=ROUNDS, workers=WORKERS, at=began), *further_events(began)]
        for number in range(1, ROUNDS + 1):
            events += made_up.one_round(number, rounds=ROUNDS, workers=WORKERS, at=began + 1 + number)
        going_on = asyncio.ensure_future(happen(dashboard, sorted(events, key=lambda pair: pair[0])))
        async with opened(browser, dashboard.url, **options) as page:
            await page.wait_for_selector("#charts canvas")
            await page.wait_for_function("() => document.querySelectorAll('.worker .facts b').length > 8")
            await asyncio.sleep(max(0.0, (began + DONE + 4.65) - time.time()))
            await page.screenshot(path=HERE / f"{name}.png", full_page=options["width"] < 500)
            assert not page.wrong, page.wrong
        going_on.cancel()
    shrink(name)


def shrink(name: str) -> None:
    """Reduce a picture to 128 colours."""
    path = HERE / f"{name}.png"
    Image.open(path).quantize(128, dither=Image.Dither.NONE).save(path, optimize=True)


async def happen(dashboard: Dashboard, events: list) -> None:
    """Send each event to the page at its time."""
    for moment, event in events:
        await asyncio.sleep(max(0.0, moment - time.time()))
        dashboard.tell(event, moment)


def further_events(began: float) -> list:
    """Return further events for the log."""
    lines = ("60000 images, 938 steps in each epoch",)
    wrote = [e.WorkerWrote(worker=w, name=made_up.name(w), stream="stdout", lines=lines) for w in range(1, WORKERS + 1)]
    return [
        *((began + 1.5, event) for event in wrote),
        (began + 10.2, e.WorkerLost(round=9, worker=2, slot=2, why="pc02: the connection ended")),
        (began + 11.4, e.WorkerReturned(round=10, worker=2, name="pc02")),
    ]


async def pictures_of_report(browser) -> None:
    """Take screenshots of the report of a complete run that lost a worker."""
    began = time.mktime((2026, 11, 20, 15, 3, 1, 0, 0, -1))
    events = [*made_up.beginning(rounds=ROUNDS, workers=WORKERS, at=began), *further_events(began)]
    for number in range(1, ROUNDS + 1):
        events += made_up.one_round(number, rounds=ROUNDS, workers=WORKERS, at=began + 1 + number)
    ended = began + ROUNDS + 3
    events += [(ended, e.RunEnded(run="r1", how="complete", version=ROUNDS)), (ended, e.Evaluated(metrics=TEST))]
    with tempfile.TemporaryDirectory() as out:
        path = Path(out) / "20261120-150301-MnistCNN"
        path.mkdir()
        writer = FolderWriter(MnistCNN(), path, {})
        writer.write(sorted(events, key=lambda pair: pair[0]))
        writer.end("finished", "", 0)
        state = folder.read_state(path)
        folder.write_json(path / folder.STATE, replace(state, began=began, ended=ended, host="master"))
        folder.write_json(
            path / folder.SUMMARY, {**folder.read_json(path / folder.SUMMARY), "source": "mnist_cnn.py", "git": None}
        )
        report.write(path)
        for name, options in REPORTS:
            async with opened(browser, (path / folder.REPORT).as_uri(), **options) as page:
                await page.screenshot(path=HERE / f"{name}.png", full_page=options["width"] < 500)
                assert not page.wrong, page.wrong
            shrink(name)


async def main() -> None:
    async with chromium() as browser:
        for name, options in PICTURES:
            await picture(browser, name, options)
        await pictures_of_report(browser)


asyncio.run(main())
