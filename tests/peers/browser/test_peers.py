"""Tests of peers in Chromium and in Python that train one model, with the server in a separate process."""

import asyncio
import contextlib
import os
import signal
import time
from collections import Counter
from pathlib import Path

import numpy as np
import psutil
import pytest
import pytest_asyncio
import safetensors.numpy
from websockets.exceptions import ConnectionClosed

from ddlf.peers import serving
from ddlf.peers.entries import Left, Posted, Rejected
from ddlf.peers.journal import history
from ddlf.peers.ledger import Fate, Unfit
from ddlf.peers.rounds import RoundLedger
from ddlf.peers.swap import SwapLedger
from tests.monitor.dashboard.browser import chromium, opened
from tests.patience import PATIENCE_S
from tests.peers.browser.joining import DOCUMENT, MODEL, BrowserPeer
from tests.peers.light import Light
from tests.peers.test_processes import Command
from tests.peers.test_server import Running

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


class Halves:
    """A folder with the model and the digits of scikit-learn; one file has 0-4, another one 5-9."""

    def __init__(self, folder):
        from ddlf.data import datasets

        self.folder = folder
        (x, y), (x_test, y_test) = datasets.with_classes("digits")
        x, x_test = x + 0.5, x_test + 0.5  # like --data digits
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


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def browser():
    """Return a browser for all tests that do not kill theirs."""
    async with chromium() as browser:
        yield browser


def peers_command(*words):
    with Command(Path(), *words) as command:
        assert command.end() == 0, "".join(command.lines)


def browser_processes():
    """Return the process ids of the running browsers."""
    pids = set()
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            line = " ".join(child.cmdline())
            pids |= {child.pid} if "--headless" in line and "--type=" not in line else set()
    return pids


def unexpected(page):
    """Return the errors of a page, except errors of a killed server and of the icon that Chromium requests."""
    return [line for line in page.wrong if "ERR_CONNECTION_REFUSED" not in line and "404" not in line]


async def test_two_browsers_with_half_of_the_classes_each_and_a_python_peer_train_one_model(halves, browser):
    """One page is blocked, the other one is reloaded, and the server is killed and resumed.

    Sets travel as bfloat16.
    """
    serve = ("serve", "digits.nnm", "--data", "digits", "--codec", "bfloat16", "--invite", "3", "--port", "0")
    with Command(halves.folder, *serve) as server:
        links = [await asyncio.to_thread(lambda: server.until(r"link +(\S+)")[1]) for _ in range(3)]
        origin, port = links[0].partition("/#")[0], links[0].rpartition(":")[2].partition("/")[0]
        url = origin + DOCUMENT
        async with opened(browser, url) as page, opened(browser, url) as other:
            low, high = BrowserPeer(page), BrowserPeer(other)
            for member, link, half in ((low, links[0], "low"), (high, links[1], "high")):
                assert (await member.session(link))[0] == 200
                joined = await member.join(*halves.train[half], name=half)
                assert (joined["device"], joined["parameters"]) == ("wasm", 64 * 32 + 32 + 32 * 10 + 10)
                assert joined["speeds"]["wasm"] > 0
            with Command(halves.folder, "join", links[2], "--data", "all.npz") as python:
                await asyncio.to_thread(python.until_post, 3)
                for member in (low, high):
                    await member.until("progress", lambda message: message["posts"] >= 5 and message["merges"] >= 1)
                progress = await high.messages("progress")
                before = progress[-1]
                stored = [message for message in progress if message["posts"] < before["posts"]][
                    -1
                ]  # before its stored post
                await high.page.reload()
                again = await high.join(*halves.train["high"], name="high")
                assert again["peer"] == 2
                assert any("has kept" in line["text"] for line in await high.messages("line"))
                later = await high.until("progress", lambda message, posts=before["posts"]: message["posts"] > posts)
                for total in ("batches", "samples", "bytesUp"):
                    assert later[total] > stored[total], total

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
                for member in (low, high):
                    await member.until("state", lambda message: message["state"] == "lost")
                with Command(halves.folder, "serve", "--resume", "last", "--data", "digits", "--port", port) as resumed:
                    for member in (low, high):
                        count = (await member.messages("progress"))[-1]["posts"]
                        await member.until("progress", lambda message, count=count: message["posts"] > count + 10)
                    await asyncio.to_thread(resumed.until, r"validated .* accuracy 0\.9")
                    await asyncio.to_thread(peers_command, "stop", "--port", port)
                    for member in (low, high):
                        await member.until("state", lambda message: message["state"] == "over")
                    assert await asyncio.to_thread(python.end) == 0
                    assert await asyncio.to_thread(resumed.end) == 0
            models = []
            for member in (low, high):
                for half in ("low", "high"):
                    x, y = halves.test[half]
                    predicted = np.argmax(await member.predict(x), axis=1)
                    assert np.mean(predicted == y) >= 0.8, half
                models.append(await member.predict(halves.test["low"][0]))
            np.testing.assert_array_equal(*models)  # both have the last set
            last = (await low.messages("progress"))[-1]
            parameters = 64 * 32 + 32 + 32 * 10 + 10
            assert last["posts"] > 10
            assert last["bytesUp"] < (last["posts"] + 1) * (2 * parameters + 2000)
            for tab in (page, other):
                assert tab.hosts == {origin.partition("//")[2]}
                assert unexpected(tab) == []
    [folder] = (halves.folder / "runs").glob("*-peers-digits")
    entries = list(history(folder))
    assert not [entry for entry in entries if isinstance(entry, Rejected) and entry.strike != "no"]
    posts = [entry for entry in entries if isinstance(entry, Posted)]
    for peer in (1, 2, 3):  # every post once and in order, across the reload and the kill
        assert [entry.number for entry in posts if entry.peer == peer] == list(
            range(1, 1 + sum(entry.peer == peer for entry in posts))
        )


async def test_bad_pages_and_bad_numbers_harm_only_themselves(halves, browser):
    """The cases are a used code, a missing session, a second tab, weights that are not finite, and bad settings of a page."""
    serve = ("serve", "digits.nnm", "--data", "digits", "--invite", "2", "--port", "0")
    with Command(halves.folder, *serve) as server:
        links = [await asyncio.to_thread(lambda: server.until(r"link +(\S+)")[1]) for _ in range(2)]
        url = links[0].partition("/#")[0] + DOCUMENT
        async with opened(browser, url) as page, opened(browser, url) as stranger:
            good, bad = BrowserPeer(page), BrowserPeer(stranger)
            x, y = halves.train["all"]
            assert (await good.session(links[0]))[0] == 200
            assert (await bad.session(links[0]))[0] == 403
            assert "join with a link first" in (await bad.join(x, y))["error"]
            assert "has not joined" in (await bad.ask("pause"))["error"]
            assert "cannot do dance" in (await bad.ask("dance"))["error"]
            assert "above 0" in (await good.join(x, y, share=0))["error"]
            assert "error" not in await good.join(x, y, share=0.5)
            await good.until("progress", lambda message: message["posts"] >= 2)

            assert (await bad.session(links[1]))[0] == 200
            assert "error" not in await bad.join(np.full_like(x, np.nan), y)
            broken = await bad.until("line", lambda message: message["text"].startswith("broken"))
            assert "not finite" in broken["text"]
            await asyncio.to_thread(server.until, "again     peer 2")
            await bad.ask("stop")
            await bad.until("state", lambda message: message["state"] == "ended")
            await asyncio.to_thread(server.until, "left      peer 2")

            await good.ask("pause")
            await good.until("state", lambda message: message["state"] == "paused")
            assert np.isfinite(await good.predict(x[:5])).all()
            at_rest = (await good.messages("progress"))[-1]["batches"]  # the answer came after the last message
            weights = safetensors.numpy.load(await good.set())
            assert weights["dense/kernel"].shape == (64, 32)
            assert all(np.isfinite(array).all() for array in weights.values())
            assert (await good.messages("progress"))[-1]["batches"] == at_rest
            await good.ask("resume")
            await good.until("progress", lambda message: message["batches"] > at_rest)

            second = await page.context.new_page()
            await second.goto(url)
            tab = BrowserPeer(second)
            assert (await tab.join(x, y))["peer"] == 1
            failed = await good.until("failed", lambda message: True)
            assert "connected again" in failed["why"]
            assert "close other windows" in failed["hint"]
            await tab.until("progress", lambda message: message["batches"] > at_rest)
            assert "error" not in await tab.ask("stop")
            await asyncio.to_thread(server.until, "left      peer 1")
            assert unexpected(page) == []


async def test_a_page_and_a_python_peer_train_shards_of_the_server(halves, browser):
    words = ("--data", "digits", "--shards", "2", "--partition", "dirichlet:0.5", "--invite", "2", "--port", "0")
    with Command(halves.folder, "serve", "digits.nnm", "--codec", "float16", *words) as server:
        links = [await asyncio.to_thread(lambda: server.until(r"link +(\S+)")[1]) for _ in range(2)]
        await asyncio.to_thread(server.until, "ddlf peers join LINK$")  # without --data
        async with opened(browser, links[0]) as page:
            await page.locator("#start button").wait_for()
            assert await page.locator("#subtitle").inner_text() == "This training uses data of the server, not yours."
            assert "one of 2 parts of its" in await page.locator("#lent").inner_text()
            assert not await page.locator("#own").is_visible()
            await page.locator("#start button").click()
            await page.locator("#stays li").first.wait_for()
            assert "part 1 of 2" in await page.locator("#stays").inner_text()
            leaves = await page.locator("#leaves").inner_text()
            assert "how many samples you have" not in leaves
            assert "rounded to float16 (2 bytes each)" in leaves
            with Command(halves.folder, "join", links[1]) as python:
                await asyncio.to_thread(python.until, r"joined .* shard 2 of 2")
                await asyncio.to_thread(python.until_post, 3)
            async with asyncio.timeout(PATIENCE_S):
                while int(await page.evaluate("document.querySelectorAll('#tiles dd')[4].firstChild.data")) < 1:
                    await page.wait_for_timeout(50)
            await page.locator("#sample").click()
            await page.locator("#guesses li").first.wait_for()
            page.on("dialog", lambda dialog: dialog.accept())
            await page.reload()  # the same peer continues with its shard and its stored weights, without a click
            await page.locator("#state[data-state=training]").wait_for()
            await page.get_by_text("part 1 of 2").wait_for()
            assert "with the weights that this browser has kept" in await page.locator("#log").text_content()
            assert unexpected(page) == []
        server.process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(server.end)


async def trains(peer, way, posts=2**30):
    """Post the last set of a light peer again and again, until the training is over."""
    with contextlib.suppress(ConnectionClosed):  # the last message may be the end
        for _ in range(posts):
            base = (peer.set_number or peer.base) if way == "rounds" else 0
            if "end" in await peer.post(peer.set, base=base, accuracy=0.5, loss=1.0):
                return


@pytest.mark.parametrize("way", ["rounds", "swap"])
async def test_a_killed_browser_is_noticed_and_neither_its_sets_nor_its_shard_are_lost(halves, way):
    words = ("--data", "digits", "--shards", "2", "--way", way, "--invite", "3", "--port", "0")
    with Command(halves.folder, "serve", "digits.nnm", *words) as server:
        links = [await asyncio.to_thread(lambda: server.until(r"link +(\S+)")[1]) for _ in range(3)]
        port = links[0].rpartition(":")[2].partition("/")[0]
        before = browser_processes()
        async with chromium() as doomed:
            [pid] = browser_processes() - before
            page = await doomed.new_page()
            page.set_default_timeout(PATIENCE_S * 1000)
            await page.goto(links[0])
            await page.locator("#start button").click()
            await page.locator("#state[data-state=training]").wait_for()
            first, later = Light(int(port), samples=0), Light(int(port), samples=0)
            assert (await first.join(links[1].partition("#")[2]))["shard"] == 2
            await trains(first, way, 3)
            training = asyncio.ensure_future(trains(first, way))
            killed_at = time.time()
            os.kill(pid, signal.SIGKILL)
            await asyncio.to_thread(server.until, "left      peer 1")
            assert (await later.join(links[2].partition("#")[2]))["shard"] == 1
            await trains(later, way, 3)
            await asyncio.to_thread(peers_command, "stop", "--port", port)
            await asyncio.gather(training, trains(later, way))  # until the training ends
            for peer in (first, later):
                await peer.abort()
            assert await asyncio.to_thread(server.end) == 0
    [folder] = (halves.folder / "runs").glob("*-peers-digits")
    plan = serving.read_folder(folder).plan
    ledger, fates, acknowledged = (RoundLedger if way == "rounds" else SwapLedger)(plan), Counter(), set()
    for entry in history(folder):
        if isinstance(entry, Left) and entry.peer == 1:
            left, lease_s = entry, ledger.members[1].lease_s
        with contextlib.suppress(Unfit):
            instructions = ledger.apply(entry)
            fates.update(item.set for item in instructions if isinstance(item, Fate))
            acknowledged |= {entry.set} if isinstance(entry, Posted) else set()
        if isinstance(entry, Posted):
            last = entry
    assert left.at <= killed_at + lease_s + 5
    assert last.at > left.at
    assert ledger.members[1].number >= 1
    # each set is in the ledger, or has one fate
    assert {fates[number] + (number in ledger.sets) for number in acknowledged} == {1}


async def test_a_page_whose_connection_breaks_at_the_end_comes_back_for_the_last_set(halves, browser):
    served = await asyncio.to_thread(serving.read_model, halves.folder / "digits.nnm", None, None, 0)
    async with Running(halves.folder, model=served.model, updates=5) as running:

        async def cut(reason):
            running.server._leases.connections[1].socket.transport.abort()
            running.server._over.set()
            running.server.done.set()

        running.server._end = cut
        url = f"http://127.0.0.1:{running.port}"
        async with opened(browser, f"{url}{DOCUMENT}") as page:
            peer = BrowserPeer(page)
            [code] = await running.server.invite()
            await peer.session(f"{url}/#{code}")
            await peer.join(*halves.train["low"])
            await running.until(lambda: running.server.ledger.counts.get("posts", 0) > 0)
            await running.server._command("stop", "")
            over = await peer.until("state", lambda message: message["state"] == "over")
            assert over["why"] == "stopped by ddlf peers stop"
            await asyncio.wait_for(asyncio.shield(running.task), PATIENCE_S)
            assert await peer.set() == await running.server.last_set()
