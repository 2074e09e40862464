"""The graph of each model of a text: pruned, with shapes, types, casts and parameters. Pure."""

from __future__ import annotations

from dataclasses import replace

from ddlf.extras.text.language.forms import Form, Forms, called
from ddlf.extras.text.language.graph import Graph, pruned
from ddlf.extras.text.language.learned import with_parameters
from ddlf.extras.text.language.problems import Problems
from ddlf.extras.text.language.shapes import infer
from ddlf.extras.text.language.types import typed


class Parts(dict[str, Graph]):
    """Graphs by the blocks that say what a model is; those that are called are there when what calls them is.

    Args:
        whole: All nodes and outputs of the text.
        forms: Its models.
        problems: Is told what is wrong.
    """

    def __init__(self, whole: Graph, forms: Forms, problems: Problems) -> None:
        super().__init__()
        self.whole, self.forms, self.problems = whole, forms, problems
        self.open: list[str] = []

    def graph(self, form: Form) -> Graph:
        """The graph of a model.

        Raises:
            NotationError: Something is wrong.
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
                ends = self.graph(self.forms[node.operator])
                shape = ends.nodes[ends.heads[0].node].shape if ends.heads else None
                node = replace(node, wanted=None if shape is None or None in shape else shape)
            for name in called((arg.value for arg in node.options), self.forms):
                self.graph(self.forms[name])
            nodes.append(node)
        shapes = infer(Graph(tuple(nodes), graph.heads), self.problems)
        known = tuple(replace(node, shape=shape) for node, shape in zip(nodes, shapes, strict=True))
        graph = typed(Graph(known, graph.heads), self.problems)
        self.problems.check()
        graph = with_parameters(graph, self.problems, self)
        self.problems.check()
        self.open.pop()
        self[form.block] = graph
        return graph

    def _pruned(self, form: Form) -> Graph:
        own = form.block in self.forms
        heads = tuple(head for head in self.whole.heads if self.forms.heads.get(head.block, "") == form.block)
        owner = "" if form is self.forms.main else form.block
        claimed = [name for name, whose in self.forms.owners.items() if whose == owner]
        graph = pruned(Graph(self.whole.nodes, heads), claimed if own else ())
        for node in graph.nodes:
            if node.operator == "input" and (node.name not in claimed if own else node.name in self.forms.owners):
                name = form.block or "the text's own model"
                self.problems.add(node.at, f"{node.name!r} is read by {name}, and is not among its inputs")
        if own and form is self.forms.main:
            for head in self.whole.heads:
                if head.block not in self.forms.heads:
                    self.problems.add(
                        head.at, f"{head.block!r} is an output of no model; name it in outputs=", derived=True
                    )
        self.problems.check()
        return graph
