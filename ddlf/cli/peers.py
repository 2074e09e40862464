"""``ddlf peers``: train one model with peers, whose data stay with them. Runs on the server, or on a peer (``join``)."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from ddlf.cli.parsing import Command, Parser, action
from ddlf.errors import ConfigError, ConnectError

A_LINK = "the link that the server has printed"


def serve(options: argparse.Namespace) -> int:
    """Run ``ddlf peers serve``."""
    from ddlf.cli.output import native_output_to_log
    from ddlf.cli.target import find_target
    from ddlf.monitor.runs import folder
    from ddlf.peers import serving
    from ddlf.peers.plan import Plan
    from ddlf.peers.qr import check_qr
    from ddlf.peers.signals import Stop

    if options.qr:
        check_qr()
    if (options.model is None) == (options.resume is None):
        raise ConfigError(
            "name a model, or a run with --resume", hint="ddlf peers serve apps/models/private_digits.nnm"
        )
    _refuse_other_way(options, options.way or "swap")
    _check_shards(options)
    port = options.port
    if options.resume is not None:
        if given := _given(options):
            raise ConfigError(f"{', '.join(given)} cannot change in a run that is resumed", hint="leave it out")
        path = serving.find_run(Path(options.out or folder.usual_out()), str(options.resume))
        plan, _, digest, last = serving.read_folder(path)
        port = last if port is None else port
        source, classes = path / folder.NOTATION, plan.classes
    else:
        source, classes = options.model, tuple(options.classes or ())
        way: Any = options.way or "swap"
        usual = {"merge": "weighted" if way == "swap" else "mean"}
        values = usual | {name: value for name in OF_PLAN if (value := getattr(options, name)) is not None}
        plan = Plan(**values, way=way, validated_by="server" if options.data is not None else "peers")
        if not source.is_file():
            raise ConfigError(f"there is no file {source}", hint="name a model text (.nnm), or the .py file of an app")
    serving.protection(options.host, options.tls_cert, options.tls_key, options.proxy or "")
    serving.listen(options.host, serving.PORT if port is None else port).close()  # it takes seconds to import Keras
    with native_output_to_log():
        served = serving.read_model(
            source, options.data, find_target, options.seed or 0, classes, trains=plan.shards > 0
        )
    if options.resume is not None:
        serving.check_layout(path, digest, served)
        if plan.validated_by == "server" and not served.can_test:
            raise ConfigError("the server validates in this run", hint="name its test data again with --data")
        if plan.shards:
            serving.give_out_again(path, plan, served, options.data)
    else:
        made = served.keras(served.model.layout.decode(served.model.first))
        plan = replace(plan, rate=serving.learning_rate(made), classes=served.classes)
        serving.check_merge(plan, made)
        if plan.shards:
            served.give_out(plan, options.seed or 0)
        path = serving.make_folder(
            Path(options.out or folder.usual_out()), source.stem, plan, served, options.seed or 0
        )
    if options.data is None and plan.validated_by == "peers":
        say("validate  peers validate in turn on their own data; --data FILE.npz lets the server do it")
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
)
"""Options that are fields of the plan."""
OF_ROUNDS = ("outer", "update_policy", "quorum", "deadline_s")


def _given(options: argparse.Namespace) -> list[str]:
    return [
        f"--{name.replace('_', '-')}"
        for name in (*OF_PLAN, "way", "seed", "classes")
        if getattr(options, name) is not None
    ]


def _refuse_other_way(options: argparse.Namespace, way: str) -> None:
    if way == "swap" and (given := [name for name in OF_ROUNDS if getattr(options, name) is not None]):
        names = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ConfigError(f"{names} has no effect in swaps", hint="add --way rounds, or leave it out")


def _check_shards(options: argparse.Namespace) -> None:
    if options.shards is not None and options.data is None:
        raise ConfigError("--shards gives out the server's own data, and there are none", hint="--data digits")
    if options.shards is not None and options.shards < 1:
        raise ConfigError(
            f"--shards needs 1 shard or more, got {options.shards}", hint="leave it out for peers with data"
        )
    if options.partition is not None and options.shards is None:
        raise ConfigError("--partition has no effect without shards", hint="add --shards 4, or leave it out")


def join(options: argparse.Namespace) -> int:
    """Run ``ddlf peers join``."""
    from ddlf.cli.output import native_output_to_log
    from ddlf.cli.target import find_target
    from ddlf.peers.joining import peer_of_app, peer_of_data, peer_of_shard
    from ddlf.peers.signals import Stop

    if options.data is not None and options.app is not None:
        raise ConfigError("--data and --app both say what to train on", hint="leave out one of them")
    how: dict[str, Any] = {"name": options.name or "", "seed": options.seed, "say": say}
    if options.app is not None:
        with native_output_to_log():
            peer = peer_of_app(options.link, find_target(options.app), **how)
    elif options.data is not None:
        peer = peer_of_data(options.link, options.data, **how)
    else:
        peer = peer_of_shard(options.link, **how)
    stop = Stop("the peer posts its last batches and says goodbye", say)
    stop.gently = peer.leave
    with stop.on_signals():
        peer.run(most_updates=options.most_updates)
    if options.save is not None:
        peer.trained.model.save(options.save)
        say(f"saved     {options.save}")
    return stop.exit_code


def invite(options: argparse.Namespace) -> int:
    """Run ``ddlf peers invite``: print new links."""
    from ddlf.peers.qr import check_qr
    from ddlf.peers.serving import ask, link_of

    if options.qr:
        check_qr()
    facts = _server(options)
    for code in ask(facts, f"invite?count={options.count}")["codes"]:
        link = link_of(facts["origin"], code, facts["pin"])
        print(link)
        if options.qr:
            _show_qr(link)
    return 0


def _show_qr(link: str) -> None:
    from ddlf.peers.qr import qr_code

    print(qr_code(link), flush=True)


def list_peers(options: argparse.Namespace) -> int:
    """Run ``ddlf peers list``: print the peers and the sets of a server."""
    from ddlf.peers import named
    from ddlf.peers.serving import ask, running

    trainings = named.found() if options.port is None else []
    for path in trainings:
        run = named.run_of(path)
        print(f"training  {path}  {'new' if run is None else run.name}")
    if trainings and not running():
        return 0
    facts = _server(options)
    found = ask(facts, "list")
    accuracy = "none yet" if found["accuracy"] is None else f"{found['accuracy']:.4f}"
    sets = ", ".join(f"{count} {state}" for state, count in found["sets"].items())
    print(f"{facts['origin']}  {found['way']}, accuracy {accuracy}, sets: {sets}")
    if found["shards"]:
        free = ", ".join(map(str, found["free_shards"])) or "none"
        print(f"shards {found['shards']}, without a peer: {free}")
    for one in found["peers"]:
        state = "removed" if one["removed"] else "here" if one["connected"] else "away" if one["present"] else "gone"
        shard = f" of shard {one['shard']}" if one["shard"] else ""
        ago = "" if one["posted_s_ago"] is None else f", last {one['posted_s_ago']:.0f} s ago"
        print(
            f"peer {one['peer']}  {one['name']}  {state}, {one['samples']:,} samples{shard}, {one['posts']:,} posts{ago}"
        )
    return 0


def kick(options: argparse.Namespace) -> int:
    """Run ``ddlf peers kick``: remove a peer for good."""
    from ddlf.peers.serving import ask

    ask(_server(options), f"kick?peer={options.peer}")
    print(f"removed   peer {options.peer}; its link is void")
    return 0


def merge(options: argparse.Namespace) -> int:
    """Run ``ddlf peers merge``: merge all sets into one, which all peers get."""
    from ddlf.peers.serving import ask

    ask(_server(options), "merge")
    print("merge     all sets become one, which each peer gets as the answer to its next post")
    return 0


def stop(options: argparse.Namespace) -> int:
    """Run ``ddlf peers stop``: end a training."""
    from ddlf.peers.serving import ask

    ask(_server(options), "stop")
    print("stopped   all sets become one, which the server writes into the folder of the run")
    return 0


def new(options: argparse.Namespace) -> int:
    """Run ``ddlf peers new``: make the folder of a training."""
    from ddlf.peers import named
    from ddlf.peers.model import read_text

    text = read_text(options.model, named.WEBNN_RATE) if options.model is not None else named.WEBNN
    path = named.make(options.name, text, {"batch_size": 64, "end": 0.97})
    say(f"made      {path}: change model.nnm and settings.json, then: ddlf peers train {path}")
    return 0


def copy(options: argparse.Namespace) -> int:
    """Run ``ddlf peers copy``: copy a training without its logs and weights."""
    from ddlf.peers import named

    say(f"copied    {options.name} to {named.copy(options.name, options.new)}, without logs and weights")
    return 0


def save(options: argparse.Namespace) -> int:
    """Run ``ddlf peers save``: copy a training with its logs and weights."""
    from ddlf.peers import named

    _refuse_while_served(options.name)
    say(f"saved     {options.name} as {named.save(options.name, options.new)}, with logs and weights")
    return 0


def reset(options: argparse.Namespace) -> int:
    """Run ``ddlf peers reset``: delete the logs and the weights of a training."""
    from ddlf.peers import named

    _refuse_while_served(options.name)
    named.reset(options.name)
    say(f"reset     {options.name}: its logs and weights are deleted")
    return 0


def train(options: argparse.Namespace) -> int:
    """Run ``ddlf peers train``: serve a training, from its beginning or from where it stopped."""
    from ddlf.peers import named

    path = named.find(options.name)
    _refuse_while_served(options.name)
    settings, run = named.settings_of(path), named.run_of(path)
    for name in (*OF_PLAN, "way", "seed", "classes"):
        setattr(options, name, settings.get(name) if run is None else None)
    options.model = path / "model.nnm" if run is None else None
    options.resume, options.out = run and f"./{run}", path / named.RUNS
    try:
        return serve(options)
    finally:
        named.write_logs(path)


def retrain(options: argparse.Namespace) -> int:
    """Run ``ddlf peers retrain``: reset a training, and serve it again."""
    reset(options)
    return train(options)


def _refuse_while_served(name: str) -> None:
    from ddlf.peers.serving import running

    for facts in running():
        if Path(name).resolve() in Path(facts["folder"]).resolve().parents:
            raise ConfigError(f"{name} is being trained", hint="stop it first: ddlf peers stop")


def _server(options: argparse.Namespace) -> dict[str, Any]:
    from ddlf.peers.serving import running

    found = [facts for facts in running() if options.port is None or facts["port"] == options.port]
    if not found:
        raise ConnectError(
            "no server of peers of yours runs on this machine", hint="start one with: ddlf peers serve MODEL"
        )
    if len(found) > 1:
        ports = ", ".join(str(facts["port"]) for facts in found)
        raise ConfigError(f"several servers of peers run here, on the ports {ports}", hint="say which with --port")
    return found[0]


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


def _serve_options(parser: Parser) -> None:
    parser.add("model", nargs="?", type=Path, help="a model as text (.nnm), or the .py file of an app")
    parser.add("--way", choices=("swap", "rounds"), help="peers swap sets when they like (default), or work in rounds")
    parser.add(
        "--merge", metavar="RULE", help="average, weighted (default), mimic, copy or elastic; in rounds a merge rule"
    )
    parser.add("--updates", type=int, metavar="N", help="batches between two posts of a peer (default: 20)")
    parser.add("--seconds", type=float, metavar="S", help="post after this time at the latest (default: no limit)")
    parser.add("--batch-size", type=int, metavar="N", help="samples in a batch (default: 32)")
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
        type=int,
        metavar="N",
        help="for studies: divide the training data of --data into N parts, and lend one to each peer",
    )
    parser.add("--resume", metavar="RUN", help="continue a run: its folder, name or 'last'")
    _address_options(parser)
    more: dict[str, Any] = {"common": False, "group": "more"}
    parser.add("--outer", metavar="RULE", help="outer optimizer of rounds", **more)
    parser.add("--update-policy", metavar="NAME", help="stop, reject or clip suspicious updates of rounds", **more)
    parser.add("--quorum", type=int, metavar="N", help="posts that a round needs", **more)
    parser.add("--deadline-s", type=float, metavar="S", help="seconds until a round closes", **more)
    parser.add("--validate-s", type=float, metavar="S", help="seconds between validations (default: 1)", **more)
    parser.add("--decay", action="store_true", default=None, help="validations lower the learning rate", **more)
    parser.add(
        "--partition",
        metavar="RULE",
        help="how shards differ: equal (default), dirichlet:0.5, classes:2, power:1",
        **more,
    )
    parser.add("--seed", type=int, help="seed of the first weights and of the shards (default: 0)", **more)
    parser.add("--out", type=Path, metavar="DIR", help="folder for the run (default: runs)", **more)


def _address_options(parser: Parser) -> None:
    parser.add("--data", metavar="FILE", help="the server's own data: a .npz file, or digits, mnist, cifar10, iris")
    parser.add("--invite", type=int, default=1, metavar="N", help="number of links to print (default: 1)")
    _qr_option(parser)
    parser.add("--port", type=int, help="port (default: 8930)")
    parser.add("--dashboard", action="store_true", help="serve a page for you: peers, rates and curves")
    more: dict[str, Any] = {"common": False, "group": "more"}
    parser.add("--host", default="127.0.0.1", help="address to listen on; TLS beyond loopback", **more)
    parser.add("--proxy", metavar="URL", help="https URL of a proxy in front, which ends TLS", **more)
    parser.add("--tls-cert", type=Path, metavar="PATH", help="certificate (default: an own one)", **more)
    parser.add("--tls-key", type=Path, metavar="PATH", help="its private key", **more)


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


def _join_options(parser: Parser) -> None:
    parser.add("link", help=A_LINK)
    parser.add("--data", metavar="FILE", help="your data, which stay here: a .npz file with x and y (default: a shard)")
    parser.add("--app", type=Path, metavar="FILE.py", help="your own code: an app with load_dataset and create_model")
    parser.add("--name", help="a name that the server shows")
    parser.add("--most-updates", type=int, metavar="N", help="leave after this number of batches")
    parser.add("--seed", type=int, default=0, help="seed of the order of samples (default: 0)")
    parser.add("--save", type=Path, metavar="PATH", help="write the model here at the end (.keras)")


def _qr_option(parser: Parser) -> None:
    parser.add("--qr", action="store_true", help="print a QR code of each link, for the camera of a phone")


def _port_option(parser: Parser) -> None:
    parser.add("--port", type=int, help="port of the server, if several run here")


def _invite_options(parser: Parser) -> None:
    parser.add("--count", type=int, default=1, metavar="N", help="number of links (default: 1)")
    _qr_option(parser)
    _port_option(parser)


def _kick_options(parser: Parser) -> None:
    parser.add("peer", type=int, help="number of the peer, as `ddlf peers list` shows it")
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
            "Serve a model to peers, and print a link for the first one. The server trains nothing.",
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
    },
)
