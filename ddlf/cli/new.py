"""``ddlf new`` and ``ddlf demo``: projects that run without changes. The wheel contains their templates."""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import ddlf
from ddlf.cli.options import add_options, reads_cluster_file
from ddlf.cli.parsing import Command, Parser
from ddlf.errors import ConfigError
from ddlf.version import __version__
from ddlf.worker.machine import has_module, keras_backend

PACKAGE = Path(ddlf.__file__).parent
TEMPLATE_FOLDERS = (PACKAGE / "templates", PACKAGE.parent / "apps")
"""Where the sources are: in an installed package, and in a checkout."""


@dataclass(frozen=True, slots=True)
class ProjectTemplate:
    """A template of a project that ``ddlf new`` writes for the user to begin with.

    Args:
        about: A description of the project.
        files: Names of the template's files, by their names in the project.
        needs: The extra of DDLF's package that the project needs; empty if it needs none.
    """

    about: str
    files: dict[str, str]
    needs: str = "tensorflow"


TEMPLATES = {
    "digits": ProjectTemplate("a small CNN on digits that come with DDLF", {"app.py": "digits_cnn.py"}),
    "mnist": ProjectTemplate("the published CNN on MNIST, which is downloaded once", {"app.py": "mnist_cnn.py"}),
    "custom-loop": ProjectTemplate("your own training loop instead of fit", {"app.py": "custom_loop.py"}),
    "convert": ProjectTemplate(
        "a program in plain Keras, and the same on workers: compare them",
        {"app.py": "converted.py", "train_keras.py": "converted_keras.py"},
    ),
    "rpc": ProjectTemplate("calls of any Python function on workers, no training", {"app.py": "calculate.py"}, ""),
}

CLUSTER = """\
# The machines to run on. Copy this to cluster.yaml, which `ddlf run` finds by itself, and write yours.
# On each of them: ddlf-worker --port 9000. Then: ddlf doctor
version: 1
workers:
  - 10.0.0.11:9000
  - 10.0.0.12:9000
"""
IGNORED = """\
.venv/
__pycache__/
runs/
*.keras
"""


def _new_options(parser: Parser) -> None:
    parser.add("name", type=Path, metavar="FOLDER", help="the new folder")
    parser.add("--template", choices=tuple(TEMPLATES), default="digits", help="what to start with (default: digits)")


def new(options: argparse.Namespace) -> int:
    """Run ``ddlf new``: write a project from a template into a new folder."""
    folder: Path = options.name
    if os.path.lexists(folder):
        raise ConfigError(f"{folder} exists already and is not overwritten", hint="choose another name")
    try:
        written = write(folder, options.template)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error.strerror}", hint="choose a folder you own") from None
    print(f"made      {', '.join(str(path) for path in written)}")
    if (needs := TEMPLATES[options.template].needs) and not has_module("keras"):
        print(f"needs     python -m pip install 'ddlf[{needs}]'")
    print(f"next      cd {folder} && ddlf run app.py")
    return 0


def write(folder: Path, name: str) -> list[Path]:
    """Write the project of a template, and return its files.

    Raises:
        OSError: A file cannot be written.
    """
    template = TEMPLATES[name]
    texts = {called: _source(template, source, called) for called, source in template.files.items()}
    texts |= {"README.md": _readme(folder.name, template), "cluster.example.yaml": CLUSTER, ".gitignore": IGNORED}
    folder.mkdir(parents=True)
    for called, text in texts.items():
        (folder / called).write_text(text, encoding="utf-8")
    return [folder / called for called in texts]


def _source(template: ProjectTemplate, source: str, called: str) -> str:
    """Return the text of a project's file, with its requirements in the form of PEP 723."""
    path = next(folder / source for folder in TEMPLATE_FOLDERS if (folder / source).is_file())
    text = path.read_text(encoding="utf-8")
    for new_name, old_name in {**template.files, called: source}.items():
        text = re.sub(rf"(apps/)?\b{re.escape(old_name)}\b", new_name, text)
    requirement = f"ddlf[{template.needs}]" if template.needs else "ddlf"
    return (
        f'# /// script\n# requires-python = ">=3.11"\n# dependencies = ["{requirement}>={__version__}"]\n# ///\n{text}'
    )


def _readme(name: str, template: ProjectTemplate) -> str:
    install = f"python -m pip install 'ddlf[{template.needs}]'" if template.needs else "python -m pip install ddlf"
    cluster_lines = (
        "\npython train_keras.py              # the same in plain Keras" if "train_keras.py" in template.files else ""
    )
    return f"""\
# {name}

{template.about[0].upper()}{template.about[1:]}.

```
{install}
ddlf run app.py --local 2          # two workers on this machine{cluster_lines}
ddlf run app.py --dry-run          # what would be done
ddlf run app.py -c cluster.yaml    # on your machines: see cluster.example.yaml
ddlf doctor -c cluster.yaml        # when something is wrong
```
"""


def demo(options: argparse.Namespace) -> int:
    """Run ``ddlf demo``: train the app for handwritten digits like ``ddlf run`` does, on workers of this machine unless
    the options name others.
    """
    from ddlf.cli.run import run_file

    backend = keras_backend()
    if missing := [name for name in ("keras", backend) if not has_module(name)]:
        raise ConfigError(
            f"the demo trains a model, and {' and '.join(missing)} {'are' if len(missing) > 1 else 'is'} not installed",
            hint="python -m pip install 'ddlf[tensorflow]'",
        )
    if not options.config and reads_cluster_file(options):
        options.local = 2
    with tempfile.TemporaryDirectory(prefix="ddlf-demo-") as folder:
        # Run a copy outside the installed package, because only the user's own code is sent to the workers.
        options.app, options.target = Path(folder) / "demo.py", None
        template = TEMPLATES["digits"]
        options.app.write_text(_source(template, template.files["app.py"], "demo.py"), encoding="utf-8")
        code = run_file(options)
    if code == 0 and sys.stdout.isatty() and not (options.quiet or options.dry_run or options.ui in ("json", "none")):
        print("next      ddlf new lab && cd lab && ddlf run app.py")
    return code


NEW = Command(
    description="Create a new folder with a small project that runs as it is.",
    examples=(
        "ddlf new lab",
        "ddlf new lab --template convert    # a program in plain Keras, and the same on workers",
    ),
    options=_new_options,
    run=new,
)
DEMO = Command(
    description="Train a small CNN on digits that come with DDLF. This needs no file, no cluster and no download.",
    examples=(
        "ddlf demo",
        "ddlf demo --local 4 --mode async",
        "ddlf demo -c cluster.yaml    # on your machines",
    ),
    options=add_options,
    run=demo,
)
