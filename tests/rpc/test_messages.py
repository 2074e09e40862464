"""Tests of errors as data: an error arrives with its type, text, causes and lines, and can be caught by its class."""

import asyncio
import copy
import json
import linecache
import pickle
import sys
import threading
import traceback
import types

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddlf import errors
from ddlf.errors import (
    ConfigError,
    DDLFError,
    ProtocolError,
    RemoteError,
    RequestTimeout,
    WorkerLost,
    tracebacks,
)
from ddlf.rpc.messages import (
    MAX_CHAIN,
    MAX_ERROR_TEXT,
    Request,
    Response,
    describe,
    dumps,
    loads,
    read_arguments,
    rebuild,
)
from tests.patience import PATIENCE_S


def arrive(error: BaseException) -> DDLFError:
    """Return the error that the master raises after a worker has raised ``error``."""
    return rebuild(loads(dumps(describe(error))), worker="worker 2 (10.0.0.7:9000)")


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


def fail_in_two_steps():
    try:
        {}["weights"]
    except KeyError as error:
        raise ValueError("no model here") from error


# --- Text and causes --------------------------------------------------------------------------------------------------


def test_the_text_has_worker_type_message_file_line_and_function_of_the_user():
    with pytest.raises(ValueError, match="no model") as caught:
        fail_in_two_steps()
    text = str(arrive(caught.value))
    line = fail_in_two_steps.__code__.co_firstlineno + 4
    assert text.startswith("worker 2 (10.0.0.7:9000): ValueError: no model here\n\n")
    assert (
        f'File "{__file__}", line {line}, in fail_in_two_steps\n    raise ValueError("no model here") from error'
        in text
    )
    assert text.endswith("ValueError: no model here")


def test_causes_arrive_in_the_order_that_python_prints_them():
    with pytest.raises(ValueError, match="no model") as caught:
        fail_in_two_steps()
    arrived = arrive(caught.value)
    expected = "The above exception was the direct cause of the following exception:"
    before, after = arrived.remote_traceback.split(expected)
    assert before.rstrip().endswith("KeyError: 'weights'")
    assert '{}["weights"]' in before
    assert "no model here" in after


def test_the_handled_error_arrives_unless_it_was_suppressed():
    error = raised(TypeError("second"))
    error.__context__ = raised(ValueError("first"))
    link = "During handling of the above exception, another exception occurred:"
    assert link in arrive(error).remote_traceback
    error.__suppress_context__ = True
    assert link not in arrive(error).remote_traceback


def test_every_member_of_a_group_arrives_with_its_own_lines():
    async def fail(number):
        raise ValueError(f"number {number}")

    async def method():
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(fail(1))
            tasks.create_task(fail(2))

    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(method())
    arrived = arrive(caught.value)
    assert type(arrived) is RemoteError
    text = arrived.remote_traceback
    assert text.index("ValueError: number 1") < text.index("ValueError: number 2") < text.index("ExceptionGroup:")
    assert text.count("in fail\n") == 2


def test_an_error_of_a_second_worker_keeps_its_traceback():
    inner = rebuild(describe(raised(ValueError("deep"))), worker="worker 9")
    text = str(arrive(raised(inner)))
    assert "worker 9: ValueError: deep" in text
    before, after = text.split("worker 9: ValueError: deep", 1)
    assert "in raised" not in before
    assert after.count("in raised") >= 2, "on the further worker, and on this one"


def test_frames_of_ddlf_before_the_users_first_are_left_out(monkeypatch):
    monkeypatch.setattr(tracebacks, "HERE", (__file__.removesuffix("test_messages.py"),))
    error = raised(ValueError("mine"))
    assert describe(error)["chain"][0][2] == []
    assert str(arrive(error)) == "worker 2 (10.0.0.7:9000): ValueError: mine"


def test_missing_source_lines_are_read_from_the_file_of_the_master():
    facts = describe(raised(ValueError("x")))
    line = facts["chain"][0][2][0][3]
    assert line == "raise error"
    facts["chain"][0][2][0][3] = ""
    assert "    raise error" in str(rebuild(facts))


def test_source_lines_are_read_from_regular_files_only(monkeypatch):
    facts = describe(raised(ValueError("x")))
    facts["chain"][0][2][0][:] = ["/dev/zero", 1, "f", ""]
    read = threading.Thread(target=lambda: str(rebuild(facts)), daemon=True)
    read.start()
    read.join(PATIENCE_S)
    assert not read.is_alive()


def test_a_deep_recursion_arrives_with_its_last_hundred_frames():
    def down(n):
        return down(n + 1)

    with pytest.raises(RecursionError) as caught:
        down(0)
    facts = describe(caught.value)
    assert len(facts["chain"][0][2]) == 100
    assert isinstance(arrive(caught.value), RecursionError)


def test_long_and_cyclic_chains_of_errors_are_cut():
    error = ValueError("0")
    for number in range(1, 100):
        link = ValueError(str(number))
        link.__cause__ = error
        error = link
    assert len(describe(error)["chain"]) == MAX_CHAIN
    first, second = ValueError("one"), ValueError("two")
    first.__cause__, second.__cause__ = second, first
    assert [entry[1] for entry in describe(first)["chain"]] == ["one", "two"]


def test_the_description_of_an_error_is_plain_data():
    with pytest.raises(ValueError, match="no model") as caught:
        fail_in_two_steps()
    facts = describe(caught.value)
    assert json.loads(json.dumps(facts)) == facts


# --- Awkward exceptions ----------------------------------------------------------------------------------------------


class Silent(Exception):
    def __str__(self):
        raise RuntimeError("no")


class TwoArguments(Exception):
    def __init__(self, code, reason):
        super().__init__(f"{code}: {reason}")
        self.callback = lambda: threading.Lock()


class NoText(Exception):
    def __str__(self):
        return 5  # type: ignore[return-value]


def test_awkward_exceptions_arrive_like_any_other():
    assert arrive(raised(Silent())).remote_message == "<its text is unavailable: RuntimeError>"
    assert arrive(raised(NoText())).remote_message == "<its text is unavailable: TypeError>"
    arrived = arrive(raised(TwoArguments(5, "why")))
    assert isinstance(arrived, TwoArguments)
    assert not hasattr(arrived, "callback"), "a function is not data"
    assert (arrived.type_name, arrived.remote_message) == (f"{__name__}.TwoArguments", "5: why")
    assert arrive(raised(ValueError("\ud800"))).remote_message == "\ud800"


def test_a_message_of_50_mb_is_cut():
    arrived = arrive(raised(ValueError("x" * 50_000_000)))
    assert arrived.remote_message == "x" * MAX_ERROR_TEXT + " [cut]"
    assert len(dumps(describe(arrived))[0]) < 200_000


# --- Catching by class -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        *(ValueError("v"), TypeError("t"), KeyError("k"), IndexError("i"), ZeroDivisionError("z"), RuntimeError("r")),
        *(AttributeError("a"), NotImplementedError("n"), AssertionError("a"), MemoryError("m"), RecursionError("r")),
        *(OSError(2, "o"), FileNotFoundError("f"), TimeoutError("t"), ConnectionResetError("c"), ImportError("i")),
        *(
            ModuleNotFoundError("m"),
            SyntaxError("s"),
            OverflowError("o"),
            EOFError("e"),
            UserWarning("w"),
            Exception("e"),
        ),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_builtin_exception_can_be_caught_as_itself(error):
    arrived = arrive(raised(error))
    assert isinstance(arrived, type(error))
    assert isinstance(arrived, RemoteError)
    assert arrived.type_name == type(error).__name__
    with pytest.raises(type(error)):
        raise arrived
    assert traceback.format_exception(arrived)


def test_a_key_error_is_printed_as_a_sentence_and_not_in_quotes():
    assert str(arrive(KeyError("weights"))) == "worker 2 (10.0.0.7:9000): KeyError: 'weights'"


def test_the_text_of_a_lookup_error_occurs_once():
    error = LookupError("no method 'f' here; it has none")
    assert str(arrive(error)).count("no method 'f' here") == 1


def test_a_builtin_with_special_arguments_can_be_caught_as_itself():
    error = UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")
    arrived = arrive(raised(error))
    assert isinstance(arrived, RemoteError)
    assert isinstance(arrived, UnicodeDecodeError)
    assert arrived.remote_message == "'utf-8' codec can't decode byte 0xff in position 0: invalid start byte"


@pytest.mark.parametrize("error", [StopIteration("s"), StopAsyncIteration("s"), SystemExit(3), KeyboardInterrupt()])
def test_exceptions_that_control_the_interpreter_arrive_as_plain_remote_errors(error):
    async def call():
        raise arrive(raised(error))

    with pytest.raises(RemoteError) as caught:
        asyncio.run(call())
    assert type(caught.value) is RemoteError
    assert caught.value.type_name == type(error).__name__


def test_errors_of_ddlf_itself_arrive_as_themselves_with_their_advice():
    arrived = arrive(ConfigError("bad", hint="do this"))
    assert type(arrived) is ConfigError
    assert str(arrived) == "worker 2 (10.0.0.7:9000): bad; do this"
    for kind in (RequestTimeout, WorkerLost):
        for may_have_run in (True, False):
            assert arrive(kind("late", may_have_run=may_have_run)).may_have_run is may_have_run


def test_every_error_class_of_ddlf_arrives_as_itself():
    for name in errors.__all__:
        kind = getattr(errors, name)
        if kind is not RemoteError:
            assert type(arrive(kind("text"))) is kind


def test_an_error_of_ddlf_from_inside_a_users_method_arrives_with_lines_and_advice():
    arrived = arrive(raised(ConfigError("bad", hint="do this")))
    assert type(arrived) is RemoteError
    assert str(arrived).startswith("worker 2 (10.0.0.7:9000): ddlf.errors.ConfigError: bad; do this\n\nTraceback on")


def test_a_name_from_the_worker_only_resolves_to_exceptions():
    for name in ("eval", "int", "print", "ddlf.errors.Any", "ddlf.errors.annotations", "ddlf.errors.__doc__", ""):
        assert type(rebuild({"chain": [[name, "text", [], ""]]})) is RemoteError


@pytest.mark.parametrize(
    "facts",
    [
        *({}, [], None, 5, {"chain": []}, {"chain": [[]]}, {"chain": [["ValueError"]]}, {"chain": None}),
        *({"chain": [[5, "text", [], ""]]}, {"chain": [["ValueError", "text", [[1, 2]], ""]]}),
        *({"chain": [["ValueError", "text", 7, ""]]}, {"chain": [["ValueError", "text", [[5, "x", None, ""]], ""]]}),
    ],
)
def test_invalid_error_data_still_gives_an_error(facts):
    assert isinstance(rebuild(facts, worker="worker 2"), ProtocolError | RemoteError)


# --- Errors of the user's own classes ---------------------------------------------------------------------------------


class BadBatch(ValueError):
    """An error class of the user. Data from a worker must not run its constructor or its ``__str__``."""

    constructed = 0

    def __new__(cls, *args, **kwargs):
        cls.constructed += 1
        return super().__new__(cls)

    def __init__(self, batch, *, where, message="text"):
        BadBatch.constructed += 1
        super().__init__(batch, where)
        self.batch, self.where, self.message, self.lock = batch, where, message, threading.Lock()

    def __str__(self):
        return f"batch {self.batch}"

    @property
    def worker_of(self):
        return self.where


class Nested:
    class Refused(BadBatch): ...


class Frozen(OSError, ValueError):
    __slots__ = ("x",)


def test_an_error_of_the_users_own_class_can_be_caught_as_itself_with_its_attributes():
    for kind in (BadBatch, Nested.Refused):
        error = raised(kind(7, where=("gpu", 1)))
        before = BadBatch.constructed
        arrived = arrive(error)
        assert BadBatch.constructed == before
        assert isinstance(arrived, kind)
        assert isinstance(arrived, RemoteError)
        assert arrived.type is kind
        assert (arrived.batch, arrived.where, arrived.args, arrived.worker_of) == (
            7,
            ("gpu", 1),
            (7, ("gpu", 1)),
            ("gpu", 1),
        )
        assert arrived.attributes == {"batch": 7, "where": ("gpu", 1), "message": "text"}
        assert str(arrived).startswith(f"worker 2 (10.0.0.7:9000): {__name__}.{kind.__qualname__}: batch 7\n")


@pytest.mark.parametrize(
    "error",
    [
        ValueError(),
        ValueError("no"),
        ValueError(""),
        ValueError(5),
        KeyError("k"),
        ValueError("a", "b"),
        BadBatch(1, where=""),
        type("Silent", (Exception,), {"__str__": lambda self: "a text"})(),
    ],
    ids=repr,
)
def test_arguments_of_an_error_arrive_unchanged(error):
    assert arrive(raised(error)).args == error.args


def test_a_class_is_looked_up_without_an_import_and_without_code_of_the_module(monkeypatch):
    class Lazy(types.ModuleType):
        def __getattr__(self, name):
            raise AssertionError("asked")

    monkeypatch.setitem(sys.modules, "lazy_module", Lazy("lazy_module"))
    for name in (
        "lazy_module.MyError",
        "this.Error",
        "xml.dom.minidom.Error",
        f"{__name__}.raised",
        f"{__name__}.gone.X",
    ):
        arrived = rebuild({"chain": [[name, "text", [], ""]]})
        assert type(arrived) is RemoteError
        assert arrived.type is None
    assert "this" not in sys.modules


def test_builtins_keep_their_special_attributes():
    arrived = arrive(raised(UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad")))
    assert arrived.type is UnicodeDecodeError
    assert (arrived.encoding, arrived.start, arrived.reason) == ("utf-8", 0, "bad")
    arrived = arrive(raised(Frozen(2, "no such file")))
    assert isinstance(arrived, OSError)
    assert (arrived.type, arrived.errno, arrived.strerror) == (Frozen, 2, "no such file")


def test_attributes_do_not_hide_attributes_of_the_error():
    error = ValueError("no")
    reserved = (
        "message",
        "hint",
        "worker",
        "type",
        "others",
        "exit_code",
        "join",
        "_text",
        "_base",
        "__class__",
        "args",
    )
    facts = describe(error) | {"attributes": dict.fromkeys(reserved, 5) | {"code": 404}}
    arrived = rebuild(facts, worker="worker 2")
    assert (arrived.code, arrived.attributes["hint"]) == (404, 5)
    assert str(arrived) == "worker 2: ValueError: no"
    assert (arrived.exit_code, arrived.type, arrived.others) == (1, ValueError, ())


def test_notes_arrive_and_large_attributes_do_not():
    error = ValueError("no")
    error.add_note("in file 3")
    error.table = list(range(100_000))
    arrived = arrive(raised(error))
    assert arrived.__notes__ == ["in file 3"]
    assert arrived.attributes == {}


@pytest.mark.parametrize(
    "facts",
    [{"attributes": 5}, {"attributes": {5: 5}}, {"args": 5}, {"notes": 5}, {"notes": [5]}, {"attributes": None}],
)
def test_invalid_attributes_of_an_error_are_a_protocol_error(facts):
    assert isinstance(rebuild(describe(ValueError("no")) | facts), ProtocolError)


def test_a_line_of_a_notebooks_cell_is_shown():
    cell = "<ipython-input-7>"
    linecache.cache[cell] = (10, None, ["1 / 0\n"], cell)
    facts = {"chain": [["ZeroDivisionError", "division by zero", [[cell, 1, "f", ""]], ""]]}
    assert "    1 / 0" in str(rebuild(facts))
    del linecache.cache[cell]


# --- Copies ------------------------------------------------------------------------------------------------------------


def samples():
    for name in errors.__all__:
        kind = getattr(errors, name)
        yield kind("E", "text", "lines") if kind is RemoteError else kind("text", hint="do this", worker="worker 1")
    yield errors.CheckpointCorrupt("text", file="f", expected="a", got="b")
    yield errors.ExecutorCrashed("text", signal="SIGKILL", stderr_tail="last")
    for error in (ValueError("v"), OSError(2, "o"), KeyError("k"), BadBatch(3, where=1), Nested.Refused(4, where=None)):
        yield arrive(raised(error))


@pytest.mark.parametrize("error", [*samples()], ids=lambda error: getattr(error, "type_name", type(error).__name__))
@pytest.mark.parametrize("copy_error", [copy.copy, copy.deepcopy, lambda error: pickle.loads(pickle.dumps(error))])
def test_every_error_can_be_copied_and_pickled(error, copy_error):
    error.may_have_run = False
    copied = copy_error(error)
    assert type(copied) is type(error)
    assert (str(copied), copied.args, vars(copied)) == (str(error), error.args, vars(error))
    if isinstance(error, OSError):
        assert copied.errno == error.errno


# --- Several workers ---------------------------------------------------------------------------------------------------


def several(*errors):
    first, *later = (rebuild(describe(error), worker=f"worker {number}") for number, error in enumerate(errors, 1))
    first.join(later, len(errors) + 1)
    return first


def test_equal_failures_are_reported_once():
    text = str(several(*(raised(ValueError("no")) for _ in range(3))))
    assert text.startswith("3 of 4 workers failed\nworker 1, worker 2, worker 3: ValueError: no\n\nTraceback")
    assert text.count("ValueError: no") == 2
    assert text.count("Traceback") == 1


def test_failures_on_the_same_line_have_one_traceback_and_a_text_each():
    text = str(several(*(raised(ValueError(f"file {number}")) for number in (1, 2))))
    assert text.startswith("2 of 3 workers failed\nworker 1: ValueError: file 1\nworker 2: ValueError: file 2\n\n")
    assert text.count("Traceback") == 1


def test_failures_of_several_kinds_are_all_reported_and_the_first_can_be_caught():
    joined = several(raised(KeyError("k")), WorkerLost("gone", hint="look"), ValueError("no"))
    assert isinstance(joined, KeyError)
    assert type(joined.others[0]) is WorkerLost
    assert joined.exit_code == WorkerLost.exit_code
    assert "worker 1: KeyError: 'k'\nworker 2: gone; look\nworker 3: ValueError: no\n\nTrace" in str(joined)
    assert str(pickle.loads(pickle.dumps(joined))) == str(joined)


def test_only_some_of_a_thousand_different_texts_are_reported():
    text = str(several(*(raised(ValueError(str(number))) for number in range(1000))))
    assert "and 992 other texts" in text
    assert len(text) < 2000


# --- Requests and responses ------------------------------------------------------------------------------------------


def test_the_arguments_of_a_request_are_a_list_and_a_dict_with_text_as_keys():
    assert read_arguments([[1], {"a": 2}]) == ([1], {"a": 2})
    for value in (None, [], [[]], [[], {}, {}], ([], {}), [(), {}], [[], []], [[], {1: 2}], {"a": 1}):
        with pytest.raises(ProtocolError, match=r"a request's value is \[arguments, keyword arguments\]"):
            read_arguments(value)


@given(st.lists(st.integers()), st.dictionaries(st.text(), st.integers()))
def test_a_request_takes_every_argument_a_method_can_have(args, kwargs):
    request = Request("run", *args, **kwargs)
    assert (request.command, request.args, request.kwargs) == ("run", tuple(args), kwargs)
    assert Request("run", command=1, self=2).kwargs == {"command": 1, "self": 2}


def test_the_text_of_a_request_stays_short():
    assert repr(Request("run", "train", batch_size=32)) == "Request('run', 'train', batch_size=32)"
    assert len(repr(Request("run", "x" * 10_000, a=list(range(9999))))) < 120


def test_a_response_is_unwrapped_to_its_result_or_its_error():
    assert Response(5).unwrap() == 5
    with pytest.raises(ValueError, match="bad"):
        Response(error=ValueError("bad")).unwrap()


def test_the_error_data_of_the_document_equals_the_sent_data(written_bytes):
    facts = {"chain": [["ValueError", "no", [["/app/train.py", 7, "step", "raise ValueError('no')"]], ""]], "hint": ""}
    assert loads([written_bytes["error-value"]]) == facts
    assert dumps(facts) == [written_bytes["error-value"]]
    arrived = rebuild(facts, worker="worker 1")
    assert isinstance(arrived, ValueError)
    assert "  File \"/app/train.py\", line 7, in step\n    raise ValueError('no')\nValueError: no" in str(arrived)
    assert describe(ValueError("no")) == {"chain": [["ValueError", "no", [], ""]], "hint": ""}


def test_the_error_of_a_missing_relative_path_names_the_folder_of_the_worker(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def error_of(path):
        try:
            open(path)  # noqa: SIM115
        except OSError as error:
            return rebuild(describe(error), worker="worker 2")

    assert f"relative paths start at {tmp_path}: copy the file there" in str(error_of("data/x.npz"))
    assert isinstance(error_of("data/x.npz"), FileNotFoundError)
    assert error_of(str(tmp_path / "x.npz")).hint == ""


class OfTensorFlow(Exception):
    """An error that resembles TensorFlow's: its message is read-only, and its constructor needs more than a text."""

    def __init__(self, node, message):
        super().__init__(node, message)
        self._message = message

    @property
    def message(self):
        return self._message

    @property
    def hint(self):
        raise RuntimeError("not here")


def test_an_error_whose_class_has_properties_of_the_same_names_arrives():
    arrived = arrive(raised(OfTensorFlow(None, "shapes differ")))
    assert isinstance(arrived, OfTensorFlow)
    assert isinstance(arrived, RemoteError)
    assert "shapes differ" in str(arrived)
    assert arrived.hint == ""
