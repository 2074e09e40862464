"""Make the screens that explain who sees updates and samples, in five settings, and print the table of the code.

``python -m tests.trials.who_sees FOLDER``

In three settings, peers swap, mask their updates, or add noise on the server. Their screens are pictures of the page that a
peer's link opens, on a computer (``1.png``) and on a phone (``1p.png``). In two settings, private workers mask their updates
or add noise to each step. Their screens are the output of ``ddlf run --dry-run`` (``4.txt``).

Give the screens to a person who did not build them, and ask which parties see the updates and the pictures. Compare the
answers with the printed lines.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ddlf.privacy import visible
from ddlf.privacy.contradictions import Choice
from tests.monitor.dashboard.browser import chromium, opened
from tests.trials.browser_peers import Commands, until

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "apps" / "models" / "private_digits.nnm"
COMPUTER, PHONE = (1280, 800), (390, 844)
"""Width and height of a window, in pixels."""
APP = """
import keras
import numpy as np

import ddlf


class Private(ddlf.IApp):
    private = True
    SETTINGS

    async def load_dataset(self):  # on each worker, never on the master
        mine = np.load("/data/pictures.npz")
        self.x_train, self.y_train = mine["x"], mine["y"]

    async def create_model(self):
        layers = [keras.Input((28, 28, 1)), keras.layers.Flatten(), keras.layers.Dense(10, activation="softmax")]
        self.model = keras.Sequential(layers)
        self.model.compile("sgd", "sparse_categorical_crossentropy")
"""


@dataclass(frozen=True, kw_only=True)
class OfPeers:
    """A training by peers: the options of ``ddlf peers serve``, and the same settings as a choice of the table."""

    options: str
    choice: Choice


@dataclass(frozen=True, kw_only=True)
class OfWorkers:
    """A run with private workers: the settings in its app, and the same settings as a choice of the table."""

    settings: str
    choice: Choice


SCREENS: tuple[OfPeers | OfWorkers, ...] = (
    OfPeers(options="", choice=Choice(trainers="peers", way="swap")),
    OfPeers(options="--way rounds --secure-aggregation", choice=Choice(trainers="peers", secure=True, quorum=3)),
    OfPeers(
        options="--way rounds --quorum 3 --clip 1 --noise 1 --trust server",
        choice=Choice(trainers="peers", quorum=3, clip=1.0, noise=1.0, trust="server"),
    ),
    OfWorkers(settings="secure_aggregation = True", choice=Choice(trainers="workers", secure=True)),
    OfWorkers(
        settings="update_clip, noise_multiplier, privacy_unit = 1.0, 1.0, 'sample'",
        choice=Choice(trainers="workers", clip=1.0, noise=1.0, unit="sample"),
    ),
)


def shown(choice: Choice) -> Iterator[str]:
    """Yield a line for each party, with the answers of the table."""
    for party, cell in visible.column_for(choice).cells.items():
        yield f"{visible.column_for(choice).name_of(party)}: updates: {cell.updates.phrase}; samples: {cell.samples.phrase}"


async def take_pictures(options: str, at: Path) -> list[Path]:
    """Serve a model, open the link of a peer in Chromium, and take a picture for each size of the window."""
    pictures = []
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        stack.callback((commands := Commands(Path(folder))).end)
        words = ["serve", str(MODEL), "--port", "0", "--invite", "2", *options.split()]
        server = commands.start(*words)
        assert server.stdout is not None
        stack.enter_context(server.stdout)  # it closes the pipe
        async with chromium() as browser:
            for (width, height), kind in ((COMPUTER, ""), (PHONE, "p")):
                link = await asyncio.to_thread(until, server, r"link +(\S+)")
                async with opened(browser, link, width=width, height=height) as page:
                    await page.locator("#state[data-state=ready]").wait_for()
                    pictures.append(at.with_name(f"{at.name}{kind}.png"))
                    await page.screenshot(path=pictures[-1])
    return pictures


def print_plan(settings: str, at: Path) -> list[Path]:
    """Write the output of ``ddlf run --dry-run`` for an app with these settings."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "app.py").write_text(APP.replace("SETTINGS", settings))
        ended = subprocess.run(
            [sys.executable, "-m", "ddlf.cli.main", "run", "app.py", "--local", "3", "--dry-run"],
            cwd=folder,
            env=os.environ
            | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])},
            capture_output=True,
            text=True,
        )
    if ended.returncode:
        raise RuntimeError(ended.stderr)
    file = at.with_name(f"{at.name}.txt")
    file.write_text(ended.stdout)
    return [file]


def make(screen: OfPeers | OfWorkers, at: Path) -> list[Path]:
    """Make the files of one screen.

    Args:
        screen: The settings.
        at: The path of the files, without the end of their names.
    """
    if isinstance(screen, OfPeers):
        return asyncio.run(take_pictures(screen.options, at))
    return print_plan(screen.settings, at)


def main(words: Sequence[str] | None = None) -> None:
    """Make all screens."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the folder of the screens")
    folder: Path = parser.parse_args(words).folder
    folder.mkdir(parents=True, exist_ok=True)
    for number, screen in enumerate(SCREENS, 1):
        files = make(screen, folder / str(number))
        print(f"{number}  {visible.column_for(screen.choice).how}  ({', '.join(file.name for file in files)})")
        for line in shown(screen.choice):
            print(f"   {line}", flush=True)


if __name__ == "__main__":
    main()
