"""``ddlf peers serve``: from a model and options to a server that runs, and files of its run. Runs on the server.

Files in the folder of a run:

| file | content |
|---|---|
| ``plan.json`` | the plan, the layout's digest, and which weights are trained |
| ``model.nnm`` | the model's text, as peers receive it |
| ``journal-*``, ``history-*`` | see ``journal.py`` |
| ``server.json`` | address and secret of the running server, for ``ddlf peers invite``; only its owner can read it |
| ``model.safetensors``, ``model.keras`` | the last set, after the end |
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import inspect
import json
import os
import secrets
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from dataclasses import replace as replace_fields
from pathlib import Path
from typing import Any

import numpy as np

from ddlf.algorithms.weights import Weights
from ddlf.app import IApp
from ddlf.errors import CheckpointMismatch, ConfigError, ConnectError, ListenError
from ddlf.events import ModelSaved
from ddlf.events.facts import from_data, to_data
from ddlf.events.record import RoundRecord
from ddlf.events.sinks import Events
from ddlf.extras import suffixes
from ddlf.monitor.dashboard.server import Dashboard
from ddlf.monitor.runs import folder as runs
from ddlf.monitor.runs.background import Behind
from ddlf.peers.classes import classes_of, numbered
from ddlf.peers.link import PIN, request
from ddlf.peers.model import (
    Trained,
    arrays_of,
    read_text,
    reports_accuracy,
    settled_text,
    text_of_model,
    trained_from_text,
)
from ddlf.peers.pages import browser_model
from ddlf.peers.plan import Plan, check_classes, how_it_ends
from ddlf.peers.server import Model, PeerServer
from ddlf.peers.sessions import Link
from ddlf.peers.shards import Shards
from ddlf.peers.signals import Stop
from ddlf.peers.telling import PeersWriter
from ddlf.rpc.tls import Security, is_loopback, make_certificate, worker_tls
from ddlf.rpc.tokens import state_folder
from ddlf.training.checkpoints.durable import replace

PORT = 8930
"""The usual port of a server of peers."""
END_S = 20.0
"""Seconds that the end of a run waits for a slow disk."""
WEB_MODELS = (".js", ".json")
"""Suffixes of model files of WebNN, which become texts."""
PLAN, SERVER = "plan.json", "server.json"


class Served:
    """A model that is ready to be served.

    Args:
        model: The model's text, layout and first set.
        trained: The Keras model with the server's test data; None without data.
        keras: Makes the Keras model with given weights, for the file at the end.
        classes: Names of the classes; empty if labels are numbers.
        converged: ``is_convergent`` of the app; None if the app has no own one.
    """

    def __init__(
        self,
        model: Model,
        trained: Trained | None,
        keras: Callable[[Weights], Any],
        classes: tuple[str, ...] = (),
        converged: Callable[[RoundRecord], bool] | None = None,
    ) -> None:
        self.model = model
        self.classes = classes
        self.converged = converged
        self.keras = keras
        self._trained = trained
        self._lock = threading.Lock()

    def give_out(self, plan: Plan, seed: int) -> None:
        """Divide the training data into the shards of the plan.

        Raises:
            ConfigError: They cannot be divided so.
        """
        assert self._trained is not None
        shards = Shards(self._trained.data, plan.shards, plan.partition, seed)
        self.model = replace_fields(self.model, shards=shards)

    @property
    def other_scale(self) -> str:
        """A line if the test data of a model of pictures have another scale than in browsers; empty otherwise."""
        if self._trained is None or not _takes_pictures(self._trained.model):
            return ""
        low, high = self._trained.reach
        if low >= 0 and high <= 1:
            return ""
        return f"the test data go from {low:g} to {high:g}; browsers make pictures 0 to 1"

    @property
    def can_test(self) -> bool:
        """Whether there are test data."""
        return self._trained is not None

    def test(self, weights: Weights) -> tuple[float, float, int]:
        """Test weights on the server's test data."""
        assert self._trained is not None
        with self._lock:
            return self._trained.test(weights, most=10**9)


def read_model(
    path: Path,
    data: str | None,
    find_app: Callable[[Path], Any],
    seed: int,
    classes: tuple[str, ...] = (),
    *,
    trains: bool = False,
) -> Served:
    """Build the model of a text or of an app, and return what the server needs of it.

    Args:
        path: The ``.nnm`` text, a model file of WebNN, or the Python file of an app.
        data: Name or file of the server's data; None without.
        find_app: Returns the app class in a Python file.
        seed: Seed of the first weights.
        classes: Names of the classes; empty to take them from text labels of the data.
        trains: Whether the data are for training, too; otherwise all of them are test data.

    Raises:
        ConfigError: The model cannot be served. The error names the reason.
    """
    import keras

    keras.utils.set_random_seed(seed)
    arrays = None if data is None else arrays_of(data)
    if arrays is not None and not trains:
        arrays = _all_for_tests(arrays)
    converged = None
    check_classes(classes)
    if arrays is not None:
        classes = classes or classes_of(arrays)
        arrays = numbered(arrays, classes, data or "")
    if path.suffix in (*suffixes("file_types"), *WEB_MODELS):
        text, first = _of_text(path, arrays, data or "", seed)
    else:
        app = _of_app(path, find_app)
        made, converged = app.model, _converged(app)
        text = text_of_model(made)
        text = settled_text(text, str(path), None).text
        from ddlf.extras import provided

        named = provided("named_weights", "ddlf peers")(made)
        first = {name: np.array(one) for name, one in named.items()}
    from ddlf.extras import provided

    notation = provided("Notation", "ddlf peers")(text, str(path))
    model = notation.compiled()
    if classes and not _tells_apart(_outputs(model), len(classes)):
        outputs = " and ".join(str(shape[-1]) for shape in _outputs(model))
        raise ConfigError(
            f"there are {len(classes)} names of classes, and the model has {outputs} outputs",
            hint="name each class once, in the order of the outputs: --classes cat,dog",
        )
    trained = None
    if arrays is not None:
        trained = trained_from_text(text, arrays, data or "", lambda line: None, seed)
    named = provided("named_weights", "ddlf peers")(model)
    if first is None:
        first = {name: np.array(one) for name, one in named.items()}
    for (name, variable), value in zip(named.items(), first.values(), strict=True):
        if tuple(variable.shape) != value.shape:
            raise ConfigError(f"{path}: the text of the model has another shape of {name!r}: please report this")
        variable.assign(value)
    from ddlf.peers.sets import layout_of

    layout = layout_of({name: np.asarray(one) for name, one in named.items()})
    learns = {id(one) for one in model.trainable_weights}
    served = Model(
        text=text,
        layout=layout,
        first=layout.encode([np.array(one) for one in named.values()]),
        trainable=tuple(id(one) in learns for one in named.values()),
        browser=browser_model(getattr(model, "inner", model), named),
    )

    def with_weights(weights: Weights) -> Any:
        for variable, value in zip(named.values(), weights, strict=True):
            variable.assign(value)
        return model

    return Served(served, trained, with_weights, classes, converged)


def _takes_pictures(model: Any) -> bool:
    """Return whether a model takes pictures in grey or in colour, and does not scale bytes itself."""
    inner = getattr(model, "inner", model)
    shapes = [tuple(one.shape) for one in inner.inputs]
    scales = any(type(layer).__name__ == "Rescaling" for layer in inner.layers)
    return len(shapes) == 1 and len(shapes[0]) == 4 and shapes[0][-1] in (1, 3) and not scales


def _tells_apart(outputs: list[tuple[int, ...]], classes: int) -> bool:
    """Return whether a model has one output, with a unit for each class, or one unit for two classes."""
    return len(outputs) == 1 and outputs[0][-1] in ((classes, 1) if classes == 2 else (classes,))


def _outputs(model: Any) -> list[tuple[int, ...]]:
    return [tuple(one.shape) for one in getattr(model, "inner", model).outputs]


def _all_for_tests(arrays: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the arrays of a file without parts as test data, too: the server trains nothing, so it needs no other part."""
    if "data" in arrays or any(name.endswith(("_train", "_val", "_test")) for name in arrays):
        return arrays
    return {**arrays, **{f"{name}_test": array for name, array in arrays.items()}}


def _of_text(path: Path, arrays: Any, source: str, seed: int) -> tuple[str, dict[str, Any] | None]:
    from ddlf.extras import provided

    text = read_text(path)
    fitted = None
    if arrays is not None:
        notation = provided("Notation", "ddlf peers")(text, str(path))
        fitted, _ = provided("dataset", "ddlf peers")(dict(arrays), source, notation.parsed, notation.loss, 0.0)
    return settled_text(text, str(path), fitted).text, None


def _of_app(path: Path, find_app: Callable[[Path], Any]) -> Any:
    app = find_app(path)()
    asyncio.run(_create(app))
    return app


def _converged(app: Any) -> Callable[[RoundRecord], bool] | None:
    """Return the app's own ``is_convergent`` as a plain function; None if the app has none."""
    if type(app).is_convergent is IApp.is_convergent:
        return None

    async def ask(record: RoundRecord) -> bool:
        found = app.is_convergent(record)
        return bool(await found if inspect.isawaitable(found) else found)

    return lambda record: asyncio.run(ask(record))


async def _create(app: Any) -> None:
    await app.create_model()


def learning_rate(model: Any) -> float:
    """Return the constant learning rate of a compiled Keras model; 0 if it has a schedule."""
    given = model.optimizer.get_config().get("learning_rate")
    return float(given) if isinstance(given, int | float) else 0.0


def check_merge(plan: Plan, model: Any) -> None:
    """Refuse a merge that needs an accuracy if the model reports none.

    Raises:
        ConfigError: The model reports no accuracy.
    """
    if plan.way == "swap" and plan.merge == "copy" and not reports_accuracy(model):
        raise ConfigError(
            "the merge copy compares accuracies, and the model reports none",
            hint="compile it with metrics=['accuracy'], or write train:metrics accuracy; into its text",
        )


# -- the folder of a run ---------------------------------------------------------------------------------------------------


def make_folder(out: Path, name: str, plan: Plan, served: Served, seed: int) -> Path:
    """Make the folder of a new run."""
    path = runs.make(out, f"peers-{name}")
    runs.write_text(path / runs.NOTATION, served.model.text)
    runs.write_json(path / runs.STATE, runs.begun(f"peers of {name}"))
    facts = {"plan": asdict(plan), "layout": served.model.layout.digest, "converges": served.converged is not None}
    if served.model.shards is not None:
        facts |= {"shards": served.model.shards.digest, "seed": seed}
    replace(path / PLAN, json.dumps(to_data(facts)).encode())
    return path


def find_run(out: Path, name: str) -> Path:
    """Return the folder of the run that a name means; for ``"last"`` the newest run with peers.

    Raises:
        ConfigError: No run has this name, or several runs have it.
    """
    if name == "last" and (found := [path for path in runs.runs_in(out) if (path / PLAN).exists()]):
        return found[0]
    return runs.find(out, name)


def read_folder(path: Path) -> tuple[Plan, str, str, int]:
    """Return plan, model text, digest of the layout and last port of an earlier run.

    Raises:
        ConfigError: The folder is not that of a run with peers.
    """
    facts = runs.read_json(path / PLAN)
    if "plan" not in facts:
        raise ConfigError(f"{path} is not the folder of a run with peers", hint="`ddlf peers serve` prints the folder")
    port = runs.read_json(path / SERVER).get("port", 0)
    return from_data(Plan, facts["plan"]), read_text(path / runs.NOTATION), str(facts["layout"]), int(port)


def give_out_again(path: Path, plan: Plan, served: Served, data: str) -> None:
    """Divide the server's data as an earlier server of the run did.

    Raises:
        CheckpointMismatch: They are other data.
    """
    facts = runs.read_json(path / PLAN)
    served.give_out(plan, int(facts["seed"]))
    if served.model.shards is None or served.model.shards.digest != facts["shards"]:
        raise CheckpointMismatch(
            f"{data} has other training data than the shards of {path}", hint="name the same data with --data"
        )


def has_begun(path: Path) -> bool:
    """Return whether an earlier server has begun the run in a folder."""
    return any(path.glob("journal-*"))


def check_layout(path: Path, digest: str, served: Served) -> None:
    """Refuse to continue a run whose model has other weights than before.

    Raises:
        CheckpointMismatch: The layouts differ.
    """
    if digest != served.model.layout.digest:
        raise CheckpointMismatch(f"the model of {path} has other weights than the sets in its journal")


# -- the port ---------------------------------------------------------------------------------------------------------------


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket.

    Raises:
        ListenError: The address cannot be used.
    """
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(512)
    except (OSError, OverflowError) as error:
        sock.close()
        taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
        why = "is in use" if taken else f"cannot be used: {getattr(error, 'strerror', None) or error}"
        raise ListenError(f"port {port} of {host} {why}", hint="choose another with --port") from None
    return sock


def protection(host: str, cert: Path | None, key: Path | None, proxy: str) -> tuple[ssl.SSLContext | None, str]:
    """Return the TLS context of a server, and the pin for its link.

    On loopback, and behind a proxy that ends TLS, there is none. Elsewhere the server shows the given certificate, or its
    own one, whose SHA-256 is in the link.

    Raises:
        ConfigError: A certificate cannot be used, or ``--proxy`` is not a URL with https.
    """
    if proxy:
        if not proxy.startswith("https://"):
            raise ConfigError(f"--proxy {proxy} is not a URL with https", hint="name the URL that browsers open")
        return None, ""
    if cert is None and _is_loopback(host):
        return None, ""
    own = state_folder() / "peers-certificate.pem"
    if cert is None:
        own.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        make_certificate(own)
    tls = worker_tls(own, Security(tls_cert=cert, tls_key=key))
    return tls.context, tls.certificate.hex() if cert is None else ""


def _is_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return is_loopback(host)
    return host == "localhost"


# -- serving ----------------------------------------------------------------------------------------------------------------


async def serve(
    path: Path,
    served: Served,
    plan: Plan,
    *,
    host: str,
    port: int,
    invitations: int,
    cert: Path | None,
    key: Path | None,
    proxy: str,
    say: Callable[[str], None],
    stop: Stop,
    dashboard: bool,
    show: Callable[[str], None] | None = None,
) -> bool:
    """Serve a model until the training is over or ``stop`` was asked for, then write the last set.

    Returns:
        Whether the training is over. Otherwise it can be continued.

    Raises:
        DDLFError: The server cannot begin, or its disk refuses.
    """
    context, pin = protection(host, cert, key, proxy)
    sock = listen(host, port)
    bound = sock.getsockname()[1]
    origin = proxy.rstrip("/") or f"{'https' if context else 'http'}://{_in_link(host)}:{bound}"
    control = secrets.token_urlsafe(32)
    name = runs.read_json(path / runs.STATE).get("app") or "peers"
    writer = PeersWriter(path, plan, name, continues=has_begun(path))
    behind = Behind(writer.write, f"the run's folder {path}")
    told = Events()
    told.subscribe(behind)
    server = PeerServer(
        path,
        served.model,
        plan,
        tell=told.emit,
        say=say,
        control=control,
        converged=served.converged,
        test=served.test if plan.validated_by == "server" else None,
        url=origin,
    )
    await asyncio.to_thread(server.recover)
    if served.converged is None and runs.read_json(path / PLAN).get("converges"):
        say("converge  is_convergent of the app is not called in a resumed run; end it with: ddlf peers stop")
    page = Dashboard(_no_workers, follow=(told,), title=name) if dashboard else None
    if page is not None:
        await page.open()
        say(f"dashboard {page.url}")
    server.tell_begin(name)
    facts = {"port": bound, "origin": origin, "pin": pin, "control": control, "pid": os.getpid(), "folder": str(path)}
    say(f"folder    {path}")
    if served.model.browser.refusal:
        say(f"browsers  {served.model.browser.refusal}")
    elif served.other_scale:
        say(f"scale     {served.other_scale}")
    say(f"ends      {how_it_ends(plan, by_app=served.converged is not None)}")

    async def invite() -> None:
        for code in await server.invite(invitations):
            link = link_of(origin, code, pin)
            say(f"link      {link}")
            if show is not None:
                show(link)
        if invitations:
            data = "" if server.plan.shards else " --data mine.npz"
            say(f"join      open a link in a browser, or: ddlf peers join LINK{data}")

    tasks: list[asyncio.Task[None]] = []

    def ready() -> None:
        stop.gently = server.leave
        tasks.append(asyncio.ensure_future(invite()))

    try:
        with _announced(path, facts):
            await server.serve(sock, ready, context)
            await asyncio.gather(*tasks, return_exceptions=True)
    except BaseException as error:
        behind.close(END_S)
        writer.end("failed", f"{type(error).__name__}: {error}", behind.lost)
        raise
    finally:
        if page is not None:
            page.close()
    server.tell_end()
    final = await server.last_set()
    replace(path / "model.safetensors", final)
    made = served.keras(served.model.layout.decode(final))
    made.save(path / runs.MODEL)
    say(f"saved     {path / runs.MODEL}")
    told.emit(ModelSaved(path=str(path / runs.MODEL)))
    behind.close(END_S)
    how, why = writer.ended or ("stopped", "")
    writer.end(how, why, behind.lost)
    say(f"report    {path / runs.REPORT}")
    return server.ledger.over


async def _no_workers() -> list[dict[str, Any]]:
    """Return the workers of a run with peers, for the dashboard: there are none."""
    return []


def link_of(origin: str, code: str, pin: str) -> str:
    """Return the link for one peer."""
    return f"{origin}/#{code}" + f"{PIN}{pin}" * bool(pin)


def _in_link(host: str) -> str:
    if host in ("0.0.0.0", "::"):
        return socket.gethostname()
    return f"[{host}]" if ":" in host else host


@contextlib.contextmanager
def _announced(path: Path, facts: dict[str, Any]) -> Iterator[None]:
    """Write address and secret of the server, so that other commands of its owner find it. The port stays after the end,
    for a resumed run.
    """
    place = state_folder() / "peer-servers" / f"{os.getpid()}.json"
    place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    replace(place, json.dumps(facts).encode())
    replace(path / SERVER, json.dumps(facts).encode())
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            place.unlink()


def running() -> list[dict[str, Any]]:
    """Return the servers of this user on this machine, newest first. Entries of killed servers are removed."""
    result = []
    for place in (state_folder() / "peer-servers").glob("*.json"):
        with contextlib.suppress(OSError, ValueError, KeyError):
            facts = json.loads(place.read_text(encoding="utf-8"))
            if runs.process_started(facts["pid"]) is None:
                place.unlink()
            else:
                result.append((place.stat().st_mtime, facts))
    return [facts for _, facts in sorted(result, key=lambda row: row[0], reverse=True)]


def ask(facts: dict[str, Any], command: str) -> dict[str, Any]:
    """Ask a running server of this user, and return its answer.

    Raises:
        ConnectError: It does not answer.
        ConfigError: It refuses.
    """
    scheme, secure = facts["origin"].partition(":")[0], bool(facts["pin"])
    link = Link("https" if secure else "http", "127.0.0.1", facts["port"], "")
    tls = None
    if scheme == "https" and secure:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        tls.check_hostname = False
        tls.load_verify_locations(state_folder() / "peers-certificate.pem")
    headers = {"Authorization": f"Bearer {facts['control']}"}
    status, body = request(link, f"/control/{command}", headers, tls)
    if status != 200:
        raise (ConfigError if status == 409 else ConnectError)(f"the server refuses: {body}")
    return dict(json.loads(body))
