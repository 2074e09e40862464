"""The benchmark of the start runs, here in its short form. Its figures are not tested: those depend on the machine."""

import json

from benchmarks import start


def test_the_start_a_killed_executor_and_memory_are_measured(tmp_path, capsys):
    file = tmp_path / "start.json"
    memory = ["--memory", "1", "--modules", "numpy"]  # whatever it is that forks need not import
    start.main(["--workers", "1", *memory, "--samples", "600", "--repeats", "1", "--json", str(file)])
    found = json.loads(file.read_text())
    assert set(found["begins_s"]) == {"plain", "1"}
    assert all(seconds > 0 for values in found["begins_s"].values() for seconds in values)
    assert found["again_s"][0] > 0
    assert found["forked_mb"] > 0
    assert found["own_mb"] > 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split("|")[1].strip() == "what"
    assert len(lines) == 6


def test_the_table_has_a_row_for_each_number_of_workers():
    found = {
        "begins_s": {"plain": [2.0], "1": [2.4], "4": [2.64]},
        "again_s": [0.5],
        "workers_in_memory": 8,
        "forked_mb": 600.0,
        "own_mb": 2400.0,
    }
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in start.report(found).splitlines()]
    assert rows[3] == ["first task, local workers: 1", "2.40 s", "1.20", "1.30"]
    assert rows[4] == ["first task, local workers: 4", "2.64 s", "1.10 of 1", "1.20"]
    assert rows[6] == ["memory of 8 workers", "600 MB of 2400 MB", "0.25", "0.33"]
