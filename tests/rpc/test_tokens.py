"""Tests of tokens: the places where they are found, the refused ones, and that messages never show one."""

import hashlib
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from ddlf.errors import AuthError
from ddlf.rpc import tokens
from ddlf.rpc.handshake import auth_key
from ddlf.rpc.tokens import Tokens, default_path, find_tokens, loopback_tokens, new_token, write_token
from tests.patience import PATIENCE_S

A, B = "a" * 43, "b" * 43


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """Set up a user with an empty home folder and without variables in the environment."""
    for name in ("DDLF_TOKEN", "DDLF_TOKEN_FILE", "XDG_CONFIG_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(tokens, "_FROM_ENVIRONMENT", {})
    return tmp_path


def file_with(content: str | bytes, path: Path, mode: int = 0o600) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    path.chmod(mode)
    return path


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


# --- Making ----------------------------------------------------------------------------------------------------------


def test_a_new_token_has_43_url_safe_characters_and_differs_from_the_last_one():
    tokens = {new_token() for _ in range(1000)}
    assert len(tokens) == 1000
    assert all(re.fullmatch(r"[A-Za-z0-9_-]{43}", token) for token in tokens)


def test_a_written_token_can_be_read_by_its_owner_only(home):
    previous = os.umask(0)
    try:
        path = write_token()
    finally:
        os.umask(previous)
    assert path == default_path() == home / ".config" / "ddlf" / "token"
    assert (mode_of(path), mode_of(path.parent)) == (0o600, 0o700)
    assert re.fullmatch(r"[A-Za-z0-9_-]{43}\n", path.read_text())
    assert find_tokens() == Tokens((path.read_bytes().strip(),), f"token file {path}")
    assert os.listdir(path.parent) == ["token"], "nothing else is left in the folder"


def test_the_default_path_follows_xdg_config_home(home, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home / "elsewhere"))
    assert default_path() == home / "elsewhere" / "ddlf" / "token"


def test_a_token_is_never_overwritten(home):
    path = write_token(home / "token")
    before = path.read_bytes()
    with pytest.raises(AuthError, match=r"already holds a token, which is not overwritten.*first line"):
        write_token(str(path))
    assert path.read_bytes() == before
    assert os.listdir(home) == ["token"]


def test_a_token_that_cannot_be_written_is_an_error_with_its_reason(home):
    file_with("", home / "file")
    with pytest.raises(AuthError, match=r"cannot write token file .*/file/token: File exists"):
        write_token(home / "file" / "token")


def test_a_token_that_does_not_fit_on_the_disk_leaves_nothing_behind(home, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "link", full)
    with pytest.raises(AuthError, match="No space left on device"):
        write_token(home / "token")
    assert os.listdir(home) == []


# --- Finding ---------------------------------------------------------------------------------------------------------


def test_nothing_configured_is_none():
    assert find_tokens() is None


def test_the_first_configured_source_wins(home, monkeypatch):
    file_with("4" * 43, default_path())
    assert find_tokens().primary == b"4" * 43
    monkeypatch.setenv("DDLF_TOKEN", "3" * 43)
    assert find_tokens().primary == b"3" * 43
    monkeypatch.setenv("DDLF_TOKEN_FILE", str(file_with("2" * 43, home / "second")))
    assert find_tokens().primary == b"2" * 43
    assert find_tokens(file_with("1" * 43, home / "first")).primary == b"1" * 43


def test_the_source_is_named_for_messages(home, monkeypatch):
    path = file_with(A, home / "t")
    assert find_tokens(path).source == f"token file {path}"
    monkeypatch.setenv("DDLF_TOKEN", A)
    assert find_tokens().source == "DDLF_TOKEN"
    monkeypatch.setenv("DDLF_TOKEN_FILE", "~/t")
    assert find_tokens().source == f"DDLF_TOKEN_FILE {path}"


def test_a_token_in_the_environment_is_removed_at_once_and_still_found_later(monkeypatch):
    monkeypatch.setenv("DDLF_TOKEN", A)
    first = find_tokens()
    assert "DDLF_TOKEN" not in os.environ
    child = subprocess.check_output([sys.executable, "-c", "import os; print('DDLF_TOKEN' in os.environ)"], text=True)
    assert child == "False\n"
    assert find_tokens() == first


def test_a_token_in_the_environment_is_removed_even_if_a_file_wins(home, monkeypatch):
    monkeypatch.setenv("DDLF_TOKEN", A)
    assert find_tokens(file_with(B, home / "t")).primary == B.encode()
    assert "DDLF_TOKEN" not in os.environ


@pytest.mark.parametrize("content", [f"{A}\n{B}\n", f"{A}\r\n{B}", f"\n{A}  \n\n{B}\n\n"])
def test_a_file_of_two_lines_proves_with_the_first_and_accepts_both(home, content):
    tokens = find_tokens(file_with(content, home / "t"))
    assert tokens.primary == A.encode()
    assert tokens.all == (A.encode(), B.encode())


def test_tokens_of_other_tools_are_accepted(home):
    hexadecimal, base64 = "0123456789abcdef" * 4, "q83vEjRWeJCrze8SNFZ4kKvN7xI0VniQ+/8="
    assert find_tokens(file_with(f"{hexadecimal}\n{base64}", home / "t")).all == (hexadecimal.encode(), base64.encode())


def test_a_link_to_a_token_file_is_followed(home):
    (home / "link").symlink_to(file_with(A, home / "t"))
    assert find_tokens(home / "link").primary == A.encode()


# --- Refusals --------------------------------------------------------------------------------------------------------


def make_missing(path):
    pass


def make_directory(path):
    path.mkdir()


def make_pipe(path):
    os.mkfifo(path, 0o600)


def containing(content: str | bytes, mode: int = 0o600):
    return lambda path: file_with(content, path, mode)


def readable_by_group(path):
    file_with(A, path, 0o640)
    if os.geteuid() == 0:  # a group may read files that belong to root
        os.chown(path, 1001, -1)


BAD_FILES = [
    pytest.param(make_missing, r"{path} does not exist.*'ddlf token new'", id="missing"),
    pytest.param(make_directory, r"{path} is a directory.*name a file", id="directory"),
    pytest.param(make_pipe, r"{path} is not a regular file.*copy", id="pipe"),
    pytest.param(containing(""), r"{path} is empty.*'ddlf token new'", id="empty"),
    pytest.param(containing(" \n\n"), r"{path} is empty.*'ddlf token new'", id="blank"),
    pytest.param(containing(bytes(range(256))), r"{path} is not a token: it holds .* one token per line", id="binary"),
    pytest.param(containing(A.encode("utf-16")), r"{path} is not a token: it holds", id="utf-16"),
    pytest.param(containing(f"# lab\n{A}"), r"{path} is not a token: it holds spaces", id="comment"),
    pytest.param(containing(f"{A}\n{B}\n{A}"), r"{path} holds 3 tokens, at most two.*keep", id="three"),
    pytest.param(containing("s3cr3t" * 2), r"{path}: token too short \(12 .*at least 32.*'ddlf token new'", id="short"),
    pytest.param(containing(f"{A}\ns3cr3t"), r"{path}: token too short \(6 characters\)", id="short second"),
    pytest.param(containing("s3cr3t" * 1000), r"{path} is longer than 4096 bytes.*name another", id="too long"),
    pytest.param(readable_by_group, r"{path} is readable by others \(0640\).*chmod 600 {path}", id="group"),
    pytest.param(containing(A, 0o644), r"{path} is readable by others \(0644\).*chmod 600 {path}", id="others"),
    pytest.param(containing(A, 0o602), r"{path} is readable by others \(0602\).*chmod 600 {path}", id="writable"),
]


@pytest.mark.parametrize(("make", "sentence"), BAD_FILES)
def test_an_invalid_named_file_is_refused_and_no_other_source_is_tried(home, monkeypatch, make, sentence):
    path = home / "named"
    make(path)
    file_with(B, default_path())
    monkeypatch.setenv("DDLF_TOKEN", B)
    expected = sentence.format(path=re.escape(str(path)))
    with pytest.raises(AuthError, match=f"token file {expected}") as caught:
        find_tokens(path)
    assert "s3cr3t" not in str(caught.value)
    monkeypatch.setenv("DDLF_TOKEN_FILE", str(path))
    with pytest.raises(AuthError, match=f"DDLF_TOKEN_FILE {expected}"):
        find_tokens()


@pytest.mark.parametrize(("make", "sentence"), [case for case in BAD_FILES if case.id != "missing"])
def test_an_invalid_default_file_is_refused_too(make, sentence):
    default_path().parent.mkdir(parents=True)
    make(default_path())
    with pytest.raises(AuthError, match=sentence.format(path=re.escape(str(default_path())))):
        find_tokens()


def test_the_sentences_for_bad_files_are_all_different():
    kinds = ("missing", "directory", "pipe", "empty", "binary", "three", "short", "too long", "others")
    sentences = [case.values[1] for case in BAD_FILES if case.id in kinds]
    assert len(set(sentences)) == len(kinds)


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ("", "DDLF_TOKEN is empty"),
        ("s3cr3t", r"DDLF_TOKEN: token too short \(6 characters\)"),
        ("s3cr3t " * 10, "DDLF_TOKEN is not a token: it holds spaces"),
        ("s3cr3t\udcff" * 10, "DDLF_TOKEN is not a token"),
    ],
)
def test_a_bad_token_in_the_environment_stays_an_error_although_it_is_removed(monkeypatch, value, sentence):
    file_with(B, default_path())
    monkeypatch.setenv("DDLF_TOKEN", value)
    for _ in range(2):
        with pytest.raises(AuthError, match=sentence) as caught:
            find_tokens()
        assert "s3cr3t" not in str(caught.value)
    assert "DDLF_TOKEN" not in os.environ


def test_an_empty_token_file_variable_is_an_error_and_not_unset(monkeypatch):
    file_with(B, default_path())
    monkeypatch.setenv("DDLF_TOKEN_FILE", "")
    with pytest.raises(AuthError, match="DDLF_TOKEN_FILE is set but empty"):
        find_tokens()


def test_a_file_that_may_not_be_read_is_an_error_with_its_reason(home, monkeypatch):
    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    path = file_with(A, home / "t")
    # root may read every file, so the mode alone has no effect in a test as root
    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(AuthError, match=rf"token file {path} cannot be read: Permission denied.*ls -l {path}"):
        find_tokens(path)


@pytest.mark.parametrize("path", ["a\0b", "x" * 300])
def test_a_path_that_cannot_exist_is_an_error_with_its_reason(path):
    with pytest.raises(AuthError, match=r"cannot be read: (embedded null byte|File name too long)"):
        find_tokens(path)


@pytest.mark.parametrize(
    ("mode", "owner", "accepted"),
    [(0o440, 0, True), (0o640, 0, True), (0o460, 0, False), (0o450, 0, False), (0o444, 0, False), (0o440, 1001, False)],
)
def test_token_file_of_root_may_be_readable_by_a_group_only(home, monkeypatch, mode, owner, accepted):
    def fstat(descriptor):
        status = list(usual(descriptor))
        status[stat.ST_UID] = owner
        return os.stat_result(status)

    path, usual = file_with(A, home / "secret", mode), os.fstat
    monkeypatch.setattr(os, "fstat", fstat)
    monkeypatch.setattr(os, "geteuid", lambda: 1001)
    if accepted:
        assert find_tokens(path).all == (A.encode(),)
    else:
        with pytest.raises(AuthError, match="is readable by others"):
            find_tokens(path)


def test_a_file_of_another_user_is_refused(home, monkeypatch):
    path = file_with(A, home / "t")
    owner = os.geteuid() or 1001
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    if os.getuid() == 0:
        os.chown(path, owner, -1)
    with pytest.raises(AuthError, match=rf"belongs to another user \(uid {owner}\)"):
        find_tokens(path)


def test_without_a_home_folder_nothing_is_written_to_a_folder_named_tilde(home, monkeypatch):
    monkeypatch.chdir(home)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # this is the result if the user id has no home
    assert find_tokens() is None
    with pytest.raises(AuthError, match=r"no home folder.*set HOME"):
        write_token()
    with pytest.raises(AuthError, match="no home folder"):
        loopback_tokens()
    assert os.listdir(home) == []


# --- The automatic token of loopback ---------------------------------------------------------------------------------


def test_the_loopback_token_is_made_once_for_this_user_only(home):
    tokens = loopback_tokens()
    path = home / ".local" / "state" / "ddlf" / "loopback-token"
    assert (mode_of(path), mode_of(path.parent)) == (0o600, 0o700)
    assert tokens == loopback_tokens() == Tokens((path.read_bytes().strip(),), f"loopback token {path}")
    assert find_tokens() is None, "it is not a token for a cluster"


def test_the_loopback_token_follows_xdg_state_home(home, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(home / "elsewhere"))
    loopback_tokens()
    assert (home / "elsewhere" / "ddlf" / "loopback-token").is_file()


@pytest.mark.parametrize(
    ("content", "mode", "sentence"),
    [("", 0o600, "is empty"), (A, 0o644, "readable by others"), ("x", 0o600, "too short")],
)
def test_an_invalid_loopback_token_is_refused_and_not_replaced(home, content, mode, sentence):
    path = file_with(content, home / ".local" / "state" / "ddlf" / "loopback-token", mode)
    with pytest.raises(AuthError, match=f"loopback token {path}.*{sentence}"):
        loopback_tokens()
    assert path.read_text() == content


def test_processes_that_start_at_once_get_the_same_loopback_token(home):
    code = """
import sys
from ddlf.rpc.tokens import loopback_tokens
print("ready", flush=True)
sys.stdin.readline()
print(loopback_tokens().primary.decode())
"""
    command = [sys.executable, "-c", code]
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) for _ in range(8)
    ]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("go\n")
    outputs = {process.communicate(timeout=PATIENCE_S)[0] for process in processes}
    folder = home / ".local" / "state" / "ddlf"
    assert outputs == {(folder / "loopback-token").read_text()}
    assert os.listdir(folder) == ["loopback-token"]


def test_the_loser_of_the_race_for_the_loopback_token_takes_the_winners_token(home, monkeypatch):
    path = home / ".local" / "state" / "ddlf" / "loopback-token"

    def made_by_another_process_meanwhile(draft, target):
        file_with(B, Path(target))
        raise FileExistsError(17, "File exists")

    monkeypatch.setattr(os, "link", made_by_another_process_meanwhile)
    assert loopback_tokens().primary == B.encode()
    assert os.listdir(path.parent) == ["loopback-token"]


# --- Holding ---------------------------------------------------------------------------------------------------------


def test_tokens_show_no_secret_in_any_text_form():
    tokens = Tokens((A.encode(), B.encode()), "token file /x")
    fingerprint = hashlib.sha256(A.encode()).hexdigest()[:4]
    assert tokens.fingerprint == fingerprint
    for text in (repr(tokens), str(tokens), f"{tokens}", f"{tokens!r}", "%s" % (tokens,), repr([tokens])):  # noqa: UP031
        assert fingerprint in text
        assert "token file /x" in text
        assert "aaaa" not in text
        assert "bbbb" not in text


def test_tokens_cannot_be_changed_or_be_none():
    tokens = Tokens((A.encode(),), "test")
    with pytest.raises(AttributeError):
        tokens.all = ()
    with pytest.raises(ValueError, match="at least one"):
        Tokens((), "test")


@pytest.mark.parametrize("token", [A.encode(), b"k" * 64, b"k" * 100])
def test_the_key_is_the_hmac_of_rfc_2104(token):
    block = (token if len(token) <= 64 else hashlib.sha256(token).digest()).ljust(64, b"\0")
    inner = hashlib.sha256(bytes(x ^ 0x36 for x in block) + b"ddlf auth key v1").digest()
    assert auth_key(token) == hashlib.sha256(bytes(x ^ 0x5C for x in block) + inner).digest()
