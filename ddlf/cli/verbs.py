"""What the command line of ``ddlf`` has: each verb with its options, its examples, and the function that does it. Imports nothing of weight."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ddlf.cli import data_verbs, look_back
from ddlf.cli.options import add_options, add_parameters
from ddlf.cli.parsing import Parser, addresses, examples_of, number, verb
from ddlf.extras import hooks
from ddlf.version import __version__

if TYPE_CHECKING:
    from ddlf.cli.parsing import Verbs

GROUPS = {
    "train": ("run", "advise", "check", "new", "demo"),
    "cluster": ("status", "top", "dashboard", "stop", "clean", "bench"),
    "data, models": ("data", "model", "export"),
    "look back": ("runs", "logs", "report"),
    "setup": ("doctor", "env", "config", "token", "completion"),
}
"""The verbs in the order in which ``ddlf --help`` shows them. Those of optional parts are left out where the part is not installed."""
TOKEN_PLACE = "this user's configuration folder"


class TopParser(Parser):
    """The parser of ``ddlf``, whose help shows the verbs in groups."""

    verbs: Verbs

    def format_help(self) -> str:
        """See argparse."""
        formatter = self._get_formatter()
        formatter.add_usage(None, self._actions, self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        lines = {action.dest: action for action in self.verbs._choices_actions}
        other = tuple(name for name in lines if not any(name in names for names in GROUPS.values()))
        for title, names in {**GROUPS, "more": other}.items():
            formatter.start_section(title)
            formatter.add_arguments([lines[name] for name in names if name in lines])
            formatter.end_section()
        formatter.start_section("options")
        formatter.add_arguments([action for action in self._actions if action.option_strings])
        formatter.end_section()
        formatter.add_text(self.epilog)
        return formatter.format_help()


def parser() -> TopParser:
    """All verbs and their options."""
    result = TopParser(
        prog="ddlf",
        description="Train unchanged Keras models on the machines you have.",
        epilog="first steps:\n"
        "  ddlf demo                          train on two workers on this machine\n"
        "  ddlf new lab && cd lab             a project of your own\n"
        "  ddlf run app.py --local 2\n"
        "  ddlf-worker --port 9000            a worker, on each machine\n"
        "  ddlf run app.py -c cluster.yaml    on them\n"
        "  ddlf doctor -c cluster.yaml        when something is wrong",
    )
    result.add_argument("--version", action="version", version=f"ddlf {__version__}")
    result.add_argument("--schema", action="store_true", help="print the JSON Schema of cluster.yaml, for editors")
    result.verbs = verbs = result.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    _train(verbs)
    _cluster(verbs)
    data_verbs.add(verbs)
    look_back.add(verbs)
    _setup(verbs)
    for add in hooks("verbs"):
        add(verbs)
    return result


def _train(verbs: Verbs) -> None:
    run = verb(
        verbs,
        "run",
        "run:run_file",
        "run an app on a cluster",
        "Run an app on a cluster.",
        "ddlf run app.py                                # 2 workers on this machine, or those of ./cluster.yaml",
        "ddlf run app.py --local 4 --master-epochs 20 --save model.keras",
        "ddlf run app.py -c cluster.yaml -p learning_rate=0.05",
        "ddlf run model.nnm --data digits                # the text of a model, no Python",
        "ddlf run app.py --checkpoint runs/a --resume auto    # the same command goes on where it ended",
        "ddlf run app.py --dashboard                          # with a page for a browser",
        "ddlf run app.py -c cluster.yaml --dry-run            # what it would do",
        "ddlf run app.py --name wide --log tensorboard        # its folder is runs/<time>-wide",
    )
    run.add_argument(
        "app",
        type=Path,
        help="Python file with a subclass of ddlf.IApp or an async function main(cluster), or the text of a model (.nnm)",
    )
    run.add_argument(
        "--data", metavar="NAME|FILE.npz", help="what a text is to learn: digits, mnist, cifar10, iris, or arrays"
    )
    run.add_argument("--target", metavar="NAME", help="the class or function that is meant, when the file has several")
    add_options(run)

    check = verb(
        verbs,
        "check",
        "check:check",
        "compare an app with plain Keras",
        "Train an app with one slot on a worker of this machine, and plain Keras on the same samples in the same order with the same seeds, and "
        "say whether they agree; if not, at which batch and in which weight they first differ, and what is likely to be why. The exit code is 0 "
        "if they agree.",
        "ddlf check app.py",
        "ddlf check app.py --batches 100 -p learning_rate=0.05",
        "ddlf check app.py --json",
    )
    check.add_argument("app", type=Path, help="Python file with a subclass of ddlf.IApp")
    check.add_argument("--target", metavar="NAME", help="the class that is meant, when the file has several")
    check.add_argument(
        "--batches", type=number("batches", 1), default=20, metavar="N", help="of the first epoch (default: 20)"
    )
    add_parameters(check)
    check.add_argument("--json", action="store_true", help="print JSON")
    check.add_argument(
        "-v", "--verbose", "--debug", dest="debug", action="store_true", help="show the whole traceback of an error"
    )

    new = verb(
        verbs,
        "new",
        "new:new",
        "write a small project to begin with",
        "Write a small project, which runs as it stands, into a new folder.",
        "ddlf new lab",
        "ddlf new lab --template convert    # a program in plain Keras, and the same on workers",
    )
    new.add_argument("name", type=Path, help="the folder, which must not exist yet")
    new.add_argument(
        "--template",
        choices=("digits", "mnist", "custom-loop", "convert", "rpc"),
        default="digits",
        help="what to begin with: %(choices)s (default: %(default)s)",
        metavar="NAME",
    )

    demo = verb(
        verbs,
        "demo",
        "new:demo",
        "train a small model on this machine",
        "Train a small CNN on digits that come with DDLF: no file, no cluster and no download is needed.",
        "ddlf demo",
        "ddlf demo --local 4 --mode async",
        "ddlf demo -c cluster.yaml    # on your machines",
    )
    add_options(demo)


def _cluster(verbs: Verbs) -> None:
    status = verb(
        verbs,
        "status",
        "status:status",
        "show what the workers do",
        "Show what the workers do.",
        "ddlf status",
        "ddlf status -c cluster.yaml --json",
    )
    _add_cluster(status)
    status.add_argument("--json", action="store_true", help="print JSON")

    top = verb(
        verbs,
        "top",
        "top:top",
        "watch a run, or what the workers do",
        "Watch the newest run of yours on this machine that shows a page; without one, or when a cluster is named, what its "
        "workers do. Ctrl-C ends it.",
        "ddlf top                      # a run that shows a page, else the workers of ./cluster.yaml",
        "ddlf top -c cluster.yaml",
        "ddlf top --once               # print it, and end",
    )
    _add_cluster(top)
    top.add_argument("--once", action="store_true", help="show it once")

    page = verb(
        verbs,
        "dashboard",
        "dashboard:dashboard",
        "open the page of a run in a browser",
        "Say where the pages of your runs on this machine are, and open that of the newest in a browser.",
        "ddlf dashboard",
        "ddlf dashboard --no-open",
    )
    page.add_argument("--no-open", dest="open", action="store_false", help="open no browser")

    stop = verb(
        verbs,
        "stop",
        "status:stop",
        "end workers, or what they run",
        "End the workers of a cluster.",
        "ddlf stop -c cluster.yaml",
        "ddlf stop --restart           # the workers stay, what they run ends",
        "ddlf stop --restart --force   # also if it is somebody else's run",
    )
    _add_cluster(stop)
    stop.add_argument("--restart", action="store_true", help="only end what they run: start their executors anew")
    stop.add_argument("--force", action="store_true", help="also while somebody's run uses them, which fails then")

    clean = verb(
        verbs,
        "clean",
        "clean:command",
        "free what earlier runs left on the workers",
        "Free data, models and variables that earlier runs left on the workers.",
        "ddlf clean -c cluster.yaml",
        "ddlf clean --methods          # hosted methods, too",
    )
    _add_cluster(clean)
    clean.add_argument("--methods", action="store_true", help="forget hosted methods, too")

    bench = verb(
        verbs,
        "bench",
        "bench:bench",
        "measure the way to each worker",
        "Measure latency and speed of the way to each worker.",
        "ddlf bench -c cluster.yaml",
        "ddlf bench -c cluster.yaml --pairs",
        "ddlf bench --hosts 10.0.0.11:9000 --megabytes 100",
    )
    _add_cluster(bench)
    bench.add_argument(
        "--megabytes", type=number("megabytes", 1, 1000), default=32, metavar="N", help="of a transfer (default: 32)"
    )
    bench.add_argument(
        "--limit", type=number("limit", 1), default=60, metavar="S", help="seconds for one worker (default: 60)"
    )
    bench.add_argument(
        "--pairs", action="store_true", help="also the ways between workers, which nobody else may use meanwhile"
    )
    bench.add_argument("--json", action="store_true", help="print JSON")


def _setup(verbs: Verbs) -> None:
    doctor = verb(
        verbs,
        "doctor",
        "doctor:doctor",
        "look for what is wrong here and on the workers",
        "Look at this machine and at the workers of a cluster, and say what to do about what is found. Nobody's run is disturbed. "
        "The exit code is 0 when nothing is found.",
        "ddlf doctor                       # this machine, and the workers of ./cluster.yaml",
        "ddlf doctor -c cluster.yaml --json",
        "ddlf doctor --hosts 10.0.0.11:9000",
    )
    _add_cluster(doctor)
    doctor.add_argument("--json", action="store_true", help="print JSON")

    env = verb(
        verbs,
        "env",
        "env:env",
        "print what a bug report needs",
        "Print versions, this machine and the settings of a run, for a bug report. Secrets and addresses are left out.",
        "ddlf env",
        "ddlf env app.py --mode async    # with the options of the run that went wrong",
        "ddlf env --json",
    )
    env.add_argument("--json", action="store_true", help="print JSON")
    _add_app(env)

    config = verbs.add_parser(
        "config",
        help="show the settings of a run",
        description="The settings of a run.",
        epilog=examples_of("ddlf config show --origin", "ddlf config show app.py --mode async --origin"),
    )
    shows = config.add_subparsers(dest="action", metavar="ACTION", parser_class=Parser, required=True)
    show = verb(
        shows,
        "show",
        "show:show",
        "each setting and its value",
        "Each setting and its value, as ddlf run would have it.",
        "ddlf config show --origin",
        "ddlf config show app.py --mode async --origin",
    )
    show.add_argument("--origin", action="store_true", help="say where each value comes from")
    _add_app(show)

    token = verbs.add_parser(
        "token",
        help="make or show the token",
        description="The secret that master and workers share.",
        epilog=examples_of(
            "ddlf token new      # once, on the master; it says how to copy it",
            "ddlf token paste    # on another machine",
        ),
    )
    actions = token.add_subparsers(dest="action", metavar="ACTION", parser_class=Parser, required=True)
    new = verb(
        actions,
        "new",
        "token:new",
        "write a new token",
        "Write a new token for this user.",
        "ddlf token new",
        "ddlf token new --token-file lab-token",
    )
    new.add_argument("--token-file", type=Path, help=f"where to (default: {TOKEN_PLACE})")
    paste = verb(
        actions,
        "paste",
        "token:paste",
        "write the token of another machine",
        "Write the token of another machine to its place on this one. It is read from the terminal, without showing it, or "
        "from standard input.",
        "ddlf token paste",
        "ssh pc01 ddlf token show | ddlf token paste",
    )
    paste.add_argument("--token-file", type=Path, help=f"where to (default: {TOKEN_PLACE})")
    shown = verb(
        actions,
        "show",
        "token:show",
        "show the token to copy it",
        "Show where the token is, and the token itself.",
        "ddlf token show",
    )
    shown.add_argument("--token-file", type=Path, help="where it is")

    completion = verb(
        verbs,
        "completion",
        "completion:completion",
        "let your shell complete commands and options",
        "Print the script by which a shell completes commands and options.",
        "ddlf completion bash > ~/.local/share/bash-completion/completions/ddlf",
        "ddlf completion zsh > ~/.zsh/completions/_ddlf     # a folder of $fpath",
        "ddlf completion fish > ~/.config/fish/completions/ddlf.fish",
    )
    completion.add_argument("shell", choices=("bash", "zsh", "fish"), help="%(choices)s", metavar="SHELL")


def _add_cluster(parser: Parser) -> None:
    one = parser.add_mutually_exclusive_group()
    one.add_argument(
        "-c", "--config", type=Path, metavar="PATH", help="cluster file (default: $DDLF_CONFIG, ./cluster.yaml)"
    )
    one.add_argument("--hosts", type=addresses, metavar="A:9000,B:9000", help="addresses of workers")
    parser.add_argument("--token-file", type=Path, metavar="PATH", help="file with the workers' token")
    parser.add_argument("--insecure-plaintext", action="store_true", help="with --hosts: do not encrypt")
    parser.add_argument(
        "--timeout", type=number("timeout", 1), default=5, metavar="S", help="seconds to wait (default: 5)"
    )
    parser.add_argument(
        "-v", "--verbose", "--debug", dest="debug", action="store_true", help="show the traceback of an error"
    )


def _add_app(parser: Parser) -> None:
    """The app whose settings are asked for, if any, and what is to be set."""
    parser.add_argument("app", type=Path, nargs="?", help="Python file with a subclass of ddlf.IApp")
    parser.add_argument("--target", metavar="NAME", help="the class that is meant, when the file has several")
    add_options(parser)
