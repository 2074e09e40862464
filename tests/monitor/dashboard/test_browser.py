"""Tests of the dashboard's page in a real browser."""

import asyncio
import time

import pytest
import pytest_asyncio

from ddlf import events as e
from ddlf.monitor.dashboard.server import Dashboard
from tests.monitor.dashboard.browser import chromium, opened
from tests.monitor.dashboard.made_up import answers, beginning, in_parts, in_portions, one_round, record, with_peers
from tests.patience import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


async def look():
    return answers(4)


def tell(dashboard, events):
    for at, event in events:
        dashboard.tell(event, at)


def train(dashboard, first, last, *, rounds=40, workers=4):
    began = time.time() - (last - first + 1)
    for number in range(first, last + 1):
        tell(dashboard, one_round(number, rounds=rounds, workers=workers, at=began + number - first))


async def points(page):
    """Return the number of points of the first chart."""
    return await page.evaluate("ddlf.known().series.x.length")


async def has_points(page, count):
    await page.wait_for_function("(n) => ddlf.known().series.x.length === n", arg=count)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def browser():
    """Return a browser for all tests. Each opens its page in a new profile."""
    async with chromium() as browser:
        yield browser


@pytest.mark.parametrize(("width", "height", "theme"), [(390, 844, "dark"), (1200, 900, "dark"), (1920, 1080, "light")])
async def test_charts_grow_during_a_run_on_phones_and_wider_screens(browser, width, height, theme):
    async with Dashboard(look, port=0) as dashboard:
        tell(dashboard, beginning(at=time.time() - 12))
        async with opened(browser, dashboard.url, width=width, height=height, color_scheme=theme) as page:
            await page.wait_for_selector("#run:not([hidden])")
            for done in (3, 7):
                train(dashboard, done - 2, done)
                await has_points(page, done if done == 3 else 6)
                reach = "(n) => JSON.stringify(ddlf.reach()) === JSON.stringify([n, n, n, n, n])"
                await page.wait_for_function(reach, arg=done)
            assert await page.locator("#charts figure").count() == 5
            assert "Round 7 of 40" in await page.inner_text("#where")
            assert await page.locator(".worker").count() == 4
            sizes = await page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
            assert sizes[0] <= sizes[1], "it is wider than the screen"
            tiles = await page.evaluate(
                "[...document.querySelectorAll('.tiles > div')].map(t => [t.scrollWidth, t.clientWidth])"
            )
            assert tiles
            assert all(content <= tile for content, tile in tiles), "a value is wider than its tile"
            assert await page.evaluate("document.documentElement.dataset.theme") == theme
            assert page.hosts == {f"127.0.0.1:{dashboard.port}"}
            assert page.wrong == []


async def test_a_loss_that_became_nan_and_the_first_line_of_an_error_are_shown(browser):
    async with Dashboard(look, port=0) as dashboard:
        tell(dashboard, beginning(at=time.time()))
        train(dashboard, 1, 3)
        last = record(4, 40, 4, [(0.5, 0.1)] * 4, float("nan"), 1.0, test=False)
        dashboard.tell(e.Committed(record=last))
        dashboard.tell(e.RunEnded(run="r1", how="failed", version=4, why="BadUpdate: NaN\n\nTraceback"))
        async with opened(browser, dashboard.url) as page:
            await has_points(page, 4)
            await page.wait_for_selector("#tiles .bad")
            assert await page.inner_text("#tiles .bad dd span") == "NaN"
            assert "NaN" in await page.inner_text("#charts .chart figcaption >> nth=0")
            assert await page.inner_text("#doing") == "BadUpdate: NaN"
            assert page.wrong == []


async def test_the_stop_button_asks_for_confirmation(browser):
    was_asked = asyncio.Event()

    def stop():
        was_asked.set()
        return True

    async with Dashboard(look, port=0, stop=stop) as dashboard:
        tell(dashboard, beginning(at=time.time()))
        async with opened(browser, dashboard.url) as page:
            await page.click("#stop")
            await page.click("text=Go on")
            await page.click("#stop")
            assert not was_asked.is_set()
            await page.click("text=Stop after this round")
            await asyncio.wait_for(was_asked.wait(), PATIENCE_S)
            await page.wait_for_selector("#phase.stopping")
            assert await page.is_disabled("#stop")


async def test_without_the_token_the_page_shows_no_data_and_names_the_reason(browser):
    async with Dashboard(look, port=0, title="secret") as dashboard:
        tell(dashboard, beginning(at=time.time()))
        async with opened(browser, dashboard.url.partition("#")[0]) as page:
            await page.wait_for_selector("#notice:not([hidden])")
            assert "token is missing" in await page.inner_text("#notice")
            assert "MnistCNN" not in await page.content()
        async with opened(browser, dashboard.url[:-1] + "-") as page:
            await page.wait_for_function("() => document.getElementById('notice').textContent.includes('wrong')")


async def test_the_last_state_of_a_run_stays_after_its_master_ends_until_the_next_run(browser):
    async with Dashboard(look, port=0) as dashboard:
        tell(dashboard, beginning(at=time.time()))
        train(dashboard, 1, 5)
        port = dashboard.port
        async with opened(browser, dashboard.url) as page:
            await has_points(page, 5)
            dashboard.tell(e.RunEnded(run="r1", how="complete", version=5))
            await asyncio.to_thread(dashboard.close)
            await page.wait_for_function("() => document.getElementById('notice').textContent.includes('has ended')")
            assert await page.inner_text("#phase") == "complete"
            assert await points(page) == 5
            async with Dashboard(look, port=port) as following:
                tell(following, beginning(at=time.time(), app="Next"))
                await page.wait_for_function("() => document.getElementById('title').textContent === 'Next'")
                assert await points(page) == 0


async def test_a_text_of_a_worker_is_not_interpreted_as_html(browser):
    async with Dashboard(look, port=0) as dashboard:
        lines = ("<img src=x onerror=alert(1)>", "<script>document.title='taken'</script>")
        dashboard.tell(e.WorkerWrote(worker=1, name="<b>pc</b>", stream="stdout", lines=lines))
        async with opened(browser, dashboard.url) as page:
            await page.wait_for_selector("#log li")
            assert await page.inner_text("#log li .text >> nth=0") == lines[0]
            assert await page.locator("#log img, #log script, #log b").count() == 0
            assert page.wrong == []


async def test_ten_thousand_rounds_stay_smooth_and_do_not_leak_memory(browser):
    """Count frames while four times as many rounds arrive as in a fast run. Memory is measured after garbage collection."""
    rounds = 10_000
    async with Dashboard(look, port=0) as dashboard:
        tell(dashboard, beginning(rounds=rounds, at=time.time()))
        async with opened(browser, dashboard.url) as page:
            devtools = await page.context.new_cdp_session(page)
            await page.wait_for_selector("#run:not([hidden])")
            await page.evaluate(
                """() => { window.gaps = []; let last = performance.now();
                const frame = (now) => { window.gaps.push(now - last); last = now; requestAnimationFrame(frame); };
                requestAnimationFrame(frame); }"""
            )
            heaps = []
            for first in range(1, rounds, 100):
                train(dashboard, first, first + 99, rounds=rounds)
                await asyncio.sleep(0.1)
                if first + 99 in (3000, rounds):
                    newest = "(n) => ddlf.known().series.x.at(-1) === n"
                    await page.wait_for_function(newest, arg=first + 99)
                    await devtools.send("HeapProfiler.collectGarbage")
                    heaps.append((await devtools.send("Runtime.getHeapUsage"))["usedSize"])
            gaps = sorted(await page.evaluate("window.gaps.splice(0)"))
            usual, worst = gaps[len(gaps) // 2], gaps[int(len(gaps) * 0.95)]
            print(f"\n{len(gaps)} frames, {usual:.0f} ms usually, {worst:.0f} ms at the 95th percentile; heap {heaps}")
            assert usual < 50, "half of the frames come later than a film's"
            assert heaps[1] < heaps[0] * 1.2 + 500_000
            assert page.wrong == []


async def test_parts_places_and_portions_are_shown(browser):
    async with Dashboard(look, port=0) as dashboard:
        tell(dashboard, in_parts(at=time.time() - 10))
        async with opened(browser, dashboard.url, width=390) as page:
            await page.wait_for_selector("#parts-card:not([hidden])")
            rows = await page.evaluate(
                "[...document.querySelectorAll('#parts tr')].map(r => [...r.children].slice(0, 5).map(c => c.textContent))"
            )
            assert rows == [
                ["1", "dense dense_1 dense_2 dense_3", "pc01", "169 MB", "15 %"],
                ["2", "dense_4", "pc03", "167 MB", "21 %"],
            ]
            place_texts = await page.evaluate("[...document.querySelectorAll('.place')].map(p => p.textContent)")
            assert place_texts[1] == "on pc09, job 4711_1, 2nd worker here: Slurm preempted its job"
            assert place_texts[0] == "on pc01, job 4711_0"
            assert "part 2, round 3" in await page.inner_text(".worker >> nth=2")
            sizes = await page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
            assert sizes[0] <= sizes[1], "it is wider than the screen"
            tell(dashboard, in_portions(at=time.time() - 10))
            await page.wait_for_selector("#parts-card", state="hidden")
            await page.wait_for_function("() => document.querySelector('#workers').textContent.includes('15 portions')")
            assert "6 dropped" in await page.inner_text(".worker >> nth=2")
            assert "last pass: step 0.5000" in await page.inner_text("#doing")
            assert page.wrong == []


@pytest.mark.parametrize(
    ("count", "width", "theme"), [(1, 320, "light"), (3, 1280, "dark"), (8, 320, "dark"), (200, 1280, "light")]
)
async def test_each_peer_has_a_curve_and_the_median_of_many_is_named(browser, count, width, theme):
    async with Dashboard(look, port=0) as dashboard:
        tell(dashboard, with_peers(count, 60, at=time.time() - 60))
        async with opened(browser, dashboard.url, width=width, color_scheme=theme) as page:
            chart = page.locator(".chart", has_text="Batches of each peer")
            await chart.locator("canvas").wait_for()
            keys = await chart.locator(".key").all_inner_texts()
            if count <= 8:
                assert [key.split("\n")[0] for key in keys] == [f"clinic {peer}" for peer in range(1, count + 1)]
            else:
                assert [key.split("\n")[0] for key in keys] == ["each of 200 peers", "median"]
                low, high = (int(part.replace(",", "")) for part in keys[0].split("\n")[1].split(" to "))
                assert low < int(keys[1].split("\n")[1].replace(",", "")) < high
            assert await page.locator(".chart", has_text="Accuracy of each peer").count() == 1
            assert await page.locator(".chart", has_text="Seconds in each").count() == 0
            await chart.locator("input").first.click()
            dashboard.tell(e.PeerArrived(peer=count + 1, name="clinic 1", samples=9))
            if count < 8:  # the page distinguishes two peers with one name
                for peer in (1, count + 1):
                    await chart.get_by_text(f"clinic 1, peer {peer}").wait_for()
            sizes = await page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
            assert sizes[0] <= sizes[1], "it is wider than the screen"
            assert page.wrong == []
