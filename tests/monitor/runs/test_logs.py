"""Tests of the output of workers: files in the folder of a run, and the command that merges them."""

from types import SimpleNamespace

import pytest

from ddlf import IApp
from ddlf import events as e
from ddlf.cli.main import main
from ddlf.monitor.runs import folder
from ddlf.monitor.runs.logs import Reader
from ddlf.monitor.runs.recording import FolderWriter
from tests.monitor.runs.made import BEGAN, run


def wrote(at, worker, *lines, dropped=0, name=None):
    name = name or f"worker {worker}"
    return BEGAN + at, e.WorkerWrote(worker=worker, name=name, stream="stdout", lines=lines, dropped=dropped)


TOLD = [
    wrote(0.001, 1, "first", "with  two spaces "),
    wrote(0.002, 2, "é 漢 \udc80", ""),
    wrote(1, 1, "late", dropped=1234),
    wrote(2, 3, "far", name="../pc 03"),
]


def test_the_files_of_all_workers_are_read_together_in_the_order_of_time(tmp_path):
    path = run(tmp_path, "app", TOLD)
    assert [(source, text) for _, source, text in Reader(path).new()] == [
        ("worker-1", "first"),
        ("worker-1", "with  two spaces "),
        ("worker-2", "é 漢 \\udc80"),
        ("worker-2", ""),
        ("worker-1", "(1,234 lines came too fast and were dropped)"),
        ("worker-1", "late"),
        ("pc-03", "far"),
    ]


def test_new_text_is_read_when_its_line_is_complete(tmp_path):
    path = run(tmp_path, "app", [TOLD[0]])
    reader = Reader(path, "worker 1")
    assert len(list(reader.new())) == 2
    with open(path / "logs" / "worker-1.log", "a") as file:
        file.write("2026-11-22 12:00:00.000  half")
        file.flush()
        assert list(reader.new()) == []
        file.write(" and half\n")
    assert list(reader.new()) == [("2026-11-22 12:00:00.000", "worker-1", "half and half")]


def ddlf(capsys, *words):
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    return (ended.value.code, *capsys.readouterr())


def test_the_command_shows_the_last_run_and_follows_a_run_until_its_end(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("DDLF_RUN_DIR", str(tmp_path))
    path = run(tmp_path, "app", TOLD)
    code, text, _ = ddlf(capsys, "logs")
    assert code == 0
    assert [line[9:] for line in text.splitlines()][::6] == ["[worker-1] first", "[pc-03] far"]
    assert ddlf(capsys, "logs", "-n", "1")[1] == text.splitlines(keepends=True)[-1]
    assert ddlf(capsys, "logs", "app", "--worker", "pc 03")[1] == text.splitlines(keepends=True)[-1]

    def over(seconds):
        with open(path / "logs" / "worker-2.log", "a") as file:
            file.write("2026-11-22 12:00:00.000  the last\n")
        monkeypatch.setattr(folder, "read_state", lambda path: state)

    state = folder.read_state(path)
    monkeypatch.setattr(folder, "read_state", lambda path: folder.begun("App"))
    monkeypatch.setattr("ddlf.cli.runs.time", SimpleNamespace(sleep=over))
    followed = ddlf(capsys, "logs", "-f")[1]
    assert followed.startswith(text)
    assert followed.splitlines()[-1].endswith("[worker-2] the last")
    assert len(followed.splitlines()) == 8


def test_a_run_without_output_of_workers_is_reported(tmp_path, capsys):
    run(tmp_path, "app", [])
    code, text, error = ddlf(capsys, "logs", "--out", str(tmp_path))
    assert (code, text) == (0, "")
    assert "the workers printed nothing in" in error


def test_a_file_that_becomes_too_long_is_rotated_and_followed(tmp_path, monkeypatch):
    monkeypatch.setattr("ddlf.monitor.runs.recording.MOST_LOG_BYTES", 100)
    path = folder.make(tmp_path, "app")
    writer = FolderWriter(IApp(), path, {})
    followed = Reader(path)
    read = []
    for number in range(9):
        writer.write([wrote(number, 1, f"line {number}")])
        read += [text for _, _, text in followed.new()]
    assert [text for text in read if text.startswith("line")] == [f"line {number}" for number in range(9)]
    remaining = [text for _, _, text in Reader(path).new()]
    assert [text for text in remaining if text.startswith("line")] == [f"line {number}" for number in range(4, 9)]
    assert "(older lines were removed: the log keeps 200 bytes of each worker)" in remaining
    assert sorted(file.name for file in (path / "logs").iterdir()) == ["worker-1.log", "worker-1.log.1"]


def test_a_worker_without_output_is_reported_with_the_workers_that_have_output(tmp_path, capsys):
    path = run(tmp_path, "app", TOLD)
    code, text, error = ddlf(capsys, "logs", "--out", str(tmp_path), "--worker", "wroker 1")
    assert (code, text) == (0, "")
    assert error == f"wroker 1 printed nothing in {path.name}; there are lines of pc-03, worker-1, worker-2\n"


def connected(at, incarnation, engine="job 12_3"):
    facts = dict(address="place 0", host=f"n{incarnation}", python="3.11", cores=2, threads=2)
    event = e.WorkerConnected(worker=1, name="worker 1", engine=engine, incarnation=incarnation, **facts)
    return BEGAN + at, event


def logged(at, *lines, left_out=0):
    return BEGAN + at, e.WorkerLogged(worker=1, name="worker 1", lines=lines, left_out=left_out)


def test_all_output_of_a_worker_is_in_its_log_with_its_incarnations(tmp_path, capsys):
    events = [
        connected(0, 1),
        logged(1, "I tensorflow"),
        wrote(2, 1, "mine"),
        connected(3, 1),
        logged(4, "more"),
        connected(5, 2),
    ]
    path = run(tmp_path, "app", [*events, logged(6, "crash", left_out=1234), connected(7, 3)])
    everything = ddlf(capsys, "logs", "--out", str(tmp_path), "--all")[1]
    assert [line[20:] for line in everything.splitlines()] == [
        "incarnation 1 of worker 1 on n1 (job 12_3)",
        "I tensorflow",
        "mine",
        "more",
        "incarnation 2 of worker 1 on n2 (job 12_3)",
        "(1,234 bytes came too fast and were left out)",
        "crash",
    ]
    assert ddlf(capsys, "logs", "--out", str(tmp_path))[1].endswith("[worker-1] mine\n")
    assert "WorkerLogged" not in (path / folder.EVENTS).read_text()
