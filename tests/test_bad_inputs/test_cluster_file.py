"""B20-B38: what a wrong cluster.yaml says. Each mistake gets line, column and a sentence."""

import pytest

from ddlf.cluster.config.cluster_file import load_config
from ddlf.errors import ConfigError

ONE = "workers: [a:9000]\n"
SECRET = "do-not-show-me-do-not-show-me-do-not"


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DDLF_CONFIG", raising=False)
    return tmp_path


def complaint(folder, content):
    """The lines of the error that a file with this content gets."""
    (folder / "cluster.yaml").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError) as refused:
        load_config()
    assert refused.value.exit_code == 2
    assert SECRET not in str(refused.value)
    return str(refused.value).splitlines()


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        pytest.param(
            "workers:\n  - a:1\nname lab\n",
            "3:1: while scanning a simple key, could not find expected ':'",
            id="B20",
        ),
        pytest.param("workers:\n\t- a:1\n", "; indent with spaces, not with tabs", id="B20 tab"),
        pytest.param(
            ONE + "name: !!python/object/apply:os.system [ls]\n",
            "2:7: tag '!!python/object/apply:os.system' is not allowed",
            id="B21",
        ),
        pytest.param(ONE + "run: {batchsize: 3}\n", "2:7: unknown key 'batchsize', did you mean 'batch_", id="B22"),
        pytest.param(
            "workers:\n- host: a\n  port: 1\n  port: 2\n",
            "4:3: key 'port' is given twice (first at line 3)",
            id="B23",
        ),
        pytest.param(
            "", "1:1: the file is empty; the smallest valid file is 'workers: [127.0.0.1:9000]'", id="B24 empty"
        ),
        pytest.param("# nothing\n\n", "1:1: the file is empty; the smallest valid file is 'w", id="B24 comments"),
        pytest.param("- a:1\n", "1:1: expected a mapping at top level, got a list", id="B25"),
        pytest.param(
            'workers: [{host: a, port: "7001"}]\n',
            "1:27: port must be an integer, got '7001', write it without quotes",
            id="B26",
        ),
        *(
            pytest.param(
                ONE + f"run: {{connect_timeout_s: {value}}}\n",
                "2:26: connect_timeout_s must be a finite number > 0, got",
                id=f"B27 {value}",
            )
            for value in ("-1", "0", ".nan", ".inf", "1e400")
        ),
        pytest.param(
            "workers: [{host: no}]\n", "1:18: host must be text, got the boolean no, write it in quotes", id="B29"
        ),
        pytest.param("workers: [{host: a, port: 22:22}]\n", "1:27: port must be an integer, got 22:22", id="B30"),
        pytest.param(
            "workers: [b:1, a:1, c:1, a:1]\n", "1:26: workers[1] and workers[3] are the same address, a:1", id="B31"
        ),
        pytest.param(
            "workers: [{name: x, host: a}, {name: x, host: b}]\n",
            "1:38: workers[0] and workers[1] have the same name, 'x'",
            id="B32",
        ),
        pytest.param("x-a: &a 1\nx-b: [" + "*a, " * 101 + "]\n" + ONE, "too many aliases (> 100)", id="B33 aliases"),
        pytest.param(
            "x-0: &x0 [1, 1]\n"
            + "".join(f"x-{n}: &x{n} [{', '.join([f'*x{n - 1}'] * 4)}]\n" for n in range(1, 15))
            + ONE,
            "more than 50,000 values",
            id="B33 billion laughs",
        ),
        pytest.param(
            ONE + f"security: {{token: {SECRET}}}\n",
            "2:12: token must not be stored in this file, use token_file in security",
            id="B34",
        ),
        pytest.param(
            ONE + f"token: {SECRET}\n", "2:1: token must not be stored in this file, use token_file", id="B34 at top"
        ),
        pytest.param("workers: [a:1]".encode("utf-16"), "1:1: not UTF-8 text", id="B36 UTF-16"),
        pytest.param("workers:\n- a:\0", "2:5: not UTF-8 text", id="B36 NUL"),
        pytest.param(
            "workers:\n" + "".join(f"- h{n}:1\n" for n in range(5000)),
            "2:1: workers: at most 4,096, got 5,000",
            id="B38",
        ),
    ],
)
def test_a_mistake_gets_line_column_and_one_sentence(in_an_empty_folder, content, sentence):
    (line,) = complaint(in_an_empty_folder, content)
    assert line.startswith("cluster.yaml:")
    assert sentence in line


def test_B22_a_needed_key_that_is_misspelt_is_reported_as_missing_too(in_an_empty_folder):
    assert complaint(in_an_empty_folder, "name: lab\nworker: [a:1]\n") == [
        "cluster.yaml:1:1: key 'workers' is missing; the smallest valid file is 'workers: [127.0.0.1:9000]'",
        "cluster.yaml:2:1: unknown key 'worker', did you mean 'workers'?",
    ]


def test_B33_a_file_that_is_too_large_is_not_read(in_an_empty_folder):
    assert complaint(in_an_empty_folder, ONE + "#" * (1 << 20)) == [
        "cluster.yaml is larger than 1 MiB, so it cannot be a cluster configuration"
    ]


def test_B35_a_relative_path_is_below_the_files_folder_and_the_error_names_the_resolved_one(in_an_empty_folder):
    lab = in_an_empty_folder / "lab"
    lab.mkdir()
    (lab / "cluster.yaml").write_text(ONE + "security: {token_file: keys/token}\n")
    with pytest.raises(ConfigError) as refused:
        load_config("lab/cluster.yaml")
    assert f"2:24: token_file 'keys/token' does not exist (looked for '{lab}/keys/token')" in str(refused.value)
    (lab / "keys").mkdir()
    (lab / "keys" / "token").write_text("t" * 43)
    assert load_config("lab/cluster.yaml").security.token_file == lab / "keys" / "token"


def test_B38_a_hundred_thousand_workers_are_refused_before_they_are_looked_at(in_an_empty_folder):
    (line,) = complaint(in_an_empty_folder, "workers:\n" + "".join(f"- h{n}\n" for n in range(100_000)))
    assert line == "cluster.yaml:49999:3: more than 50,000 values"
