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
import json
import secrets
import socket
import ssl
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import replace as replace_fields
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from ddlf.algorithms.weights import Weights
from ddlf.app import IApp
from ddlf.errors import CheckpointError, CheckpointMismatch, ConfigError, ListenError
from ddlf.events import ModelSaved
from ddlf.events.facts import from_data, to_data
from ddlf.events.record import RoundRecord
from ddlf.events.sinks import Events
from ddlf.extras import provided, suffixes
from ddlf.monitor.dashboard.server import Dashboard
from ddlf.monitor.runs import folder as runs
from ddlf.monitor.runs.background import BackgroundWriter
from ddlf.peers.classes import classes_of, numbered
from ddlf.peers.model import (
    Trained,
    arrays_of,
    metrics_of,
    read_text,
    reports_accuracy,
    samples_of,
    settled_text,
    text_of_model,
    trained_from_text,
    trained_tensors,
)
from ddlf.peers.pages import browser_model
from ddlf.peers.plan import Plan, check_classes, describe_end
from ddlf.peers.run_events import PeersWriter
from ddlf.peers.running_server import name_in_link, server_at
from ddlf.peers.secure_updates import check_layout as check_layout_of_sums
from ddlf.peers.served_model import Model
from ddlf.peers.server import PeerServer
from ddlf.peers.shards import Shards, check_count
from ddlf.peers.signals import Stop
from ddlf.peers.wire import FLOAT32, Wire
from ddlf.rpc.iworker import awaited
from ddlf.rpc.tls import Security, is_loopback, make_certificate, worker_tls
from ddlf.rpc.tokens import state_folder
from ddlf.training.checkpoints.durable import explained, replace

PORT = 8930
"""The usual port of a server of peers."""
END_S = 20.0
"""Seconds that the end of a run waits for a slow disk."""
OF_DATA = ("data", "validation")
"""Keys of a text about data, which have no effect: peers bring their data, and the server names its data in ``--data``."""
WEB_MODELS = (".js", ".json")
"""Suffixes of model files of WebNN, which become texts."""
PLAN = runs.PEERS


class Served:
    """A model that is ready to be served.

    Args:
        model: The model's text, layout and first set.
        trained: The Keras model with the server's test data; None without data.
        keras: Makes the Keras model with given weights, for the file at the end.
        classes: Names of the classes; empty if labels are numbers.
        converged: ``is_convergent`` of the app; None if the app has no own one.
        left_out: Names of the app's metrics that peers do not report.
        batch_size: Samples in a batch, as the text or the app says; 0 if it does not.
        unused: Parts of the text or of the app that have no effect on peers, such as ``train:epochs``.
    """

    def __init__(
        self,
        model: Model,
        trained: Trained | None,
        keras: Callable[[Weights], Any],
        classes: tuple[str, ...] = (),
        converged: Callable[[RoundRecord], bool] | None = None,
        left_out: tuple[str, ...] = (),
        batch_size: int = 0,
        unused: tuple[str, ...] = (),
    ) -> None:
        self.model = model
        self.left_out = left_out
        self.batch_size = batch_size
        self.unused = unused
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
        self._trained.keep_test_data()  # the shards have copies of the rest

    @property
    def other_scale(self) -> str:
        """A line if the test data of a model of pictures have another scale than in browsers; empty otherwise."""
        scale = self._trained.other_scale if self._trained else ""
        return f"the test data go {scale}" if scale else ""

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
    shards: int = 0,
    say: Callable[[str], None] = lambda line: None,
) -> Served:
    """Build the model of a text or of an app, and return what the server needs of it.

    Args:
        path: The ``.nnm`` text, a model file of WebNN, or the Python file of an app.
        data: Name or file of the server's data; None without.
        find_app: Returns the app class in a Python file, or refuses the file.
        seed: Seed of the first weights.
        classes: Names of the classes; empty to take them from text labels of the data.
        shards: Number of shards of the training data; if it is 0, all of the data are test data.
        say: Prints a line.

    Raises:
        ConfigError: The model cannot be served. The error names the reason.
    """
    check_classes(classes)
    arrays = None if data is None else arrays_of(data)
    if arrays is not None:
        arrays = arrays if shards else _all_for_tests(arrays)
        classes = classes or classes_of(arrays)
        arrays = numbered(arrays, classes, data or "")
        check_count(shards, samples_of(arrays))
    is_text = path.suffix in (*suffixes("file_types"), *WEB_MODELS)
    text, batch_size, unused = _settle_text(path, arrays, data or "", classes) if is_text else ("", 0, ())
    app_class = None if is_text else find_app(path)

    say(f"model     Keras builds {path}, which takes some seconds")
    import keras  # everything before does without it

    keras.utils.set_random_seed(seed)
    first: dict[str, Any] | None = None
    converged, left_out = None, tuple[str, ...]()
    if app_class is not None:
        app = app_class()
        asyncio.run(_create_app(app))
        app_model, converged = app.model, _convergence_test(app)
        text = settled_text(text_of_model(app_model), str(path), None).text
        variables = provided("named_weights", "ddlf peers")(app_model)
        first = {name: np.array(array) for name, array in variables.items()}
        left_out = tuple(metrics_of(app_model)[1])
        says_batch = any("batch_size" in vars(kind) for kind in app_class.__mro__ if kind is not IApp)
        batch_size = int(app.batch_size) if says_batch else 0
        unused = (f"{app_class.__name__}.train",) if app_class.train is not IApp.train else ()
    notation = provided("Notation", "ddlf peers")(text, str(path))
    model = notation.compiled()
    _check_outputs(classes, [tuple(array.shape) for array in getattr(model, "inner", model).outputs])
    trained = None
    if arrays is not None:
        trained = trained_from_text(text, arrays, data or "", lambda line: None, seed)
    variables = provided("named_weights", "ddlf peers")(model)
    if first is None:
        first = {name: np.array(array) for name, array in variables.items()}
    for (name, variable), value in zip(variables.items(), first.values(), strict=True):
        if tuple(variable.shape) != value.shape:
            raise ConfigError(f"{path}: the text of the model has another shape of {name!r}: please report this")
        variable.assign(value)
    from ddlf.peers.sets import layout_of

    layout = layout_of({name: np.asarray(array) for name, array in variables.items()})
    served = Model(
        text=text,
        layout=layout,
        first=layout.encode([np.array(array) for array in variables.values()]),
        trainable=trained_tensors(model, variables),
        browser=browser_model(getattr(model, "inner", model), variables),
    )

    def with_weights(weights: Weights) -> Any:
        for variable, value in zip(variables.values(), weights, strict=True):
            variable.assign(value)
        return model

    return Served(served, trained, with_weights, classes, converged, left_out, batch_size, unused)


def _check_outputs(classes: tuple[str, ...], outputs: Sequence[tuple[int | None, ...]]) -> None:
    """Refuse names of classes for a model that has not one output, with a unit for each class, or one unit for two classes.

    Args:
        classes: The names; none are always right.
        outputs: Shape of each output.

    Raises:
        ConfigError: Names the outputs.
    """
    units = [shape[-1] for shape in outputs]
    count = len(classes)
    if count and not (len(units) == 1 and units[0] in ((count, 1) if count == 2 else (count,))):
        raise ConfigError(
            f"there are {count} names of classes, and the model has {' and '.join(map(str, units))} outputs",
            hint="name the class of each output, in their order",
        )


def _all_for_tests(arrays: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the arrays of a file without parts as test data, too: the server trains nothing, so it needs no other part."""
    if "data" in arrays or any(name.endswith(("_train", "_val", "_test")) for name in arrays):
        return arrays
    return {**arrays, **{f"{name}_test": array for name, array in arrays.items()}}


def _settle_text(
    path: Path, arrays: Any, source: str, classes: tuple[str, ...] = ()
) -> tuple[str, int, tuple[str, ...]]:
    """Return the text in a file with all keys of its training decided, its batch size, and keys without effect.

    This needs no Keras.
    """
    text = read_text(path)
    notation = provided("Notation", "ddlf peers")(text, str(path))
    shapes = [head.declared_shape for head in notation.parsed.graph.heads]
    if all(shapes):
        _check_outputs(classes, shapes)
    fitted = None
    if arrays is not None:
        fitted, _ = provided("dataset", "ddlf peers")(dict(arrays), source, notation.parsed, notation.loss, 0.0)
    settings = notation.train_block.settings
    keys = {key for key, value in settings.items() if value is not None and key != "batch_size"}
    keys |= {key for key in OF_DATA if notation.key_value(key) is not None}
    return (
        settled_text(text, str(path), fitted).text,
        int(settings.get("batch_size", 0)),
        tuple(f"train:{key}" for key in sorted(keys)),
    )


async def _create_app(app: Any) -> None:
    await awaited(app.create_model())


def _convergence_test(app: Any) -> Callable[[RoundRecord], bool] | None:
    """Return the app's own ``is_convergent`` as a plain function; None if the app has none."""
    if type(app).is_convergent is IApp.is_convergent:
        return None

    async def ask(record: RoundRecord) -> bool:
        return bool(await awaited(app.is_convergent(record)))

    return lambda record: asyncio.run(ask(record))


def learning_rate(model: Any) -> float:
    """Return the constant learning rate of a compiled Keras model; 0 if it has a schedule."""
    rate = model.optimizer.get_config().get("learning_rate")
    return float(rate) if isinstance(rate, int | float) else 0.0


def check_tests(plan: Plan) -> None:
    """Refuse settings that need tests of sets, if nobody tests any.

    Raises:
        ConfigError: Names the settings.
    """
    if (needs := _needs_tests(plan)) and not plan.tests_sets:
        is_off = "--validate-s 0 turns tests off"
        raise ConfigError(
            f"{needs} has no effect: {'in rounds, peers do not test the model' if plan.validate_s else is_off}",
            hint="name test data of the server with --data" if plan.validate_s else "leave out --validate-s",
        )


def check_accuracy(plan: Plan, model: Any) -> None:
    """Refuse settings that need an accuracy, or a constant learning rate, if the model has none.

    Raises:
        ConfigError: Names the settings.
    """
    copies = plan.way == "swap" and plan.merge == "copy"
    needs = "the merge copy" if copies else _needs_tests(plan)
    if needs and not reports_accuracy(model):
        raise ConfigError(
            f"{needs} compares accuracies, and the model reports none",
            hint="compile it with metrics=['accuracy'], write train:metrics accuracy; into its text, or leave it out",
        )
    if plan.decay and not learning_rate(model):
        raise ConfigError(
            "--decay lowers a constant learning rate, and the model has a schedule", hint="leave out one of them"
        )


def _needs_tests(plan: Plan) -> str:
    """Return the first setting that needs tests of sets, as an option; empty without one."""
    needs = {f"--end {plan.end:g}": 0 < plan.end < 1, f"--trial {plan.trial:g}": plan.trial > 0, "--decay": plan.decay}
    return next((option for option, is_set in needs.items() if is_set), "")


def check_sets(plan: Plan, served: Served) -> None:
    """Refuse a codec without effect, and one that would make first weights infinite.

    Raises:
        ConfigError: Names the codec or the weight.
    """
    if plan.secure_aggregation:
        check_layout_of_sums(served.model.layout)
    wire = Wire(served.model.layout, plan.codec, served.model.trainable)
    if plan.codec != FLOAT32 and wire.layout is wire.model:
        raise ConfigError(
            f"the codec {plan.codec} has no effect: the model trains no float32 weights", hint="leave out --codec"
        )
    if problem := wire.overflow(wire.model.decode(served.model.first)):
        raise ConfigError(problem, hint="use bfloat16 or float32")


def noise_lines(plan: Plan, model: Model) -> list[str]:
    """Return what the server says about clip and noise: no line without them."""
    if (mechanism := plan.mechanism) is None:
        return []
    clipping = "each peer clips its update" if mechanism.trust == "nobody" else "the server clips each update"
    lines = [
        f"noise     {clipping} to the norm {mechanism.clip:g}; the sum of a round has noise of {mechanism.std:g}, and is divided by "
        f"{mechanism.divisor:,}"
    ]
    if mechanism.trust == "nobody":
        share = f"each peer adds noise of {mechanism.std_of_one:g}; the server sees each update with this share only"
        lines.append(f"shares    {share}; a round needs {mechanism.least:,} post{'s' * (mechanism.least != 1)}")
    if left_out := [name for name, on in zip(model.layout.names, model.trainable, strict=True) if not on]:
        names = ", ".join(left_out[:3]) + ", .." * (len(left_out) > 3)
        lines.append(f"left out  weights that are not trained stay as they are: {names}")
    test = "" if plan.validated_by == "server" else "; --data lets the server test"
    lines.append(f"metrics   peers report no loss and no accuracy, because metrics have no noise{test}")
    return lines


# -- the folder of a run ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFile:
    """The content of ``plan.json``.

    Args:
        plan: The plan.
        layout: Digest of the layout of sets.
        converges: Whether the app has its own ``is_convergent``.
        shards: Digest of the shards of the server's data; empty without shards.
        seed: Seed of the division into shards.
    """

    plan: Plan
    layout: str
    converges: bool = False
    shards: str = ""
    seed: int = 0


def make_folder(out: Path, name: str, plan: Plan, served: Served, seed: int) -> Path:
    """Make the folder of a new run.

    Raises:
        CheckpointError: It cannot be written, for example because the disk is full.
    """
    shards = served.model.shards
    content = PlanFile(
        plan=plan,
        layout=served.model.layout.digest,
        converges=served.converged is not None,
        shards="" if shards is None else shards.digest,
        seed=seed,
    )
    with explained(out, "begin a run in", need=2 * served.model.layout.bytes):
        path = runs.make(out, f"peers-{name}")
        runs.write_text(path / runs.NOTATION, served.model.text)
        runs.write_json(path / runs.STATE, runs.begun(f"peers of {name}"))
        replace(path / PLAN, json.dumps(to_data(content)).encode())
    return path


def find_run(out: Path, name: str) -> Path:
    """Return the folder of the run that a name means; for ``"last"`` the newest run with peers.

    Raises:
        ConfigError: No run with peers has this name, or several runs have it.
    """
    if name != "last":
        return runs.find(out, name)
    path = next((path for path in runs.runs_in(out) if (path / PLAN).exists()), None)
    if path is None:
        raise ConfigError(f"no run in {str(out)!r} has peers", hint="start one with: ddlf peers serve MODEL")
    return path


def read_folder(path: Path) -> PlanFile:
    """Return the plan of an earlier run, and the facts beside it.

    Raises:
        ConfigError: The folder is not that of a run with peers.
        CheckpointError: Its plan or its journal is missing.
    """
    data = runs.read_json(path / PLAN)
    if "plan" not in data:
        if has_begun(path) or (path / PLAN).exists():
            raise CheckpointError(f"{path / PLAN} cannot be read", hint="copy this file back, or begin a new run")
        hint = f"continue it with: ddlf run APP --resume {path}" if (path / runs.STATE).exists() else "name another run"
        raise ConfigError(f"{path} is a run without peers", hint=hint)
    if not has_begun(path):
        raise CheckpointError(
            f"{path} has no journal, so there is nothing to continue", hint="copy its journal back, or begin a new run"
        )
    return from_data(PlanFile, data)


def give_out_again(path: Path, earlier: PlanFile, served: Served, data: str) -> None:
    """Divide the server's data as an earlier server of the run did.

    Raises:
        CheckpointMismatch: They are other data.
    """
    served.give_out(earlier.plan, earlier.seed)
    if served.model.shards is None or served.model.shards.digest != earlier.shards:
        raise CheckpointMismatch(
            f"{data} has other training data than the shards of {path}", hint="name the same data with --data"
        )


def has_begun(path: Path) -> bool:
    """Return whether an earlier server has begun the run in a folder."""
    return any(file.stat().st_size for file in path.glob("journal-*"))


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
        code = error.errno if isinstance(error, OSError) else None
        reason = getattr(error, "strerror", None) or error
        if isinstance(error, socket.gaierror) or code == errno.EADDRNOTAVAIL:
            raise ListenError(
                f"the address {host} cannot be used: {reason}", hint="name an address of this machine with --host"
            ) from None
        problem = "is in use" if code == errno.EADDRINUSE else f"cannot be used: {reason}"
        raise ListenError(f"port {port} of {host} {problem}", hint="choose another with --port") from None
    return sock


def protection(host: str, cert: Path | None, key: Path | None, proxy: str) -> tuple[ssl.SSLContext | None, str]:
    """Return the TLS context of a server, and the pin for its link.

    On loopback, and behind a proxy that ends TLS, there is none. Elsewhere the server shows the given certificate, or its
    own one. The pin is the certificate's SHA-256; it is empty if this system trusts the certificate for the name in the
    link.

    Raises:
        ConfigError: A certificate cannot be used, or ``--proxy`` is not a URL with https.
    """
    if key is not None and cert is None:
        raise ConfigError("--tls-key has no effect without --tls-cert", hint="name the certificate of this key, too")
    if proxy and cert is not None:
        raise ConfigError("--tls-cert has no effect with --proxy, which ends TLS", hint="leave out one of them")
    if proxy:
        if not proxy.startswith("https://"):
            raise ConfigError(f"--proxy {proxy} is not a URL with https", hint="name the URL that browsers open")
        if urlsplit(proxy).path.strip("/"):
            raise ConfigError(
                f"--proxy {proxy} has a path, and links have none", hint="give the server its own host name or port"
            )
        return None, ""
    if cert is None and _is_loopback(host):
        return None, ""
    own_path = own_certificate()
    if cert is None:
        own_path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        make_certificate(own_path)
    tls = worker_tls(own_path, Security(tls_cert=cert, tls_key=key or cert))
    is_trusted = cert is not None and _is_trusted(tls.context, name_in_link(host).strip("[]"))
    return tls.context, "" if is_trusted else tls.certificate.hex()


def _is_trusted(server: ssl.SSLContext, name: str) -> bool:
    """Return whether a program on this system trusts a server under a name. A client and a server talk in memory."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = ssl.create_default_context().wrap_bio(to_client, to_server, server_hostname=name)
    answering = server.wrap_bio(to_server, to_client, server_side=True)
    for end in (client, answering):
        with contextlib.suppress(ssl.SSLWantReadError):
            end.do_handshake()
    try:
        client.do_handshake()
    except ssl.SSLError:
        return False
    return True


def own_certificate() -> Path:
    """Return the file of the server's own certificate and key."""
    return state_folder() / "peers-certificate.pem"


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
    origin = proxy.rstrip("/") or f"{'https' if context else 'http'}://{name_in_link(host)}:{bound}"
    control = secrets.token_urlsafe(32)
    name = runs.read_json(path / runs.STATE).get("app") or "peers"
    continues = has_begun(path)
    writer = PeersWriter(path, plan, name, continues=continues)
    behind = BackgroundWriter(writer.write, f"the run's folder {path}")
    events = Events()
    events.subscribe(behind)
    server = PeerServer(
        path,
        served.model,
        plan,
        tell=events.emit,
        say=say,
        control=control,
        converged=served.converged,
        test=served.test if plan.validated_by == "server" else None,
        url=origin,
        proxied=bool(proxy),
    )
    try:
        await asyncio.to_thread(server.recover)
    except BaseException as error:
        sock.close()
        _write_end(behind, writer, error)
        raise
    if served.converged is None and read_folder(path).converges:
        say("converge  is_convergent of the app is not called in a resumed run; end it with: ddlf peers stop")
    page = Dashboard(_no_workers, follow=(events,), title=name) if dashboard else None
    if page is not None:
        await page.open()
        say(f"dashboard {page.url}")
    server.tell_begin(name)
    certificate = (cert or own_certificate()) if context else None
    running = server_at(sock, path, origin=origin, pin=pin, control=control, certificate=certificate)
    say(f"folder    {path}")
    if served.unused and not continues:  # a resumed run has a text with all decisions
        names = ", ".join(served.unused)
        say(f"unused    {names}: peers train the compiled model batch by batch, without epochs, on their own data")
    if served.left_out:
        say(f"metrics   peers report loss and accuracy, so {', '.join(served.left_out)} is left out")
    if served.model.browser.refusal:
        say(f"browsers  {served.model.browser.refusal}")
    elif served.other_scale:
        say(f"scale     {served.other_scale}")
    for line in noise_lines(plan, served.model):
        say(line)
    if plan.secure_aggregation:
        say(
            f"secure    the server learns sums of the updates of {plan.quorum:,} peers or more; people can compare the codes that "
            "peers print"
        )
    say(f"ends      {describe_end(plan, by_app=served.converged is not None)}")

    async def invite() -> None:
        for code in await server.invite(invitations):
            link = running.link(code)
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
        with running.announced():
            await server.serve(sock, ready, context)
            await asyncio.gather(*tasks, return_exceptions=True)
        server.tell_end()
        await _save(path, served, server)
        events.emit(ModelSaved(path=str(path / runs.MODEL)))
    except BaseException as error:
        _write_end(behind, writer, error)
        raise
    finally:
        sock.close()  # it is still open if the server has not begun
        if page is not None:
            page.close()
    say(f"saved     {path / runs.MODEL}")
    _write_end(behind, writer)
    say(f"report    {path / runs.REPORT}")
    return server.ledger.over


def _write_end(behind: BackgroundWriter, writer: PeersWriter, failure: BaseException | None = None) -> None:
    """Write the last events and how the run has ended, as far as the disk takes them."""
    behind.close(END_S)
    how, reason = writer.ended or ("stopped", "")
    if failure is not None:
        how, reason = "failed", f"{type(failure).__name__}: {failure}"
    try:
        writer.end(how, reason, behind.lost)
    except OSError as error:
        behind.tell(error)


async def _save(path: Path, served: Served, server: PeerServer) -> None:
    """Write the last set into the folder of a run, as a set and as a Keras model.

    Raises:
        CheckpointError: They cannot be written. A later server of the run tries it again.
    """
    final = await server.last_set()
    with explained(path, "write the last set in", need=2 * len(final)):
        replace(path / "model.safetensors", final)
        served.keras(served.model.layout.decode(final)).save(path / runs.MODEL)


async def _no_workers() -> list[dict[str, Any]]:
    """Return the workers of a run with peers, for the dashboard: there are none."""
    return []
