"""Expands the blocks of a model text to a graph of layers: macros with options, repetitions, ``from``, ``to``, and
names. Pure.

A macro passes its options to the macros that it calls, if they can use them. An option with the name of a layer
replaces that layer. The macro's last layer gets the remaining options. An inner option overrides an outer one.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from ddlf.extras.text.language import keras_layers
from ddlf.extras.text.language.blocks import PLAIN, Block, Blocks, plain, type_and_shape
from ddlf.extras.text.language.forms import Forms
from ddlf.extras.text.language.graph import Graph, ModelOutput, Node
from ddlf.extras.text.language.operators import DTYPES, EVERYWHERE, OPERATORS, is_keras
from ddlf.extras.text.language.values import Arg, Call, Items, Number, String, Tensor, Value, Word, walk

MAX_LAYERS = 10_000
MAX_NESTED = 30
"""The maximum depth of macros, and the maximum length of a chain of blocks that start at each other's end."""
NO_OPTIONS = ("", "to", "call", "share", *EVERYWHERE)
"""Keys that are not options of the layer itself."""
KEPT = ("name", "shapes", "lrm")
"""Options of a macro's call that belong to the call itself."""


IT = "it"
"""In ``call=with(...)``: the name of the previous layer's output."""
INSTEAD = ("binary", "matmul", "gather", "where")
"""Kinds of operators in which ``to`` replaces an operand."""


class _TooMany(Exception):
    """Raised to stop the expansion of macros when a model text has too many layers."""


@dataclass(slots=True)
class Scope:
    """The names of layers and blocks that a layer of a model text can refer to."""

    start: int
    names: dict[str, int] = field(default_factory=dict)
    outer: Scope | None = None


@dataclass(slots=True)
class MacroContext:
    """The context of a layer: the enclosing macros, the factor of the learning rate, and the outermost macro's call."""

    macros: tuple[str, ...] = ()
    lrm: float = 1.0
    call: int | None = None


def expand(blocks: Blocks, forms: Forms) -> Graph:
    """Expand the blocks of a model text to one graph of layers, with all its models and also unused blocks.

    Mistakes are added to the blocks' problems.
    """
    return _Expansion(blocks, forms).graph()


class _Expansion:
    def __init__(self, blocks: Blocks, forms: Forms) -> None:
        self.blocks, self.problems, self.forms = blocks, blocks.problems, forms
        self.nodes: list[Node] = []
        self.names: dict[str, dict[str, int]] = {}
        self.ends: dict[str, int | None] = {}
        self.open: list[str] = []
        self.called: set[str] = set()
        self.layers = 0
        self.accepting: dict[tuple[str, str], bool] = {}

    def graph(self) -> Graph:
        heads: list[ModelOutput] = []
        try:
            for block in self.blocks.values():
                if not block.is_macro and not block.is_name_only:
                    self._end(block, block.at)
            heads = [head for block in self.blocks.values() if not block.is_macro and (head := self._head(block))]
        except _TooMany:
            pass
        inputs = [block for block in self.blocks.values() if "input" in block.statements]
        if not inputs:
            self.problems.add(0, "the text has no block with an input, such as digits:input shape=[64];", derived=True)
        elif not any("output" in block.statements for block in self.blocks.values()):
            at = inputs[0].statements["input"].at
            self.problems.add(at, f"{inputs[0].name!r} has an input, but no block has an output", derived=True)
        for block in self.blocks.values():
            if block.is_macro and block.name not in self.called:
                self.problems.warn(block.at, f"the macro {block.name!r} is never called")
        return Graph(tuple(self.nodes), tuple(heads))

    def _head(self, block: Block) -> ModelOutput | None:
        statements = block.statements
        factors = [(name, statements[name]) for name in ("delta", "gamma", "alpha") if name in statements]
        if "output" not in statements:
            for property_ in ("loss", "delta", "gamma", "alpha"):
                if property_ in statements:
                    self.problems.add(
                        statements[property_].at, f"{property_!r} belongs to a block with an output", derived=True
                    )
            return None
        end = self.ends.get(block.name)
        if end is None or not statements["output"].items:
            return None
        dtype, shape = type_and_shape(statements["output"].items[0], "output", self.problems)
        name, loss = block.name, ""
        if "name" in statements and statements["name"].items:
            name = str(plain(statements["name"].items[0][0].value))
        if "loss" in statements and statements["loss"].items:
            loss = str(plain(statements["loss"].items[0][0].value))
        numbers = tuple((key, float(factor.items[0][0].value.value)) for key, factor in factors if _is_number(factor))  # type: ignore[union-attr]
        return ModelOutput(name, end, loss, numbers, dtype, shape, block.name, statements["output"].at)

    def _end(self, block: Block, at: int) -> int | None:
        """Return the number of the last node of a block that begins with an input or ``from``; None if a mistake hides
        it.
        """
        if block.name in self.ends:
            return self.ends[block.name]
        if block.name in self.open:
            self.problems.add(at, f"{block.name!r} begins at its own end: {', '.join([*self.open, block.name])}")
            return None
        if len(self.open) > MAX_NESTED:
            self.problems.add(at, f"more than {MAX_NESTED} blocks begin each at the end of another block")
            return None
        self.open.append(block.name)
        current = self._start(block)
        names = self.names.setdefault(self.forms.owner(block.name), {})
        scope = Scope(-1 if current is None else current, names)
        for call in block.calls if current is not None else ():
            current = self._layer(call, current, scope, MacroContext())
        self.open.pop()
        self.ends[block.name] = current
        return current

    def _start(self, block: Block) -> int | None:
        statements = block.statements
        if "input" in statements and "from" in statements:
            self.problems.add(
                statements["from"].at, f"{block.name!r} has an input and 'from'; it can begin in one place only"
            )
        if "input" in statements:
            if not statements["input"].items:
                return None
            dtype, shape = type_and_shape(statements["input"].items[0], "input", self.problems)
            at = statements["input"].at
            options = tuple(arg for arg in statements["input"].items[0] if arg.key not in ("", "shape"))
            self.nodes.append(
                Node(
                    "input",
                    options=options,
                    name=block.name,
                    written=dtype or "float32",
                    declared_shape=shape,
                    at=at,
                    call=at,
                )
            )
            return len(self.nodes) - 1
        if "from" not in statements:
            sentence = (
                f"{block.name!r} has an output, but nothing goes in; write {block.name}:input or {block.name}:from"
            )
            if block.name not in self.blocks.broken:
                self.problems.add(statements["output" if "output" in statements else "model"].at, sentence)
            return None
        if not statements["from"].items or not isinstance(word := statements["from"].items[0][0].value, Word):
            return None
        other = self.blocks.get(word.name)
        if other is None or other.is_macro or other.is_name_only:
            if word.name not in self.blocks.broken:
                names = [item.name for item in self.blocks.values() if not item.is_macro and item is not block]
                reason = (
                    "is a macro, which does not have its own end"
                    if other and other.is_macro
                    else "does not have its own layers"
                )
                sentence = f"{word.name!r} {reason}" if other else f"there is no block {word.name!r}"
                self.problems.add(word.at, sentence + self.problems.suggestion(word.name, names))
            return None
        return self._end(other, word.at)

    def _layer(self, call: Call, current: int | None, scope: Scope, context: MacroContext) -> int | None:
        """Add a layer, or the layers of a macro. Return the number of the last node; None after a mistake."""
        self.layers += 1
        if self.layers > MAX_LAYERS:
            at = call.at if context.call is None else context.call
            self.problems.add(at, f"the text asks for more than {MAX_LAYERS:,} layers")
            raise _TooMany
        options = {arg.key: arg for arg in call.args}
        if "shapes" in options and call.name != "Input":
            return self._copies(call, options, current, scope, context)
        factor = plain(options["lrm"].value) if "lrm" in options else 1.0
        lrm = context.lrm * (factor if isinstance(factor, int | float) and factor > 0 else 1.0)
        block = self.blocks.get(call.name)
        if block is not None and call.name not in OPERATORS and call.name not in self.forms:
            end = self._macro(call, block, current, scope, replace(context, lrm=lrm))
        else:
            end = self._node(call, current, scope, replace(context, lrm=lrm))
        if end is not None and "name" in options and isinstance(options["name"].value, Word | String):
            name = str(plain(options["name"].value))
            last = self.blocks[name].calls[-1:] if name in self.blocks and name == self.open[-1] else []
            if name in scope.names or (name in self.blocks and call not in last):
                self.problems.add(options["name"].at, f"the name {name!r} is given twice")
            scope.names[name] = end
        return end

    def _copies(
        self, call: Call, options: dict[str, Arg], current: int | None, scope: Scope, context: MacroContext
    ) -> int | None:
        shapes = options["shapes"]
        if "shape" in options:
            self.problems.add(options["shape"].at, "'shape' and 'shapes' are given both")
            return None
        if not (isinstance(shapes.value, Items) and shapes.value.values) or not all(
            isinstance(item, Items) for item in shapes.value.values
        ):
            return None  # already reported
        other_args = tuple(arg for arg in call.args if arg.key not in ("shapes", "name"))
        for item in shapes.value.values[:-1]:
            current = self._layer(
                replace(call, args=(*other_args, Arg("shape", item, shapes.at))), current, scope, context
            )
        last = Arg("shape", shapes.value.values[-1], shapes.at)
        args = (*(arg for arg in call.args if arg.key != "shapes"), last)
        return self._layer(replace(call, args=args), current, scope, context)

    def _macro(self, call: Call, block: Block, current: int | None, scope: Scope, context: MacroContext) -> int | None:
        self.called.add(block.name)
        if not block.is_macro:
            key = next(name for name in ("input", "from", "output", "model") if name in block.statements)
            suggestion = f", did you mean 'from {block.name}'?" if key != "output" else ""
            self.problems.add(call.at, f"{block.name!r} is not a macro: it has its own {key!r}{suggestion}")
            return None
        if block.name in context.macros:
            self.problems.add(
                call.at, f"the macro {block.name!r} calls itself: {', '.join([*context.macros, block.name])}"
            )
            return None
        if len(context.macros) >= MAX_NESTED:
            self.problems.add(call.at, f"macros are nested deeper than {MAX_NESTED}")
            return None
        for arg in call.args:
            if not arg.key:
                self.problems.add(arg.at, f"the macro {block.name!r} takes options only, such as shape=[10]")
        if not block.calls:
            if "layers" not in block.statements and block.name not in self.blocks.broken:
                self.problems.add(call.at, f"the macro {block.name!r} has no layers")
            return None
        inner_context = MacroContext(
            (*context.macros, block.name), context.lrm, call.at if context.call is None else context.call
        )
        body = self._bound(call, block)
        if body is None or current is None:
            return None
        inner: Scope = Scope(current, {}, scope)
        at: int | None = current
        for item in body:
            at = self._layer(item, at, inner, inner_context)
        return at

    def _bound(self, call: Call, block: Block) -> list[Call] | None:
        """Return a macro's layers after passing the options of its call to them; None if no layer can use one of the
        options.
        """
        passed = [arg for arg in call.args if arg.key and arg.key not in KEPT]
        body, used_keys = list(block.calls), set[str]()
        for arg in passed:
            for index, item in enumerate(block.calls):
                if item.name == arg.key and (replacement := self._replacement(item, arg)):
                    body[index], used_keys = replacement, used_keys | {arg.key}
        free = [call.name for call in block.calls if self.blocks.is_free(call.name) and call.name not in used_keys]
        for arg in passed:
            if arg.key in used_keys:
                continue
            inner = [index for index, item in enumerate(body) if self._accepts(item.name, arg.key)]
            last = body[-1]
            if not inner and not self._binds(last.name, arg.key) and self.problems.suggestion(arg.key, free):
                self.problems.add(
                    arg.at, f"{block.name!r} has no option {arg.key!r}{self.problems.suggestion(arg.key, free)}"
                )
                return None
            used = False
            for index in inner or [len(body) - 1]:
                if arg.key not in {arg.key for arg in body[index].args}:
                    body[index] = replace(body[index], args=(*body[index].args, arg))
                    used = True
            if not used:
                self.problems.warn(arg.at, f"{arg.key!r} has no effect: the layers of {block.name!r} have their own")
        for name in free:
            self.problems.add(call.at, f"{block.name!r} needs {name}=, such as {block.name}({name}=relu)", derived=True)
        return None if free else body

    def _replacement(self, call: Call, arg: Arg) -> Call | None:
        """Return the layer that an option of a macro's call puts in place of a layer of the macro, or None after a
        mistake.
        """
        if isinstance(arg.value, Word):
            return Call(arg.value.name, call.args, arg.value.at)
        if isinstance(arg.value, Call):
            return Call(arg.value.name, (*call.args, *arg.value.args), arg.value.at)
        self.problems.add(arg.value.at, f"{arg.key} must be a layer, such as relu")
        return None

    def _accepts(self, name: str, key: str, depth: int = 0) -> bool:
        """Return whether a macro has a layer that can use an option."""
        block = self.blocks.get(name)
        if block is None or name in OPERATORS or not block.calls or depth > MAX_NESTED:
            return False
        if (name, key) not in self.accepting:
            # assume this until it is known, so that the search ends if a macro calls itself
            self.accepting[name, key] = False
            self.accepting[name, key] = self._binds(block.calls[-1].name, key) or any(
                call.name == key or self._accepts(call.name, key, depth + 1) for call in block.calls
            )
        return self.accepting[name, key]

    def _binds(self, name: str, key: str) -> bool:
        """Return whether a layer with this name has an option: an operator, a Keras layer or a placeholder."""
        if name in OPERATORS:
            return key in (*OPERATORS[name].options, *EVERYWHERE)
        if is_keras(name):
            return key in (*keras_layers.arguments().get(name, (key,)), *EVERYWHERE)
        return name not in self.blocks and key in EVERYWHERE

    def _node(self, call: Call, current: int | None, scope: Scope, context: MacroContext) -> int | None:
        name, at = call.name, call.at if context.call is None else context.call
        keras = is_keras(name) or name in self.forms
        if name not in OPERATORS and not keras:
            if name not in self.blocks.broken:
                macros = [block.name for block in self.blocks.values() if block.is_macro]
                self.problems.add(
                    call.at, f"unknown operator {name!r}{self.problems.suggestion(name, [*OPERATORS, *macros])}"
                )
            return None
        if keras:
            self.blocks.refuse_code(call)
        placeholders = self.blocks.free if context.macros else ()
        mistakes = 0 if keras else sum(not self.blocks.option(name, arg, placeholders) for arg in call.args if arg.key)
        if mistakes:
            return None
        options_by_key = {arg.key: arg for arg in call.args if arg.key}
        written, operands = self._operands(call, scope, "to" in options_by_key)
        if operands is None or current is None:
            return None
        read = self._inputs(call, options_by_key, current, scope, keras=keras)
        if read is None:
            return None
        shape = options_by_key["shape"].value if "shape" in options_by_key else None
        declared_shape = tuple(plain(shape)) if isinstance(shape, Items) and _sizes(shape) else None
        options = tuple(sorted((arg for arg in call.args if arg.key not in NO_OPTIONS), key=lambda arg: arg.key))
        called = (
            str(plain(options_by_key["name"].value))
            if "name" in options_by_key and isinstance(options_by_key["name"].value, Word | String)
            else ""
        )
        call_arguments, inputs = read
        share = ""
        if keras and "share" in options_by_key:
            shared = self._shared(call, options_by_key["share"], options, scope)
            if shared is None:
                return None
            share, options = shared
        elif name in self.forms:
            share = name if any(node.operator == name for node in self.nodes) else ""
            for arg in options:
                self.problems.add(arg.at, f"{name!r} is a model, and takes no {arg.key}=")
        node = Node(
            name, inputs, operands, options, called, written, declared_shape, context.lrm, call_arguments, share
        )
        self.nodes.append(replace(node, at=call.at, call=at))
        return len(self.nodes) - 1

    def _inputs(
        self, call: Call, options: dict[str, Arg], current: int, scope: Scope, *, keras: bool
    ) -> tuple[Call | None, tuple[int, ...]] | None:
        """Return the arguments of a layer's call, if the model text has them, and the nodes that it reads; None after a
        problem."""
        name = call.name
        if keras and "call" in options:
            if "to" in options:
                self.problems.add(options["to"].at, "'to' and 'call' are given both")
                return None
            call_arguments = self._call_arguments(options["call"], current, scope)
            return None if call_arguments is None else (call_arguments[0], tuple(call_arguments[1]))
        inputs = [current]
        if name == "residual" and "to" not in options:
            inputs.append(scope.start)
        if "to" in options and name != "cast":
            value = options["to"].value
            for word in value.values if isinstance(value, Items) else (value,):
                other = self._named(word, scope)
                if other is None:
                    return None
                inputs.append(other)
        if not keras and not self._reads_enough(call, len(inputs) - 1 if "to" in options or name != "residual" else 0):
            return None
        if name == "part" and self.nodes[current].operator in OPERATORS:
            self.problems.add(call.at, "part selects a tensor of a Keras layer with several outputs")
            return None
        return None, tuple(inputs)

    def _shared(
        self, call: Call, arg: Arg, options: tuple[Arg, ...], scope: Scope
    ) -> tuple[str, tuple[Arg, ...]] | None:
        """Return the name and options of the layer whose weights a call uses again (option ``share``); None after a
        mistake.
        """
        number = self._named(arg.value, scope, "share")
        if number is None:
            return None
        other = self.nodes[number]
        if other.operator != call.name or not other.name:
            self.problems.add(arg.at, f"share= must name a {call.name}, and this is a {other.operator}")
            return None
        for item in options:
            self.problems.add(item.at, f"{call.name} has its options where it is called first, not with share=")
        return other.share or other.name, other.options

    # -- what a layer reads ---------------------------------------------------------------------------------------

    def _operands(self, call: Call, scope: Scope, to: bool) -> tuple[str, tuple[str | Number, ...] | None]:
        """Return the type, parameters and numbers of a layer's operands; None after a mistake."""
        name, written = call.name, ""
        if name not in OPERATORS:
            return "", ()
        operator, operands = OPERATORS[name], list[str | Number]()
        for arg in (arg for arg in call.args if not arg.key):
            value = arg.value
            if isinstance(value, Word) and value.name in DTYPES:
                written = value.name
            elif isinstance(value, Word) and name == "cast":
                self.problems.add(
                    value.at, f"there is no type {value.name!r}{self.problems.suggestion(value.name, DTYPES)}"
                )
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
                operands.append(value.name)
                if value.name in scope.names:
                    self.problems.add(value.at, f"{value.name!r} is a layer, did you mean 'to={value.name}'?")
            elif isinstance(value, Number):
                operands.append(value)
            else:
                self.problems.add(value.at, f"an operand of {name} is a parameter's name, a number or a type")
                return "", None
        least, most = max(operator.least - to, 0), max(operator.most - (to and operator.kind in INSTEAD), 0)
        if name == "cast" and not written:
            self.problems.add(call.at, "cast needs a type, such as cast(float16)")
            return "", None
        if not least <= len(operands) <= most:
            expected = f"{least}" if least == most else f"{least} to {most}"
            if most == 0:
                self.problems.add(call.at, f"{name} takes no operand, got {len(operands)}")
            else:
                self.problems.add(
                    call.at, f"{name} takes {expected} parameter{'s' * (most > 1)} or numbers, got {len(operands)}"
                )
            return "", None
        return written, tuple(operands)

    def _reads_enough(self, call: Call, count: int) -> bool:
        """Return whether ``to`` names the number of layers that an operator reads."""
        least, most = OPERATORS[call.name].reads
        if count >= least and (most is None or count <= most):
            return True
        expected = {
            "concat": "the name of a layer or block, or a list of them",
            "scatter": "indices and values, such as to=[indices, updates]",
        }.get(OPERATORS[call.name].kind, "one layer or block")
        sentence = (
            f"{call.name} needs to=, {expected}"
            if count < least
            else f"{call.name} reads {expected} with to=, got {count}"
        )
        self.problems.add(call.at, sentence)
        return False

    def _named(self, value: object, scope: Scope, key: str = "to") -> int | None:
        """Return the number of the node that ``to`` names."""
        if not isinstance(value, Word):
            self.problems.add(getattr(value, "at", 0), f"{key}= must name a layer or a block")
            return None
        searched: Scope | None = scope
        names: list[str] = []
        while searched is not None:
            if value.name in searched.names:
                return searched.names[value.name]
            names += searched.names
            searched = searched.outer
        block = self.blocks.get(value.name)
        if block is not None and not block.is_macro and not block.is_name_only:
            return self._end(block, value.at)
        names += [block.name for block in self.blocks.values() if not block.is_macro]
        if value.name not in self.blocks.broken:
            suggestion = self.problems.suggestion(value.name, names)
            # The layer with this name may have a mistake itself, or be in an unreadable statement.
            follows = value.name in self.blocks.called or (bool(self.blocks.broken) and not suggestion)
            self.problems.add(value.at, f"nothing above is called {value.name!r}{suggestion}", derived=follows)
        return None

    def _call_arguments(self, arg: Arg, current: int, scope: Scope) -> tuple[Call, list[int]] | None:
        """Read the option ``call=with(...)``, the arguments of a layer's call. Return them with tensors in place of
        names, and the nodes that they read; None after a problem.
        """
        call = arg.value
        if not isinstance(call, Call) or call.name != "with":
            self.problems.add(arg.value.at, "call= takes the arguments of the call, such as call=with(it, mask=other)")
            return None
        inputs, before = [current], len(self.problems)

        def tensors(value: Value) -> Value:
            if isinstance(value, Items):
                return Items(tuple(map(tensors, value.values)), value.at)
            if isinstance(value, Call):
                return Call(value.name, tuple(Arg(arg.key, tensors(arg.value), arg.at) for arg in value.args), value.at)
            if not isinstance(value, Word) or value.name in PLAIN:
                return value
            node = current if value.name == IT else self._named(value, scope, "call")
            if node is None:
                return value
            if node not in inputs:
                inputs.append(node)
            return Tensor(value.name, inputs.index(node), value.at)

        arguments = tensors(call)
        if not isinstance(arguments, Call) or len(self.problems) > before:
            return None
        if not any(isinstance(tensor, Tensor) and tensor.index == 0 for tensor in walk(arguments)):
            self.problems.add(call.at, f"the layer's input is not used; its name in with() is {IT!r}")
            return None
        return arguments, inputs


def _sizes(items: Items) -> bool:
    return all(
        (isinstance(item, Number) and isinstance(item.value, int)) or item == Word("none", 0) for item in items.values
    )


def _is_number(statement: object) -> bool:
    items: Any = getattr(statement, "items", ())
    return bool(items) and isinstance(items[0][0].value, Number)
