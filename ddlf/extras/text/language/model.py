"""Reads a model from its text: statements, blocks, graph, shapes, types and parameters.

Pure, except for ``load``, which reads a file.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path

from ddlf.errors import NotationError
from ddlf.extras.text.language.blocks import Blocks
from ddlf.extras.text.language.expand import expand
from ddlf.extras.text.language.forms import Form, Forms, called
from ddlf.extras.text.language.graph import Graph, pruned
from ddlf.extras.text.language.inference import infer, with_parameters, with_types
from ddlf.extras.text.language.operators import OPERATORS
from ddlf.extras.text.language.problems import Problems, TextProblem
from ddlf.extras.text.language.syntax import MAX_BYTES, Parsed, parse
from ddlf.extras.text.language.values import Statement
from ddlf.extras.text.language.web_model import RATE, SUFFIXES, text_of_web_model


@dataclass(frozen=True, slots=True)
class Model:
    """A model that was read from a model text and checked.

    Attributes:
        file: The name of the file.
        text: The text of the model.
        graph: The computation: pruned, with shapes, types, casts and parameters.
        train: The statements of its block ``train``, by key.
        warnings: Warnings about valid, but probably unintended statements.
        form: The kind of the model.
        parts: Kind and graph of each model that it calls as a layer, by the model's block.
    """

    file: str
    text: str
    graph: Graph
    train: dict[str, Statement]
    warnings: tuple[TextProblem, ...]
    form: Form = field(default_factory=Form)
    parts: dict[str, tuple[Form, Graph]] = field(default_factory=dict)

    @property
    def draws(self) -> bool:
        """Return whether operators have weights to initialize. Keras layers have their own initializers."""
        graphs = [self.graph, *(graph for _, graph in self.parts.values())]
        return any(node.parameters and node.operator in OPERATORS for graph in graphs for node in graph.nodes)


def read(text: str | bytes, file: str = "model.nnm", *, custom_layers: Collection[str] = ()) -> Model:
    """Return the model of a model text.

    Args:
        text: The text, or its bytes in UTF-8.
        file: The name of the file, for errors.
        custom_layers: The names of registered custom layers.

    Raises:
        NotationError: The text has mistakes; the error lists them.
    """
    text, parsed, problems = statements(text, file)
    blocks = Blocks(parsed, problems, custom_layers)
    forms = Forms(blocks)
    graph_of_all = expand(blocks, forms)
    problems.check()
    parts = _Graphs(graph_of_all, forms, problems)
    graph = parts.graph(forms.main)
    reached = {node.at for item in parts.values() for node in item.nodes if node.operator == "input"}
    for block in blocks.values():
        if "input" in block.statements and block.statements["input"].at not in reached:
            problems.warn(block.at, f"the input {block.name!r} leads to no output")
    called = {name: (forms[name], item) for name, item in parts.items() if name != forms.main.block}
    return Model(file, text, graph, blocks.train, problems.warnings(), forms.main, called)


def statements(text: str | bytes, file: str) -> tuple[str, Parsed, Problems]:
    """Return the decoded model text, its statements, and the mistakes in their syntax.

    Raises:
        NotationError: The text is too large, or not in UTF-8.
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
                f"byte 0x{text[error.start]:02x} is no UTF-8{_kind_hint(text)}",
            )
            raise
    else:
        decoded = text
    text = decoded.removeprefix("\ufeff")
    problems = Problems(text, file)
    return text, parse(text, problems), problems


def _kind_hint(data: bytes) -> str:
    """Return a sentence that names the kind of a file that is not a model text, for the error."""
    if data.startswith(b"PK\x03\x04"):
        return ": this is a zip file, as .keras and .npz are; of a model `ddlf model convert` makes a text"
    return ": this is an HDF5 file; load it with Keras, and save it as .keras" if data.startswith(b"\x89HDF") else ""


def _refuse(file: str, line: int, column: int, sentence: str) -> None:
    raise NotationError(f"{file}:{line}:{column}: {sentence}", problems=(TextProblem(line, column, sentence),))


def load(path: Path | str, *, custom_layers: Collection[str] = ()) -> Model:
    """Read and check the model in a file: a model text, or a model file of WebNN (``web_model.py``).

    Args:
        path: The path of the file.
        custom_layers: The names of registered custom layers.

    Raises:
        NotationError: The file cannot be read, or its text has mistakes.
    """
    return read(text_of_file(path), str(path), custom_layers=custom_layers)


def text_of_file(path: Path | str, rate: float = RATE) -> bytes | str:
    """Return the model text in a file. A model file of WebNN becomes a text.

    Args:
        path: The file.
        rate: Learning rate for a model file of WebNN, which names none.

    Raises:
        NotationError: The file cannot be read, or is not a model file of WebNN.
    """
    data = read_bytes(path)
    if Path(path).suffix not in SUFFIXES or len(data) > MAX_BYTES:
        return data
    return text_of_web_model(data.decode("utf-8", "replace"), str(path), rate)


def read_bytes(path: Path | str) -> bytes:
    """Return the bytes of a file, limited to slightly more than the maximum size of a model text.

    Raises:
        NotationError: The file cannot be read.
    """
    try:
        with open(path, "rb") as file:
            return file.read(MAX_BYTES + 1)
    except OSError as error:
        raise NotationError(
            f"{path} cannot be read: {error.strerror}", hint="name a file with the text of a model"
        ) from error


class _Graphs(dict[str, Graph]):
    """Builds the graph of each model of a model text, by the model's block. A called model comes before its caller.

    Args:
        full_graph: All nodes and outputs of the text.
        forms: The models of the text.
        problems: Collects the mistakes.
    """

    def __init__(self, full_graph: Graph, forms: Forms, problems: Problems) -> None:
        super().__init__()
        self.full_graph, self.forms, self.problems = full_graph, forms, problems
        self.open: list[str] = []

    def graph(self, form: Form) -> Graph:
        """Return the graph of a model.

        Raises:
            NotationError: The model has mistakes.
        """
        if form.block in self:
            return self[form.block]
        if form.block in self.open:
            self.problems.add(form.at, f"the model {form.block!r} calls itself: {', '.join(self.open)}")
            self.problems.check()
        self.open.append(form.block)
        graph = self._pruned(form)
        nodes = []
        for node in graph.nodes:
            if node.operator in self.forms:
                inner = self.graph(self.forms[node.operator])
                shape = inner.nodes[inner.heads[0].node].shape if inner.heads else None
                node = replace(node, declared_shape=None if shape is None or None in shape else shape)
            for name in called((arg.value for arg in node.options), self.forms):
                self.graph(self.forms[name])
            nodes.append(node)
        shapes = infer(Graph(tuple(nodes), graph.heads), self.problems)
        inferred = tuple(replace(node, shape=shape) for node, shape in zip(nodes, shapes, strict=True))
        graph = with_types(Graph(inferred, graph.heads), self.problems)
        self.problems.check()
        graph = with_parameters(graph, self.problems, self)
        self.problems.check()
        self.open.pop()
        self[form.block] = graph
        return graph

    def _pruned(self, form: Form) -> Graph:
        is_called = form.block in self.forms
        heads = tuple(head for head in self.full_graph.heads if self.forms.heads.get(head.block, "") == form.block)
        owner = "" if form is self.forms.main else form.block
        claimed = [name for name, owner_of_name in self.forms.owners.items() if owner_of_name == owner]
        graph = pruned(Graph(self.full_graph.nodes, heads), claimed if is_called else ())
        for node in graph.nodes:
            if node.operator == "input" and (node.name not in claimed if is_called else node.name in self.forms.owners):
                name = form.block or "the text's own model"
                self.problems.add(node.at, f"{node.name!r} is read by {name}, and is not among its inputs")
        if is_called and form is self.forms.main:
            for head in self.full_graph.heads:
                if head.block not in self.forms.heads:
                    self.problems.add(
                        head.at, f"{head.block!r} is an output of no model; name it in outputs=", derived=True
                    )
        self.problems.check()
        return graph
