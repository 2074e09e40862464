"""Tests of the digest of DDLF's own source."""

import subprocess
import sys
import zipfile
from pathlib import Path

from ddlf.worker.source import Source, other_source, source
from tests.processes import copied_package

PROGRAM = "from ddlf.worker.source import source\nprint(source().digest)"


def digest_with(place: Path) -> str:
    """Return the digest that a new process computes, which imports DDLF from a folder or zip file."""
    program = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={"PYTHONPATH": str(place)},
        cwd=place.parent,
        capture_output=True,
        text=True,
    )
    assert program.returncode == 0, program.stderr
    return program.stdout.strip()


def test_equal_source_has_one_digest_wherever_it_is(tmp_path):
    package = copied_package(tmp_path)
    (package / "templates").mkdir()  # as in an installed package
    (package / "templates/app.py").write_text("x = 1\n")
    (package / "notes.txt").write_text("no source\n")
    assert digest_with(tmp_path) == source().digest
    archive = tmp_path / "ddlf.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for path in sorted(package.rglob("*")):
            file.write(path, path.relative_to(tmp_path))
    assert digest_with(archive) == source().digest


def test_digest_changes_with_content_name_and_number_of_files(tmp_path):
    package = copied_package(tmp_path)
    file = package / "rpc/iworker.py"
    text = file.read_text()
    file.write_text(f"{text}# edited\n")
    digests = {source().digest, digest_with(tmp_path)}
    file.write_text(text)
    file.rename(package / "rpc/iworker2.py")
    digests.add(digest_with(tmp_path))
    (package / "rpc/iworker2.py").unlink()
    digests.add(digest_with(tmp_path))
    assert len(digests) == 4


def test_sentence_names_workers_and_both_sources():
    master = Source("0.1.0", "a")
    assert other_source(["worker 1 (pc03)"], Source("0.1.0", "b"), master) == (
        "worker 1 (pc03) has other source of DDLF 0.1.0 than this machine: results may differ. Install the same there, "
        "and start it again"
    )
    assert other_source(["w1", "w2"], Source("", ""), master).startswith("w1, w2 have other source of DDLF 0.1.0 than")
    assert "w1 has DDLF 0.2.0, and this machine has DDLF 0.1.0:" in other_source(["w1"], Source("0.2.0", "b"), master)
