"""Makes the pictures of the page of a run: ``python docs/pictures``, with Debian's Chromium. The run in them is made up."""

import asyncio
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

from PIL import Image  # noqa: E402  # matplotlib needs it, too

from ddlf import events as e  # noqa: E402
from ddlf.dashboard.server import Dashboard  # noqa: E402
from tests.dashboard import made_up  # noqa: E402
from tests.dashboard.browser import chromium, opened  # noqa: E402

ROUNDS, DONE, WORKERS = 40, 23, 4
PICTURES = (
    ("dashboard-light", dict(width=1920, height=1080, color_scheme="light")),
    ("dashboard-dark", dict(width=1920, height=1080, color_scheme="dark")),
    ("dashboard-phone", dict(width=390, height=844, color_scheme="dark")),
)


async def look() -> list[dict]:
    return made_up.answers(WORKERS)


async def picture(browser, name: str, options: dict) -> None:
    """Take one, in the middle of a round."""
    about = dict(title="lab", cluster="lab, cluster.yaml (4 workers)")
    async with Dashboard(look, port=0, stop=lambda: True, **about) as dashboard:
        began = time.time() - DONE - 2
        events = [*made_up.beginning(rounds=ROUNDS, workers=WORKERS, at=began), *said(began)]
        for number in range(1, ROUNDS + 1):
            events += made_up.one_round(number, rounds=ROUNDS, workers=WORKERS, at=began + 1 + number)
        going_on = asyncio.ensure_future(happen(dashboard, sorted(events, key=lambda pair: pair[0])))
        async with opened(browser, dashboard.url, **options) as page:
            await page.wait_for_selector("#charts canvas")
            await page.wait_for_function("() => document.querySelectorAll('.worker .facts b').length > 8")
            await asyncio.sleep(max(0.0, (began + DONE + 4.65) - time.time()))
            await page.screenshot(path=HERE / f"{name}.png", full_page=options["width"] < 500)
            assert not page.wrong, page.wrong
        Image.open(HERE / f"{name}.png").quantize(128, dither=Image.Dither.NONE).save(
            HERE / f"{name}.png", optimize=True
        )
        going_on.cancel()


async def happen(dashboard: Dashboard, events: list) -> None:
    """Let events happen when they do."""
    for at, event in events:
        await asyncio.sleep(max(0.0, at - time.time()))
        dashboard.tell(event, at)


def said(began: float) -> list:
    """What the log shows beside the beginning."""
    lines = ("60000 images, 938 steps in each epoch",)
    wrote = [e.WorkerWrote(worker=w, name=made_up.name(w), stream="stdout", lines=lines) for w in range(1, WORKERS + 1)]
    return [
        *((began + 1.5, event) for event in wrote),
        (began + 10.2, e.WorkerLost(round=9, worker=2, slot=2, why="pc02: the connection ended")),
        (began + 11.4, e.WorkerReturned(round=10, worker=2, name="pc02")),
    ]


async def main() -> None:
    async with chromium() as browser:
        for name, options in PICTURES:
            await picture(browser, name, options)


asyncio.run(main())
