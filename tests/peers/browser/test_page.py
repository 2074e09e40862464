"""Tests of the page of a peer in Chromium, used like a person: join, choose data, train, pause, try the model, stop."""

import asyncio
import importlib
from dataclasses import asdict
from io import BytesIO

import numpy as np
import pytest
import pytest_asyncio
from safetensors.numpy import load

from ddlf.peers.pages import seen_by
from ddlf.peers.plan import Plan
from ddlf.privacy import visible
from tests.monitor.dashboard.browser import chromium
from tests.patience import PATIENCE_S
from tests.peers.browser.alone import CODE, Alone, digits_model, joined

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]
RANDOM = np.random.default_rng(0)
CONTRAST = """() => {
  const context = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgb = (color) => {
    context.clearRect(0, 0, 1, 1);
    context.fillStyle = color;
    context.fillRect(0, 0, 1, 1);
    return [...context.getImageData(0, 0, 1, 1).data];
  };
  const linear = (n) => (n / 255 <= 0.04045 ? n / 255 / 12.92 : ((n / 255 + 0.055) / 1.055) ** 2.4);
  const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const ground = (node) => {
    for (; node; node = node.parentElement) {
      const color = rgb(getComputedStyle(node).backgroundColor);
      if (color[3] === 255) return color;
    }
    return [255, 255, 255];
  };
  const weak = [];
  for (const node of document.querySelectorAll("body *")) {
    const hasText = [...node.childNodes].some((one) => one.nodeType === 3 && one.data.trim());
    if (!hasText || !node.checkVisibility() || node.disabled || node.closest(".unseen, .skip, option, noscript")) continue;
    const style = getComputedStyle(node), color = node.ownerSVGElement ? style.fill : style.color;
    const [a, b] = [light(rgb(color)), light(ground(node))].sort((x, y) => y - x), ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5) weak.push([node.textContent.trim().slice(0, 40), ratio]);
  }
  return weak;
}"""
"""Script that finds texts with a contrast below 4.5, the limit of WCAG 2.2 AA."""
UNNAMED = """() => [...document.querySelectorAll("button, input, select, canvas, svg[role]")]
  .filter((node) => node.checkVisibility() && !node.closest("[aria-hidden]"))
  .filter((node) => !(node.getAttribute("aria-label") || node.textContent.trim() || node.labels?.[0]?.textContent.trim()))
  .map((node) => node.outerHTML.slice(0, 80))"""


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def browser():
    """Return a browser with an invented camera for all tests. Each opens its page in a new profile."""
    async with chromium("--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream") as browser:
        yield browser


def digits(count=200):
    (x, y), _ = importlib.import_module("ddlf.data.datasets").with_classes("digits")
    np.savez_compressed(target := BytesIO(), x=x[:count].reshape(-1, 8, 8), y=y[:count])
    return {"name": "digits.npz", "mimeType": "application/zip", "buffer": target.getvalue()}


def picture(size, color, kind="PNG"):
    from PIL import Image

    Image.new("RGB", size, color).save(target := BytesIO(), kind)
    return target.getvalue()


async def is_sound(page):
    """Check the properties that every state of the page must have."""
    assert page.wrong == []
    assert len(page.hosts) == 1
    assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert await page.evaluate(UNNAMED) == []
    assert await page.evaluate(CONTRAST) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_a_person_with_a_keyboard_and_a_phone_trains_a_model(browser, scheme):
    async with joined(
        browser, Alone(digits_model()), width=320, height=640, color_scheme=scheme, accept_downloads=True
    ) as page:
        await page.locator("#choose").wait_for()
        assert CODE not in page.url
        await is_sound(page)
        await page.locator("#npz").set_input_files(files=[digits()])
        await page.locator("#seen").wait_for()
        assert "160 samples for training, and 40 held out" in await page.locator("#counts").inner_text()
        assert await page.locator("#samples li").count() == 24
        await is_sound(page)

        await page.locator("#name").focus()
        await page.keyboard.type("clinic 7")
        await page.keyboard.press("Enter")  # Enter submits a form
        await page.locator("#state[data-state=training]").wait_for()
        read = "Number(document.querySelectorAll('#tiles dd')[2].firstChild.data.replaceAll(',', ''))"
        while await page.evaluate(read) < 2000:
            await page.wait_for_timeout(50)
        assert await page.locator("#main").evaluate("(main) => main.contains(document.activeElement)")
        await page.locator("#pause").press("Space")
        await page.locator("#state[data-state=paused]").wait_for()
        assert await page.locator("#pause").inner_text() == "Resume"
        await is_sound(page)

        await page.locator("#sample").press("Enter")
        await page.locator("#guesses li").first.wait_for()
        parts = [
            float(part.rstrip(" %")) for part in await page.locator("#guesses li span:last-child").all_inner_texts()
        ]
        assert parts == sorted(parts, reverse=True)
        assert len(parts) == 5
        assert 50 < sum(parts) <= 100.3  # the page shows the best five of ten classes
        async with page.expect_download() as download:
            await page.locator("#save").press("Enter")
        weights = load((await (await download.value).path()).read_bytes())
        assert (288, 10) in {array.shape for array in weights.values()}
        await page.locator("#pause").press("Enter")
        await page.locator("#state[data-state=training]").wait_for()

        await page.locator("#stop").press("Enter")
        await page.keyboard.press("Escape")  # Escape does not leave the page
        assert await page.locator("#state").inner_text() == "training"
        await page.locator("#stop").press("Enter")
        await page.locator("#leave button[value=leave]").press("Enter")
        await page.locator("#state[data-state=ended]").wait_for()
        await is_sound(page)


async def test_pictures_in_folders_are_read_drawn_and_counted_and_bad_ones_named(browser, tmp_path):
    keras = importlib.import_module("keras")
    model = keras.Sequential(
        [keras.Input((8, 8, 3)), keras.layers.Flatten(), keras.layers.Dense(2, activation="softmax")], name="pets"
    )
    model.compile("sgd", "categorical_crossentropy", metrics=["accuracy"])
    for folder, color in (("cat", (255, 0, 0)), ("dog", (0, 0, 255)), ("cow", (0, 255, 0))):
        (tmp_path / "pets" / folder).mkdir(parents=True)
        for n in range(6):
            (tmp_path / "pets" / folder / f"{n}.png").write_bytes(picture((30 + n, 20), color))
    bad = {"empty.png": b"", "broken.jpg": picture((9, 9), 0, "JPEG")[:99], "text.gif": b"hello", "huge.png": huge()}
    for name, content in bad.items():
        (tmp_path / "pets" / "cat" / name).write_bytes(content)
    (tmp_path / "pets" / "cat" / "notes.txt").write_text("hello")
    async with joined(browser, Alone(model, ("cat", "dog"))) as page:
        await page.locator("#choose").wait_for()
        await page.locator("#folder").set_input_files(tmp_path / "pets")
        await page.locator("#seen").wait_for()
        notes = await page.locator("#notes li").all_inner_texts()
        unread = next(note for note in notes if "could not be read" in note)
        assert unread.startswith("3 of 22 pictures could not be read")
        assert [name in unread for name in bad] == [True, True, True, False]
        assert any(
            note.startswith("1 of 22 pictures have more than 64 million points") and "huge.png" in note
            for note in notes
        )
        assert any(
            "6 of 22 pictures have a label" in note and "(cow): the classes are cat, dog" in note for note in notes
        )
        assert any("1 other file left out" in note for note in notes)
        assert await page.locator("#classes li").all_inner_texts() == ["cat4", "dog5"]
        colors = await page.evaluate(
            """[...document.querySelectorAll("#samples li")].map((item) =>
                 [item.textContent, ...item.querySelector("canvas").getContext("2d").getImageData(3, 3, 1, 1).data])"""
        )
        assert {tuple(item) for item in colors} == {("cat", 255, 0, 0, 255), ("dog", 0, 0, 255, 255)}
        await is_sound(page)

        await page.locator("#forget").click()
        assert not await page.locator("#seen").is_visible()
        only = {"name": "one.png", "mimeType": "image/png", "buffer": picture((9, 9), 0)}
        await page.locator("#files").set_input_files(files=[{**only, "name": f"{n}.png"} for n in range(5)])
        await page.locator("#which").wait_for()
        assert "These 5 pictures are in no folder" in await page.locator("#which").inner_text()
        await page.locator("#which button[value=take]").click()  # no class is chosen, so the page still asks
        assert await page.locator("#which").is_visible()
        await page.keyboard.press("Escape")
        await page.locator("#notes").get_by_text("5 pictures left out: you chose no class").wait_for()
        assert not await page.locator("#seen").is_visible()
        await page.locator("#files").set_input_files(files=[{**only, "name": f"{n}.png"} for n in range(5)])
        await page.locator("#label").select_option("dog")
        await is_sound(page)
        await page.locator("#which button[value=take]").click()
        await page.locator("#seen").wait_for()
        assert await page.locator("#classes li").all_inner_texts() == ["cat0", "dog4"]
        assert "All samples have the label dog" in await page.locator("#notes").inner_text()
        await page.locator("#npz").set_input_files(files=[{**digits(), "buffer": b"PK"}])
        await page.locator("#problem").wait_for()
        assert "digits.npz cannot be read" in await page.locator("#why").inner_text()
        assert page.wrong == []


def huge():
    """Return a PNG that claims 60,000 x 60,000 points."""
    content = bytearray(picture((2, 2), 0))
    content[16:24] = (60_000).to_bytes(4, "big") * 2
    return bytes(content)


@pytest.mark.parametrize(
    ("answers", "code", "reason", "hint"),
    [
        ({}, "wrong", "This link was used already, or it has expired.", "invite"),
        ({}, "", "This browser has no place in this training.", "the whole link"),
        (
            {"/graph": (409, b"browsers cannot train the layer 'odd'")},
            CODE,
            "browsers cannot train the layer 'odd'",
            "Python",
        ),
        ({"/graph": (200, b'{"graph": {"format": 99}}')}, CODE, "older build", "Reload"),
        ({"/graph": (404, b"")}, CODE, "no model for this page", "build"),
    ],
)
async def test_a_person_who_cannot_join_reads_one_sentence_and_what_to_do(browser, answers, code, reason, hint):
    alone = Alone(digits_model())
    alone.answers = answers
    async with joined(browser, alone, code=code) as page:
        await page.locator("#problem").wait_for()
        assert reason in await page.locator("#why").inner_text()
        assert hint in await page.locator("#hint").inner_text()
        assert not await page.locator("#choose").is_visible()
        assert [line for line in page.wrong if "the server responded with a status" not in line] == []


async def test_a_reload_continues_the_training_and_other_tabs_are_warned(browser):
    alone = Alone(digits_model())
    async with joined(browser, alone) as page:
        await page.locator("#choose").wait_for()
        await page.locator("#npz").set_input_files(files=[{**digits(), "buffer": b"PK"}])
        await page.locator("#problem").wait_for()
        assert "#" not in page.url
        await page.reload()  # before the link is used
        await page.locator("#choose").wait_for()
        await page.locator("#npz").set_input_files(files=[digits()])
        await page.locator("#name").fill("clinic 7")
        assert alone.codes == {CODE}
        await page.locator("#start button").click()
        await page.locator("#state[data-state=training]").wait_for()
        assert alone.codes == set()
        other = await page.context.new_page()
        await other.goto(page.url)
        await other.get_by_text("Another tab of this browser trains already").wait_for()
        assert await other.locator("#state").inner_text() == "ready"
        dialogs = []

        async def answer(dialog):
            dialogs.append(dialog.type)
            await dialog.accept()

        page.on("dialog", answer)
        await page.locator("#share").fill("50")
        await page.reload()  # while it trains
        await page.locator("#state[data-state=training]").wait_for()
        await page.get_by_text("Your 200 samples and their labels").wait_for()
        assert await page.locator("#share-value").inner_text() == "50 %"
        assert await page.locator("#name").input_value() == "clinic 7"
        await page.locator("#pause").click()
        await page.locator("#state[data-state=paused]").wait_for()
        await page.reload()  # while it is paused
        await page.locator("#state[data-state=paused]").wait_for()
        assert dialogs == ["beforeunload"] * 2

        await other.reload()  # another tab waits for a click, and then uses the stored data
        await other.locator("#again").click()
        await other.locator("#seen").wait_for()
        assert "160 samples for training" in await other.locator("#counts").inner_text()
        await page.locator("#stop").click()
        await page.locator("#leave button[value=leave]").click()
        await page.locator("#state[data-state=ended]").wait_for()
        for tab in (page, other):  # the stored copy is gone
            await tab.reload()
            await tab.locator("#choose").wait_for()
            assert not await tab.locator("#again").is_visible()
            assert await tab.locator("#state").inner_text() == "ready"
            assert page.wrong == []


NAME = """() => {
  const node = document.activeElement;
  return node.getAttribute("aria-label") ?? node.labels?.[0]?.textContent.trim() ?? node.textContent.trim();
}"""
"""Script that returns the name of the focused element."""


async def reached(page, name):
    """Press Tab until an element with this name has the focus."""
    focused = []
    for _ in range(40):
        await page.keyboard.press("Tab")
        focused.append(await page.evaluate(NAME))
        if focused[-1].startswith(name):
            box = await page.evaluate("document.activeElement.getBoundingClientRect().toJSON()")
            assert box["width"] > 0, name
            return
    raise AssertionError(f"Tab does not reach {name!r}, only {focused}")


async def heard(page):
    """Return role and name of each element in Chromium's accessibility tree, which screen readers use."""
    devtools = await page.context.new_cdp_session(page)
    nodes = (await devtools.send("Accessibility.getFullAXTree"))["nodes"]
    elements = []
    for node in nodes:
        if node.get("ignored"):
            continue
        facts = {entry["name"]: entry["value"].get("value") for entry in node.get("properties", [])}
        name = node.get("name", {}).get("value", "")
        elements.append((node["role"]["value"], name))
        assert name or not facts.get("focusable") or node["role"]["value"] in ("main", "RootWebArea"), node
    return set(elements)


async def chosen(choosers):
    return await asyncio.wait_for(choosers.get(), PATIENCE_S)


async def test_a_person_with_a_keyboard_and_a_screen_reader_trains_a_model_from_a_link(browser):
    async with joined(browser, Alone(digits_model())) as page:
        choosers = asyncio.Queue()
        # set once, because Playwright does not wait until a new listener is active
        page.on("filechooser", choosers.put_nowait)
        await page.locator("#choose").wait_for()
        assert {("heading", "Train digits together"), ("status", "ready"), ("button", ".npz file"), ("main", "")} <= {
            (role, "ready" if role == "status" else name) for role, name in await heard(page)
        }
        await reached(page, "Pictures of one class")
        await page.keyboard.press("Space")
        files = [{"name": f"{n}.png", "mimeType": "image/png", "buffer": picture((9, 9), n)} for n in range(3)]
        await (await chosen(choosers)).set_files(files)
        await page.locator("#which").wait_for()
        assert {("dialog", "Which class?")} <= await heard(page)
        await page.keyboard.type("7")  # the list has the focus
        await reached(page, "Take this class")
        await page.keyboard.press("Enter")
        await page.locator("#seen").wait_for()
        await reached(page, ".npz file")
        await page.keyboard.press("Space")
        await (await chosen(choosers)).set_files([digits()])
        await page.get_by_text("160 samples for training").wait_for()
        assert {("list", "Samples of each class"), ("image", "A picture with the label 3")} <= await heard(page)
        await reached(page, "Start training")
        await page.keyboard.press("Enter")
        await page.locator("#state[data-state=training]").wait_for()
        await page.locator("#train .chart .curve").nth(1).wait_for()
        await reached(page, "Share of time")
        await page.keyboard.press("ArrowLeft")
        assert await page.locator("#share-value").inner_text() == "90 %"
        tree = await heard(page)
        assert {("slider", "Share of time"), ("button", "Pause"), ("heading", "What leaves this browser")} <= tree
        assert any(role == "image" and name.startswith("Loss: ") and name.endswith(" batches") for role, name in tree)
        await reached(page, "A sample of yours")
        await page.keyboard.press("Enter")
        await page.locator("#guesses li").first.wait_for()
        assert any(role == "StaticText" and "The model says" in name for role, name in await heard(page))
        await reached(page, "A picture")
        await page.keyboard.press("Space")
        await (await chosen(choosers)).set_files(files[:1])
        await page.get_by_text("The model takes this picture for").wait_for()
        await is_sound(page)


NOISE = {"way": "rounds", "merge": "mean", "clip": 1.0, "noise": 1.0, "quorum": 3}


PLANS = [
    Plan(),
    Plan(way="rounds", merge="mean"),
    Plan(**NOISE),
    Plan(way="rounds", merge="mean", secure_aggregation=True, quorum=3),
    Plan(**NOISE, trust="nobody"),
]
"""One plan for each kind of training by peers."""
TOPS = "(names) => names.map((name) => document.querySelector(name).getBoundingClientRect().top)"


@pytest.mark.parametrize(("width", "height"), [(1280, 800), (390, 844)])
async def test_the_first_screen_explains_the_privacy_without_scrolling(browser, width, height):
    alone = Alone(digits_model())
    async with joined(browser, alone, width=width, height=height) as page:
        for plan in PLANS:
            alone.graph |= {"plan": asdict(plan), "visible": asdict(seen_by(plan))}
            await page.reload()
            await page.locator("#choose").wait_for()
            explanation, choose = await page.evaluate(TOPS, ["#who", "#choose"])
            assert 0 < explanation < choose <= height, plan
            await is_sound(page)


async def test_the_screen_explains_who_sees_updates_and_samples(browser):
    """The test looks before and during the training, on a phone, in each kind of training."""
    alone = Alone(digits_model())
    async with joined(browser, alone, width=320, height=640) as page:
        for plan in PLANS:
            alone.graph |= {"plan": asdict(plan), "visible": asdict(seen_by(plan))}
            await page.reload()
            await page.locator("#who").wait_for()
            rows = [await row.locator("th, td").all_inner_texts() for row in await page.locator("#who-rows tr").all()]
            column = visible.column_for(plan.choice)
            assert rows == [[row.party, row.updates] for row in column.rows()]
            assert (
                await page.locator("#who-samples").inner_text()
                == "Your pictures and their labels: nobody else sees them."
            )
            assert visible.UPDATE in await page.locator("#who-updates").inner_text()
            assert column.remaining(plan.choice)[-1] in await page.locator("#who-more").inner_text()
            await is_sound(page)
        await page.locator("#npz").set_input_files(files=[digits()])
        await page.get_by_role("button", name="Start training").click()
        await page.locator("#state[data-state=training]").wait_for()
        await page.locator("#leaves li").first.wait_for()
        await page.locator("#tiles").get_by_text("1.250").wait_for()
        assert "at delta 1e-5; lower protects more" in await page.locator("#tiles").inner_text()
        sent = await page.locator("#leaves").inner_text()
        assert visible.NOBODY.before in sent
        assert "how many samples you have (160)" in sent
        assert "the loss and the accuracy" not in sent
        assert await page.locator("#who-rows tr").count() == len(rows)
        train, explanation = await page.evaluate(TOPS, ["#train", "#who"])
        assert train < explanation
        await is_sound(page)


async def test_no_text_of_a_curve_is_cut(browser):
    async with joined(browser, Alone(digits_model()), width=320, height=640) as page:
        await page.locator("#choose").wait_for()
        cut = await page.evaluate(
            """async () => {
              const { Chart } = await import("/page/chart.js"), figure = document.querySelector("#train .chart"), svg = figure.querySelector("svg");
              document.getElementById("train").hidden = false;
              const cut = [];
              for (const most of [2, 400, 1000, 9999, 10000, 1e6]) {
                const chart = new Chart(figure, { name: "Loss", show: String });
                for (let n = 0; n <= 10; n++) chart.add((n * most) / 10, 1e4 * n);
                for (const text of svg.querySelectorAll("text")) {
                  const { x, width } = text.getBBox();
                  if (x < 0 || x + width > svg.clientWidth) cut.push([most, text.textContent, x, width]);
                }
                if (![...svg.querySelectorAll("text")].some((text) => text.getAttribute("text-anchor") === "middle")) cut.push(most);
              }
              return cut;
            }"""
        )
        assert cut == []
        lines = """() => {
          const title = document.getElementById("title");
          title.textContent = "Train private_digits together";
          const range = document.createRange(), node = title.firstChild, at = node.data.indexOf("private"), end = node.data.indexOf(" together");
          range.setStart(node, at);
          range.setEnd(node, end);
          return range.getClientRects().length;
        }"""
        assert await page.evaluate(lines) == 1  # the name of the app takes one line


async def test_a_browser_without_web_assembly_does_not_use_the_link(browser):
    alone = Alone(digits_model())
    async with joined(browser, alone) as page:
        await page.add_init_script("delete globalThis.WebAssembly")
        await page.reload()
        await page.locator("#problem").wait_for()
        assert await page.locator("#why").inner_text() == "This browser cannot train: it has no WebAssembly."
        assert "current version of Firefox" in await page.locator("#hint").inner_text()
        assert alone.codes == {CODE}


async def test_a_camera_takes_labelled_pictures_and_a_refused_one_gets_a_sentence(browser):
    async with joined(browser, Alone(digits_model())) as page:
        await page.locator("#camera").click()
        await page.locator("#viewfinder").wait_for()
        for name in ("3", "3", "5", "5"):
            await page.get_by_label(f"Take a picture of class {name}").click()
        await page.locator("#seen").wait_for()
        assert "3 samples for training, and 1 held out" in await page.locator("#counts").inner_text()
        await page.locator("#camera-off").click()
        await is_sound(page)
    async with chromium("--deny-permission-prompts") as strict, joined(strict, Alone(digits_model())) as page:
        await page.locator("#camera").click()
        await page.locator("#problem").wait_for()
        assert "camera" in await page.locator("#why").inner_text()
