"""``ddlf export`` and ``ddlf model compare``: write a model for other programs, and compare the results with Keras. No
cluster is needed."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from ddlf.errors import ConfigError
from ddlf.events.record import size
from ddlf.extras.export.export import Exported, loadable, plan, write
from ddlf.extras.export.formats import BACKENDS, installed_backends, read, to_install
from ddlf.extras.export.source import find
from ddlf.extras.export.steps import StepRunner
from ddlf.extras.export.verify import BATCHES, TOLERANCE, BackendComparison, LayerComparison, Row, all_agree, compare

OF_VERIFY = {"--inputs": "inputs", "--tolerance": "tolerance", "--json": "json"}
"""Options that only have an effect on a comparison."""


def export(options: argparse.Namespace) -> int:
    """Run ``ddlf export``: write a model in the requested formats, and return the exit code."""
    for flag, name in OF_VERIFY.items():
        if not options.verify and getattr(options, name):
            raise ConfigError(f"{flag} has no effect without --verify", hint="add --verify, or leave it out")
    formats = read(options.to)
    other_formats = [item.name for item in formats if item.name != "stablehlo"]
    if options.batch is not None and other_formats:
        raise ConfigError(
            f"--batch fixes the batch of stablehlo, and has no effect on {', '.join(other_formats)}",
            hint="leave one of them out",
        )
    source = find(options.model, options.code)
    folder = options.out if options.out is not None else Path()
    targets = plan(source, formats, folder, backend=options.backend, overwrite=options.overwrite)
    _check_inputs(options.inputs)
    backends = _backends(options.backend)
    say = _silent if options.json else _say
    with tempfile.TemporaryDirectory(prefix="ddlf-export-") as name:
        steps = StepRunner(Path(name), options.code)
        with loadable(source, steps, targets[0].backend) as model:
            if source.is_text:
                say("weights   initial weights of the text")
            batches = (options.batch,) if options.batch is not None else BATCHES
            comparison = BackendComparison(model, steps, backends[0], inputs=options.inputs, batches=batches)
            if options.inputs is not None:
                comparison.reference_row  # noqa: B018  # refuse wrong inputs before writing a file
            written = write(model, targets, source.stem, steps, lambda exported: say(_wrote(exported)), options.batch)
            if options.debug:
                _show_logs(steps)
            if not options.verify:
                return 1 if any(exported.refused for exported in written) else 0
            return _compared(comparison, backends, written, options)


def compare_backends(options: argparse.Namespace) -> int:
    """Run ``ddlf model compare``: run a model on each Keras backend, print the first layer whose outputs differ, and
    return the exit code."""
    source = find(options.model, options.code)
    _check_inputs(options.inputs)
    backends = _named(options.backends) if options.backends else installed_backends()
    if len(backends) < 2:
        missing = [name for name in ("tensorflow-cpu", "jax", "torch") if name.removesuffix("-cpu") not in backends]
        raise ConfigError(
            f"there is one backend of Keras, {BACKENDS[backends[0]]}, and nothing to compare it with"
            if backends
            else "no backend of Keras is installed",
            hint=to_install(missing[:1]),
        )
    with tempfile.TemporaryDirectory(prefix="ddlf-export-") as name:
        steps = StepRunner(Path(name), options.code)
        with loadable(source, steps, backends[0]) as model:
            comparison = BackendComparison(model, steps, backends[0], inputs=options.inputs, layers=True)
            return _compared(comparison, backends, [], options)


def _compared(
    comparison: BackendComparison, backends: Sequence[str], written: Sequence[Exported], options: argparse.Namespace
) -> int:
    tolerance = TOLERANCE if options.tolerance is None else options.tolerance
    say = _silent if options.json else _say
    say(_line("what", "run by", "difference", [f"batch {batch}" for batch in comparison.batches], "size"))
    rows = compare(comparison, backends, written, lambda row: say(_row_line(row, tolerance)))
    layers = comparison.compare_layers(tolerance)
    for entry in layers:
        say(_first_difference(entry, backends[0], tolerance))
    if options.debug:
        _show_logs(comparison.steps)
    if options.json:
        print(json.dumps({"rows": [row.to_data() for row in rows], "layers": [asdict(entry) for entry in layers]}))
    return 0 if all_agree(rows, tolerance) and not any(entry.first for entry in layers) else 1


def _named(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in BACKENDS:
            raise ConfigError(f"there is no backend {name!r}", hint=f"the backends are: {', '.join(BACKENDS)}")
        if name not in installed_backends():
            raise ConfigError(f"{BACKENDS[name]} is not installed", hint=to_install([name.replace("flow", "flow-cpu")]))
    return list(dict.fromkeys(names))


def _backends(first: str | None) -> list[str]:
    """Return the installed Keras backends. The first one is the reference for comparisons: the named backend, or else
    the usual one."""
    return sorted(installed_backends(), key=lambda name: name != first)


def _check_inputs(path: Path | None) -> None:
    if path is not None and not path.is_file():
        raise ConfigError(f"--inputs {path}: there is no such file", hint="name a .npz with an array for each input")


def _say(line: str) -> None:
    print(line, flush=True)


def _silent(line: str) -> None:
    pass


def _wrote(written: Exported) -> str:
    if written.refused is not None:
        return f"refused   {written.target.format.name}: {written.refused}"
    return f"wrote     {' and '.join(map(str, written.target.paths))}: {size(written.bytes)}"


def _row_line(row: Row, tolerance: float) -> str:
    if row.lacking:
        return _line(
            row.label, row.by, "", (), size(row.bytes), f"not run: this program is not installed; {row.lacking}"
        )
    if row.refused is not None:
        return _line(row.label, row.by, "", (), "", str(row.refused))
    difference = "reference" if row.difference is None else f"{row.difference:.1e}"
    note = "" if row.agrees(tolerance) else f"differs by more than {tolerance:g}, at batch {row.batch}"
    times = [f"{1000 * item:.3g} ms" for item in row.seconds]
    return _line(row.label, row.by, difference, times, size(row.bytes) if row.bytes else "", note)


def _line(label: str, by: str, difference: str, times: Sequence[str], bytes: str, note: str = "") -> str:
    if note and not difference:
        return f"{label:<12}{by:<31}  {note}"
    return f"{label:<12}{by:<31}  {difference:<11}{''.join(f'{item:<11}' for item in times)}{bytes:<9}{note}".rstrip()


def _first_difference(layers: LayerComparison, reference: str, tolerance: float) -> str:
    pair = f"{BACKENDS[reference]} and {BACKENDS[layers.backend]}"
    if not layers.first:
        return f"layers    {pair} agree in all {layers.count} common layers, within {layers.before:.1e}"
    before = f"earlier layers agree within {layers.before:.1e}"
    return f"layers    {pair} first differ in {layers.first!r}, by {layers.difference:.1e} (more than {tolerance:g}); {before}"


def _show_logs(steps: StepRunner) -> None:
    for log in sorted(steps.folder.glob("*.log")):
        if text := log.read_text(errors="replace").strip():
            print(f"--- {log.stem}\n{text}", file=sys.stderr)
