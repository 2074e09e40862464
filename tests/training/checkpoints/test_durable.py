"""Tests of sealed JSON, of files that are on the disk when the call returns, and of the texts for errors of the system."""

import errno
import json
import os
import stat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddlf.errors import CheckpointCorrupt, CheckpointError, LeaseError
from ddlf.training.checkpoints import durable

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
CONTENTS = st.dictionaries(st.text().filter(lambda key: key != durable.SEAL), JSON, max_size=4)


@given(CONTENTS)
def test_sealed_data_is_read_back_unchanged_in_its_order(tmp_path_factory, content):
    unsealed = durable.unseal(durable.seal(content), tmp_path_factory.getbasetemp())
    assert unsealed == content
    assert list(unsealed) == list(content)


@given(CONTENTS, st.floats())
def test_sealed_data_is_spelled_like_the_json_module_spells_it(content, number):
    content = {**content, "number": number, "nested": [{}, [], [content]]}
    spelled = durable.seal(content).decode()
    seal = json.loads(spelled)[durable.SEAL]
    assert spelled == json.dumps({**content, durable.SEAL: seal}, indent=1) + "\n"


@given(CONTENTS, st.data())
def test_a_flipped_bit_anywhere_breaks_the_seal(tmp_path_factory, content, data):
    sealed = bytearray(durable.seal(content))
    bit = data.draw(st.integers(0, 8 * len(sealed) - 1))
    sealed[bit // 8] ^= 1 << bit % 8
    with pytest.raises(CheckpointCorrupt, match="manifest"):
        durable.unseal(bytes(sealed), tmp_path_factory.getbasetemp() / "manifest")


def test_the_same_values_spelled_otherwise_break_the_seal(tmp_path):
    sealed = durable.seal({"rate": 1e-30, "name": "é"})
    for old, new in ((b"1e-30", b"1E-30"), (b"\\u00e9", b"\\u00E9"), (b'",\n', b'" ,\n'), (b"{", b" {")):
        assert json.loads(sealed.replace(old, new)) == json.loads(sealed)
        with pytest.raises(CheckpointCorrupt, match="another spelling"):
            durable.unseal(sealed.replace(old, new), tmp_path)


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"", "is empty"),
        (b"\0" * 100, "holds only zeros"),
        (b"round = 3", "is not JSON"),
        (b"\xff\xfe{}", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"[]", "is JSON, but not sealed"),
        (b"{}", "is JSON, but not sealed"),
        (b'{"sha256": 3}', "is JSON, but not sealed"),
        (b'{"round": 3, "sha256": "00"}', "expected SHA-256 00, found SHA-256 "),
    ],
)
def test_each_kind_of_unsealed_data_is_refused_with_its_own_sentence(tmp_path, data, sentence):
    with pytest.raises(CheckpointCorrupt, match=sentence) as caught:
        durable.unseal(data, tmp_path / "manifest.json")
    assert caught.value.file == str(tmp_path / "manifest.json")


def test_deeply_nested_json_is_damage_at_any_depth(tmp_path):
    for depth in range(50, 2000, 50):
        data = b'{"a": ' + b"[" * depth + b"]" * depth + b', "sha256": "00"}'
        with pytest.raises(CheckpointCorrupt):
            durable.unseal(data, tmp_path)


@pytest.mark.parametrize("content", [{"n": 10**5000}, {"o": object()}, {"s": {1, 2}}])
def test_values_that_json_cannot_hold_are_not_sealed(content):
    with pytest.raises(CheckpointError, match="JSON"):
        durable.seal(content)


def test_too_much_json_is_not_sealed(monkeypatch):
    monkeypatch.setattr(durable, "MAX_SEALED_BYTES", 100)
    with pytest.raises(CheckpointError, match="over the limit of 100 B"):
        durable.seal({"text": "x" * 100})


def test_file_is_replaced_completely_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "owner.json"
    durable.replace(path, b"old")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    monkeypatch.setattr(os, "rename", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "broken")))
    with pytest.raises(OSError, match="broken"):
        durable.replace(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["owner.json"]


def test_a_file_is_synced_before_it_gets_its_name_and_the_folder_after(tmp_path, monkeypatch):
    operations = []
    fsync, rename = os.fsync, os.rename
    monkeypatch.setattr(os, "fsync", lambda fd: (operations.append(os.readlink(f"/proc/self/fd/{fd}")), fsync(fd)))
    monkeypatch.setattr(os, "rename", lambda old, new: (operations.append("rename"), rename(old, new)))
    durable.replace(tmp_path / "owner.json", b"x")
    assert operations[0].startswith(f"{tmp_path}/.owner.json-")
    assert operations[1:] == ["rename", str(tmp_path)]


@pytest.mark.parametrize(
    ("number", "sentence"),
    [
        (errno.ENOSPC, r"no space: need 412 MB, free .* in /"),
        (errno.EDQUOT, "no space: need 412 MB, but the quota"),
        (errno.EFBIG, r"no space: need 412 MB.*see ulimit -f"),
        (errno.EROFS, "cannot write in .*: Read-only file system; use another folder"),
        (errno.EACCES, f"Permission denied for uid {os.geteuid()}; change its owner or mode"),
        (errno.ESTALE, r"Stale file handle; the network file system lost it"),
        (errno.EIO, "cannot write in .*: Input/output error"),
    ],
)
def test_an_error_of_the_operating_system_becomes_a_sentence(tmp_path, number, sentence):
    with (
        pytest.raises(CheckpointError, match=sentence) as caught,
        durable.explained(tmp_path, "write in", need=412_000_000),
    ):
        raise OSError(number, os.strerror(number))
    assert caught.value.errno == number
    assert caught.value.exit_code == 7


def test_a_full_disk_is_reported_also_when_the_needed_size_is_unknown(tmp_path):
    assert str(durable.no_space(tmp_path, 0)).startswith("no space: free ")


def test_errors_of_ddlf_pass_unchanged(tmp_path):
    with pytest.raises(LeaseError, match="only said"), durable.explained(tmp_path, "write in"):
        raise LeaseError("only said")
