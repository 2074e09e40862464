"""``ddlf peers``: train one model with peers, whose data stay with them. Runs on the server, or on a peer (``join``)."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddlf.cli.audit import AUDIT
from ddlf.cli.parsing import Command, Parser, action, number
from ddlf.errors import ConfigError, ConnectError

if TYPE_CHECKING:
    from ddlf.peers.running_server import RunningServer
    from ddlf.peers.sample_peer import SampleNoiseSettings

A_LINK = "the link that the server has printed"


def serve(options: argparse.Namespace) -> int:
    """Run ``ddlf peers serve``."""
    from ddlf.cli.output import native_output_to_log

    with native_output_to_log(), contextlib.ExitStack() as resources:
        return _serve(options, resources)


def _serve(options: argparse.Namespace, resources: contextlib.ExitStack) -> int:
    from ddlf.cli.target import find_app
    from ddlf.monitor.runs import folder
    from ddlf.peers import serving
    from ddlf.peers.plan import Plan, usual_merge
    from ddlf.peers.qr import check_qr
    from ddlf.peers.running_server import last_port
    from ddlf.peers.signals import Stop
    from ddlf.privacy.secure_sum import LEAST

    if options.qr:
        check_qr()
    if options.model is None and options.resume is None:
        raise ConfigError(
            "name a model, or a run with --resume", hint="ddlf peers serve apps/models/private_digits.nnm"
        )
    if options.model is not None and options.resume is not None:
        raise ConfigError(
            f"{options.model} and --resume {options.resume} cannot be served together",
            hint=f"leave {options.model} out: a resumed run has its own model",
        )
    _refuse_other_way(options, options.way or "swap")
    _check_shards(options)
    _check_limit(options)
    port = options.port
    if options.resume is not None:
        if changed := _given_options(options):
            raise ConfigError(f"{', '.join(changed)} cannot change in a run that is resumed", hint="leave it out")
        path = serving.find_run(Path(options.out or folder.usual_out()), str(options.resume))
        resources.enter_context(_locked(path))
        earlier = serving.read_folder(path)
        plan = earlier.plan
        if plan.validated_by == "server" and options.data is None:
            raise ConfigError("the server validates in this run", hint="name its test data again with --data")
        port = last_port(path) if port is None else port
        source, classes = path / folder.NOTATION, plan.classes
    else:
        source, classes = options.model, tuple(options.classes or ())
        way: Any = options.way or "swap"
        usual: dict[str, Any] = {"merge": usual_merge(way)}
        if options.secure_aggregation:
            usual["quorum"] = LEAST
        values = usual | {name: value for name in OF_PLAN if (value := getattr(options, name)) is not None}
        plan = Plan(**values, way=way, validated_by="server" if options.data is not None else "peers")
        serving.check_tests(plan)
        if not source.is_file():
            raise ConfigError(f"there is no file {source}", hint="name a model text (.nnm), or the .py file of an app")
    serving.protection(options.host, options.tls_cert, options.tls_key, options.proxy or "")
    serving.listen(options.host, serving.PORT if port is None else port).close()  # it takes seconds to import Keras
    served = serving.read_model(source, options.data, find_app, options.seed or 0, classes, shards=plan.shards, say=say)
    if options.resume is not None:
        serving.check_layout(path, earlier.layout, served)
        if plan.shards:
            serving.give_out_again(path, earlier, served, options.data)
    else:
        model = served.keras(served.model.layout.decode(served.model.first))
        plan = replace(plan, rate=serving.learning_rate(model), classes=served.classes)
        if options.batch_size is None and served.batch_size:
            plan = replace(plan, batch_size=served.batch_size)
        serving.check_accuracy(plan, model)
        serving.check_sets(plan, served)
        if plan.shards:
            served.give_out(plan, options.seed or 0)
        path = serving.make_folder(
            Path(options.out or folder.usual_out()), source.stem, plan, served, options.seed or 0
        )
        resources.enter_context(_locked(path))
    if plan.validated_by == "peers" and plan.validate_s and plan.noise is None:
        sentence = (
            "peers validate in turn on their own data" if plan.tests_sets else "nobody does, in rounds without --data"
        )
        say(f"validate  {sentence}; --data FILE.npz lets the server do it")
    stop = Stop("the server writes the mean of all sets", say)
    with stop.on_signals():
        is_over = asyncio.run(
            serving.serve(
                path,
                served,
                plan,
                host=options.host,
                port=serving.PORT if port is None else port,
                invitations=options.invite,
                cert=options.tls_cert,
                key=options.tls_key,
                proxy=options.proxy or "",
                say=say,
                show=_show_qr if options.qr else None,
                stop=stop,
                dashboard=options.dashboard,
            )
        )
    if is_over:
        return 0
    say(f"ended     continue with: ddlf peers serve --resume {path}")
    return stop.exit_code


OF_PLAN = (
    "merge",
    "outer",
    "update_policy",
    "updates",
    "seconds",
    "batch_size",
    "quorum",
    "deadline_s",
    "validate_s",
    "end",
    "decay",
    "shards",
    "partition",
    "longest",
    "trial",
    "codec",
    "clip",
    "noise",
    "trust",
    "divisor",
    "delta",
    "privacy_budget",
    "secure_aggregation",
    "update_limit",
)
"""Options that are fields of the plan."""
OF_ROUNDS = ("outer", "update_policy", "quorum", "deadline_s")


def _given_options(options: argparse.Namespace) -> list[str]:
    return [
        f"--{name.replace('_', '-')}"
        for name in (*OF_PLAN, "way", "seed", "classes")
        if getattr(options, name) is not None
    ]


def _refuse_other_way(options: argparse.Namespace, way: str) -> None:
    if way == "swap" and (unused := [name for name in OF_ROUNDS if getattr(options, name) is not None]):
        names = ", ".join(f"--{name.replace('_', '-')}" for name in unused)
        raise ConfigError(f"{names} has no effect in swaps", hint="add --way rounds, or leave it out")


def _check_limit(options: argparse.Namespace) -> None:
    if options.update_limit is not None and options.secure_aggregation is None:
        raise ConfigError(
            "--update-limit has no effect without secure aggregation", hint="add --secure-aggregation, or leave it out"
        )


def _check_shards(options: argparse.Namespace) -> None:
    if options.shards is not None and options.data is None:
        raise ConfigError("--shards gives out the server's own data, and there are none", hint="--data digits")
    if options.partition is not None and options.shards is None:
        raise ConfigError("--partition has no effect without shards", hint="add --shards 4, or leave it out")


def join(options: argparse.Namespace) -> int:
    """Run ``ddlf peers join``."""
    from ddlf.cli.output import native_output_to_log

    with native_output_to_log():
        return _join(options)


def _join(options: argparse.Namespace) -> int:
    from ddlf.cli.target import find_app
    from ddlf.peers.joining import peer_of_app, peer_of_data, peer_of_shard
    from ddlf.peers.signals import Stop
    from ddlf.training.evaluation.master import check_path

    if options.save is not None:
        check_path(options.save)
    if options.data is not None and options.app is not None:
        raise ConfigError("--data and --app both say what to train on", hint="leave out one of them")
    privacy: dict[str, Any] = {
        "secure_aggregation": options.secure_aggregation,
        "sample_noise": _sample_noise(options),
    }
    if options.secure_aggregation and options.data is None and options.app is None:
        raise ConfigError("--secure-aggregation protects your data, and a shard is the server's", hint="add --data")
    common: dict[str, Any] = {"name": options.name or "", "seed": options.seed or 0, "say": say}
    if options.app is not None:
        peer = peer_of_app(options.link, find_app(options.app), **common, **privacy)
    elif options.data is not None:
        peer = peer_of_data(options.link, options.data, **common, **privacy)
    else:
        peer = peer_of_shard(options.link, **common)
    stop = Stop("the peer posts its last batches and says goodbye", say)
    stop.gently = peer.leave
    try:
        with stop.on_signals():
            peer.run(most_updates=options.most_updates)
    finally:
        if options.save is not None and peer.updates:  # also if the server is gone
            _save_model(peer.trained.model, options.save)
    return stop.exit_code


def _save_model(model: Any, path: Path) -> None:
    from ddlf.training.evaluation.master import write_model

    write_model(model, path)
    say(f"saved     {path}")


OF_SAMPLES = ("clip", "noise", "delta", "privacy_budget")
"""Options of a peer that hides single samples."""


def _sample_noise(options: argparse.Namespace) -> SampleNoiseSettings | None:
    """Return how the peer hides single samples; None if it does not."""
    dependent = [f"--{name.replace('_', '-')}" for name in OF_SAMPLES if getattr(options, name) is not None]
    if options.privacy_unit is None:
        if dependent:
            raise ConfigError(
                f"{', '.join(dependent)} of a peer needs --privacy-unit sample",
                hint="add it; noise that hides all samples of a peer is an option of ddlf peers serve",
            )
        return None
    if options.clip is None or options.noise is None:
        raise ConfigError("--privacy-unit sample needs --clip and --noise", hint="add --clip 1 --noise 1")
    if options.data is None and options.app is None:
        raise ConfigError("--privacy-unit sample hides your samples, and a shard is the server's", hint="add --data")
    if options.seed is not None:
        raise ConfigError(
            "--seed has no effect with --privacy-unit sample: batches come from the system's random source",
            hint="leave it out",
        )
    from ddlf.peers.sample_peer import SampleNoiseSettings

    delta = {"delta": options.delta} if options.delta is not None else {}
    return SampleNoiseSettings(clip=options.clip, noise=options.noise, budget=options.privacy_budget, **delta)


def invite(options: argparse.Namespace) -> int:
    """Run ``ddlf peers invite``: print new links."""
    from ddlf.peers.qr import check_qr

    if options.qr:
        check_qr()
    for link in _server(options).invite(options.count, options.peers):
        print(link)
        if options.qr:
            _show_qr(link)
    return 0


def _show_qr(link: str) -> None:
    from ddlf.peers.qr import qr_code

    print(qr_code(link), flush=True)


def list_peers(options: argparse.Namespace) -> int:
    """Run ``ddlf peers list``: print the peers and the sets of a server."""
    from ddlf.events.record import size
    from ddlf.peers import training_folders
    from ddlf.peers.running_server import running_servers

    trainings = training_folders.folders() if options.port is None else []
    for path in trainings:
        run = training_folders.run_of(path)
        print(f"training  {path}  {'new' if run is None else run.name}")
    if trainings and not running_servers():
        return 0
    server = _server(options)
    overview = server.overview()
    accuracy = "none yet" if overview.accuracy is None else f"{overview.accuracy:.4f}"
    sets = ", ".join(f"{count} {state}" for state, count in overview.sets.items())
    print(f"{server.origin}  {overview.way}, accuracy {accuracy}, sets: {sets}")
    print(f"each set  {size(overview.set_bytes)} as {overview.codec}")
    if missing := overview.missing_posts:
        print(
            f"the round needs {missing:,} more post{'s' * (missing > 1)}, and all peers that are here have posted or were rejected"
        )
    if overview.shards:
        free = ", ".join(map(str, overview.free_shards)) or "none"
        print(f"shards {overview.shards}, without a peer: {free}")
    for peer in overview.peers:
        state = peer.state + f", out for {peer.out_s:.0f} s" * (peer.out_s > 0)
        state += f", {peer.strikes} strike{'s' * (peer.strikes != 1)}" * (peer.strikes > 0)
        shard = f" of shard {peer.shard}" if peer.shard else ""
        ago = "" if peer.posted_s_ago is None else f", last {peer.posted_s_ago:.0f} s ago"
        name, samples, posts = (f"  {peer.name}" * bool(peer.name), peer.samples, peer.posts)
        contributions = f"{samples:,} sample{'s' * (samples != 1)}{shard}, {posts:,} post{'s' * (posts != 1)}"
        epsilon = f", epsilon {peer.epsilon:.4g}" if peer.epsilon else ""
        print(f"peer {peer.peer}{name}  {state}, {contributions}{ago}{epsilon}")
    return 0


def kick(options: argparse.Namespace) -> int:
    """Run ``ddlf peers kick``: remove a peer for good."""
    _server(options).kick(options.peer)
    print(f"removed   peer {options.peer}; its link is void")
    return 0


def merge(options: argparse.Namespace) -> int:
    """Run ``ddlf peers merge``: merge all sets into one, which all peers get."""
    _server(options).merge()
    print("merge     all sets become one, which each peer gets as the answer to its next post")
    return 0


def stop(options: argparse.Namespace) -> int:
    """Run ``ddlf peers stop``: end a training."""
    by_sums = _server(options).stop().secure
    result = "the base of the last complete round is the result" if by_sums else "all sets become one"
    print(f"stopped   {result}, which the server writes into the folder of the run")
    return 0


def new(options: argparse.Namespace) -> int:
    """Run ``ddlf peers new``: make the folder of a training."""
    from ddlf.peers import training_folders

    text = training_folders.text_of(options.model) if options.model is not None else training_folders.WEBNN
    path = training_folders.make(options.name, text, {"batch_size": 64, "end": 0.97})
    say(f"made      {path}: change model.nnm and settings.json, then: ddlf peers train {path}")
    return 0


def copy(options: argparse.Namespace) -> int:
    """Run ``ddlf peers copy``: copy a training without its logs and weights."""
    from ddlf.peers import training_folders

    say(f"copied    {options.name} to {training_folders.copy(options.name, options.new)}, without logs and weights")
    return 0


def save(options: argparse.Namespace) -> int:
    """Run ``ddlf peers save``: copy a training with its logs and weights."""
    from ddlf.peers import training_folders

    with _locked(training_folders.find(options.name)):
        path = training_folders.save(options.name, options.new)
    say(f"saved     {options.name} as {path}, with logs and weights")
    return 0


def reset(options: argparse.Namespace) -> int:
    """Run ``ddlf peers reset``: delete the logs and the weights of a training."""
    from ddlf.peers import training_folders

    with _locked(training_folders.find(options.name)):
        training_folders.reset(options.name)
    say(f"reset     {options.name}: its logs and weights are deleted")
    return 0


def train(options: argparse.Namespace) -> int:
    """Run ``ddlf peers train``: serve a training, from its beginning or from where it stopped."""
    from ddlf.peers import training_folders

    with _locked(path := training_folders.find(options.name)):
        settings, run = training_folders.settings_of(path), training_folders.run_of(path)
        for name in (*OF_PLAN, "way", "seed", "classes"):
            setattr(options, name, settings.get(name) if run is None else None)
        options.model = path / "model.nnm" if run is None else None
        options.resume, options.out = run and f"./{run}", path / training_folders.RUNS
        try:
            return serve(options)
        finally:
            training_folders.write_logs(path)


def retrain(options: argparse.Namespace) -> int:
    """Run ``ddlf peers retrain``: reset a training, and serve it again."""
    reset(options)
    return train(options)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Keep other servers and commands from a training or a run, also before its server can be found.

    Raises:
        ConfigError: It is being trained.
    """
    from ddlf.peers.running_server import running_servers

    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        served = [Path(server.folder).resolve() for server in running_servers()]
        is_free = not any(path.resolve() in (folder_served, *folder_served.parents) for folder_served in served)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            is_free = False
        if not is_free:
            raise ConfigError(f"{path} is being trained", hint="stop it first: ddlf peers stop")
        yield
    finally:
        os.close(folder)


def _server(options: argparse.Namespace) -> RunningServer:
    from ddlf.peers.running_server import running_servers

    servers = [server for server in running_servers() if options.port is None or server.port == options.port]
    if not servers:
        raise ConnectError(
            "no server of peers of yours runs on this machine", hint="start one with: ddlf peers serve MODEL"
        )
    if len(servers) > 1:
        ports = ", ".join(str(server.port) for server in servers)
        raise ConfigError(f"several servers of peers run here, on the ports {ports}", hint="say which with --port")
    return servers[0]


def say(line: str) -> None:
    """Print a line at once."""
    print(line, file=sys.stdout, flush=True)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(","))


def _end(text: str) -> float:
    """Return the end of a training: ``97%`` is an accuracy of 0.97."""
    with contextlib.suppress(ValueError):
        if not text.endswith("%"):
            return float(text)
        if 0 < (share := float(text[:-1]) / 100) < 1:
            return share
    raise argparse.ArgumentTypeError(f"an accuracy below 1, such as 0.97 or 97%, or seconds, such as 600; got {text!r}")


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if isfinite(value := float(text)) and value >= 0:
            return value
    raise argparse.ArgumentTypeError(f"seconds, such as 1.5; got {text!r}")


def _positive(text: str) -> float:
    with contextlib.suppress(ValueError):
        if isfinite(value := float(text)) and value > 0:
            return value
    raise argparse.ArgumentTypeError(f"a finite number above 0, such as 1.5; got {text!r}")


def _times(text: str) -> float:
    with contextlib.suppress(ValueError):
        if isfinite(value := float(text)) and value >= 0:
            return value
    raise argparse.ArgumentTypeError(f"a number from 0 on, such as 6 or 0.2; got {text!r}")


def _peer(text: str) -> int:
    if text.isdecimal():
        return int(text)
    raise argparse.ArgumentTypeError(f"the number of a peer, as `ddlf peers list` shows it; got {text!r}")


ONLY_PYTHON = {
    "--privacy-unit": "a browser cannot hide single samples, and a Python peer does it by itself: ddlf peers join LINK "
    "--data FILE --privacy-unit sample --clip 1 --noise 1"
}


def _serve_options(parser: Parser) -> None:
    parser.INSTEAD = {**parser.INSTEAD, **ONLY_PYTHON}
    parser.add("model", nargs="?", type=Path, help="a model as text (.nnm), or the .py file of an app")
    parser.add("--way", choices=("swap", "rounds"), help="peers swap sets when they like (default), or work in rounds")
    parser.add(
        "--merge", metavar="RULE", help="average, weighted (default), mimic, copy or elastic; in rounds a merge rule"
    )
    parser.add("--updates", type=number(1), metavar="N", help="batches between two posts of a peer (default: 20)")
    parser.add("--seconds", type=_seconds, metavar="S", help="post after this time at the latest (default: no limit)")
    parser.add("--batch-size", type=number(1), metavar="N", help="samples in a batch (default: of the model, else 32)")
    parser.add(
        "--end",
        type=_end,
        metavar="X",
        help="below 1, or with %%: accuracy to reach, as the mean of 5 validations; from 1 on: seconds (default: no end)",
    )
    parser.add(
        "--classes",
        type=_names,
        metavar="A,B",
        help="names of the classes, for labels that are texts (default: of --data)",
    )
    parser.add(
        "--shards",
        type=number(1),
        metavar="N",
        help="for studies: divide the training data of --data into N parts, and lend one to each peer",
    )
    parser.add(
        "--codec",
        metavar="NAME",
        help="bfloat16 or float16: sets travel with half of the bytes (default: float32)",
    )
    parser.add("--resume", metavar="RUN", help="continue a run: its folder, name or 'last'")
    _address_options(parser)
    group: dict[str, Any] = {"common": False, "group": "more"}
    parser.add("--outer", metavar="RULE", help="outer optimizer of rounds", **group)
    parser.add("--update-policy", metavar="NAME", help="stop, reject or clip suspicious updates of rounds", **group)
    parser.add(
        "--quorum", type=number(1), metavar="N", help="posts that a round needs (default: 1, in secure sums 3)", **group
    )
    parser.add(
        "--deadline-s",
        type=_seconds,
        metavar="S",
        help="seconds after its first post until a round closes (default: 30)",
        **group,
    )
    parser.add(
        "--longest",
        type=_times,
        metavar="X",
        help="a training X times as long as usual counts less, and the next one is rejected; 0: no check (default: 6)",
        **group,
    )
    parser.add(
        "--trial",
        type=_times,
        metavar="X",
        help="test each set on --data first, and reject it if its accuracy is lower than usual by X (default: no test)",
        **group,
    )
    parser.add(
        "--validate-s", type=_seconds, metavar="S", help="seconds between validations; 0: none (default: 1)", **group
    )
    parser.add("--decay", action="store_true", default=None, help="validations lower the learning rate", **group)
    parser.add(
        "--partition",
        metavar="RULE",
        help="how shards differ: equal (default), dirichlet:0.5, classes:2, power:1",
        **group,
    )
    parser.add(
        "--seed", type=number(0, 2**32 - 1), help="seed of the first weights and of the shards (default: 0)", **group
    )
    parser.add("--out", type=Path, metavar="DIR", help="folder for the run (default: runs)", **group)

    privacy: dict[str, Any] = {"common": False, "group": "privacy"}
    parser.add(
        "--clip",
        type=_positive,
        metavar="C",
        help="rounds: shorten each update to the norm C before it counts; needs --noise",
        **privacy,
    )
    parser.add(
        "--noise",
        type=_positive,
        metavar="Z",
        help="rounds: noise on the sum of the updates, with the standard deviation Z times C; needs --clip",
        **privacy,
    )
    parser.add(
        "--trust",
        choices=("server", "nobody"),
        help="who may see updates without noise: the server adds it (default), or each peer adds a share (nobody)",
        **privacy,
    )
    parser.add(
        "--privacy-budget",
        type=_positive,
        metavar="E",
        help="rounds: end before a release would make epsilon of a peer larger; needs --noise",
        **privacy,
    )
    parser.add(
        "--divisor",
        type=number(1),
        metavar="N",
        help="divides the noised sum of a round (default: the quorum)",
        **privacy,
    )
    parser.add("--delta", type=_positive, metavar="D", help="delta of the stated epsilon (default: 1e-5)", **privacy)
    parser.add(
        "--secure-aggregation",
        action="store_true",
        default=None,
        help="rounds: peers mask their updates, so that the server learns sums of three or more only",
        **privacy,
    )
    parser.add(
        "--update-limit",
        type=_positive,
        metavar="X",
        help="largest value of an update in a secure sum (default: 8); larger ones are refused",
        **privacy,
    )


def _address_options(parser: Parser) -> None:
    parser.add("--data", metavar="FILE", help="the server's own data: a .npz file, or digits, mnist, cifar10, iris")
    parser.add("--invite", type=number(0, 100), default=1, metavar="N", help="number of links to print (default: 1)")
    _qr_option(parser)
    parser.add("--port", type=number(0, 65535), help="port; 0 for any free one (default: 8930)")
    parser.add("--dashboard", action="store_true", help="serve a page for you: peers, rates and curves")
    group: dict[str, Any] = {"common": False, "group": "more"}
    parser.add("--host", default="127.0.0.1", help="address to listen on; TLS beyond loopback", **group)
    parser.add("--proxy", metavar="URL", help="https URL of a proxy in front, which ends TLS", **group)
    parser.add("--tls-cert", type=Path, metavar="PATH", help="certificate (default: an own one)", **group)
    parser.add("--tls-key", type=Path, metavar="PATH", help="its private key", **group)


def _name_option(parser: Parser) -> None:
    parser.add("name", help="name of the training, a folder here")


def _new_options(parser: Parser) -> None:
    _name_option(parser)
    parser.add(
        "--model", type=Path, metavar="FILE", help="a model as text, or a file of WebNN (default: WebNN's model)"
    )


def _copy_options(parser: Parser) -> None:
    _name_option(parser)
    parser.add("new", help="name of the copy")


def _train_options(parser: Parser) -> None:
    _name_option(parser)
    _address_options(parser)
    elsewhere = "it is a setting of the training: write {} into settings.json in its folder"
    names = {f"--{name.replace('_', '-')}": elsewhere.format(name) for name in (*OF_PLAN, "way", "seed", "classes")}
    parser.INSTEAD = {**parser.INSTEAD, **names, **ONLY_PYTHON}


def _join_options(parser: Parser) -> None:
    parser.add("link", help=A_LINK)
    parser.add("--data", metavar="FILE", help="your data, which stay here: a .npz file with x and y (default: a shard)")
    parser.add("--app", type=Path, metavar="FILE.py", help="your own code: an app with load_dataset and create_model")
    parser.add("--name", help="a name that the server shows")
    parser.add("--secure-aggregation", action="store_true", help="refuse a server that sees your single updates")
    parser.add("--most-updates", type=number(1), metavar="N", help="leave after this number of batches")
    parser.add("--seed", type=number(0), help="seed of the order of samples (default: 0)")
    parser.add("--save", type=Path, metavar="PATH", help="write the model here at the end (.keras)")
    parser.add(
        "--privacy-unit", choices=("sample",), help="hide each of your samples: noise in each step, before it leaves"
    )
    parser.add("--clip", type=_positive, metavar="C", help="sample: most norm of the gradient of a sample")
    parser.add(
        "--noise", type=_positive, metavar="Z", help="sample: noise of a step, with the standard deviation Z times C"
    )
    parser.add("--delta", type=_positive, metavar="D", help="sample: delta of the stated epsilon (default: 1e-5)")
    parser.add(
        "--privacy-budget", type=_positive, metavar="E", help="sample: leave before a step would make epsilon larger"
    )


def _qr_option(parser: Parser) -> None:
    parser.add("--qr", action="store_true", help="print a QR code of each link, for the camera of a phone")


def _port_option(parser: Parser) -> None:
    parser.add("--port", type=number(1, 65535), help="port of the server, if several run here")


def _invite_options(parser: Parser) -> None:
    parser.add("--count", type=number(1, 100), default=1, metavar="N", help="number of links (default: 1)")
    parser.add("--peers", type=number(1, 1000), default=1, metavar="N", help="peers that each link is for (default: 1)")
    _qr_option(parser)
    _port_option(parser)


def _kick_options(parser: Parser) -> None:
    parser.add("peer", type=_peer, help="number of the peer, as `ddlf peers list` shows it")
    _port_option(parser)


PEERS = Command(
    description="Train one model with peers: each trains on its own data, and only weights travel.",
    examples=(
        "ddlf peers serve apps/models/private_digits.nnm    # prints a link: open it in a browser, or",
        "ddlf peers join LINK --data mine.npz",
    ),
    actions={
        "serve": action(
            "serve a model, and print a link",
            "Serve a model to peers, and print a link for the first one: it opens in a browser, or `ddlf peers join` takes it. "
            "The server trains nothing.",
            _serve_options,
            serve,
            *("ddlf peers serve apps/models/private_digits.nnm --end 0.97", "ddlf peers serve --resume last"),
        ),
        "join": action(
            "train on your own data",
            "Train the server's model on your own data, which stay here. No code of the server runs.",
            _join_options,
            join,
            "ddlf peers join LINK --data mine.npz",
        ),
        "invite": action(
            "print a link for another peer",
            "Print new links of a server that runs here. Each is for one peer, and expires after a day.",
            _invite_options,
            invite,
            "ddlf peers invite --count 3",
        ),
        "list": action(
            "show trainings, and the peers of a server",
            "Show the trainings in this folder, then the peers and the sets of a server that runs here.",
            _port_option,
            list_peers,
            "ddlf peers list",
        ),
        "kick": action(
            "remove a peer for good", "Remove a peer: its link becomes void.", _kick_options, kick, "ddlf peers kick 3"
        ),
        "merge": action(
            "merge all sets into one",
            "Merge all sets by their trainings. Each peer gets the result as the answer to its next post.",
            _port_option,
            merge,
            "ddlf peers merge",
        ),
        "stop": action(
            "end a training",
            "Merge all sets, send the result to all peers, write it into the folder of the run, and end the server.",
            _port_option,
            stop,
            "ddlf peers stop",
        ),
        "new": action(
            "make a training with a name",
            "Make a folder with a model and settings.",
            _new_options,
            new,
            *("ddlf peers new digits", "ddlf peers new digits --model mnist.js"),
        ),
        "copy": action(
            "copy a training without logs",
            "Copy model and settings of a training, without its logs and weights.",
            _copy_options,
            copy,
            "ddlf peers copy digits other",
        ),
        "save": action(
            "copy a training with logs and weights",
            "Copy a training with its logs and weights. The logs are written from the journal.",
            _copy_options,
            save,
            "ddlf peers save digits first",
        ),
        "reset": action(
            "delete logs and weights of a training",
            "Delete the logs and the weights of a training. Model and settings stay.",
            _name_option,
            reset,
            "ddlf peers reset digits",
        ),
        "train": action(
            "serve a training",
            "Serve a training from its beginning, or continue it, and write its logs at the end.",
            _train_options,
            train,
            "ddlf peers train digits --data mnist",
        ),
        "retrain": action(
            "reset and serve a training",
            "Delete the logs and the weights of a training, and serve it again.",
            _train_options,
            retrain,
            "ddlf peers retrain digits",
        ),
        "audit": AUDIT,
    },
)
