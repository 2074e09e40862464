"""The package itself: what it offers, and what importing it costs."""

import pytest

import ddlf
from tests.processes import python


def test_importing_it_imports_nothing_of_weight():
    code = "import sys, ddlf\nprint([m for m in ('numpy', 'keras', 'tensorflow', 'asyncio', 'msgpack') if m in sys.modules])"
    assert python(code) == "[]\n"


def test_importing_what_a_script_needs_imports_neither_numpy_nor_keras():
    code = (
        "import sys\nfrom ddlf import Cluster, IApp, Request, read_config, run, main\n"
        "print([m for m in ('keras', 'tensorflow') if m in sys.modules])"
    )
    assert python(code) == "[]\n"


def test_fake_run_imports_no_keras_when_it_is_imported():
    code = (
        "import sys\nfrom ddlf.testing import FakeRun\nprint([m for m in ('keras', 'tensorflow') if m in sys.modules])"
    )
    assert python(code) == "[]\n"


@pytest.mark.parametrize("name", ddlf.__all__)
def test_every_public_name_is_there_and_has_a_docstring(name):
    assert getattr(ddlf, name).__doc__
    assert name in dir(ddlf)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'ddlf' has no attribute 'Clutser'"):
        _ = ddlf.Clutser
    with pytest.raises(ImportError):
        exec("from ddlf import no_such_name")
