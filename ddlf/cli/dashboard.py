"""``ddlf dashboard``: find the page of a run. Also decides whether ``ddlf run`` serves one."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from ddlf.cli.parsing import Command, Parser
from ddlf.data.app import UserApp
from ddlf.errors import ConfigError, ConnectError, DDLFError

if TYPE_CHECKING:
    from ddlf.cli.stopping import StopRequest
    from ddlf.cluster.cluster import Cluster
    from ddlf.monitor.terminal.display import Display

VARIABLE = "DDLF_DASHBOARD"
WORDS = {
    **dict.fromkeys(("1", "on", "true", "yes"), True),
    **dict.fromkeys(("0", "off", "false", "no"), False),
    "auto": None,
}
NO_PAGE = "no run of yours has a dashboard on this machine"


def requested(options: argparse.Namespace) -> tuple[bool | int | None, str] | None:
    """Return the value of ``--dashboard`` or else of ``$DDLF_DASHBOARD``, with the name of its origin; None if neither
    is given.

    Raises:
        ConfigError: The variable has an invalid value.
    """
    if options.dashboard is not None:
        return options.dashboard, "--dashboard" if options.dashboard else "--no-dashboard"
    text = os.environ.get(VARIABLE, "").strip().lower()
    if not text:
        return None
    if text in WORDS:
        return WORDS[text], VARIABLE
    if not (text.isdigit() and int(text) < 65536):
        raise ConfigError(f"{VARIABLE} must be on, off, auto or a port, got {text!r}")
    return int(text), VARIABLE


@contextlib.asynccontextmanager
async def served(
    cluster: Cluster,
    app: UserApp | None,
    options: argparse.Namespace,
    display: Display,
    stop: StopRequest,
    described: str,
) -> AsyncIterator[None]:
    """Serve the dashboard, a web page about the run, during a ``with`` block, if it is wanted, and print its address.

    A problem is an error only if a port was given.

    Args:
        cluster: The cluster that the page shows.
        app: The app whose run it shows; None for a function.
        options: The parsed options.
        display: The other display of the run.
        stop: Asks the run to end.
        described: A description of the cluster, for people.

    Raises:
        ListenError: The given port cannot be used.
    """
    requested_port = (requested(options) or (None, ""))[0] if app is None else app.dashboard
    if requested_port is None:
        requested_port = sys.stdout.isatty() and display.prints and not os.environ.get("CI")
    if requested_port is False:
        yield
        return

    def say(text: str) -> None:  # on one line, so that it can be copied
        print(text, file=None if display.prints else sys.stderr, flush=True)

    button = stop.interrupted if app is not None else None
    page = cluster.dashboard(
        app, port=None if requested_port is True else requested_port, stop=button, cluster=described
    )
    try:
        await page.open()
    except DDLFError as error:
        if requested_port is not True:
            raise
        say(f"dashboard not shown: {error}")
        yield
        return
    stop.tell = page.stopping
    try:
        say(f"dashboard {page.url}" + f" ({page.note})" * bool(page.note))
        if page.tunnel:
            say(f"          on your own machine first: {page.tunnel}")
        yield
    finally:
        page.close()


def _options(parser: Parser) -> None:
    parser.add("--no-open", dest="open", action="store_false", help="do not open a browser")


def dashboard(options: argparse.Namespace) -> int:
    """Run ``ddlf dashboard``: print the addresses of the web pages of this user's runs, newest first. Open the newest
    page if there is a screen.
    """
    from ddlf.monitor.dashboard.address import open_pages, tunnel

    pages = open_pages()
    if not pages:
        raise ConnectError(NO_PAGE, hint="start one with: ddlf run APP --dashboard")
    for page in pages:
        print(f"{page['url']}  {page['title'] or page['cluster']}, process {page['pid']}")
    if command := tunnel(pages[0]["port"], os.environ):
        print(f"on your own machine first: {command}")
    elif options.open and has_screen():
        import webbrowser

        webbrowser.open(pages[0]["url"])
    return 0


def has_screen() -> bool:
    """Return whether the user would see a browser that this process opens."""
    return sys.stdout.isatty() and (
        sys.platform in ("darwin", "win32") or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
    )


DASHBOARD = Command(
    description="Print the addresses of the pages of your runs on this machine, and open the newest in a browser.",
    examples=("ddlf dashboard", "ddlf dashboard --no-open"),
    options=_options,
    run=dashboard,
)
