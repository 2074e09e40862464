"""Tests of hosting functions on a worker: their names, their files, and their survival."""

import functools
import stat

import pytest

from ddlf.worker.calls import Methods, concurrent, single_use_method, takes_self


def add(a, b):
    return a + b


async def double(self, x):
    return 2 * x


class Counter:
    def __call__(self, x):
        return x

    def count(self, x):
        return x


def passes_all_on(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


def passes_one_on(function):
    @functools.wraps(function)
    def wrapper(this, x):
        return function(this, x)

    return wrapper


def gives_self_itself(function):
    @functools.wraps(function)
    def wrapper(x):
        return function(None, x)

    return wrapper


def takes_another_one(function):
    @functools.wraps(function)
    def wrapper(self, x):
        return function(x)

    return wrapper


def with_self(self, x):
    return self, x


@pytest.fixture
def folders(tmp_path):
    """Return the folder that is removed with the daemon, and the one that survives it."""
    return tmp_path / "session", tmp_path / "persist"


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (add, False),
        (double, True),
        (lambda self: self, True),
        (lambda *self: self, False),
        (lambda: None, False),
        (lambda x, self=1: x, False),
        (Counter(), False),
        (Counter().count, False),
        (print, False),
        (max, False),
        (passes_all_on(with_self), True),
        (passes_all_on(passes_all_on(double)), True),
        (passes_all_on(add), False),
        (passes_one_on(with_self), True),
        (gives_self_itself(with_self), False),
        (takes_another_one(add), True),
        (functools.lru_cache(with_self), True),
        (functools.partial(with_self), True),
        (functools.partial(with_self, 1), False),
        (functools.partial(with_self, x=1), True),
    ],
)
def test_only_a_function_whose_first_parameter_is_called_self_gets_the_worker(function, expected):
    assert takes_self(function) is expected


def test_a_method_is_hosted_under_the_functions_name_and_can_be_called(folders):
    methods = Methods(*folders)
    assert methods.add(add, None, False, False) == "add"
    assert methods.names() == ["add"]
    assert methods.get("add").function(2, 3) == 5


def test_a_new_executor_finds_the_hosted_methods_of_the_last_one(folders):
    Methods(*folders).add(double, "twice", False, True)
    method = Methods(*folders).get("twice")
    assert (method.takes_self, method.concurrent) == (True, True)
    assert method.function.__name__ == "double"


def test_only_persistent_methods_outlive_the_daemons_folder(folders, tmp_path):
    methods = Methods(*folders)
    methods.add(add, None, True, False)
    methods.add(double, None, False, False)
    assert Methods(tmp_path / "another session", folders[1]).names() == ["add"]


@pytest.mark.parametrize("again_persistent", [True, False])
def test_adding_a_method_again_replaces_it_in_both_folders(folders, tmp_path, again_persistent):
    methods = Methods(*folders)
    methods.add(add, "f", not again_persistent, False)
    methods.add(double, "f", again_persistent, False)
    assert Methods(*folders).get("f").function.__name__ == "double"
    survivors = Methods(tmp_path / "another session", folders[1]).names()
    assert survivors == (["f"] if again_persistent else [])


def test_a_removed_method_is_gone_from_memory_and_disk(folders):
    methods = Methods(*folders)
    methods.add(add, None, True, False)
    methods.remove("add")
    assert methods.names() == []
    assert Methods(*folders).names() == []
    assert not [path for folder in folders if folder.exists() for path in folder.iterdir()]


def test_an_unknown_method_is_refused_with_the_nearest_name(folders):
    methods = Methods(*folders)
    with pytest.raises(LookupError, match="it has none; add it with add_method"):
        methods.get("trian")
    methods.add(add, "train", False, False)
    with pytest.raises(LookupError, match=r"no method 'trian' here; it has: train \(did you mean 'train'\?\)"):
        methods.get("trian")


@pytest.mark.parametrize("name", ["__class__", "_private", "a.b", "../x", "a/b", "x" * 200, "1x", "é"])
def test_a_name_that_is_not_an_identifier_is_refused_and_writes_no_file(folders, name):
    with pytest.raises(ValueError, match="is not a valid name for a method"):
        Methods(*folders).add(add, name, False, False)
    assert not folders[0].exists()


def test_a_lambda_needs_a_name(folders):
    with pytest.raises(ValueError, match="set name="):
        Methods(*folders).add(lambda x: x, None, False, False)
    assert Methods(*folders).add(lambda x: x, "identity", False, False) == "identity"


def test_only_the_owner_may_read_files_of_methods(folders):
    Methods(*folders).add(add, None, True, False)
    (path,) = folders[1].iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(folders[1].stat().st_mode) == 0o700


def test_a_file_of_a_method_is_not_unpickled_before_it_is_called(folders):
    Methods(*folders).add(add, None, True, False)
    (path,) = folders[1].iterdir()
    path.write_bytes(b"no pickle")
    methods = Methods(*folders)
    assert methods.names() == ["add"]
    with pytest.raises(TypeError, match="cannot load code"):
        methods.get("add")


def test_a_function_can_be_marked_as_concurrent():
    assert single_use_method(concurrent(lambda: None)).concurrent
    assert not single_use_method(add).concurrent
