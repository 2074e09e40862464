"""The models of a model text: its own model, and the models that it calls as layers. Pure.

``tower:model Sequential();`` turns the block into a model. Each call ``tower()`` uses the same weights. The model has
the block's inputs and outputs, or those of the blocks in ``inputs=`` and ``outputs=``. A block belongs to the model of
the input at its beginning.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass

from ddlf.extras.text.language.blocks import Block, Blocks, plain
from ddlf.extras.text.language.values import Arg, Call, Value, Word, walk

FUNCTIONAL = "Functional"


@dataclass(frozen=True, slots=True)
class Form:
    """A model of a model text.

    Attributes:
        block: The block that defines the model; empty for a model without a statement.
        kind: The name of its class.
        name: Its name; empty if the text has none.
        options: Further options of the model.
        inputs: The structure of the blocks that are inputs; None for all of its input blocks.
        outputs: The structure of the blocks that are outputs; None for all of its output blocks.
        at: The position of its statement in the text.
    """

    block: str = ""
    kind: str = FUNCTIONAL
    name: str = ""
    options: tuple[Arg, ...] = ()
    inputs: Value | None = None
    outputs: Value | None = None
    at: int = 0


class Forms(dict[str, Form]):
    """The models of a model text by their blocks. ``main`` is the text's own model, which needs no statement.

    Args:
        blocks: All blocks; their problems collect the mistakes.
    """

    def __init__(self, blocks: Blocks) -> None:
        super().__init__()
        self.blocks, self.problems = blocks, blocks.problems
        forms = {block.name: form for block in blocks.values() if (form := _form(block))}
        called_names = {name for block in blocks.values() for name in called(block.calls, forms)}
        top_level = [form for name, form in forms.items() if name not in called_names]
        for form in top_level[1:]:
            self.problems.add(
                form.at, f"{form.block!r} and {top_level[0].block!r} are models, and none calls the other"
            )
        self.main = top_level[0] if top_level else Form()
        self.owners = self._claimed(forms)
        self.heads = {
            name: form.block for form in forms.values() for name in self._names(form.outputs, form, "output", "outputs")
        }
        self.update(forms)
        outputs = {name for name, block in blocks.items() if "output" in block.statements}
        if forms and not top_level and outputs <= self.heads.keys():
            names = ", ".join(forms)
            self.problems.add(next(iter(forms.values())).at, f"each model is called by another one or itself: {names}")

    def owner(self, name: str) -> str:
        """Return the block of the model that a block belongs to; empty for the model text's own model."""
        visited: set[str] = set()
        while name not in visited and name in self.blocks:
            visited.add(name)
            if name in self.owners:
                return self.owners[name]
            statements = self.blocks[name].statements
            if (
                "from" not in statements
                or not statements["from"].items
                or not isinstance(at := statements["from"].items[0][0].value, Word)
            ):
                break
            name = at.name
        return ""

    def _claimed(self, forms: dict[str, Form]) -> dict[str, str]:
        """Return for each input block the model that it belongs to, by the model's block. The model text's own model
        has an empty name."""
        owners: dict[str, str] = {}
        for form in forms.values():
            for name in self._names(form.inputs, form, "input", "inputs"):
                if name in owners:
                    self.problems.add(form.at, f"{name!r} is an input of {form.block!r} and of {owners[name]!r}")
                owners[name] = "" if form is self.main else form.block
        return owners

    def _names(self, value: Value | None, form: Form, property_: str, key: str) -> list[str]:
        """Return the names of the blocks that are a model's inputs or outputs."""
        if value is None:
            if property_ in self.blocks[form.block].statements:
                return [form.block]
            self.problems.add(
                form.at, f"{form.block!r} does not have its own {property_}; write {key}= with names of blocks"
            )
            return []
        names = []
        for word in (word for word in walk(value) if isinstance(word, Word)):
            block = self.blocks.get(word.name)
            if block is None or property_ not in block.statements:
                having = [block.name for block in self.blocks.values() if property_ in block.statements]
                suggestion = self.problems.suggestion(word.name, having)
                self.problems.add(word.at, f"there is no block {word.name!r} with an {property_}{suggestion}")
            else:
                names.append(word.name)
        return names


def called(values: Iterable[Value], forms: Container[str]) -> Iterator[str]:
    """Yield the names of the models that some values of a model text call as layers."""
    for value in values:
        yield from (call.name for call in walk(value) if isinstance(call, Call) and call.name in forms)


def _form(block: Block) -> Form | None:
    statement = block.statements.get("model")
    if statement is None or not statement.items or not isinstance(call := statement.items[0][0].value, Call):
        return None
    options_by_key = {arg.key: arg for arg in call.args}
    options = tuple(arg for arg in call.args if arg.key not in ("", "name", "inputs", "outputs"))
    name = str(plain(options_by_key["name"].value)) if "name" in options_by_key else block.name
    inputs, outputs = (options_by_key[key].value if key in options_by_key else None for key in ("inputs", "outputs"))
    return Form(block.name, call.name, name, options, inputs, outputs, call.at)
