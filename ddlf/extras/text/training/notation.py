"""Represents a model text in programs, as the ``self.model`` of an app or on its own.

Keras is imported when the model is built.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ddlf.data.app_data import has_data
from ddlf.errors import AppError, DatasetError, NotationError
from ddlf.events import Decided, Warned
from ddlf.extras import OPTIONAL_SETTINGS, check_settings, hooks
from ddlf.extras.text.language.graph import ModelOutput, inputs_of
from ddlf.extras.text.language.model import read, statements
from ddlf.extras.text.language.printer import changed, spelled
from ddlf.extras.text.language.problems import Problems
from ddlf.extras.text.language.values import Call, String, Value
from ddlf.extras.text.training import text_bytes
from ddlf.extras.text.training.block import (
    ALIASES,
    IN_BRACKETS,
    check_train,
    clips,
    has_own_rates,
    ignored_of,
    is_none,
    read_key,
)
from ddlf.extras.text.training.data import arrays_by_name, check_rows, check_shapes, held_out
from ddlf.extras.text.training.decisions import (
    OF_RUNS,
    Decision,
    OutputStatistics,
    decide,
    last_activation,
    learning_task,
    mismatch,
    outputs_of,
    values_by_name,
)
from ddlf.extras.text.training.text_bytes import WEIGHTS, place_of, text_of
from ddlf.training.context import App
from ddlf.training.registry import DEFAULTS, MODE, SETTINGS
from ddlf.training.slot.optimizers import followers

SET_RATES = ("LearningRateScheduler", "ReduceLROnPlateau")
"""Keras callbacks that need a settable learning rate."""


def load_notation(path: str | Path) -> Notation:
    """Load a model text, a model written in DDLF's notation, from a file.

    ``create_model`` can set ``self.model`` to the result. A worker receives the master's text, and the data decides
    open keys. Without an app, call its methods ``run``, ``test`` and ``train``.

    Args:
        path: The path of the text, from the current folder or beside the script; or a ``.safetensors`` file, whose
            weights the model starts with.

    Raises:
        NotationError: The file cannot be read, or the text has mistakes; the error lists them.
    """
    if not str(path).endswith(WEIGHTS) or text_bytes.ask is not None:
        return Notation(text_of(path), str(path))
    from ddlf.extras.text.conversion.weights import load

    text, tensors = load(place_of(path))
    result = Notation(text, str(path))
    result.tensors = tensors
    return result


class Notation:
    """A model text with the decisions about its training. It can be used like the Keras model that it describes.

    All other attributes are those of the Keras model, which is built on first use.

    Args:
        text: The text of the model.
        file: The name of the file, for errors.
        values: Values that replace those of the text, by block and key.
        decisions: The values among them that rules decided.

    Attributes:
        parsed: The model in the text.
        train_block: The block ``train`` of the text.
        settings: The values of settings of a run by name, written or decided.
        inputs: The shape of each input, by name.
        outputs: The shape of each output, by name.
        layer_positions: After the model is built: the character offset of each layer in the text, by the layer's name.
        tensors: Weights to start with, by name; None to draw them.

    Raises:
        NotationError: The text has mistakes.
    """

    def __init__(
        self,
        text: str | bytes,
        file: str = "model.nnm",
        values: Mapping[tuple[str, str], str] | None = None,
        decisions: tuple[Decision, ...] = (),
    ) -> None:
        self.parsed = read(text, file)
        self.file, self.values, self.decisions = file, dict(values or {}), decisions
        self._problems = Problems(self.parsed.text, file)
        self.train_block = check_train(self.parsed)
        blocks = [read_key(key, value, f"-p {key}") for (block, key), value in self.values.items() if block == "train"]
        self._key_values = {key: value for item in blocks for key, value in item.key_values.items()}
        self.settings = self.train_block.settings | {
            name: first for item in blocks for name, first in item.settings.items()
        }
        self._model: Any = None
        self.layer_positions: dict[str, int] = {}
        self._trained: Any = None  # the compiled wrapper around the model, if there is one
        self._by_text = False  # whether the text compiled it, not a program
        self.tensors: dict[str, Any] | None = None
        graph = self.parsed.graph
        self.inputs = {node.name: tuple(node.shape or ()) for node in inputs_of(graph)}
        self.outputs = {
            head.name: tuple(head.declared_shape or graph.nodes[head.node].shape or ()) for head in graph.heads
        }

    def __reduce__(self) -> Any:
        return Notation, (self.parsed.text, self.file, self.values, self.decisions)

    def __repr__(self) -> str:
        return f"Notation({self.file!r}: {', '.join(self.inputs)} -> {', '.join(self.outputs)})"

    # -- what holds ---------------------------------------------------------------------------------------------------

    @property
    def text(self) -> str:
        """Return the model text with all decisions. A run of this text decides nothing."""
        return changed(self.parsed.text, self.values) if self.values else self.parsed.text

    @property
    def digest(self) -> str:
        """Return a hash of layers, losses and training keys, which determine the result's bits.

        It has 16 hex digits, and does not depend on settings of the run.
        """
        key_values = {key: value for key, value in self._all_key_values().items() if key != "data"}
        blocks = changed(
            self.parsed.text,
            {key_path: value for key_path, value in self.values.items() if key_path[0] != "train"},
            without="train",
        )
        return hashlib.sha256(
            f"{blocks}\n{sorted((key, spelled(value)) for key, value in key_values.items())!r}".encode()
        ).hexdigest()[:16]

    def with_values(self, values: Mapping[tuple[str, str], str]) -> Notation:
        """Return a copy of the model text in which these values, by block and key, replace or add to its own.

        Raises:
            NotationError: A value is invalid.
        """
        values = {**self.values, **values}
        optimizer = self.key_value("optimizer")
        if isinstance(optimizer, Call) and ("train", "optimizer") not in values:
            dropped = [key for key, names in IN_BRACKETS.items() if ("train", key) in values for key in names]
            remaining = tuple(arg for arg in optimizer.args if arg.key not in dropped)
            if remaining != optimizer.args:  # otherwise keep the text's value with its position
                values["train", "optimizer"] = spelled(replace(optimizer, args=remaining))
        return Notation(self.parsed.text, self.file, values, self.decisions)

    def key_value(self, key: str) -> Value | None:
        """Return the value of a key of the block ``train``; None without the key."""
        return self._key_values.get(key, self.train_block.key_values.get(key))

    def _all_key_values(self) -> dict[str, Value]:
        return {**self.train_block.key_values, **self._key_values}

    @property
    def data(self) -> str | None:
        """Return the name of the data set or file that the model text trains on; None if it names none."""
        value = self.key_value("data")
        return None if value is None else value.value if isinstance(value, String) else str(getattr(value, "name", ""))

    @property
    def loss(self) -> str:
        """Return the loss of all outputs without their own loss in the text; empty without one."""
        return str(getattr(self.key_value("loss"), "name", ""))

    @property
    def written(self) -> frozenset[tuple[str, str]]:
        """Return the block and key of each statement that the user has written, which rules must not decide."""
        _, parsed, _ = statements(self.parsed.text, self.file)
        result = {
            (statement.block.name, statement.property.name) for statement in parsed.statements
        } | self.values.keys()
        optimizer, clipping = self.key_value("optimizer"), self.key_value("clipping")
        if clips(optimizer):
            result |= {("train", "clipping"), ("train", "clip")}
        if clipping is not None and not is_none(clipping):
            result.add(("train", "clip"))
        if has_own_rates(optimizer):
            result.add(("train", "schedule"))
        return frozenset(result)

    @property
    def path(self) -> Path:
        """Return the path of the file, from the current folder or beside the script."""
        return Path(place_of(self.file))

    def statement_positions(self) -> dict[tuple[str, str], int]:
        """Return the position of each statement, by block and key.

        A setting of a run also has its full name as a key.
        """
        _, parsed, _ = statements(self.parsed.text, self.file)
        positions = {(statement.block.name, statement.property.name): statement.at for statement in parsed.statements}
        long_names = {
            ("train", ALIASES.get(key, key)): at for (block, key), at in positions.items() if block == "train"
        }
        return positions | long_names

    def line_of(self, at: int) -> int:
        """Return the line, from 1, of a character in the model text."""
        return self._problems.line_and_column(at)[0]

    def position_of(self, key: str) -> str:
        """Return file, line and column of a key of the block ``train``, for errors."""
        if key not in self._key_values and key in self.train_block.at:
            line, column = self._problems.line_and_column(self.train_block.at[key])
            return f"{self.file}:{line}:{column}: train:{key}"
        return f"{self.file}: train:{key}"

    # -- deciding -----------------------------------------------------------------------------------------------------

    def settled(
        self,
        x: Any,
        y: Any,
        *,
        validation: bool,
        weighted: bool = False,
        fixed_settings: Collection[str] = (),
        trains: bool = True,
    ) -> Notation:
        """Return a copy of the model text with a decision for each training key that the text leaves open.

        Args:
            x: The training inputs in a structure that Keras accepts; None if they are not in memory.
            y: The training labels in a structure that Keras accepts; None if they are not in memory.
            validation: Whether there is validation data.
            weighted: Whether samples have weights.
            fixed_settings: The settings of a run that rules must not decide.
            trains: Whether the model is trained, not only tested.

        An existing Keras model is kept. Keys that would change it are not decided.

        Raises:
            AppError: The labels do not fit the model, or a key cannot be decided.
            DatasetError: Samples have another shape than an input.
            NotationError: A key has no effect without validation data.
        """
        if trains and not validation and self.patience is not None:
            raise NotationError(
                f"{self.position_of('patience')} has no effect without validation data",
                hint="write train:validation 0.2, or give x_val and y_val; else leave patience out",
            )
        check_shapes(values_by_name({} if x is None else x, list(self.inputs)), self.inputs, self.file)
        if self.tensors is not None:
            _ = self.keras
        task = learning_task(
            *(self.parsed, x, y),
            parameters=self.parsed.graph.parameters or 0,
            validation=validation,
            weighted=weighted,
            losses=self._losses(),
            ignore=ignored_of(self._all_key_values()),
        )
        existing = ["scaling", "initial"] if self._model is not None else []
        written = self.written | {("train", key) for key in (*existing, *fixed_settings)}
        try:
            decisions = tuple(decide(task, written))
        except ValueError as error:
            raise AppError(f"{self.file} has no loss for an output: {error}") from None
        settled = Notation(
            self.parsed.text,
            self.file,
            self.values | {(decision.block, decision.key): decision.value for decision in decisions},
            self.decisions + decisions,
        )
        settled._check(task.outputs)
        if self._model is not None:
            settled._model, self._model.notation, settled.layer_positions = self._model, settled, self.layer_positions
        return settled

    def _check(self, outputs: Sequence[OutputStatistics]) -> None:
        """Refuse losses that cannot compare labels with outputs."""
        for head, output in zip(self.parsed.graph.heads, outputs, strict=True):
            loss, _ = self.loss_of(head)
            if output.labels is not None and (reason := mismatch(output, loss)):
                raise AppError(f"{self.file}: the output {head.name!r} has the loss {loss}: {reason}")

    def _losses(self) -> dict[str, str]:
        return {head.name: self.loss_of(head)[0] for head in self.parsed.graph.heads}

    def loss_of(self, head: ModelOutput) -> tuple[str, dict[str, float]]:
        """Return the name of an output's loss, and the loss's factors."""
        factors_given = {key: self.values.get((head.block, key)) for key in ("delta", "gamma", "alpha")}
        factors = dict(head.factors) | {key: float(value) for key, value in factors_given.items() if value is not None}
        return head.loss or self.values.get((head.block, "loss"), "") or self.loss, factors

    # -- the model of Keras -------------------------------------------------------------------------------------------

    @property
    def keras(self) -> Any:
        """Return the Keras model, built on first use, and compiled after keys were decided."""
        if self._model is None:
            from ddlf.extras.text.conversion.build import build, initial_of, scaling_of

            scaling = scaling_of(self.key_value("scaling"), list(self.inputs))
            self._model = build(self.parsed, scaling, initial_of(self.key_value("initial")), self.layer_positions)
            self._model.notation = self
            if self.tensors is not None:
                from ddlf.extras.text.conversion.weights import fill

                fill(self._model, self.tensors, Path(self.file))
        return self._model

    def compiled(self) -> Any:
        """Return the Keras model, compiled with the losses and training keys of the text.

        Raises:
            NotationError: Keras refuses a value.
        """
        from ddlf.extras.text.training.compile_model import compile

        model, graph = self.keras, self.parsed.graph
        heads = [(head, *self.loss_of(head), last_activation(graph, head.node)) for head in graph.heads]
        result = compile(model, heads, self._all_key_values(), self.position_of)
        self._by_text = True
        if result is not model:
            self._trained, result.notation = result, self
        return result

    @property
    def patience(self) -> int | None:
        """Return the number of epochs without progress that ends training, or None."""
        value = self.key_value("patience")
        return getattr(value, "value", None)

    def ready(self, app: App) -> Any:
        """Return the Keras model that an app trains, compiled with the losses and training keys of the text and the
        decisions about the app's data. A compiled model stays as it is.

        Args:
            app: The user's ``IApp``, with its data.
        """
        if self._model is not None and self._model.compiled:
            return self._model
        x, y, w = (getattr(app, name, None) for name in ("x_train", "y_train", "w_train"))
        # If a program loads the text itself, the program has the settings.
        fixed_settings = not_open(app) if app.notation is not None else OF_RUNS
        settled = self.settled(
            x, y, validation=has_data(app, "val"), weighted=w is not None, fixed_settings=fixed_settings
        )
        if app.notation is not None:
            take_decided(app, settled)
        model = settled.compiled()
        if not hasattr(app, "worker"):
            settled._announce(app)
            app.callbacks = [*app.callbacks, *settled._early_stopping()]
        return model

    def _announce(self, app: App) -> None:
        """Emit the decisions, and a warning for each key of the model text without an effect in this app."""
        for decision in self.decisions:
            key = f"{decision.block}:{decision.key}"
            app.run_context.emit(Decided(key=key, value=decision.value, rule=decision.rule, why=decision.reason))

        def warn(key: str, sentence: str) -> None:
            app.run_context.emit(Warned(about="model", why=f"train:{key} of {self.file} has no effect{sentence}"))

        if not getattr(app, "takes_data", False):
            for key in ("data", "validation"):
                if self.key_value(key) is not None:
                    warn(key, ": load_dataset says what the data is")
        if app.notation is not None:
            return
        for name, value in self.train_block.settings.items():
            if SETTINGS[name].check(name, value) != SETTINGS[name].check(name, getattr(app, name)):
                warn(name, f" here: write notation = {self.file!r} in the class, instead of create_model")

    def _early_stopping(self) -> list[Any]:
        """Return the callback that ends training after ``patience`` epochs without progress, if the model text has
        it.
        """
        if self.patience is None:
            return []
        import keras

        return [keras.callbacks.EarlyStopping(patience=self.patience, restore_best_weights=True)]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        return getattr(self.keras, name)

    # -- by itself ----------------------------------------------------------------------------------------------------

    def run(self, inputs: Any) -> Any:
        """Return the output of the model: an array, or a dict of arrays by name for several outputs.

        Args:
            inputs: An array with a row for each sample, or a dict by the names of the inputs.

        Raises:
            NotationError: No input has such a name.
            DatasetError: An array does not fit its input.
        """
        return self.keras.predict(self._checked_arrays(inputs)[0], verbose=0)

    def test(self, inputs: Any, outputs: Any) -> dict[str, float]:
        """Evaluate the model on these arrays, and return its loss and metrics by name.

        Args:
            inputs: An array with a row for each sample, or a dict by the names of the inputs.
            outputs: The expected outputs: an array, or a dict by the names of the outputs.

        Raises:
            NotationError: No input or output has such a name.
            DatasetError: An array does not fit its input or output.
            AppError: The labels do not fit an output.
        """
        x, y = self._checked_arrays(inputs, outputs)
        model = self.be_compiled(x, y, validation=False, trains=False)
        return {name: float(value) for name, value in model.evaluate(x, y, verbose=0, return_dict=True).items()}

    def train(
        self,
        inputs: Any,
        outputs: Any,
        *,
        validation: tuple[Any, Any] | None = None,
        epochs: int | None = None,
        batch_size: int | None = None,
        seed: int | None = None,
    ) -> dict[str, list[float]]:
        """Train on this machine with Keras's ``fit``. The arrays decide the open keys; ``decisions`` lists the results.

        Args:
            inputs: An array with a row for each sample, or a dict by the names of the inputs.
            outputs: The expected outputs: an array, or a dict by the names of the outputs.
            validation: Inputs and outputs to test after each epoch.
            epochs: The number of epochs; by default that of the model text, else 10.
            batch_size: By default that of the text, else 32.
            seed: The seed of first weights and order; by default that of the text, else 0. It has no effect on an existing model.

        Returns:
            A dict of lists. Loss and each metric have a list with a value for each epoch.

        Raises:
            NotationError: No input or output has such a name.
            DatasetError: An array does not fit its input or output.
            AppError: The labels do not fit an output, or a key of the text has no effect on these arrays.
        """
        import keras

        x, y = self._checked_arrays(inputs, outputs)
        if validation is not None:
            if not (isinstance(validation, tuple | list) and len(validation) == 2):
                raise DatasetError(
                    "validation must be a pair of inputs and outputs", hint="give both: validation=(inputs, outputs)"
                )
            validation = self._checked_arrays(*validation)
        if fraction := getattr(self.key_value("validation"), "value", 0.0):
            if validation is not None:
                raise DatasetError(
                    f"{self.position_of('validation')} would hold out some of the samples, and validation is given as well",
                    hint="leave one of both out",
                )
            every = max(round(1 / fraction), 2)
            (x, x_val), (y, y_val) = held_out(x, every), held_out(y, every)  # like a run
            validation = (x_val, y_val)

        def setting(name: str, argument: Any = None) -> Any:
            value = self.settings.get(name, DEFAULTS[name]) if argument is None else argument
            return SETTINGS[name].check(name, value)

        if self._model is None:
            keras.utils.set_random_seed(setting("seed", seed))
        model = self.be_compiled(x, y, validation=validation is not None)
        epochs, batch_size = setting("master_epochs", epochs), setting("batch_size", batch_size)
        app = SimpleNamespace(**{name: setting(name) for name in OPTIONAL_SETTINGS if name in SETTINGS}, notation=None)
        check_settings(app, DEFAULTS)
        for finish in hooks("ready_model"):
            finish(app, model)
        if schedules := followers(model.optimizer):
            first = next(iter(x.values())) if isinstance(x, dict) else x
            steps = int(model.optimizer.iterations)  # a schedule counts from the first step of all
            for schedule in schedules:
                schedule.plan(steps + epochs * math.ceil(len(first) / batch_size), epochs)
            model.train_function = None  # an earlier plan may be compiled into it
        history = model.fit(
            x,
            y,
            batch_size=batch_size,
            epochs=epochs,
            validation_data=validation,
            callbacks=self._early_stopping() if validation is not None else [],
            class_weight=setting("class_weight"),
            verbose=0,
        ).history
        return {name: [float(value) for value in values] for name, values in history.items()}

    def be_compiled(self, x: Any, y: Any, *, validation: bool, trains: bool = True) -> Any:
        """Return the compiled Keras model to train. The first call decides the training keys that the model text leaves
        open.
        """
        if self._trained is None and (self._model is None or not self._model.compiled):
            settled = self.settled(x, y, validation=validation, trains=trains)
            settled.compiled()
            vars(self).update(vars(settled))
        return self._model if self._trained is None else self._trained

    def _checked_arrays(self, inputs: Any, *outputs: Any) -> tuple[Any, Any]:
        """Return the user's inputs, and outputs if given, in the structure that Keras accepts, after checking them."""
        texts = [node.name for node in inputs_of(self.parsed.graph) if node.dtype == "string"]
        x = arrays_by_name(inputs, self.inputs, "input", self.file, texts)
        y = arrays_by_name(outputs[0], self.outputs, "output", self.file) if outputs else {}
        check_shapes(x, self.inputs, self.file)
        check_rows(x, y)
        if y and self._by_text:
            self._check(outputs_of(self.parsed, y, self._losses(), ignored_of(self._all_key_values())))
        return tuple(next(iter(item.values())) if len(item) == 1 else item for item in (x, y))  # type: ignore[return-value]


async def check_app(app: App) -> None:
    """Read the model text that an app names in its attribute ``notation``, before the run starts."""
    if app.notation is not None:
        take_notation(app)


def take_notation(app: App) -> None:
    """Read the model text that an app names in its attribute ``notation``. Apply its settings to the app, except the
    ones that the app sets itself.

    Raises:
        NotationError: The text has mistakes.
        AppError: ``notation`` is not the path of a text.
    """
    notation = app.notation
    if isinstance(notation, str | Path):
        notation = app.notation = load_notation(notation)
    if not isinstance(notation, Notation):
        raise AppError(
            f"notation must be the file of a text, or what ddlf.load_notation gives, got {type(notation).__name__}"
        )
    for name, value in notation.train_block.settings.items():
        if not _sets(app, name):
            setattr(app, name, value)


def _sets(app: App, name: str) -> bool:
    """Return whether an app sets a setting itself, so that the text does not override it."""
    return name in vars(app) or any(name in vars(kind) for kind in type(app).__mro__ if kind.__module__ != "ddlf.app")


def not_open(app: App) -> list[str]:
    """Return the settings that rules must not decide for an app: those it sets, and those in conflict with them."""
    names = [name for name in OF_RUNS if _sets(app, name)]
    check = SETTINGS["rate_decay"].check
    if check("rate_decay", app.rate_decay) != check("rate_decay", "never"):
        names.append("schedule")
    if any(kind.__name__ in SET_RATES for callback in app.callbacks for kind in type(callback).__mro__):
        names.append("schedule")
    if not MODE.kind(app.mode).keeps_optimizer:
        names.append("clip")  # rolling clipping uses the norms of earlier steps
    return names


def take_decided(app: App, notation: Notation) -> None:
    """Set the settings of a run that the rules decided as attributes of the app."""
    for decision in notation.decisions:
        if decision.block == "train" and decision.key in OF_RUNS:
            setattr(app, decision.key, notation.settings[decision.key])
