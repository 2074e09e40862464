"""Writes parsed options as the words of another command, such as the ``ddlf run`` that ``ddlf plan`` prints."""

from __future__ import annotations

import argparse
import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ddlf.cli.options import NOT_SHORT, RUN
from ddlf.settings.checks import exact_size
from ddlf.training.registry import option

NEVER = frozenset((*NOT_SHORT, "help", "app", "dashboard", "quiet", "debug"))
"""Options that neither change the training nor name workers, or that short trainings refuse."""


SIZES = ("gpu_memory",)
"""Options whose values are bytes."""


def command_line(
    command: str,
    file: Path | str,
    options: argparse.Namespace,
    settings: Mapping[str, Any] | None = None,
    parameters: Mapping[str, Any] | None = None,
) -> str:
    """Return a command for a shell, with the options that change a run or name its workers.

    Args:
        command: The command, such as ``"ddlf run"``.
        file: The file of the app.
        options: The parsed options of the present command.
        settings: Settings by name. They replace the same settings of the options.
        parameters: Values of ``-p`` by name. They replace the same ones of the options.
    """
    return f"{command} {shlex.join([str(file), *words(options, settings, parameters)])}"


def words(
    options: argparse.Namespace,
    settings: Mapping[str, Any] | None = None,
    parameters: Mapping[str, Any] | None = None,
) -> list[str]:
    """Return the options that change a run or name its workers, as ``ddlf run`` reads them; see ``command_line``."""
    settings, parameters, words = settings or {}, parameters or {}, list[str]()
    for run_option in RUN.parser("ddlf run").options:
        value = getattr(options, run_option.dest, None)
        if value is None or value is False or run_option.dest in {*NEVER, *settings, "parameters"}:
            continue
        value_text = exact_size(value) if run_option.dest in SIZES else _text(value)
        words += [run_option.names[0], *([] if value is True or value == math.inf else [value_text])]
    for name, value in settings.items():
        words += [option(name), _text(value)]
    remaining = [text for text in options.parameters if text.partition("=")[0] not in {*settings, *parameters}]
    for text in [*remaining, *(f"{name}={value}" for name, value in parameters.items())]:
        words += ["-p", text]
    return words


def given_names(options: argparse.Namespace, names: Sequence[str]) -> set[str]:
    """Return the names among ``names`` that an option or ``-p`` sets."""
    by_parameter = {text.partition("=")[0] for text in options.parameters}
    return {name for name in names if getattr(options, name, None) is not None or name in by_parameter}


def _text(value: Any) -> str:
    """Return the value of an option as it is typed."""
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], int):  # --listen
        host, port = value
        return str(port) if host is None else f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    if isinstance(value, tuple):  # --gpus
        return ",".join(value) or "none"
    return str(value)
