"""What a layer reads: names of layers and blocks as nodes of the graph, its operands, and what it is called with. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from ddlf.extras.text.language.blocks import PLAIN, Blocks
from ddlf.extras.text.language.operators import DTYPES, OPERATORS
from ddlf.extras.text.language.values import Arg, Call, Items, Number, Tensor, Value, Word

IT = "it"
"""In ``call=with(...)``: what the layer before gives."""
INSTEAD = ("binary", "matmul", "gather", "where")
"""Kinds of operators of which ``to`` stands in the place of an operand."""
READ = {
    "concat": (1, None),
    "residual": (0, None),
    "gatherElements": (1, 1),
    "gatherND": (1, 1),
    "scatterElements": (2, 2),
    "scatterND": (2, 2),
}
"""How many layers ``to`` names, at least and at most, where that is not none or one."""


@dataclass(slots=True)
class Scope:
    """The names that can be seen from a layer."""

    start: int
    names: dict[str, int] = field(default_factory=dict)
    above: Scope | None = None


class Reads:
    """Finds what layers read.

    Args:
        blocks: All blocks; their problems are told what is wrong.
    """

    def __init__(self, blocks: Blocks) -> None:
        self.blocks, self.problems = blocks, blocks.problems

    def end_of(self, name: str, at: int) -> int | None:
        """Number of the node at the end of a block; None if it cannot be found."""
        raise NotImplementedError

    def operands(self, call: Call, scope: Scope, to: bool) -> tuple[str, tuple[str | Number, ...] | None]:
        """The type that a layer is given, and its parameters and numbers; None if they are wrong."""
        name, written = call.name, ""
        if name not in OPERATORS:
            return "", ()
        operator, found = OPERATORS[name], list[str | Number]()
        for arg in (arg for arg in call.args if not arg.key):
            value = arg.value
            if isinstance(value, Word) and value.name in DTYPES:
                written = value.name
            elif isinstance(value, Word) and name == "cast":
                self.problems.add(value.at, f"there is no type {value.name!r}{self.problems.near(value.name, DTYPES)}")
                return "", None
            elif name == "part" and not (
                isinstance(value, Number) and isinstance(value.value, int) and value.value >= 0
            ):
                self.problems.add(value.at, "part takes the number of a tensor, from 0, such as part(1)")
                return "", None
            elif name == "gather" and not (isinstance(value, Number) and isinstance(value.value, int)):
                self.problems.add(
                    value.at, "gather takes a whole number, such as gather(3), or the indices of a layer: to="
                )
                return "", None
            elif isinstance(value, Word):
                found.append(value.name)
                if value.name in scope.names:
                    self.problems.add(value.at, f"{value.name!r} is a layer, did you mean 'to={value.name}'?")
            elif isinstance(value, Number):
                found.append(value)
            else:
                self.problems.add(value.at, f"an operand of {name} is a parameter's name, a number or a type")
                return "", None
        least, most = max(operator.least - to, 0), max(operator.most - (to and operator.kind in INSTEAD), 0)
        if name == "cast" and not written:
            self.problems.add(call.at, "cast needs a type, such as cast(float16)")
            return "", None
        if not least <= len(found) <= most:
            wanted = f"{least}" if least == most else f"{least} to {most}"
            if most == 0:
                self.problems.add(call.at, f"{name} takes no operand, got {len(found)}")
            else:
                self.problems.add(
                    call.at, f"{name} takes {wanted} parameter{'s' * (most > 1)} or numbers, got {len(found)}"
                )
            return "", None
        return written, tuple(found)

    def count(self, call: Call, named: int) -> bool:
        """Whether ``to`` names as many layers as an operator reads."""
        least, most = READ.get(call.name, (0, 1))
        if named >= least and (most is None or named <= most):
            return True
        what = {
            "concat": "the name of a layer or block, or a list of them",
            "scatterElements": "indices and what is written there, such as to=[indices, updates]",
            "scatterND": "indices and what is written there, such as to=[indices, updates]",
        }.get(call.name, "one layer or block")
        self.problems.add(
            call.at,
            f"{call.name} needs to=, {what}" if named < least else f"{call.name} reads {what} with to=, got {named}",
        )
        return False

    def named(self, value: object, scope: Scope, key: str = "to") -> int | None:
        """Number of the node that ``to`` names."""
        if not isinstance(value, Word):
            self.problems.add(getattr(value, "at", 0), f"{key}= must name a layer or a block")
            return None
        looked: Scope | None = scope
        known: list[str] = []
        while looked is not None:
            if value.name in looked.names:
                return looked.names[value.name]
            known += looked.names
            looked = looked.above
        block = self.blocks.get(value.name)
        if block is not None and not block.is_macro and not block.is_name_only:
            return self.end_of(block.name, value.at)
        known += [each.name for each in self.blocks.values() if not each.is_macro]
        if value.name not in self.blocks.broken:
            meant = self.problems.near(value.name, known)
            # The layer of this name may be there, and be what is wrong itself, or be in a statement that could not be read.
            follows = value.name in self.blocks.called or (bool(self.blocks.broken) and not meant)
            self.problems.add(value.at, f"nothing above is called {value.name!r}{meant}", derived=follows)
        return None

    def given(self, arg: Arg, current: int, scope: Scope) -> tuple[Call, list[int]] | None:
        """What ``call=with(...)`` says, with tensors in the place of words, and the nodes that it reads; None if it is wrong."""
        call = arg.value
        if not isinstance(call, Call) or call.name != "with":
            self.problems.add(arg.value.at, "call= is what the layer is called with, such as call=with(it, mask=other)")
            return None
        inputs, before = [current], len(self.problems)

        def tensors(value: Value) -> Value:
            if isinstance(value, Items):
                return Items(tuple(map(tensors, value.values)), value.at)
            if isinstance(value, Call):
                return Call(
                    value.name, tuple(Arg(each.key, tensors(each.value), each.at) for each in value.args), value.at
                )
            if not isinstance(value, Word) or value.name in PLAIN:
                return value
            node = current if value.name == IT else self.named(value, scope, "call")
            if node is None:
                return value
            if node not in inputs:
                inputs.append(node)
            return Tensor(value.name, inputs.index(node), value.at)

        made = tensors(call)
        if not isinstance(made, Call) or len(self.problems) > before:
            return None
        if not _uses_first(made):
            self.problems.add(call.at, f"what comes in is not used; {IT!r} is its name in with()")
            return None
        return made, inputs


def _uses_first(value: Value) -> bool:
    if isinstance(value, Call):
        return any(_uses_first(arg.value) for arg in value.args)
    if isinstance(value, Items):
        return any(map(_uses_first, value.values))
    return isinstance(value, Tensor) and value.index == 0
