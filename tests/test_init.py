"""Tests of the package itself: its public names, and the modules that an import of it loads."""

import pytest

import ddlf
from tests.processes import python

HELP = """
import contextlib, io
from ddlf.cli.main import main
with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    main([*{}, "--help"])
"""
ARRAYS = "numpy keras tensorflow"
"""Packages for arrays and models, which take long to import."""
COMMAND = "keras tensorflow pyarrow pydantic yaml cloudpickle asyncio ddlf.events"


@pytest.mark.parametrize(
    ("code", "heavy"),
    [
        ("import ddlf", f"{ARRAYS} asyncio msgpack"),
        ("from ddlf import Cluster, IApp, Request, read_config, run, main", "keras tensorflow"),
        ("from ddlf.testing import FakeRun", "keras tensorflow"),
        ("import ddlf.rpc.tokens", "numpy pydantic yaml platformdirs asyncio"),
        ("import ddlf.worker.daemon, ddlf.rpc.dial", "cryptography"),
        ("import ddlf.cli.worker, ddlf.worker.daemon, ddlf.rpc.tokens", f"{ARRAYS} cloudpickle pydantic yaml"),
        ("from ddlf.worker.machine import machine_facts\nmachine_facts()", ARRAYS),
        ("import ddlf.cluster.config.addresses", "ddlf.cluster.config.cluster_file pydantic yaml"),
        ("import ddlf.cli.run, ddlf.monitor.ui\nwith ddlf.monitor.ui.opened('plain'): pass", "rich"),
        ("import ddlf\nddlf.load_notation('apps/models/digits.nnm')", "keras tensorflow pydantic"),
        pytest.param(HELP.format([]), f"numpy {COMMAND}", id="ddlf --help"),
        # This help names the rules of each setting, and modules of rules import NumPy.
        pytest.param(HELP.format(["run"]), COMMAND, id="ddlf run --help"),
    ],
)
def test_process_imports_no_heavy_module_without_need(code, heavy):
    assert python(f"import sys\n{code}\nprint({set(heavy.split())} & {{*sys.modules}})") == "set()\n"


@pytest.mark.parametrize("name", ddlf.__all__)
def test_every_public_name_exists_and_has_a_docstring(name):
    assert getattr(ddlf, name).__doc__
    assert name in dir(ddlf)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'ddlf' has no attribute 'Clutser'"):
        _ = ddlf.Clutser
    with pytest.raises(ImportError):
        exec("from ddlf import no_such_name")
