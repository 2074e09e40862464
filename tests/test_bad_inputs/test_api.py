"""B39-B59: what wrong calls of the Python interface say, and that the cluster stays usable after each."""

import asyncio
import collections
import dataclasses
import decimal
import enum
import math
import pathlib
import re
import socket
import sys
import tempfile
import threading
import time

import numpy as np
import pytest

import ddlf
from ddlf.cluster.proxy import ProxyWorker
from ddlf.errors import (
    AppError,
    ConfigError,
    ConnectError,
    DDLFError,
    NotPicklable,
    RemoteError,
    ResultNotData,
    WorkerLost,
)
from ddlf.rpc import code
from tests.patience import PATIENCE_S
from tests.training.models import Blobs, Quick, app, small_model

pytestmark = pytest.mark.asyncio(loop_scope="session")


def echo(value):
    return value


def train(weights, epochs=1):
    return epochs


def is_usable(cluster):
    """A call that any working cluster answers."""
    return asyncio.wait_for(cluster.run_method(echo, value=1), PATIENCE_S)


# -- B39-B42: connecting ------------------------------------------------------------------------------------------------


async def test_B39_workers_that_cannot_be_reached_are_a_table_after_one_timeout_for_all(token_file, monkeypatch):
    silent = [socket.create_server(("127.0.0.1", 0)) for _ in range(40)]
    ports = [9, *(sock.getsockname()[1] for sock in silent)]
    begin = time.monotonic()
    monkeypatch.setattr("ddlf.rpc.dial.HANDSHAKE_TIMEOUT_S", 1.0)
    with pytest.raises(ConnectError) as refused:
        await ddlf.Cluster(["127.0.0.1"] * 41, ports, token_file=token_file, connect_timeout_s=1.0).connect()
    assert time.monotonic() - begin < 20 * 1.0
    head, *rows = str(refused.value).splitlines()
    assert head == "41 of 41 workers could not be reached:"
    assert [row.split()[1] for row in rows] == [f"127.0.0.1:{port}" for port in ports]
    assert "connection refused" in rows[0]
    assert refused.value.exit_code == 3
    for sock in silent:
        sock.close()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        pytest.param(
            ("localhost",),
            "hosts must be a list of names or addresses, got the text 'localhost'; write ['localhost']",
            id="B40",
        ),
        pytest.param(([],), "a cluster needs at least one worker; name one, or use Cluster.local(2)", id="B40 empty"),
        pytest.param((["a", "b"], [1]), "2 hosts but 1 ports", id="B40 lengths"),
        pytest.param((["a"], [99999]), "a port must be 1-65535, got 99999", id="B40 port"),
        pytest.param(([7],), "a host must be text, got 7", id="B40 host"),
    ],
)
async def test_B40_addresses_that_cannot_be_are_refused_at_once(arguments, sentence):
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        ddlf.Cluster(*arguments)


async def test_B41_a_call_before_connect_after_close_or_on_another_loop_says_which(start_worker, token_file):
    cluster = ddlf.Cluster(["127.0.0.1"], start_worker().port, token_file=token_file)
    with pytest.raises(WorkerLost, match="not connected yet; connect first"):
        await cluster.run_method(echo, value=1)
    await cluster.connect()

    def elsewhere():
        with pytest.raises(WorkerLost, match="connected on another event loop; connect and call inside one") as refused:
            asyncio.run(asyncio.wait_for(cluster.run_method(echo, value=1), PATIENCE_S))
        assert not refused.value.may_have_run

    await asyncio.to_thread(elsewhere)
    assert await is_usable(cluster) == [1]
    await cluster.close()
    with pytest.raises(WorkerLost, match="the connection was closed on this side; connect again"):
        await cluster.run_method(echo, value=1)


FORK = """
import asyncio, os, sys
from ddlf import Cluster
async def main():
    async with Cluster.local(1) as cluster:
        child = os.fork()
        if not child:
            try:
                asyncio.run(asyncio.wait_for(cluster.run_method(len, obj=[]), 120))
            except Exception as error:
                print(error, flush=True)
            os._exit(0)
        os.waitpid(child, 0)
        print(await cluster.run_code("1 + 1"))
def start():
    asyncio.run(main())
start()
"""


async def test_B41_a_forked_child_is_told_to_connect_itself_and_its_parent_goes_on():
    from tests.processes import python

    refusal, answer = (await asyncio.to_thread(python, FORK)).splitlines()
    assert "connected in another process; make a Cluster of its own in each" in refusal
    assert answer == "[2]"


async def test_B42_waiting_inside_the_loop_that_would_have_to_answer_is_refused():
    async def inside():
        with pytest.raises(RuntimeError, match="inside a coroutine use await"):
            ddlf.run(asyncio.sleep(0))
        return True

    assert await asyncio.to_thread(ddlf.run, inside())


# -- B43-B47: names -----------------------------------------------------------------------------------------------------


async def test_B43_an_unknown_method_is_named_with_those_there_are_and_the_nearest(cluster):
    await cluster.add_method(train)
    await cluster.add_method(echo)
    with pytest.raises(LookupError, match=r"no method 'trian' here; it has: echo, train \(did you mean 'train'\?\)"):
        await cluster.run_at(2, "trian")
    assert await is_usable(cluster) == [1, 1]


@pytest.mark.parametrize(
    "name",
    ["__class__", "_private", "a.b", "", "x" * 10_000, 5, None, b"train", lambda: 1],
    ids=[
        "B44 dunder",
        "B44 private",
        "B44 dotted",
        "B44 empty",
        "B44 long",
        "B44 int",
        "B44 None",
        "B44 bytes",
        "B44 λ",
    ],
)
async def test_B44_what_is_no_name_of_a_method_is_refused_before_anything_is_sent(cluster, name):
    before = cluster.workers[0].bytes_sent
    with pytest.raises(ConfigError) as refused:
        await cluster.run(name)
    assert "is no name of a method; a name has letters, digits and underscores" in str(refused.value)
    assert len(str(refused.value)) < 300
    assert cluster.workers[0].bytes_sent == before


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        pytest.param({}, "train() missing 1 required positional argument: 'weights'", id="B45 missing"),
        pytest.param(
            {"weights": 1, "epoch": 2}, "train() got an unexpected keyword argument 'epoch'", id="B45 unknown"
        ),
    ],
)
async def test_B45_wrong_arguments_are_a_type_error_that_names_the_argument(cluster, arguments, sentence):
    await cluster.add_method(train)
    with pytest.raises(TypeError) as refused:
        await cluster.run_at(1, train, **arguments)
    assert isinstance(refused.value, RemoteError)
    assert sentence in str(refused.value)


@pytest.mark.parametrize("name", ["1x", "class", "__builtins__", "😀", ""])
async def test_B46_what_is_no_name_of_a_variable_is_refused(cluster, name):
    with pytest.raises(ValueError, match="is no valid variable name"):
        await cluster.options(workers=[1]).set_variable(name, 1)
    assert await cluster.variables() == [{}, {}]


async def test_B47_an_unknown_variable_is_a_key_error_with_the_nearest_name(cluster):
    await cluster.set_variable("weights", 1)
    with pytest.raises(KeyError, match="no variable 'wieghts' here; did you mean 'weights'"):
        await cluster.options(workers=[1]).get_variable("wieghts")


# -- B48-B51: values ----------------------------------------------------------------------------------------------------


def unsendable():
    """Functions that hold what belongs to this process, with the type that must be named."""
    lock, sock, generator = threading.Lock(), socket.socket(), (number for number in [1])
    file = tempfile.TemporaryFile("w")  # noqa: SIM115  closed below
    yield "lock", (lambda: lock), "variable 'lock' (a _thread.lock)"
    yield "socket", (lambda: sock), "variable 'sock' (a socket.socket)"
    yield "generator", (lambda: generator), "variable 'generator' (a builtins.generator)"
    yield "file", (lambda: file), "variable 'file' (a "
    sock.close()
    file.close()


async def test_B48_a_function_that_holds_what_cannot_be_sent_is_refused_with_the_path_to_it(cluster):
    for what, function, path in unsendable():
        with pytest.raises(NotPicklable) as refused:
            await cluster.run_method(function)
        assert path in str(refused.value), what
    assert await is_usable(cluster) == [1, 1]


async def test_B48_an_installed_module_in_a_closure_travels_by_name(cluster):
    assert await cluster.run_method(lambda: math.sqrt(4)) == [2, 2]


async def test_B48_a_huge_array_in_a_closure_is_refused_with_the_way_to_send_it(cluster, monkeypatch):
    monkeypatch.setattr(code, "MAX_CODE_BYTES", 1_000_000)
    weights = np.zeros(10**6)
    with pytest.raises(NotPicklable, match=r"function '.*<lambda>' carries 8\.0 MB .*; pass .* or use set_variable"):
        await cluster.run_method(lambda: weights.sum())
    assert await cluster.run_method(lambda value: value.sum(), value=weights) == [0, 0]


async def test_B49_a_list_that_contains_itself_is_refused_with_the_place(cluster):
    inner: dict = {}
    outer = [1, 2, 3, inner]
    inner["x"] = outer
    with pytest.raises(NotPicklable, match=r"contains itself.* \(at .*\[3\]\['x'\] of the value\)"):
        await cluster.run_method(echo, value=outer)


WIDE = np.array([[1, 2, 3], [4, 5, 6]], "f4")


@pytest.mark.parametrize(
    "array",
    [
        pytest.param(np.arange(20)[::2], id="B50 not contiguous"),
        pytest.param(np.asfortranarray(WIDE), id="B50 Fortran order"),
        pytest.param(np.array(5.0), id="B50 0-d"),
        pytest.param(np.empty((0, 3)), id="B50 empty"),
        pytest.param(WIDE.astype(">f4"), id="B50 big-endian"),
        pytest.param(np.frombuffer(b"\1\2\3", np.uint8), id="B50 read-only"),
        pytest.param(np.array([True, False]), id="B50 bool"),
        pytest.param(np.array([1 + 2j]), id="B50 complex"),
        pytest.param(np.array([np.nan, np.inf, -0.0]), id="B50 NaN"),
        pytest.param(np.float16([1, 2]), id="B50 half"),
    ],
)
async def test_B50_an_array_comes_back_with_its_type_shape_and_bits(cluster, array):
    back = await cluster.run_at(1, *(await hosted(cluster)), array)
    assert (back.dtype, back.shape) == (array.dtype, array.shape)
    assert back.tobytes() == array.tobytes()


async def test_B50_a_memory_map_comes_back_as_an_array(cluster, tmp_path):
    mapped = np.memmap(tmp_path / "m", np.int32, "w+", shape=(3, 4))
    mapped[:] = np.arange(12).reshape(3, 4)
    back = await cluster.run_at(1, *(await hosted(cluster)), mapped)
    assert type(back) is np.ndarray
    np.testing.assert_array_equal(back, mapped)


@pytest.mark.parametrize(
    ("array", "name"),
    [
        pytest.param(np.array([{}, None]), "a numpy.ndarray of object", id="B50 object"),
        pytest.param(
            np.zeros(2, [("a", "i4"), ("b", "f8")]), "a numpy.ndarray of [('a', '<i4'), ('b', '<f8')]", id="B50 struct"
        ),
        pytest.param(np.array(["2026-11-20"], "M8[D]"), "a numpy.ndarray of datetime64[D]", id="B50 datetime"),
        pytest.param(np.zeros(2, np.clongdouble), "a numpy.ndarray of complex256", id="B50 complex256"),
        pytest.param(np.ma.masked_array([1, 2], [0, 1]), "a numpy.ma.MaskedArray", id="B50 masked"),
    ],
)
async def test_B50_an_array_that_is_no_plain_data_reaches_a_worker_and_is_refused_by_name_as_a_result(
    cluster, array, name
):
    name = name.replace("complex256", np.dtype(np.clongdouble).name)
    assert await cluster.options(workers=[1]).run_method(lambda value: str(value.dtype), value=array) == [
        str(array.dtype)
    ]
    with pytest.raises(ResultNotData) as refused:
        await cluster.run_at(1, *(await hosted(cluster)), array)
    text = str(refused.value).replace("numpy.ma.core.", "numpy.ma.").replace(" with 1 dimensions", "")
    assert f"{name} is not plain data" in text


async def hosted(cluster):
    """``echo`` by name."""
    await cluster.add_method(echo)
    return ("echo",)


@dataclasses.dataclass
class Point:
    x: int


class Colour(enum.Enum):
    RED = 1


@pytest.mark.parametrize(
    "value",
    [
        2**64,
        -(2**200),
        {math.nan: 1},
        {1: "a", None: "b", (1, 2): "c"},
        b"bytes",
        "text",
        {1, 2},
        (1, [2, (3,)]),
        1 + 2j,
        Point(1),
        Colour.RED,
        pathlib.PurePosixPath("/a"),
        decimal.Decimal("1.0"),
    ],
    ids=lambda value: f"B51 {str(value)[:20]}",
)
async def test_B51_a_value_comes_back_exactly_with_its_types(cluster, value):
    back = await cluster.run_at(1, *(await hosted(cluster)), value)
    assert type(back) is type(value)
    assert repr(back) == repr(value)


@pytest.mark.parametrize(
    ("value", "name"),
    [
        pytest.param(collections.deque(), "deque", id="B51 deque"),
        pytest.param(slice(1), "slice", id="B51 slice"),
        pytest.param(object(), "object", id="B51 object"),
    ],
)
async def test_B51_another_object_is_refused_as_a_result_with_its_type_and_place(cluster, value, name):
    with pytest.raises(ResultNotData) as refused:
        await cluster.run_at(1, *(await hosted(cluster)), {"a": [1, value]})
    assert f"{name} is not plain data (at ['a'][1] of the value)" in str(refused.value)


# -- B52-B59: settings, models, cancelling -----------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [-1, "5", math.nan, math.inf, True], ids=lambda value: f"B52 {value!r}")
async def test_B52_a_time_that_cannot_be_is_refused(cluster, seconds):
    with pytest.raises(ConfigError, match="timeout_s must be a number of seconds of 0 or more, got"):
        cluster.options(timeout_s=seconds)


async def test_B52_no_time_at_all_is_over_at_once_and_none_is_no_limit(cluster):
    with pytest.raises(TimeoutError, match=r"did not end within 0 s|its time was over"):
        await cluster.options(timeout_s=0, workers=[1]).run_code("1")
    assert await cluster.options(timeout_s=None).run_code("1") == [1, 1]


@pytest.mark.parametrize("seconds", [0, -1, "5", math.nan, math.inf, None, True], ids=lambda value: f"B52 {value!r}")
async def test_B52_a_time_to_connect_that_cannot_be_is_refused(seconds):
    with pytest.raises(ConfigError, match="connect_timeout_s must be a number of seconds above 0, got"):
        ddlf.Cluster(["127.0.0.1"], connect_timeout_s=seconds)


@pytest.mark.parametrize("value", [0, -1, 2.5, "32", True], ids=lambda value: f"B53 {value!r}")
@pytest.mark.parametrize("name", ["batch_size", "master_epochs", "worker_epochs"])
async def test_B53_a_setting_that_cannot_be_is_refused_before_a_worker_is_needed(name, value):
    with pytest.raises(ConfigError, match=f"{name} must be a whole number of 1 or more, got {value!r}"):
        await Blobs().train_sync(**{name: value})


async def test_B53_a_batch_larger_than_the_data_is_one_batch(two_workers):
    (record,) = await app(two_workers, samples=20, batch_size=1000).train_sync(master_epochs=1)
    assert record.samples == 20


def not_built():
    import keras

    model = keras.Sequential([keras.layers.Dense(3), keras.layers.Reshape((5,))])
    model.compile("sgd", "mse")
    return model


def not_compiled():
    import keras

    return keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])


def with_loss(loss):
    model = not_compiled()
    model.compile("sgd", loss)
    return model


def of_other_outputs():
    import keras

    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3, activation="softmax")])
    model.compile("sgd", "categorical_crossentropy")
    return model


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        pytest.param(not_built, "is not built, and cannot be called on 2 rows of x_train", id="B54"),
        pytest.param(
            not_compiled, "is not compiled; end create_model with self.model.compile(optimizer, loss)", id="B54 compile"
        ),
        pytest.param(lambda: 5, "create_model set self.model to a int, which is no Keras model", id="B54 no model"),
        pytest.param(lambda: with_loss("crossentropie"), "crossentropie", id="B56 loss"),
        pytest.param(of_other_outputs, "target.shape=(", id="B56 shape"),
    ],
)
async def test_B54_B56_a_model_that_cannot_train_is_named_before_the_first_round(two_workers, make, sentence):
    class Wrong(Blobs):
        async def create_model(self):
            self.model = make()

    made = Wrong(two_workers)
    with pytest.raises(Exception) as refused:  # noqa: PT011  Keras's own on the master, or a RemoteError
        await made.train_sync(master_epochs=1)
    assert sentence in str(refused.value)
    assert made.history == []
    assert await is_usable(two_workers) == [1, 1]


@pytest.mark.parametrize("method", ["load_dataset", "create_model"])
@pytest.mark.parametrize("where", ["master", "worker"])
async def test_B54_exit_in_a_method_is_an_error_with_a_sentence(two_workers, method, where):
    class Exits(Blobs):
        samples = 130 + len(f"{where} {method}") + (where == "worker")  # no worker has loaded these

        def exit_from(self, name):
            if name == method and (where == "worker") == hasattr(self, "worker"):
                sys.exit(3)

        async def load_dataset(self):
            self.exit_from("load_dataset")
            await super().load_dataset()

        async def create_model(self):
            self.exit_from("create_model")
            await super().create_model()

    with pytest.raises(DDLFError, match=rf"{method} called sys.exit\(3\)"):
        await Exits(two_workers).train_sync(master_epochs=1)
    assert await is_usable(two_workers) == [1, 1]


async def test_B54_named_arrays_for_a_sequential_model_are_refused_with_a_sentence(two_workers):
    class Named(Blobs):
        async def load_dataset(self):
            await super().load_dataset()
            self.x_train = {"points": self.x_train}

    with pytest.raises(AppError, match=r"x_train is a dict of 'points', and .* is a Sequential model, which takes one"):
        await Named(two_workers).train_sync(master_epochs=1)


async def test_B55_a_layer_of_the_users_own_file_travels_with_the_app_and_a_missing_module_is_named(
    two_workers,
):
    class Missing(Blobs):
        async def create_model(self):
            if hasattr(self, "worker"):
                import no_such_package_of_mine  # noqa: F401
            self.model = small_model()

    with pytest.raises(DDLFError) as refused:
        await Missing(two_workers).train_sync(master_epochs=1)
    assert "No module named 'no_such_package_of_mine'" in str(refused.value)


async def test_B57_the_same_worker_twice_is_refused(cluster):
    first = cluster.workers[0]
    for workers in ([first, first], [1, 1], [first, 1]):
        with pytest.raises(ConfigError, match="the same worker is named twice"):
            cluster.options(workers=workers)
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:9000 is named twice"):
        ddlf.Cluster(["127.0.0.1", "127.0.0.1"])


async def test_B58_a_callback_that_raises_ends_training_with_its_own_line_and_the_workers_stay_usable(two_workers):
    class Raising(Blobs):
        async def create_model(self):
            import keras

            class Callback(keras.callbacks.Callback):
                def on_train_batch_end(self, batch, logs=None):
                    raise ArithmeticError("my callback")

            await super().create_model()
            self.worker_callbacks = [Callback()]

    with pytest.raises(DDLFError, match="ArithmeticError: my callback") as refused:
        await Raising(two_workers).train_sync(master_epochs=1)
    assert 'raise ArithmeticError("my callback")' in str(refused.value)
    assert len(await Quick(two_workers).train_sync(master_epochs=1)) == 1


async def test_B58_an_on_round_that_raises_does_too(two_workers):
    class Raising(Quick):
        def on_round(self, record):
            raise ArithmeticError("my on_round")

    with pytest.raises(ArithmeticError, match="my on_round"):
        await Raising(two_workers).train_sync(master_epochs=2)
    assert len(await Quick(two_workers).train_sync(master_epochs=1)) == 1


async def test_B59_cancelling_twice_and_waiting_twice_are_harmless(cluster):
    call = asyncio.ensure_future(cluster.run_code("import time\nwhile True: time.sleep(0.01)"))
    await asyncio.sleep(0)
    call.cancel()
    call.cancel()
    waiting = [asyncio.ensure_future(asyncio.wait({call})) for _ in range(2)]
    await asyncio.wait_for(asyncio.gather(*waiting), PATIENCE_S)
    assert call.cancelled()
    answer = asyncio.ensure_future(cluster.run_method(echo, value=3))
    assert await asyncio.gather(answer, answer) == [[3, 3], [3, 3]]
    assert await answer == answer.result() == [3, 3]


async def test_B59_close_and_connect_can_be_repeated(token_file):
    cluster = ddlf.Cluster(["127.0.0.1"], 9, token_file=token_file)
    await cluster.close()
    await cluster.close()
    assert isinstance(cluster.workers[0], ProxyWorker)
