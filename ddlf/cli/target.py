"""Find what ``ddlf run`` runs in a file, and turn options into its settings."""

from __future__ import annotations

import argparse
import ast
import asyncio
import contextlib
import difflib
import importlib.util
import inspect
import linecache
import os
import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddlf.cli.dashboard import requested
from ddlf.cli.options import OF_A_CLUSTER, OF_AN_APP, OF_SETTINGS, given_options, reads_cluster_file
from ddlf.cli.parsing import Parser
from ddlf.cli.words import words
from ddlf.cluster import background_loop
from ddlf.errors import AppError, ConfigError, DDLFError, VersionError
from ddlf.extras import hook_for, suffixes
from ddlf.settings.checks import FOLDER
from ddlf.settings.setting import Group
from ddlf.training.registry import SETTINGS, option, settings_with, spread

if TYPE_CHECKING:
    from ddlf.app import IApp
    from ddlf.cluster.cluster import Cluster
    from ddlf.cluster.proxy import ProxyWorker

AN_APP = "a subclass of ddlf.IApp"
A_FUNCTION = "an async function main(cluster)"


class Importing:
    """Watches the import of the user's file, to notice a script that runs by itself or names its app.

    Attributes:
        ran_by_itself: Whether the file has waited for a coroutine. Such a script does all its work itself, so nothing
            remains to run.
        named: The app or function that the file passed to ``ddlf.main``.
    """

    now: Importing | None = None

    def __init__(self, path: Path, unused: list[str]) -> None:
        self.path = path
        self.unused = unused
        self.ran_by_itself = False
        self.named: Any = None

    def check_runs_by_itself(self, coroutine: Any) -> None:
        """Record that the script waits for a coroutine itself, so that it has nothing left to run.

        Raises:
            ConfigError: There are options that would have no effect.
        """
        if self.unused:
            coroutine.close()
            raise ConfigError(
                f"{', '.join(self.unused)} has no effect: {self.path} runs by itself when it is imported",
                hint="put what runs there under if __name__ == '__main__': and write async def main(cluster)",
            )
        self.ran_by_itself = True

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Notice calls of ``asyncio.run``, ``ddlf.run`` and ``ddlf.main`` during a ``with`` block."""
        usual = asyncio.run

        def run(main: Any, **options: Any) -> Any:
            self.check_runs_by_itself(main)
            return usual(main, **options)

        asyncio.run = run
        background_loop.before_waiting = self.check_runs_by_itself
        Importing.now = self
        try:
            yield
        finally:
            asyncio.run = usual
            background_loop.before_waiting = None
            Importing.now = None


async def nothing_to_run() -> None:
    """Do nothing. This is the target to run if the user's script has already done all its work during its import."""


def find_target(
    path: Path, name: str | None = None, options: argparse.Namespace | None = None, *, has_option: bool = True
) -> Any:
    """Load a file and find what to run in it: its one ``IApp`` subclass, or its async function ``main``.

    Args:
        path: The file.
        name: Name of the class or function; None if the file has only one.
        options: The parsed options. If the script runs by itself, options that it cannot see are refused.
        has_option: Whether the command has the option ``--target``.

    Raises:
        ConfigError: The file does not exist, or is not a Python file.
        AppError: The file contains nothing to run, or more than one app or function.
    """
    check_file(path)
    data = getattr(options, "data", None)
    if (app_of_file := hook_for("app_of_file", "file_types", path.suffix)) is not None:
        if name is not None:
            raise ConfigError(f"--target {name} has no effect: {path} is the text of one model", hint="leave it out")
        return app_of_file(path, data)
    if data is not None:
        raise ConfigError(f"--data has no effect on {path}", hint="an app loads its data in load_dataset")
    if name is None and _only_calls_fit(path):
        raise _nothing_to_run(path)
    # Modules beside the file can be imported, like with `python file.py`.
    sys.path.insert(0, str(path.parent.resolve()))
    module_name = (
        path.stem if path.stem.isidentifier() and path.stem not in sys.modules else f"app_{abs(hash(str(path))):x}"
    )
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    importing = Importing(path, _all_given_options(options) if options is not None else [])
    with importing.watched():
        spec.loader.exec_module(module)
    if importing.ran_by_itself:
        return nothing_to_run
    if importing.named is not None and name is None:
        return importing.named
    return _choose(path, module, name, has_option=has_option)


def find_app(path: Path) -> type[IApp]:
    """Load a file and find its app, for a command that cannot use a function.

    Raises:
        ConfigError: The file does not exist, or is not a Python file.
        AppError: The file has no app, or several.
    """
    from ddlf.app import IApp

    target = find_target(path, has_option=False)
    if inspect.isclass(target) and issubclass(target, IApp):
        return target
    problem = (
        "runs by itself when it is imported" if target is nothing_to_run else f"has {target.__name__}(), and no app"
    )
    raise AppError(f"{path} {problem}", hint=f"name a file with {AN_APP}, or a model as text (.nnm)")


def _all_given_options(options: argparse.Namespace) -> list[str]:
    return given_options(options, (*OF_A_CLUSTER, *OF_AN_APP, "ui", "dry_run")) + ["-p"] * bool(options.parameters)


def check_file(path: Path) -> None:
    others_than_python = suffixes("file_types")
    kinds = (".py", *others_than_python)
    if not path.is_file():
        if path.is_dir():
            inside = sorted(file for kind in kinds for file in path.glob(f"*{kind}"))
            app, folder = inside[0] if len(inside) == 1 else path / "app.py", " (it is a folder)"
            matches = [app] if app in inside else []
        else:
            files, folder = {file.name: file for kind in kinds for file in path.parent.glob(f"*{kind}")}, ""
            matches = [files[name] for name in difflib.get_close_matches(path.name, files, 1)]
        raise ConfigError(
            f"there is no file {str(path)!r}{folder}", hint=f"did you mean {str(matches[0])!r}?" if matches else ""
        )
    if path.suffix not in kinds:
        text = " or a model as text" if others_than_python else ""
        hint = f", or a text that ends in {' or '.join(others_than_python)}" if others_than_python else ""
        raise ConfigError(f"{str(path)!r} is not a Python file{text}", hint=f"give the .py file of an app{hint}")


def _choose(path: Path, module: types.ModuleType, name: str | None, *, has_option: bool) -> Any:
    from ddlf.app import IApp

    apps = [
        value
        for value in vars(module).values()
        if inspect.isclass(value) and issubclass(value, IApp) and value.__module__ == module.__name__
    ]
    # If one app of the file derives from another one, the subclass is meant.
    candidates = [
        app for app in apps if not any(app is not subclass and issubclass(subclass, app) for subclass in apps)
    ]
    main = getattr(module, "main", None)
    mains = [main] if inspect.iscoroutinefunction(main) else []
    if name is not None:
        return _named(path, module, name, [*apps, *mains])
    if len(candidates) > 1:
        first = candidates[0].__name__
        hint = f"say which with --target, as in --target {first}"
        if not has_option:
            hint = f"end the file with ddlf.main({first}), or name a file with one app"
        raise AppError(f"{path} has several apps: {', '.join(app.__name__ for app in candidates)}", hint=hint)
    if candidates:
        if has_option and mains and mains[0].__module__ == module.__name__ and takes_a_cluster(mains[0]):
            print(
                f"target    {candidates[0].__name__}; for main(cluster), which is there too: --target main", flush=True
            )
        return candidates[0]
    if not mains and inspect.isfunction(main):
        raise AppError(f"main in {path} is not async", hint="write async def main(cluster), or run it with python")
    if not mains:
        raise _nothing_to_run(path)
    return main


def _only_calls_fit(path: Path) -> bool:
    """Return whether the text of a file calls ``fit``, and names neither a class nor a function that DDLF could run.

    Such a plain Keras script trains while it is imported, and its user would learn only afterwards that it has no app.
    """
    source = path.read_bytes()
    can_have_a_target = rb"\bclass\b|main|ddlf|asyncio|import \*|\bexec\b"
    return b".fit(" in source and re.search(can_have_a_target, source) is None


def _nothing_to_run(path: Path) -> AppError:
    return AppError(
        f"{path} has nothing to run",
        hint=f"write {AN_APP}, or {A_FUNCTION}; ddlf new mine --template convert shows how a Keras script becomes an app",
    )


def _named(path: Path, module: types.ModuleType, name: str, targets: list[Any]) -> Any:
    target = getattr(module, name, None)
    if target in targets or inspect.iscoroutinefunction(target):
        return target
    names = [target.__name__ for target in targets]
    raise AppError(f"--target {name}: {path} has no such app or async function{guess(name, names)}")


def takes_a_cluster(function: Callable[..., Any]) -> bool:
    """Return whether an async function has a parameter for the cluster."""
    return bool(inspect.signature(function).parameters)


def prepare_app(target: type[IApp], cluster: Cluster | None, options: argparse.Namespace) -> IApp:
    """Create the app, and apply the settings of the options and the cluster file."""
    try:
        inspect.signature(target).bind(cluster)
    except TypeError as error:
        raise AppError(
            f"{target.__name__} cannot be made as {target.__name__}(cluster): {error}",
            hint="give other parameters of its __init__ defaults, or make them attributes of the class",
        ) from None
    app = target(cluster)
    for name, value, _ in overrides(target, options):
        setattr(app, name, value)
    app.run_context.typed = tuple(words(options))
    return app


def overrides(target: type[IApp], options: argparse.Namespace) -> Iterator[tuple[str, Any, str]]:
    """Yield the name, value and origin of each setting that overrides an attribute of the app.

    Later ones override earlier ones.

    Raises:
        ConfigError: A parameter is not an attribute of the app, or has another type; the cluster file is wrong.
    """
    run: dict[str, Any] = {}
    if reads_cluster_file(options):
        from ddlf.cluster.config.addresses import find_config

        if path := find_config(options.config):
            from ddlf.cluster.config.cluster_file import load_config

            run |= {name: value for name, value in load_config(path).run if name in SETTINGS and value is not None}
            yield from ((name, value, str(path)) for name, value in spread(run, str(path)).items())
    if folder := os.environ.get("DDLF_RUN_DIR"):
        yield "out", folder, "$DDLF_RUN_DIR"
    elif getattr(target, "out", None) is None:
        yield "out", "runs", "ddlf run"
    if named := os.environ.get("DDLF_UI"):
        yield "ui", named, "$DDLF_UI"
    option_values = {name: value for name in OF_SETTINGS if (value := getattr(options, name)) is not None}
    kinds = {"mode": target.mode, "exchange": target.exchange, **run, **dict(_parameters(options)), **option_values}
    settings = settings_with(kinds["mode"], kinds["exchange"])
    texts = {name: settings[name].read(text) for name, text in _parameters(options) if name in settings}
    spread({**texts, **option_values}, "the options")  # refuses two contradicting values
    for name, value in option_values.items():
        yield from ((key, part, option(name)) for key, part in spread({name: value}).items())
    if page := requested(options):
        yield "dashboard", *page
    if options.quiet:
        yield "verbose", False, "--quiet"
        yield "ui", "none", "--quiet"
    if options.takeover:
        yield "takeover", True, "--takeover"
    for key, text in _parameters(options):
        default = getattr(target, key, settings[key].default if key in settings else property())
        if hasattr(target, key) and (callable(default) or isinstance(default, property | Group)):
            raise ConfigError(f"-p {key}: {target.__name__}.{key} is not a setting", hint="define it in the class")
        if key.startswith("_") or isinstance(default, property):
            raise ConfigError(
                f"-p {key}: {target.__name__} has no attribute {key!r}{_suggestion(target, key, settings)}"
            )
        if key in OF_SETTINGS and getattr(options, key, None) is not None:
            raise ConfigError(f"{option(key)} and -p {key} both set {key}", hint="leave one of them out")
        is_path = key in SETTINGS and SETTINGS[key].accepts is FOLDER and text != "None"  # also if it is called 3
        value = text if is_path else _value(key, text, default)
        yield from ((name, part, f"-p {key}") for name, part in spread({key: value}).items())


def _suggestion(target: type[IApp], key: str, setting_names: Iterable[str]) -> str:
    """Return the end of an error about an unknown name: the app's attribute with the nearest name, or all of its own
    attributes.
    """
    from ddlf.app import IApp

    synonym = Parser.SYNONYMS.get(f"--{key}", "").removeprefix("--").replace("-", "_")
    if synonym in SETTINGS:
        return f", did you mean {synonym!r}?"

    def is_plain(value: Any) -> bool:
        return not (callable(value) or isinstance(value, property | Group))

    def plain(cls: type) -> list[str]:
        return [name for name in dir(cls) if not name.startswith("_") and is_plain(getattr(cls, name))]

    matches = difflib.get_close_matches(key, [*plain(target), *setting_names], 1)
    if matches:
        return f", did you mean {matches[0]!r}?"
    own_names = sorted(set(plain(target)) - set(plain(IApp)) - set(SETTINGS))
    return f"; its own are: {', '.join(own_names)}" if own_names else f"; write {key} = ... in the class to have it"


def function_arguments(target: Callable[..., Any], options: argparse.Namespace) -> dict[str, Any]:
    """Return the keyword arguments for a function that runs on a cluster.

    Raises:
        ConfigError: An option is only for apps, or for a cluster although the function takes none.
    """
    signature = f"{target.__name__}({'cluster' if takes_a_cluster(target) else ''})"
    if unused := given_options(options, OF_AN_APP):
        raise ConfigError(
            f"{', '.join(unused)} has no effect on {signature}, which is not an app", hint="set its parameters with -p"
        )
    if not takes_a_cluster(target) and (unused := _all_given_options(options)) and target is not nothing_to_run:
        raise ConfigError(f"{', '.join(unused)} has no effect on {signature}", hint="write async def main(cluster)")
    parameters = list(inspect.signature(target).parameters.values())[1:]
    defaults = {parameter.name: parameter.default for parameter in parameters}
    arguments = {}
    for key, text in _parameters(options):
        if key not in defaults:
            raise ConfigError(f"-p {key}: {target.__name__} has no parameter {key!r}{guess(key, list(defaults))}")
        arguments[key] = _value(key, text, defaults[key])
    missing = [
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        and parameter.name not in arguments
    ]
    if missing:
        raise ConfigError(
            f"{signature} needs a value for {', '.join(missing)}", hint=f"give it with -p {missing[0]}=VALUE"
        )
    return arguments


def _parameters(options: argparse.Namespace) -> Iterator[tuple[str, str]]:
    keys: set[str] = set()
    for pair in options.parameters:
        key, equals, text = pair.partition("=")
        if not equals or not key:
            raise ConfigError(f"-p takes KEY=VALUE, got {pair!r}")
        if key in keys:
            raise ConfigError(f"-p {key} is given twice", hint="leave one of them out")
        keys.add(key)
        yield key, text


def guess(key: str, names: list[str]) -> str:
    """Return the end of an error about an unknown name: the known name that is nearest, or all known names."""
    matches = difflib.get_close_matches(key, names, 1)
    return f", did you mean {matches[0]!r}?" if matches else f"; there are: {', '.join(names) or 'none'}"


_KINDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    list: "a list such as [1, 2]",
    tuple: "a tuple such as (1, 2)",
    dict: "a dict such as {0: 1.5}",
}


def _value(key: str, text: str, default: Any) -> Any:
    """Parse the text of a value to the type of the default that it replaces."""
    if isinstance(default, str):
        return text
    if isinstance(default, bool) and text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        value = text
    if isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if default is not None and default is not inspect.Parameter.empty and type(value) is not type(default):
        raise ConfigError(f"-p {key} must be {_KINDS.get(type(default)) or type(default).__name__}, got {text!r}")
    return value


# -- the requirements of a script (PEP 723) ----------------------------------------------------------------------------

ASK_S = 5.0


def needs_of(target: Any) -> list[str]:
    """Return the required packages in the file of an app, its class or a function."""
    kind = target if inspect.isclass(target) or inspect.isfunction(target) else type(target)
    try:
        return needs_in("".join(linecache.getlines(inspect.getfile(kind))))
    except (TypeError, OSError):  # not from a file
        return []


def needs_in(source: str) -> list[str]:
    """Return the required packages in a script's block of PEP 723; empty without a readable block."""
    import tomllib

    block = re.search(r"^# /// script$\n((?:^#(?:| .*)$\n)+?)^# ///$", source, re.MULTILINE)
    lines = block[1].splitlines() if block else []
    try:
        needs = tomllib.loads("\n".join(line.removeprefix("#").removeprefix(" ") for line in lines)).get(
            "dependencies", []
        )
    except tomllib.TOMLDecodeError:
        return []
    return [str(need) for need in needs] if isinstance(needs, list) else []


async def check_needs(cluster: Cluster, target: Any, say: Callable[[str], None], *, local: bool) -> None:
    """Look for the script's required packages on workers, and report the workers that lack some.

    Workers that do not answer are skipped.

    Args:
        cluster: The connected cluster.
        target: An app, its class or a function.
        say: Prints a line.
        local: Whether the workers have the packages of this process, which started them.

    Raises:
        VersionError: All workers lack a package, so the script cannot run.
    """
    needs = needs_of(target)
    if not needs:
        return

    async def missing(worker: ProxyWorker) -> str:
        try:
            return ", ".join((await worker.ask("machine", needs, timeout_s=ASK_S))["unmet"])
        except DDLFError:
            return ""

    if local:
        from ddlf.worker.machine import unmet

        lacking = {"this machine": ", ".join(unmet(needs))}
    else:
        texts = await asyncio.gather(*map(missing, cluster.workers))
        lacking = {worker.name: text for worker, text in zip(cluster.workers, texts, strict=True)}
    rows = [f"{name} lacks requirements of the script: {text}" for name, text in lacking.items() if text]
    if len(rows) == len(lacking):
        raise VersionError("; ".join(rows), hint="install it, or leave it out of the block '# /// script'")
    for row in rows:
        say(f"missing   {row}")
