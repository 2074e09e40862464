"""A client of the dashboard outside of a browser, for ``ddlf top`` on the same machine."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any

from ddlf.errors import AuthError, ConnectError
from ddlf.monitor.dashboard.address import HOST
from ddlf.monitor.dashboard.board import MOST_LINES

MOST_BYTES = 64 * 1024**2


async def watch(port: int, token: str) -> AsyncGenerator[dict[str, Any], None]:
    """Yield the state of a page whenever it changes, until the master ends.

    Args:
        port: Port of the page.
        token: Token of the page.

    Yields:
        The same dict each time: ``"about"``, ``"run"``, ``"lanes"``, ``"workers"``, ``"curves"`` (values by name),
        ``"log"``, ``"now"``, ``"held_s"`` and ``"over"``, in the format of the page.

    Raises:
        ConnectError: No page is there, or it has disappeared.
        AuthError: The token is wrong.
    """
    from websockets.asyncio.client import connect
    from websockets.exceptions import ConnectionClosed, InvalidMessage, InvalidStatus

    state: dict[str, Any] = {"run": None, "lanes": [], "workers": [], "curves": {}, "log": []}
    where = f"127.0.0.1:{port}"
    try:
        async with connect(
            f"ws://{HOST}:{port}/live",
            subprotocols=["ddlf"],  # type: ignore[list-item]
            additional_headers={"Authorization": f"Bearer {token}"},
            compression=None,
            max_size=MOST_BYTES,
            proxy=None,
        ) as page:
            async for text in page:
                take(state, json.loads(text))
                yield state
    except InvalidStatus as error:
        if error.response.status_code == 401:
            raise AuthError(
                f"the page on {where} has another token", hint="check whether the page belongs to another user"
            ) from None
        raise ConnectError(f"the page on {where} answers {error.response.status_code}") from None
    except ConnectionClosed:
        if not state.get("over"):
            raise ConnectError(f"the master of the page on {where} has ended") from None
    except (OSError, InvalidMessage) as error:
        raise ConnectError(f"no page answers on {where}: {error}") from None


def take(state: dict[str, Any], message: dict[str, Any]) -> None:
    """Update the known state of a run by a message of the dashboard, which contains only changes."""
    state.update({name: message[name] for name in ("about", "run", "lanes", "workers") if name in message})
    state.update({name: message[name] for name in ("now", "held_s", "over")})
    if series := message.get("series"):
        start = series["from"]
        state["curves"] = {
            name: [*state["curves"].get(name, [None] * start)[:start], *values]
            for name, values in series["columns"].items()
        }
    if log := message.get("log"):
        state["log"] = [*(state["log"] if log["more"] else []), *log["new"]][-MOST_LINES:]
