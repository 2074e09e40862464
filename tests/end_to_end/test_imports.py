"""Tests that workers import modules beside the script, whatever place the import has and whatever folder they run in."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

FILES = {
    "flat.py": "def n(): return 'flat'",
    "late.py": "import flat\nWHAT = 'late and ' + flat.n()",
    "raises.py": "def f():\n    raise ValueError('from here')  # this line",
    "pk/__init__.py": "from . import sub",
    "pk/two.py": "from .sub import three\ntwo = 'pk.two ' + three",
    "pk/sub/__init__.py": "three = 'pk.sub'",
    "pk/words.txt": "alpha beta",
    "pk/tables/a.csv": "1,2",
    "ns/tool.py": "def n(): return 'ns.tool'",
    "ns/deep/er.py": "x = 'ns.deep.er'",
    "secret.txt": "no module's data",
    ".hidden/x.py": "",
}
SCRIPT = """
import ddlf, json, sys
import ns.tool
from ddlf import Cluster

def imports():
    import flat, late
    from pk import two
    from ns import tool
    import ns.deep.er
    import importlib
    return flat.n(), late.WHAT, two.two, tool.n(), ns.deep.er.x, importlib.import_module("pk.sub").three

def at_the_top():
    return ns.tool.n()

def data():
    import importlib.resources, pkgutil
    files = importlib.resources.files("pk")
    names = sorted(file.name for file in files.iterdir())
    with (files / "words.txt").open() as stream, importlib.resources.as_file(files / "words.txt") as path:
        opened = stream.read(), path.read_text()
    table = files.joinpath("tables", "a.csv").read_bytes()
    return names, opened, table, pkgutil.get_data("pk", "words.txt"), (files / "tables").is_dir()

def fails():
    import raises
    raises.f()

def missing():
    import no_such_module

def outside():
    import importlib.resources, pk
    found = []
    for path in ("../secret.txt", "two.py", "/etc/passwd"):
        try:
            found.append((importlib.resources.files("pk") / path).read_bytes())
        except FileNotFoundError:
            pass
    return found

async def in_a_thread():
    import asyncio
    def work():
        import flat
        return flat.n()
    return await asyncio.to_thread(work)

@ddlf.concurrent
def beside():
    import flat
    return flat.n()

def where():
    import sys
    return [path for path in sys.path if not path or path == FOLDER]

async def main(cluster):
    global FOLDER
    FOLDER = sys.path[0]
    for method in (imports, at_the_top, data, outside, in_a_thread, beside, where):
        print(json.dumps((await cluster.run_method(method))[0], default=str))
    for method in (fails, missing):
        try:
            await cluster.run_method(method)
        except Exception as error:
            print(str(error).replace("\\n", "|"))

if __name__ == "__main__":
    ddlf.main(main)
"""


@pytest.fixture
def folder(tmp_path):
    for name, text in (FILES | {"script.py": SCRIPT}).items():
        path = tmp_path / "work" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    return tmp_path / "work"


@pytest.mark.parametrize("way", [pytest.param("local", marks=pytest.mark.slow), "from elsewhere", "ddlf run, remote"])
def test_modules_beside_the_script_are_imported(folder, tmp_path, start_worker, way):
    command, where = ["script.py", "--local", "1"], folder
    if way == "from elsewhere":
        command, where = [str(folder / "script.py"), "--local", "1"], tmp_path
    elif way == "ddlf run, remote":
        worker = start_worker()
        command = ["-m", "ddlf.cli.main", "run", str(folder / "script.py"), "--hosts", f"127.0.0.1:{worker.port}"]
        command += ["--token-file", str(worker.token_file)]
        where = tmp_path
    ended = subprocess.run([sys.executable, *command, "--quiet"], cwd=where, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    imports, top, data, outside, thread, beside, paths, fails, missing = ended.stdout.splitlines()[-9:]
    assert imports == '["flat", "late and flat", "pk.two pk.sub", "ns.tool", "ns.deep.er", "pk.sub"]'
    assert top == '"ns.tool"'
    assert data == ('[["tables", "words.txt"], ["alpha beta", "alpha beta"], "b\'1,2\'", "b\'alpha beta\'", true]')
    assert outside == "[]"
    assert thread == beside == '"flat"'
    assert paths == "[]"
    assert "ValueError: from here|" in fails
    assert f"File \"{folder / 'raises.py'}\", line 2, in f|    raise ValueError('from here')  # this line" in fails
    assert "install no_such_module on the worker, or keep it below the script's folder" in missing
