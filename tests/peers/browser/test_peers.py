"""Peers in Chromium and in Python train one model, with a server in a process of its own."""

import asyncio
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import safetensors.numpy

from ddlf.peers.entries import Posted
from ddlf.peers.journal import history
from tests.monitor.dashboard.browser import chromium, opened
from tests.patience import PATIENCE_S
from tests.peers.browser.joining import DOCUMENT, MODEL, BrowserPeer
from tests.peers.test_processes import Command

pytestmark = pytest.mark.slow


class Halves:
    """The digits of scikit-learn, in a folder with the model: 0-4 and 5-9 apart."""

    def __init__(self, folder):
        from ddlf.data import datasets

        self.folder = folder
        (x, y), (x_test, y_test) = datasets.with_classes("digits")
        x, x_test = x + 0.5, x_test + 0.5  # as --data digits
        self.train, self.test = {}, {}
        for name, part, of in (("low", y < 5, y_test < 5), ("high", y >= 5, y_test >= 5)):
            self.train[name] = (x[part].reshape(-1, 64).astype("f4"), y[part].astype("i4"))
            self.test[name] = (x_test[of].reshape(-1, 64).astype("f4"), y_test[of].astype("i4"))
        self.train["all"] = (x.reshape(-1, 64).astype("f4"), y.astype("i4"))
        np.savez(folder / "all.npz", x_train=self.train["all"][0], y_train=y, x_test=x_test, y_test=y_test)
        (folder / "digits.nnm").write_text(MODEL)


@pytest.fixture
def halves(tmp_path):
    return Halves(tmp_path)


def peers_command(*words):
    done = subprocess.run(
        [sys.executable, "-m", "ddlf.cli.main", "peers", *words], capture_output=True, text=True, env=os.environ
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def unexpected(page):
    """Return the errors of a page, except those of a killed server, and of the icon that Chromium asks for by itself."""
    return [line for line in page.wrong if "ERR_CONNECTION_REFUSED" not in line and "404" not in line]


async def test_two_browsers_with_half_of_the_classes_each_and_a_python_peer_train_one_model(halves):
    """One page is blocked meanwhile, one is loaded again, one browser is killed, and the server is killed and resumed."""
    with Command(halves.folder, "serve", "digits.nnm", "--data", "digits", "--invite", "4", "--port", "0") as server:
        links = [await asyncio.to_thread(lambda: server.until(r"link +(\S+)")[1]) for _ in range(4)]
        origin, port = links[0].partition("/#")[0], links[0].rpartition(":")[2].partition("/")[0]
        url = origin + DOCUMENT
        async with (
            chromium() as browser,
            chromium() as doomed,
            opened(browser, url) as page,
            opened(browser, url) as other,
            opened(doomed, url) as killed,
        ):
            low, high, gone = BrowserPeer(page), BrowserPeer(other), BrowserPeer(killed)
            for one, link, half in ((low, links[0], "low"), (high, links[1], "high"), (gone, links[2], "low")):
                assert (await one.session(link))[0] == 200
                joined = await one.join(*halves.train[half], name=half)
                assert (joined["device"], joined["parameters"]) == ("wasm", 64 * 32 + 32 + 32 * 10 + 10)
                assert joined["speeds"]["wasm"] > 0
            with Command(halves.folder, "join", links[3], "--data", "all.npz") as python:
                await asyncio.to_thread(python.until, "posted    set 3 ")
                for one in (low, high, gone):
                    await one.until("progress", lambda told: told["posts"] >= 5 and told["merges"] >= 1)
                await high.page.reload()
                again = await high.join(*halves.train["high"], name="high")
                assert again["peer"] == 2
                assert any("has kept" in line["text"] for line in await high.told("line"))

                before, after = await low.page.evaluate(
                    """async () => {
                      const last = () => told.filter(({ told }) => told === "progress").at(-1).batches, before = last();
                      const end = performance.now() + 3000;
                      while (performance.now() < end);
                      await new Promise((resolve) => setTimeout(resolve, 100));
                      return [before, last()];
                    }"""
                )
                assert after > before + 20

                server.process.send_signal(signal.SIGKILL)
                server.end()
                for one in (low, high):
                    await one.until("state", lambda told: told["state"] == "lost")
                await doomed.close()
                with Command(halves.folder, "serve", "--resume", "last", "--data", "digits", "--port", port) as resumed:
                    await asyncio.to_thread(resumed.until, r"left      peer 3 \(low\)")
                    for one in (low, high):
                        count = (await one.told("progress"))[-1]["posts"]
                        await one.until("progress", lambda told, count=count: told["posts"] > count + 40)
                    await asyncio.to_thread(peers_command, "stop", "--port", port)
                    for one in (low, high):
                        await one.until("state", lambda told: told["state"] == "over")
                    assert await asyncio.to_thread(python.end) == 0
                    assert await asyncio.to_thread(resumed.end) == 0
            models = []
            for one in (low, high):
                for half in ("low", "high"):
                    x, y = halves.test[half]
                    found = np.argmax(await one.predict(x), axis=1)
                    assert np.mean(found == y) >= 0.8, half
                models.append(await one.predict(halves.test["low"][0]))
            np.testing.assert_array_equal(*models)  # both hold the last set
            for one in (page, other):
                assert one.hosts == {origin.partition("//")[2]}
                assert unexpected(one) == []
    [folder] = (halves.folder / "runs").glob("*-peers-digits")
    posts = [entry for entry in history(folder) if isinstance(entry, Posted)]
    for peer in (1, 2, 3, 4):  # every post once and in order, across the reload and both kills
        assert [entry.number for entry in posts if entry.peer == peer] == list(
            range(1, 1 + sum(entry.peer == peer for entry in posts))
        )


async def test_bad_pages_and_bad_numbers_harm_only_themselves(halves):
    """A used code, no session, a second tab, weights that are not finite, and the wishes of a page."""
    serve = ("serve", "digits.nnm", "--data", "digits", "--invite", "2", "--port", "0")
    with Command(halves.folder, *serve) as server:
        links = [await asyncio.to_thread(lambda: server.until(r"link +(\S+)")[1]) for _ in range(2)]
        url = links[0].partition("/#")[0] + DOCUMENT
        async with chromium() as browser, opened(browser, url) as page, opened(browser, url) as stranger:
            good, bad = BrowserPeer(page), BrowserPeer(stranger)
            x, y = halves.train["all"]
            assert (await good.session(links[0]))[0] == 200
            assert (await bad.session(links[0]))[0] == 403
            assert "join with a link first" in (await bad.join(x, y))["error"]
            assert "has not joined" in (await bad.ask("pause"))["error"]
            assert "cannot do dance" in (await bad.ask("dance"))["error"]
            assert "above 0" in (await good.join(x, y, share=0))["error"]
            assert "error" not in await good.join(x, y, share=0.5)
            await good.until("progress", lambda told: told["posts"] >= 2)

            assert (await bad.session(links[1]))[0] == 200
            assert "error" not in await bad.join(np.full_like(x, np.nan), y)
            broken = await bad.until("line", lambda told: told["text"].startswith("broken"))
            assert "not finite" in broken["text"]
            await asyncio.to_thread(server.until, "again     peer 2")
            await bad.ask("stop")
            await bad.until("state", lambda told: told["state"] == "ended")
            await asyncio.to_thread(server.until, "left      peer 2")

            await good.ask("pause")
            await good.until("state", lambda told: told["state"] == "paused")
            at_rest = (await good.told("progress"))[-1]["batches"]
            assert np.isfinite(await good.predict(x[:5])).all()
            held = safetensors.numpy.load(await good.set())
            assert held["dense/kernel"].shape == (64, 32)
            assert all(np.isfinite(one).all() for one in held.values())
            assert (await good.told("progress"))[-1]["batches"] == at_rest
            await good.ask("resume")
            await good.until("progress", lambda told: told["batches"] > at_rest)

            second = await page.context.new_page()
            await second.goto(url)
            tab = BrowserPeer(second)
            assert (await tab.join(x, y))["peer"] == 1
            failed = await good.until("failed", lambda told: True)
            assert "connected again" in failed["why"]
            assert "close other windows" in failed["hint"]
            await tab.until("progress", lambda told: told["batches"] > at_rest)
            assert "error" not in await tab.ask("stop")
            await asyncio.to_thread(server.until, "left      peer 1")
            assert unexpected(page) == []


async def test_a_page_and_a_python_peer_train_shards_of_the_server(halves):
    words = ("--data", "digits", "--shards", "2", "--partition", "dirichlet:0.5", "--invite", "2", "--port", "0")
    with Command(halves.folder, "serve", "digits.nnm", *words) as server:
        links = [await asyncio.to_thread(lambda: server.until(r"link +(\S+)")[1]) for _ in range(2)]
        await asyncio.to_thread(server.until, "ddlf peers join LINK$")  # without --data
        async with chromium() as browser, opened(browser, links[0]) as page:
            page.set_default_timeout(PATIENCE_S * 1000)
            await page.locator("#start button").wait_for()
            assert await page.locator("#subtitle").inner_text() == "This training uses data of the server, not yours."
            assert "one of 2 parts of its own data" in await page.locator("#lent").inner_text()
            assert not await page.locator("#own").is_visible()
            await page.locator("#start button").click()
            await page.locator("#stays li").first.wait_for()
            assert "part 1 of 2" in await page.locator("#stays").inner_text()
            assert "how many samples you have" not in await page.locator("#leaves").inner_text()
            with Command(halves.folder, "join", links[1]) as python:
                await asyncio.to_thread(python.until, r"joined .* shard 2 of 2")
                await asyncio.to_thread(python.until, "posted    set 3 ")
            async with asyncio.timeout(PATIENCE_S):
                while int(await page.evaluate("document.querySelectorAll('#tiles dd')[4].firstChild.data")) < 1:
                    await page.wait_for_timeout(50)
            await page.locator("#sample").click()
            await page.locator("#guesses li").first.wait_for()
            assert unexpected(page) == []
        server.process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(server.end)
