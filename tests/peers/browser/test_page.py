"""The page of a peer as people use it, in Chromium: join, choose data, look, train, pause, try the model, stop."""

import importlib
from io import BytesIO

import numpy as np
import pytest
from safetensors.numpy import load

from tests.patience import PATIENCE_S
from tests.peers.browser.alone import CODE, Alone, digits_model, joined

pytestmark = pytest.mark.slow
RANDOM = np.random.default_rng(0)
WAIT = {"timeout": PATIENCE_S * 1000}
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
"""Texts whose contrast is below the 4.5 of WCAG 2.2 AA."""
UNNAMED = """() => [...document.querySelectorAll("button, input, select, canvas, svg[role]")]
  .filter((node) => node.checkVisibility() && !node.closest("[aria-hidden]"))
  .filter((node) => !(node.getAttribute("aria-label") || node.textContent.trim() || node.labels?.[0]?.textContent.trim()))
  .map((node) => node.outerHTML.slice(0, 80))"""


def digits(count=200):
    (x, y), _ = importlib.import_module("ddlf.data.datasets").with_classes("digits")
    np.savez_compressed(target := BytesIO(), x=x[:count].reshape(-1, 8, 8), y=y[:count])
    return {"name": "digits.npz", "mimeType": "application/zip", "buffer": target.getvalue()}


def picture(size, color, kind="PNG"):
    from PIL import Image

    Image.new("RGB", size, color).save(target := BytesIO(), kind)
    return target.getvalue()


async def is_sound(page):
    """Check what holds for each state of the page."""
    assert page.wrong == []
    assert len(page.hosts) == 1
    assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert await page.evaluate(UNNAMED) == []
    assert await page.evaluate(CONTRAST) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_a_person_with_a_keyboard_and_a_phone_trains_a_model(scheme):
    async with joined(Alone(digits_model()), width=320, height=640, color_scheme=scheme, accept_downloads=True) as page:
        page.set_default_timeout(PATIENCE_S * 1000)
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
        await page.keyboard.press("Enter")  # a form begins with Enter
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
        assert 50 < sum(parts) <= 100.3  # the best five of ten
        async with page.expect_download() as download:
            await page.locator("#save").press("Enter")
        weights = load((await (await download.value).path()).read_bytes())
        assert (288, 10) in {one.shape for one in weights.values()}
        await page.locator("#pause").press("Enter")
        await page.locator("#state[data-state=training]").wait_for()

        await page.locator("#stop").press("Enter")
        await page.keyboard.press("Escape")  # stays
        assert await page.locator("#state").inner_text() == "training"
        await page.locator("#stop").press("Enter")
        await page.locator("#leave button[value=leave]").press("Enter")
        await page.locator("#state[data-state=ended]").wait_for()
        await is_sound(page)


async def test_pictures_in_folders_are_read_drawn_and_counted_and_bad_ones_named(tmp_path):
    keras = importlib.import_module("keras")
    made = keras.Sequential(
        [keras.Input((8, 8, 3)), keras.layers.Flatten(), keras.layers.Dense(2, activation="softmax")], name="pets"
    )
    made.compile("sgd", "categorical_crossentropy", metrics=["accuracy"])
    for folder, color in (("cat", (255, 0, 0)), ("dog", (0, 0, 255)), ("cow", (0, 255, 0))):
        (tmp_path / "pets" / folder).mkdir(parents=True)
        for n in range(6):
            (tmp_path / "pets" / folder / f"{n}.png").write_bytes(picture((30 + n, 20), color))
    bad = {"empty.png": b"", "broken.jpg": picture((9, 9), 0, "JPEG")[:99], "text.gif": b"hello", "huge.png": huge()}
    for name, content in bad.items():
        (tmp_path / "pets" / "cat" / name).write_bytes(content)
    (tmp_path / "pets" / "cat" / "notes.txt").write_text("hello")
    async with joined(Alone(made, ("cat", "dog"))) as page:
        page.set_default_timeout(PATIENCE_S * 1000)
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
        assert {tuple(one) for one in colors} == {("cat", 255, 0, 0, 255), ("dog", 0, 0, 255, 255)}
        await is_sound(page)

        await page.locator("#forget").click()
        assert not await page.locator("#seen").is_visible()
        only = {"name": "one.png", "mimeType": "image/png", "buffer": picture((9, 9), 0)}
        await page.locator("#files").set_input_files(files=[{**only, "name": f"{n}.png"} for n in range(5)])
        await page.locator("#seen").wait_for()
        assert "All samples have the label cat" in await page.locator("#notes").inner_text()
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
    ("answers", "code", "why", "hint"),
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
async def test_a_person_who_cannot_join_reads_one_sentence_and_what_to_do(answers, code, why, hint):
    alone = Alone(digits_model())
    alone.answers = answers
    async with joined(alone, code=code) as page:
        await page.locator("#problem").wait_for(**WAIT)
        assert why in await page.locator("#why").inner_text()
        assert hint in await page.locator("#hint").inner_text()
        assert not await page.locator("#choose").is_visible()
        assert [line for line in page.wrong if "the server responded with a status" not in line] == []


async def test_a_reload_keeps_session_and_data_and_a_closed_tab_is_warned_of():
    async with joined(Alone(digits_model())) as page:
        page.set_default_timeout(PATIENCE_S * 1000)
        await page.locator("#npz").set_input_files(files=[digits()])
        await page.locator("#start button").click()
        await page.locator("#state[data-state=training]").wait_for()
        other = await page.context.new_page()
        await other.goto(page.url)
        await other.get_by_text("Another tab of this browser trains already").wait_for()
        await other.close()
        asked = []

        async def answer(dialog):
            asked.append(dialog.type)
            await dialog.accept()

        page.on("dialog", answer)
        await page.reload()
        assert asked == ["beforeunload"]
        await page.locator("#again").click()
        await page.locator("#seen").wait_for()
        assert "160 samples for training" in await page.locator("#counts").inner_text()
        assert not await page.get_by_text("Another tab").count()
        await page.locator("#forget").click()
        await page.locator("#folder:focus").wait_for(state="attached")  # the copy is gone
        await page.reload()
        await page.locator("#choose").wait_for()
        assert not await page.locator("#again").is_visible()
        assert page.wrong == []


async def test_a_camera_takes_labelled_pictures_and_a_refused_one_gets_a_sentence():
    flags = ("--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream")
    async with joined(Alone(digits_model()), *flags) as page:
        page.set_default_timeout(PATIENCE_S * 1000)
        await page.locator("#camera").click()
        await page.locator("#viewfinder").wait_for()
        for name in ("3", "3", "5", "5"):
            await page.get_by_label(f"Take a picture of class {name}").click()
        await page.locator("#seen").wait_for()
        assert "3 samples for training, and 1 held out" in await page.locator("#counts").inner_text()
        await page.locator("#camera-off").click()
        await is_sound(page)
    async with joined(Alone(digits_model()), "--deny-permission-prompts") as page:
        await page.locator("#camera").click(**WAIT)
        await page.locator("#problem").wait_for(**WAIT)
        assert "camera" in await page.locator("#why").inner_text()
