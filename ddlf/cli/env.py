"""``ddlf env``: versions, machine, environment and settings for a bug report. It prints no secrets and no addresses."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import ddlf
from ddlf.app import IApp
from ddlf.cli.config import setting_rows
from ddlf.cli.doctor import size
from ddlf.cli.options import add_app_options, add_json
from ddlf.cli.parsing import Command, Parser
from ddlf.cli.target import find_target, prepare_app
from ddlf.cluster.config.addresses import find_config
from ddlf.errors import ConfigError, DDLFError
from ddlf.rpc import tokens
from ddlf.worker.machine import PACKAGES, machine_facts, packages

PREFIXES = (
    *("DDLF_", "KERAS_", "XLA_", "JAX_", "OMP_", "PYTHON", "XDG_", "CUDA_VISIBLE_DEVICES", "TMPDIR"),
    *(
        "TF_CPP_",
        "TF_ENABLE_",
        "TF_FORCE_",
        "TF_GPU_",
        "TF_NUM_",
        "TF_USE_",
        "TF_XLA_",
    ),  # TF_VAR_ are Terraform's secrets
)
DEFAULTS = ("default", "ddlf run")
"""Origins of values that nobody has set."""
SECRET = re.compile(r"TOKEN$|KEY|SECRET|PASS|CREDENTIAL", re.IGNORECASE)


def _options(parser: Parser) -> None:
    add_json(parser)
    add_app_options(parser)


def env(options: argparse.Namespace) -> int:
    """Run ``ddlf env``: print the report about this machine and installation, and return the exit code."""
    facts = _shortened(_facts(options))
    if options.json:
        print(json.dumps(facts, indent=2))
        return 0
    for title, value in facts.items():
        lines = value if isinstance(value, list) else [value]
        for number, line in enumerate(lines):
            print(f"{'' if number else title:<12}  {line}")
    return 0


def _facts(options: argparse.Namespace) -> dict[str, Any]:
    # This comes first, because the search for a token removes it from the environment.
    variables = {name: value for name, value in sorted(os.environ.items()) if name.startswith(PREFIXES)}
    machine = machine_facts([Path.cwd()])
    requirements = [re.split(r"[^\w.-]", text)[0] for text in metadata.requires("ddlf") or []]
    versions = packages(sorted({*PACKAGES, *requirements}))
    return {
        "ddlf": f"{machine['ddlf']}, source {machine['source']}, in {Path(ddlf.__file__).parent}",
        "python": f"{machine['python']} ({platform.python_implementation()}), {sys.executable}",
        "platform": machine["platform"],
        "machine": size(machine),
        "keras": f"with {machine['keras_backend']}{'' if machine['has_backend'] else ', which is not installed'}",
        "packages": [f"{name} {version}" for name, version in versions.items()],
        "environment": [f"{name}={'(set)' if SECRET.search(name) else value}" for name, value in variables.items()],
        "token": _token(options),
        "cluster": _cluster(options),
        "settings": _settings(options),
    }


def _token(options: argparse.Namespace) -> str:
    try:
        token_set = tokens.find_tokens(options.token_file)
    except DDLFError as error:
        return str(error)
    return token_set.source if token_set else "none"


def _cluster(options: argparse.Namespace) -> str:
    """Return where the workers come from, such as an option or the cluster file, without their names and addresses."""
    if options.hosts:
        return f"--hosts ({len(options.hosts.split(','))} workers)"
    if options.launcher:
        return f"--launcher {options.launcher.partition(':')[0]}"
    if options.listen:
        return f"--listen ({options.workers} workers)"
    if options.local or not (path := find_config(options.config)):
        return _local_workers(options)
    from ddlf.cluster.config.cluster_file import load_config

    try:
        config = load_config(options.config)
        workers = f"{len(config.workers)} workers" if config.launcher is None else f"launcher {config.launcher_name}"
        return f"{path} ({workers})"
    except ConfigError as error:
        return str(error)


def _local_workers(options: argparse.Namespace) -> str:
    from ddlf.cluster.launch.local import Local
    from ddlf.worker.assignment import CardWish

    try:
        workers = Local(options.local, CardWish(options.gpus, options.gpu_memory))
    except ConfigError as error:
        return str(error)
    return f"{len(workers.addresses)} workers on this machine"


def _settings(options: argparse.Namespace) -> list[str]:
    """Return the settings that differ from the defaults, or the reason why they are unknown."""
    try:
        target: Any = find_target(options.app, options.target) if options.app else IApp
        if not isinstance(target, type):
            return [f"{target.__name__} is not an app, so it has none"]
        rows = [row for row in setting_rows(prepare_app(target, None, options), options) if row[2] not in DEFAULTS]
    except Exception as error:  # the bug report may be about an app that cannot be loaded
        return [f"cannot be had: {type(error).__name__}: {error}"]
    return [f"{name} = {value}  ({where})" for name, value, where in rows] or ["all have their defaults"]


def _shortened(value: Any) -> Any:
    """Return a value with ``~`` instead of the user's home folder, because its name is private."""
    home = str(Path.home())
    if isinstance(value, dict):
        return {name: _shortened(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_shortened(part) for part in value]
    return re.sub(rf"{re.escape(home)}(?=$|/)", "~", value) if len(home) > 1 else value


ENV = Command(
    description="Print versions, this machine and the settings of a run, for a bug report. Secrets and addresses are left out.",
    examples=(
        "ddlf env",
        "ddlf env app.py --mode async    # with the options of the run that failed",
        "ddlf env --json",
    ),
    options=_options,
    run=env,
)
