"""Make the screenshots of the page of a peer: ``python docs/pictures/peers.py``, with Debian's Chromium. The engine trains
digits; the sets that the page counts are those of one peer alone.
"""

import asyncio
import sys
from io import BytesIO
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

import numpy as np  # noqa: E402
from PIL import Image  # noqa: E402

from ddlf.data import datasets  # noqa: E402
from tests.peers.browser.alone import Alone, digits_model, joined  # noqa: E402

PICTURES = {
    "peer-light": dict(width=1180, height=1240, color_scheme="light"),
    "peer-phone": dict(width=390, height=844, color_scheme="dark"),
}


async def picture(name: str, options: dict) -> None:
    """Take screenshots before and during a training."""
    (x, y), _ = datasets.with_classes("digits")
    np.savez(target := BytesIO(), x=x.reshape(-1, 8, 8) + 0.5, y=y)  # from 0 to 1, as pictures
    file = {"name": "digits.npz", "mimeType": "application/zip", "buffer": target.getvalue()}
    async with joined(Alone(digits_model()), **options) as page:
        await page.locator("#npz").set_input_files(files=[file])
        await page.locator("#seen").wait_for()
        if name == "peer-light":
            await page.screenshot(path=HERE / "peer-data.png", full_page=True)
            shrink("peer-data")
        await page.locator("#start button").click()
        await page.locator("#state[data-state=training]").wait_for()
        await page.wait_for_timeout(2500)
        await page.locator("#pause").click()
        await page.locator("#sample").click()
        await page.locator("#guesses li").first.wait_for()
        await page.locator("#pause").click()
        await page.locator("#state[data-state=training]").wait_for()
        await page.evaluate("scrollTo(0, 0)")
        await page.screenshot(path=HERE / f"{name}.png")
        assert not page.wrong, page.wrong
    shrink(name)


def shrink(name: str) -> None:
    """Reduce a picture to 128 colours."""
    path = HERE / f"{name}.png"
    Image.open(path).quantize(128, dither=Image.Dither.NONE).save(path, optimize=True)


async def main() -> None:
    for name, options in PICTURES.items():
        await picture(name, options)


asyncio.run(main())
