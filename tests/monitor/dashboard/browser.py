"""Start Debian's Chromium with Playwright, which is installed without a browser."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from tests.patience import PATIENCE_S

if TYPE_CHECKING:
    from playwright.async_api import Browser, Page

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--enable-precise-memory-info"),
)


@contextlib.asynccontextmanager
async def chromium(*flags: str) -> AsyncIterator[Browser]:
    """Start a new browser, with additional flags."""
    # imported here, because the import would slow down every process that collects the tests
    from playwright.async_api import async_playwright

    path = shutil.which("chromium")
    assert path, "install it: apt-get install chromium"
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=path, args=[*FLAGS, *flags], timeout=PATIENCE_S * 1000
        )
        try:
            yield browser
        finally:
            await browser.close()


@contextlib.asynccontextmanager
async def opened(
    browser: Browser, url: str, *, width: int = 1280, height: int = 900, **options: Any
) -> AsyncIterator[Page]:
    """Open a page in a new profile. ``page.wrong`` has its errors and warnings, ``page.hosts`` the hosts of its requests."""
    context = await browser.new_context(viewport={"width": width, "height": height}, **options)
    context.set_default_timeout(PATIENCE_S * 1000)
    page: Any = await context.new_page()
    page.wrong, page.hosts = [], set()
    page.on(
        "console", lambda message: page.wrong.append(message.text) if message.type in ("error", "warning") else None
    )
    page.on("pageerror", lambda error: page.wrong.append(str(error)))
    page.on("request", lambda request: page.hosts.add(request.url.split("/")[2]))
    page.on("websocket", lambda socket: page.hosts.add(socket.url.split("/")[2]))
    await page.goto(url)
    try:
        yield page
    finally:
        await context.close()
