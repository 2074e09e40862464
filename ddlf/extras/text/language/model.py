"""A model from its text: statements, blocks, graph, shapes, types, parameters, one after the other. Pure, but for ``load``, which reads a file."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from ddlf.errors import NotationError
from ddlf.extras.text.language.blocks import Blocks
from ddlf.extras.text.language.expand import expand
from ddlf.extras.text.language.forms import Form, Forms
from ddlf.extras.text.language.graph import Graph
from ddlf.extras.text.language.operators import OPERATORS
from ddlf.extras.text.language.parts import Parts
from ddlf.extras.text.language.problems import Problem, Problems
from ddlf.extras.text.language.syntax import MAX_BYTES, Parsed, parse
from ddlf.extras.text.language.values import Statement


@dataclass(frozen=True, slots=True)
class Model:
    """A model that was read.

    Attributes:
        file: Name of the file.
        text: The text itself.
        graph: What it computes: pruned, with shapes, types, casts and parameters.
        train: What its block ``train`` says, by key.
        warnings: What is allowed, and probably not meant.
        form: What kind of a model it is.
        parts: The models that are called in it as layers, by their blocks: what kind, and what each computes.
    """

    file: str
    text: str
    graph: Graph
    train: dict[str, Statement]
    warnings: tuple[Problem, ...]
    form: Form = field(default_factory=Form)
    parts: dict[str, tuple[Form, Graph]] = field(default_factory=dict)

    @property
    def draws(self) -> bool:
        """Whether operators have weights: layers of Keras have initializers of their own."""
        graphs = [self.graph, *(graph for _, graph in self.parts.values())]
        return any(node.parameters and node.operator in OPERATORS for graph in graphs for node in graph.nodes)


def read(text: str | bytes, file: str = "model.nnm", *, own: Collection[str] = ()) -> Model:
    """Return the model of a text.

    Args:
        text: The text, or its bytes in UTF-8.
        file: Name of the file, as errors have it.
        own: Names of registered layers of the user's own.

    Raises:
        NotationError: Something is wrong; it has all that was found.
    """
    text, parsed, problems = statements(text, file)
    blocks = Blocks(parsed, problems, own)
    forms = Forms(blocks)
    whole = expand(blocks, forms)
    problems.check()
    parts = Parts(whole, forms, problems)
    graph = parts.graph(forms.main)
    reached = {node.at for each in parts.values() for node in each.nodes if node.operator == "input"}
    for block in blocks.values():
        if "input" in block.statements and block.statements["input"].at not in reached:
            problems.warn(block.at, f"the input {block.name!r} leads to no output")
    called = {name: (forms[name], each) for name, each in parts.items() if name != forms.main.block}
    return Model(file, text, graph, blocks.train, problems.warnings(), forms.main, called)


def statements(text: str | bytes, file: str) -> tuple[str, Parsed, Problems]:
    """The text as such, its statements, and what is wrong with them.

    Raises:
        NotationError: It is too large, or no text.
    """
    if len(text) > MAX_BYTES:
        _refuse(file, 1, 1, f"the text is longer than {MAX_BYTES:,} bytes, the most that it may have")
    if isinstance(text, bytes):
        try:
            decoded = text.decode()
        except UnicodeDecodeError as error:
            before = text[: error.start].decode()
            _refuse(
                file,
                before.count("\n") + 1,
                len(before) - before.rfind("\n"),
                f"byte 0x{text[error.start]:02x} is no UTF-8{_other_kind(text)}",
            )
            raise
    else:
        decoded = text
    text = decoded.removeprefix("\ufeff")
    problems = Problems(text, file)
    return text, parse(text, problems), problems


def _other_kind(data: bytes) -> str:
    """What a file is that is no text."""
    if data.startswith(b"PK\x03\x04"):
        return ": this is a zip file, as .keras and .npz are; of a model `ddlf model convert` makes a text"
    return ": this is an HDF5 file; load it with Keras, and save it as .keras" if data.startswith(b"\x89HDF") else ""


def _refuse(file: str, line: int, column: int, sentence: str) -> None:
    raise NotationError(f"{file}:{line}:{column}: {sentence}", problems=(Problem(line, column, sentence),))


def load(path: Path | str, *, own: Collection[str] = ()) -> Model:
    """Return the model of a file.

    Args:
        path: The file.
        own: As ``read`` has it.

    Raises:
        NotationError: It cannot be read, or something is wrong in it.
    """
    return read(read_bytes(path), str(path), own=own)


def read_bytes(path: Path | str) -> bytes:
    """The bytes of a file, no more of them than a text may have.

    Raises:
        NotationError: It cannot be read.
    """
    try:
        with open(path, "rb") as file:
            return file.read(MAX_BYTES + 1)
    except OSError as error:
        raise NotationError(
            f"{path} cannot be read: {error.strerror}", hint="name a file with the text of a model"
        ) from error
