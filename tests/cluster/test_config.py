"""Tests of reading cluster.yaml: the accepted files, and the sentence and position of each mistake."""

import json
import re
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator
from pydantic import ValidationError

import ddlf
from ddlf.cluster.config.addresses import find_config, parse_address
from ddlf.cluster.config.cluster_file import (
    MAX_WORKERS,
    Addresses,
    ClusterConfig,
    WorkerAddress,
    compose,
    load_config,
    read_config,
    schema,
)
from ddlf.errors import ConfigError
from ddlf.training.registry import STRATEGIES

MODES = f"one of {', '.join(STRATEGIES)}"


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DDLF_CONFIG", raising=False)


def write(content: str | bytes, name: str = "cluster.yaml") -> Path:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def complaint(content: str | bytes) -> str:
    write(content)
    with pytest.raises(ConfigError) as caught:
        load_config()
    return str(caught.value)


# --- Accepted files --------------------------------------------------------------------------------------------------


def test_a_full_file_is_read_as_written():
    write("hunter2-but-longer", "lab/token")
    config = load_config(
        write(
            """
            version: 1
            name: lab
            x-note: {anything: [goes, here]}
            workers:
              - 10.0.0.11:9001
              - "[::1]:9002"
              - {name: pc03, host: pc03.lab, port: 9003, x-rack: 7}
              - host: pc04
            security: {token_file: token}
            run: {min_workers: 2, connect_timeout_s: 5, dead_after_s: 1.5, mode: async, master_epochs: 100, worker_epochs: 10,
                  batch_size: 32, seed: 0, slots: 4, optimizer_state: fresh, evaluate_every: 0}
            """,
            "lab/cluster.yaml",
        )
    )
    assert config.name == "lab"
    assert config.workers == (
        WorkerAddress(host="10.0.0.11", port=9001),
        WorkerAddress(host="::1", port=9002),
        WorkerAddress(host="pc03.lab", port=9003, name="pc03"),
        WorkerAddress(host="pc04", port=9000),
    )
    assert config.security.token_file == Path.cwd() / "lab" / "token"
    assert config.run.model_dump(exclude_none=True) == {
        "min_workers": 2,
        "connect_timeout_s": 5.0,
        "dead_after_s": 1.5,
        "mode": "async",
        "master_epochs": 100,
        "worker_epochs": 10,
        "batch_size": 32,
        "seed": 0,
        "slots": 4,
        "optimizer_state": "fresh",
        "evaluate_every": 0,
    }


def test_only_workers_are_needed_and_the_rest_has_defaults():
    write("workers: [127.0.0.1:9000]")
    config = load_config()
    assert (config.version, config.name, config.security.token_file) == (1, None, None)
    assert config.run.connect_timeout_s == 10.0
    assert config.run.min_workers is None


ACCEPTED = [
    ("workers: [a:1]\nrun:\nsecurity:\n", "sections whose lines are all commented out"),
    ("\ufeffworkers: [a:1]\n", "a byte order mark, as Notepad writes it"),
    ("workers:\r\n  - a:1\r\n", "line ends of Windows"),
    ("workers: [a:1]\nrun: {connect_timeout_s: 1e2}\n", "a number that YAML 1.1 takes for text"),
    ("workers: [a:1]\nrun: {split: 'stages:2', micro_batches: 4}\n", "a text that is None by default"),
    ("workers: [a:1]\nrun: {data_memory: 128MiB, shuffle: window}\n", "more of them"),
    ("workers: [a:1, a:2, b:1]\n", "two workers on one host"),
    ("x-port: &port 9000\nworkers: [{host: a, port: *port}]\n", "an alias"),
    ("workers: [a:1]\nname: 2026-11-20\n", "a name that looks like a date"),
]


@pytest.mark.parametrize(("content", "accepted"), ACCEPTED)
def test_a_valid_file_is_accepted(content, accepted):
    write(content)
    assert load_config().workers[0].host == "a", accepted


def test_the_largest_number_of_workers_is_read_within_seconds():
    write("workers:\n" + "".join(f"  - {{name: w{i}, host: h{i}, port: 9000}}\n" for i in range(MAX_WORKERS)))
    start = time.perf_counter()
    assert len(load_config().workers) == MAX_WORKERS
    assert time.perf_counter() - start < 20


def test_read_config_gives_hosts_and_ports_to_unpack():
    write("workers: [a:1, {host: b}]")
    hosts, ports = read_config()
    assert (hosts, ports) == (["a", "b"], [1, 9000])
    assert read_config() == Addresses(hosts=["a", "b"], ports=[1, 9000])


def test_a_configuration_cannot_be_changed():
    write("workers: [a:1]")
    with pytest.raises(ValidationError, match="frozen"):
        load_config().name = "other"


def test_a_file_is_checked_again_only_when_it_has_changed_or_had_mistakes():
    write("workers: [a:1]\nsecurity: {token_file: token}")
    with pytest.raises(ConfigError, match="token_file 'token' does not exist"):
        load_config()
    Path("token").touch()
    first = load_config()
    assert load_config() is first
    write("workers: [b:2]")
    assert load_config().workers[0].host == "b"


def test_a_configuration_made_in_python_keeps_the_same_rules():
    with pytest.raises(ValueError, match="are the same address"):
        ClusterConfig(workers=(WorkerAddress(host="a"), WorkerAddress(host="a")))
    assert ClusterConfig.model_validate({"workers": ["a:1"], "x-mine": 1}).workers[0].port == 1


def test_a_home_folder_in_token_file_is_expanded(monkeypatch):
    home = write("t" * 43, "home/token").parent.absolute()
    monkeypatch.setenv("HOME", str(home))
    write("workers: [a:1]\nsecurity: {token_file: ~/token}")
    assert load_config().security.token_file == home / "token"


# --- The choice of the file ------------------------------------------------------------------------------------------


def test_a_named_file_wins_over_the_environment_which_wins_over_the_folder(monkeypatch):
    write("workers: [here:1]")
    write("workers: [environment:1]", "environment.yaml")
    write("workers: [named:1]", "named.yaml")
    assert read_config().hosts == ["here"]
    monkeypatch.setenv("DDLF_CONFIG", "environment.yaml")
    assert read_config().hosts == ["environment"]
    assert read_config("named.yaml").hosts == ["named"]
    assert find_config("named.yaml") == Path("named.yaml")


def test_without_any_file_the_error_says_where_it_looked_and_shows_an_example_that_works():
    assert find_config() is None
    with pytest.raises(ConfigError) as caught:
        load_config()
    message = str(caught.value)
    assert "DDLF_CONFIG is not set" in message
    assert f"{Path.cwd()}/cluster.yaml does not exist" in message
    example = "workers: [127.0.0.1:9000]"
    assert example in message
    write(example)
    assert read_config() == (["127.0.0.1"], [9000])


def test_a_named_file_that_is_missing_is_an_error_even_if_another_exists(monkeypatch):
    write("workers: [a:1]")
    with pytest.raises(ConfigError, match=f"config file nofile.yaml not found, looked in {Path.cwd()}"):
        load_config("nofile.yaml")
    monkeypatch.setenv("DDLF_CONFIG", "/no/such/file.yaml")
    with pytest.raises(ConfigError, match=r"config file /no/such/file.yaml \(named by DDLF_CONFIG\) not found"):
        load_config()


def test_an_empty_name_does_not_count_as_a_missing_name():
    write("workers: [a:1]")
    with pytest.raises(ConfigError, match="is a directory"):
        load_config("")


def test_an_empty_variable_counts_as_unset(monkeypatch):
    write("workers: [a:1]")
    monkeypatch.setenv("DDLF_CONFIG", "")
    assert read_config().hosts == ["a"]


def test_a_folder_instead_of_the_file_is_named():
    Path("folder").mkdir()
    with pytest.raises(ConfigError, match="config file folder is a directory"):
        load_config("folder")


def test_a_path_below_a_file_is_an_error_with_its_reason():
    write("")
    with pytest.raises(ConfigError, match="cannot be read: Not a directory"):
        load_config("cluster.yaml/x.yaml")


# --- Mistakes: each has a position and a sentence --------------------------------------------------------------------

ONE = "workers: [a:1]\n"


MISTAKES = [
    # YAML
    ("workers:\n  - a:1\nname lab\n", "3:1: while scanning a simple key, could not find expected ':'"),
    ("workers:\n\t- a:1\n", "2:1: .*; indent with spaces, not with tabs"),
    ("workers:\n  - [::1]:9000\n", r"2:6: .*; an IPv6 address in brackets needs quotes, as in '\[::1\]:9000'"),
    (ONE + "---\n" + ONE, "2:1: expected a single document in the stream, but found another document"),
    ("workers: [*a]\n", "1:11: found undefined alias 'a'"),
    (ONE + "name: !!python/object/apply:os.system [ls]\n", "2:7: tag '!!python/object/apply:os.system' is not "),
    (ONE + "x-y: !!python/name:os.system ''\n", "2:6: tag '!!python/name:os.system' is not allowed"),
    ("workers: [!!binary aaaa]\n", "1:11: tag '!!binary' is not allowed"),
    (ONE + "name: a\nname: b\n", r"3:1: key 'name' is given twice \(first at line 2\)"),
    ("workers:\n- host: a\n  port: 1\n  port: 2\n", r"4:3: key 'port' is given twice \(first at line 3\)"),
    (ONE + "? [a]\n: 1\n", "2:3: a key must be text, got a list"),
    (ONE + "run: {<<: {seed: 1}}\n", r"2:7: merge keys \('<<'\) are not supported"),
    ("", "1:1: the file is empty; the smallest valid file is 'workers:"),
    ("# nothing\n", "1:1: the file is empty; the smallest valid file is 'workers:"),
    ("- a:1\n", "1:1: expected a mapping at top level, got a list; the smallest"),
    (b"w\xffrkers", "1:2: not UTF-8 text"),
    ("workers: [a:1]".encode("utf-16"), "1:1: not UTF-8 text"),
    ("workers:\n- a:\0", "2:5: not UTF-8 text"),
    (ONE + "name: \x07", "2:7: control character U[+]0007 is not allowed"),
    # Keys
    (ONE + "run: {batchsize: 3}\n", "2:7: unknown key 'batchsize', did you mean 'batch_size'"),
    (ONE + "run: {codec: int8}\n", "2:7: codec is not a setting for this file: set it in the app, or with --codec"),
    (
        ONE + "run: {checkpoint_keep: 2}\n",
        "2:7: checkpoint_keep is not a setting for this file: set it in the app, or with -p checkpoint_keep=VALUE",
    ),
    (ONE + "seed: 3\n", "2:1: unknown key 'seed', it belongs in 'run'"),
    ("workers: [{host: a, prt: 1}]\n", "1:21: unknown key 'prt', did you mean 'port'"),
    (ONE + "zzz: 3\n", "2:1: unknown key 'zzz', known here: version, name, workers, launcher, security, run"),
    ("name: lab\n", "1:1: key 'workers' is missing; the smallest"),
    ("workers: [{port: 1}]\n", "1:11: key 'host' is missing"),
    (ONE + "version: 2\n", "2:10: version must be 1, got 2"),
    (ONE + "version: true\n", "2:10: version must be 1, got the boolean true"),
    # Values
    ("workers: [{host: a, port: '7001'}]\n", "1:27: port must be an integer, got '7001', write it without quotes"),
    ("workers: [{host: a, port: 22:22}]\n", "1:27: port must be an integer, got 22:22"),
    ("workers: [{host: a, port: 010}]\n", "1:27: port must be an integer, got 010"),
    ("workers: [{host: a, port: 0x10}]\n", "1:27: port must be an integer, got 0x10"),
    ("workers: [{host: a, port: 90.0}]\n", "1:27: port must be an integer, got 90.0"),
    ("workers: [{host: a, port: true}]\n", "1:27: port must be an integer, got the boolean true"),
    ("workers: [{host: a, port: 70000}]\n", "1:27: port must be 1-65535, got 70000"),
    ("workers: [{host: a, port:}]\n", "1:26: port must be an integer, got nothing"),
    ("workers: [{host: no}]\n", "1:18: host must be text, got the boolean no, write it in quotes"),
    ("workers: [{host: 12}]\n", "1:18: host must be text, got 12, write it in quotes"),
    ("workers: [{host: 10.0.0.256}]\n", "1:18: '10.0.0.256' is not a valid IP address"),
    ("workers: [a:99999]\n", "1:11: port must be 1-65535, got 99999"),
    ("workers: [[a]]\n", r"1:11: workers\[0\] must be 'host:port' or a mapping, got a list"),
    ("workers:\n-\n", r"2:2: workers\[0\] must be 'host:port' or a mapping, got nothing"),
    ("workers: a:1\n", "1:10: workers must be a list, got a:1"),
    ("workers: []\n", "1:10: workers must list at least one address"),
    (ONE + "launcher: herd\n", "2:11: launcher and workers exclude each other"),
    ("launcher: 3\n", "1:11: launcher must be text, or a mapping such as {slurm: {cores: 2}}"),
    (ONE + "name: ''\n", "2:7: name must be 1 to 64 printable characters"),
    (ONE + 'name: "\\e[31m"\n', r"2:7: name must be 1 to 64 printable characters .*, got '\\x1b\[31m'"),
    (ONE + "run: 5\n", "2:6: run must be a mapping, got 5"),
    (ONE + "run: {mode: snc}\n", f"2:13: mode must be {MODES}, got 'snc'; did you mean 'sync'\\?"),
    (ONE + "run: {split: [2]}\n", "2:14: split "),
    (ONE + "run: {batch_size: 0}\n", "2:19: batch_size must be at least 1, got 0"),
    (ONE + "run: {seed: 4294967296}\n", "2:13: seed must be at most 4294967295, got 4294967296"),
    (ONE + f"run: {{seed: {'9' * 5000}}}\n", "2:13: seed must be an integer, got 9999"),
    *(
        (ONE + f"run: {{connect_timeout_s: {value}}}\n", "2:26: connect_timeout_s must be a finite number > 0, got")
        for value in ("-1", "0", ".nan", ".inf", "-.INF", "1e400", "1.0e+400")
    ),
    (
        ONE + "run: {connect_timeout_s: '5'}\n",
        "2:26: connect_timeout_s must be a number, got '5', write it",
    ),
    (ONE + "security: {token_file: 5}\n", "2:24: token_file must be the path of a file, got 5"),
    # Contradictions
    ("workers: [a:1, b:1, a:1]\n", r"1:21: workers\[0\] and workers\[2\] are the same address, a:1"),
    ("workers: [A.lab:1, {host: a.lab., port: 1}]\n", r"1:20: workers\[0\] and workers\[1\] are the same address"),
    ("workers: ['[::1]:1', '[0::1]:1']\n", r"1:22: workers\[0\] and workers\[1\] are the same address"),
    (
        "workers: [{name: x, host: a}, {name: x, host: b}]\n",
        r"1:38: workers\[0\] and workers\[1\] have the same name, 'x'",
    ),
    (
        "workers: [{host: a, advertise: 'n:9'}, {host: b, advertise: 'N.:9'}]\n",
        r"1:61: workers\[0\] and workers\[1\] advertise the same address, N.:9",
    ),
    (
        "workers: [{host: a, advertise: 0.0.0.0}]\n",
        r"1:32: advertise: '0.0.0.0' is only an address to listen on: other",
    ),
    ("workers: [{host: a, gpus: [0, 0]}]\n", "1:27: gpus names the card 0 twice"),
    ("workers: [{host: a, gpus: 1}]\n", r"1:27: gpus must name cards, such as \[0\] or \[0, 1\], or be none, got 1"),
    ("workers: [{host: a, gpus: none, gpu_memory: 8GiB}]\n", "1:11: gpu_memory has no effect with gpus: none"),
    ("workers: [{host: a, gpu_memory: much}]\n", "1:33: gpu_memory must be a size such as `512MiB` or `2GB`"),
    ("workers: [{host: a, advertise: 'n:x'}]\n", r"1:32: advertise: port must be an integer, got 'x'"),
    (
        ONE + "run: {heartbeat_s: 5, dead_after_s: 2}\n",
        r"2:37: dead_after_s \(2 s\) must be at least 3 x heartbeat_s \(5 s\)",
    ),
    (ONE + "run: {heartbeat_s: 5}\n", r"2:6: dead_after_s \(4 s\) must be at least 3 x heartbeat_s \(5 s\)"),
    (ONE + "run: {dead_after_s: .nan}\n", "2:21: dead_after_s must be a finite number > 0, got .nan"),
    (ONE + "run: {min_workers: 2}\n", "2:20: min_workers is 2, but workers lists only 1"),
    # Limits
    ("x-a: &a 1\nx-b: [" + "*a, " * 101 + "]\n" + ONE, r"2:407: too many aliases \(> 100\)"),
    ("workers: &a [*a]\n", "1:10: nested deeper than 20 levels"),
    ("workers: " + "[" * 100_000, "1:30: nested deeper than 20 levels"),
    ("workers:\n" + "".join(f"- h{i}:1\n" for i in range(5000)), "2:1: workers: at most 4,096, got 5,000"),
]


@pytest.mark.parametrize(("content", "expected"), MISTAKES)
def test_a_mistake_gets_its_position_and_a_sentence(content, expected):
    message = complaint(content)
    assert re.match(f"cluster.yaml:{expected}", message), message
    assert "\n" not in message, "one mistake, one line"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (
            "worker: [a:1]\n",
            ["1:1: key 'workers' is missing", "1:1: unknown key 'worker', did you mean 'workers'?"],
        ),
        ("workers: [{hots: a}]\n", ["1:11: key 'host' is missing", "1:12: unknown key 'hots', did you mean 'host'?"]),
    ],
)
def test_a_misspelt_key_that_is_needed_is_also_reported_as_missing(content, expected):
    lines = complaint(content).splitlines()
    assert [line.startswith(f"cluster.yaml:{start}") for line, start in zip(lines, expected, strict=True)] == [True] * 2


def test_all_problems_are_reported_at_once_in_the_order_of_the_file():
    assert complaint(
        """\
nam: lab
workers:
  - 10.0.0.1:9000
  - {host: no, port: 22:22}
  - 10.0.0.1:9000
  - 10.0.0.2
  - host: a
    port: 1
    port: 2
run: {min_workers: 8, mode: snc}
security:
  token: do-not-show-me-do-not-show-me-do-not
  token_file: nope
"""
    ).splitlines() == [
        "cluster.yaml:1:1: unknown key 'nam', did you mean 'name'?",
        "cluster.yaml:4:12: host must be text, got the boolean no, write it in quotes",
        "cluster.yaml:4:22: port must be an integer, got 22:22",
        "cluster.yaml:5:5: workers[0] and workers[2] are the same address, 10.0.0.1:9000",
        "cluster.yaml:6:5: '10.0.0.2' has no port, write '10.0.0.2:9000'",
        "cluster.yaml:9:5: key 'port' is given twice (first at line 8)",
        "cluster.yaml:10:20: min_workers is 8, but workers lists only 5",
        f"cluster.yaml:10:29: mode must be {MODES}, got 'snc'; did you mean 'sync'?",
        "cluster.yaml:12:3: token must not be stored in this file, use token_file in security",
        f"cluster.yaml:13:15: token_file 'nope' does not exist (looked for '{Path.cwd()}/nope')",
    ]


def test_a_relative_token_file_is_looked_for_beside_the_file_and_not_in_the_working_folder():
    write("a token in the wrong place", "token")
    path = write("workers: [a:1]\nsecurity: {token_file: token}\n", "lab/cluster.yaml")
    with pytest.raises(ConfigError, match=f"lab/cluster.yaml:2:24: .*looked for '{Path.cwd()}/lab/token'"):
        load_config(path)


def test_paths_of_certificates_are_resolved_like_that_of_the_token_and_belong_together():
    for name in ("ca", "cert", "key"):
        write("a file", f"lab/{name}.pem")
    files = "tls_ca: ca.pem, tls_cert: cert.pem, tls_key: key.pem"
    security = load_config(write(f"workers: [a:1]\nsecurity: {{{files}}}\n", "lab/cluster.yaml")).security
    folder = Path.cwd() / "lab"
    assert (security.tls_ca, security.tls_cert, security.tls_key) == tuple(
        folder / f"{name}.pem" for name in ("ca", "cert", "key")
    )
    write("a file", "cert.pem")
    assert complaint(ONE + "security: {tls_cert: cert.pem}\n") == (
        "cluster.yaml:2:11: tls_cert and tls_key belong together, give both or none"
    )
    assert complaint(ONE + "security: {tls_ca: cert.pem, insecure_plaintext: true}\n") == (
        "cluster.yaml:2:11: insecure_plaintext and certificates exclude each other"
    )
    assert complaint(ONE + "security: {insecure_plaintext: 1}\n").startswith("cluster.yaml:2:32: insecure_plaintext")
    assert complaint(ONE + "security: {tls_key: no.pem}\n") == (
        f"cluster.yaml:2:21: tls_key 'no.pem' does not exist (looked for '{Path.cwd()}/no.pem')"
    )


def test_the_first_of_very_many_problems_are_shown_and_the_rest_counted():
    lines = complaint("workers:\n" + "  - h\n" * 100).splitlines()
    assert len(lines) == 21
    assert lines[-1] == "... and 80 more problems"


@pytest.mark.parametrize(
    "section", ["token: {}", "security: {{token: {}}}", "run: {{token: {}}}", "x: {}", "name: [{}]"]
)
def test_a_secret_in_the_file_is_never_shown(section):
    secret = "s3cr3t" * 8
    assert "s3cr3t" not in complaint(ONE + section.format(secret))


def test_a_token_file_given_as_configuration_is_not_shown():
    assert "s3cr3t" not in complaint("s3cr3t" * 8)


def test_a_file_over_one_mebibyte_is_refused_without_reading_it_all():
    with open("cluster.yaml", "wb") as file:
        file.truncate(1 << 40)  # a sparse file takes no space on the disk
    with pytest.raises(ConfigError, match=r"cluster\.yaml is larger than 1 MiB"):
        load_config()


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(
            "a: &a [x,x,x,x,x,x,x,x,x,x]\n"
            + "".join(f"{b}: &{b} [{','.join([f'*{a}'] * 10)}]\n" for a, b in pairwise("abcdefghij")),
            id="90 aliases that stand for ten thousand million values",
        ),
        pytest.param("workers: &a [*a, *a, *a]\n", id="an alias that contains itself"),
        pytest.param("workers: &a\n  x: *a\n", id="a mapping that contains itself"),
        pytest.param("workers: " + "[" * 1_000_000, id="a million brackets"),
        pytest.param("workers: [" + "1," * 500_000 + "]", id="half a million values"),
        pytest.param("a" * 1_000_000, id="one long word"),
    ],
)
def test_a_hostile_file_is_refused_within_seconds(content):
    start = time.perf_counter()
    message = complaint(content)
    assert time.perf_counter() - start < 20
    assert len(message) < 300


# --- Addresses -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("localhost:9000", ("localhost", 9000)),
        ("10.0.0.1:1", ("10.0.0.1", 1)),
        ("pc_03.lab.example.:65535", ("pc_03.lab.example.", 65535)),
        ("[::1]:9000", ("::1", 9000)),
        ("[fe80::1%eth0]:9000", ("fe80::1%eth0", 9000)),
    ],
)
def test_an_address_is_split_into_host_and_port(text, address):
    assert parse_address(text) == address
    host, port = address
    assert str(WorkerAddress(host=host, port=port)) == text


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a:99999", "port must be 1-65535, got 99999"),
        ("a:0", "port must be 1-65535, got 0"),
        ("a:-1", "port must be 1-65535, got -1"),
        ("a:" + "9" * 5000, "port must be 1-65535, got '999999999999999999999999999999999999999999999999999999999...'"),
        ("a:http", "port must be an integer, got 'http'"),
        ("a:1.5", "port must be an integer, got '1.5'"),
        ("a:+1", "port must be an integer, got '+1'"),
        ("a:\u0663", "port must be an integer, got '\u0663'"),
        ("a:1\n", r"port must be an integer, got '1\n'"),
        ("a", "'a' has no port, write 'a:9000'"),
        ("a:", "'a:' has no port, write 'a:9000'"),
        ("[::1]", "'[::1]' has no port, write '[::1]:9000'"),
        ("::1:9000", "an IPv6 address needs brackets, as in '[::1]:9000', got '::1:9000'"),
        ("[pc]:9000", "only an IPv6 address is written in brackets, got '[pc]:9000'"),
        ("[::g]:9000", "'::g' is not a valid IP address"),
        ("10.0.0.256:9000", "'10.0.0.256' is not a valid IP address"),
        ("10:22", "'10' is not a valid IP address"),
        (":9000", "host must be a host name or an IP address, got ''"),
        ("ann@pc:22", "host must be a host name or an IP address, got 'ann@pc'"),
        ("pc/x:9000", "host must be a host name or an IP address, got 'pc/x'"),
        ("http://pc:9000", "an address is host:port without a protocol, got 'http://pc:9000'"),
        ("pc 3:9000", "host must be a host name or an IP address, got 'pc 3'"),
        ("a" * 64 + ":1", "host must be a host name or an IP address, got '" + "a" * 57 + "...'"),
        ("", "'' has no port, write ':9000'"),
    ],
)
def test_an_invalid_address_is_refused_with_the_reason(text, sentence):
    with pytest.raises(ConfigError) as caught:
        parse_address(text)
    assert str(caught.value) == sentence


# --- The schema for editors ------------------------------------------------------------------------------------------


def test_the_schema_describes_both_forms_of_a_worker_and_leaves_x_keys_free():
    result = schema()
    assert result["oneOf"] == [{"required": ["workers"]}, {"required": ["launcher"]}]
    assert result["properties"]["version"]["const"] == 1
    assert (result["properties"]["workers"]["minItems"], result["properties"]["workers"]["maxItems"]) == (
        1,
        MAX_WORKERS,
    )
    short_form, mapping = result["$defs"]["WorkerAddress"]["anyOf"]
    assert short_form["type"] == "string"
    assert re.search(short_form["pattern"], "[::1]:9000")
    assert mapping["required"] == ["host"]
    assert (mapping["properties"]["port"]["minimum"], mapping["properties"]["port"]["maximum"]) == (1, 65535)
    for section in (result, mapping, result["$defs"]["RunConfig"], result["$defs"]["SecurityConfig"]):
        assert section["additionalProperties"] is False
        assert section["patternProperties"] == {"^x-": {}}


def test_every_key_in_the_schema_is_described():
    definitions = schema()
    mappings = [
        definitions,
        definitions["$defs"]["WorkerAddress"]["anyOf"][1],
        *map(definitions["$defs"].get, ("RunConfig", "SecurityConfig")),
    ]
    for mapping in mappings:
        for key, value in mapping["properties"].items():
            assert value.get("description"), key


def test_the_shipped_schema_equals_the_schema_of_the_models():
    shipped = (Path(ddlf.__file__).parent / "cluster/config/cluster.schema.json").read_text(encoding="utf-8")
    assert shipped == json.dumps(schema(), indent=2) + "\n", "update the schema with: python docs/reference"


def data_of(content: str | bytes) -> Any:
    """Return the data of a file as an editor reads it, or None if its YAML is invalid."""
    try:
        document = compose(content.removeprefix("\ufeff"))
    except (yaml.YAMLError, TypeError):  # bytes that are not text
        return None
    return None if document is None or document.problems else document.data


BEYOND_A_SCHEMA = re.compile(
    r"same (address|name)|3 x heartbeat_s|lists only|with gpus: none|"  # rules about several values
    r"[ :](\.nan|\.inf|1e400|1\.0e\+400)|port: 90\.0|"  # JSON has none of the first values, and takes 90.0 for an integer
    r"mode must be one of|"  # packages add strategies, and a text may have their settings
    r"a:99999|10\.0\.0\.256|\\e|advertise: (0|'n:x)"  # mistakes inside of texts
)


def test_the_schema_is_valid_and_accepts_the_accepted_files():
    Draft202012Validator.check_schema(schema())
    check = Draft202012Validator(schema()).validate
    root = Path(__file__).parents[2] / "cluster.yaml"
    modeline = "# yaml-language-server: $schema="
    assert (root.parent / root.read_text().splitlines()[0].removeprefix(modeline)).is_file()
    for content in (root.read_text(), *(content for content, _ in ACCEPTED)):
        check(data_of(content))


@pytest.mark.parametrize(("content", "expected"), MISTAKES)
def test_the_schema_refuses_the_mistakes_that_a_schema_can_describe(content, expected):
    data = data_of(content)
    beyond = bool(BEYOND_A_SCHEMA.search(f"{content} {expected}"))
    assert data is None or Draft202012Validator(schema()).is_valid(data) is beyond
