"""Tests of the handshake: it accepts only clients with the token, and no parser is reachable before its end."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ddlf.rpc.handshake
from ddlf.errors import AuthError, ConnectError, ProtocolError, VersionError
from ddlf.rpc.handshake import (
    FLAG_TLS,
    HELLO,
    PREAMBLE,
    PROOF_BYTES,
    ClientHandshake,
    Hello,
    Role,
    Verdict,
    WorkerHandshake,
    auth_key,
    decode_hello,
    is_http,
    key_id,
    proof,
    read_preamble,
    short_answer,
)
from tests.patience import PATIENCE_S

TOKEN, OTHER = b"t" * 43, b"o" * 43
LIMIT = 4 * 1024**3


def meet(client_token=TOKEN, worker_tokens=(TOKEN,), *, on_client_hello=bytes, on_answer=bytes, on_proof=bytes) -> bool:
    """Run a whole handshake, in which an attacker may alter each message. Return whether the worker accepts."""
    client, worker = ClientHandshake(Role.DATA, client_token, LIMIT), WorkerHandshake(worker_tokens, LIMIT)
    _, answer = worker.answer(on_client_hello(client.hello))
    _, proof_of_client = client.read_hello(on_answer(answer))
    return worker.accepts(on_proof(proof_of_client))


def flip(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def test_two_sides_with_the_same_token_accept_each_other_and_read_the_hello_of_the_other_side():
    client, worker = ClientHandshake(Role.CONTROL, TOKEN, 1000), WorkerHandshake((TOKEN,), 2000)
    clients_hello, answer = worker.answer(client.hello)
    workers_hello, proof_of_client = client.read_hello(answer)
    assert worker.accepts(proof_of_client)
    assert (clients_hello.role, clients_hello.max_message_bytes) == (Role.CONTROL, 1000)
    assert workers_hello.max_message_bytes == 2000
    ClientHandshake.read_verdict(bytes([Verdict.ACCEPTED]))


def test_a_client_shows_no_proof_to_a_worker_with_another_token():
    with pytest.raises(AuthError, match="the worker has another token than this side"):
        meet(worker_tokens=(OTHER,))


def test_a_worker_refuses_a_client_with_another_token_that_continues_the_handshake():
    client, worker = ClientHandshake(Role.DATA, OTHER, LIMIT), WorkerHandshake((TOKEN,), LIMIT)
    _, answer = worker.answer(client.hello)
    assert not worker.accepts(proof(auth_key(OTHER), "C", client.hello, answer[: HELLO.size]))


def test_both_tokens_are_accepted_while_one_replaces_the_other():
    assert meet(TOKEN, (TOKEN, OTHER))
    assert meet(OTHER, (TOKEN, OTHER))
    with pytest.raises(AuthError):
        meet(b"x" * 43, (TOKEN, OTHER))


def test_a_recorded_handshake_opens_nothing():
    client, first = ClientHandshake(Role.DATA, TOKEN, LIMIT), WorkerHandshake((TOKEN,), LIMIT)
    _, answer = first.answer(client.hello)
    _, proof_of_client = client.read_hello(answer)
    assert first.accepts(proof_of_client)
    second = WorkerHandshake((TOKEN,), LIMIT)
    second.answer(client.hello)
    assert not second.accepts(proof_of_client)
    with pytest.raises(AuthError):
        ClientHandshake(Role.DATA, TOKEN, LIMIT).read_hello(answer)


def test_a_reflected_proof_opens_nothing():
    client, worker = ClientHandshake(Role.DATA, TOKEN, LIMIT), WorkerHandshake((TOKEN,), LIMIT)
    _, answer = worker.answer(client.hello)
    assert not worker.accepts(answer[HELLO.size :]), "the worker's own proof"
    with pytest.raises(AuthError):  # a reflected hello of the client is refused, too
        client.read_hello(client.hello + proof(auth_key(OTHER), "S", client.hello, client.hello))


REFUSALS = (AuthError, ProtocolError, VersionError)


def test_no_bit_of_the_clients_hello_can_be_altered_on_the_way():
    for bit in range(HELLO.size * 8):
        with pytest.raises(REFUSALS):
            meet(on_client_hello=lambda data, bit=bit: flip(data, bit))


def test_no_bit_of_the_workers_answer_can_be_altered_on_the_way():
    for bit in range((HELLO.size + PROOF_BYTES) * 8):
        with pytest.raises(REFUSALS):
            meet(on_answer=lambda data, bit=bit: flip(data, bit))


def test_no_bit_of_the_clients_proof_can_be_altered_on_the_way():
    for bit in range(PROOF_BYTES * 8):
        assert not meet(on_proof=lambda data, bit=bit: flip(data, bit))


@given(st.integers(0, 63))
def test_a_proof_is_bound_to_the_certificate_that_was_seen(position):
    hellos = b"c" * 64, b"w" * 64
    certificate = bytearray(32)
    certificate[position // 2] = 1 + position
    assert proof(auth_key(TOKEN), "C", *hellos) != proof(auth_key(TOKEN), "C", *hellos, bytes(certificate))


def test_every_handshake_has_fresh_nonces():
    nonces = {decode_hello(ClientHandshake(Role.DATA, TOKEN, LIMIT).hello).nonce for _ in range(1000)}
    nonces |= {WorkerHandshake((TOKEN,), LIMIT).answer(bytes_of_a_client())[1][32:64] for _ in range(1000)}
    assert len(nonces) == 2000


def bytes_of_a_client() -> bytes:
    return ClientHandshake(Role.DATA, TOKEN, LIMIT).hello


def test_the_token_is_in_no_message():
    client, worker = ClientHandshake(Role.DATA, TOKEN, LIMIT), WorkerHandshake((TOKEN,), LIMIT)
    _, answer = worker.answer(client.hello)
    _, proof_of_client = client.read_hello(answer)
    messages = client.hello + answer + proof_of_client
    assert TOKEN not in messages
    assert auth_key(TOKEN) not in messages


def test_every_refused_client_gets_the_same_error_except_from_a_busy_worker():
    with pytest.raises(AuthError, match="the worker refused this side's token"):
        ClientHandshake.read_verdict(bytes([Verdict.REFUSED]))
    with pytest.raises(AuthError):
        ClientHandshake.read_verdict(b"\0")
    with pytest.raises(ConnectError, match="the worker accepts no more connections; close other masters"):
        ClientHandshake.read_verdict(bytes([Verdict.BUSY]))


# --- Preambles -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "description"),
    [
        (b"GET / HTTP/1.1\r\n", "looks like HTTP"),
        (b"POST /rpc HTTP/1.1", "looks like HTTP"),
        (b"OPTIONS * HTTP/1.1", "looks like HTTP"),
        (b"HTTP/1.1 400 Bad Request", "looks like HTTP"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01", "looks like TLS"),
        (b"\x15\x03\x03\x00\x02\x02\x46\x00", "looks like TLS"),
        (b"SSH-2.0-OpenSSH_9.2", "looks like SSH"),
        (b"*1\r\n$4\r\nPING\r\n", "first bytes 2a 31 0d 0a 24 34 0d 0a"),
        (b"\x00\x00\x00\x85\xffSMB", "first bytes 00 00 00 85 ff 53 4d 42"),
        (bytes(8), "first bytes 00 00 00 00 00 00 00 00"),
        (b"\xff" * 8, "first bytes ff ff ff ff ff ff ff ff"),
        (b"ddlf\x01\x00\x01\x00", "first bytes 64 64 6c 66 01 00 01 00"),
    ],
)
def test_another_protocol_is_recognised_by_its_first_bytes(data, description):
    with pytest.raises(ProtocolError) as caught:
        read_preamble(data[:8])
    assert str(caught.value) == f"not a DDLF client ({description})"


def test_only_http_requests_are_answered_as_http():
    assert is_http(b"GET / HT")
    assert not is_http(b"HTTP/1.1")
    assert not is_http(b"DDLF\x01\x00\x01\x00")
    assert not is_http(b"")


def test_another_major_version_is_named_and_a_higher_minor_version_is_accepted():
    with pytest.raises(
        VersionError, match=r"the other side speaks protocol 2\.7, this side 1\.1; install the same version"
    ):
        read_preamble(b"DDLF\x02\x07\x01\x00")
    assert read_preamble(b"DDLF\x01\xff\x02\x00") is Role.DATA


def test_a_client_of_another_version_receives_the_version_of_the_worker():
    magic, major, minor, _, _ = PREAMBLE.unpack(short_answer())
    assert (magic, major, minor) == (b"DDLF", *ddlf.rpc.handshake.VERSION)


@pytest.mark.parametrize("role", [0, 4, 255])
def test_an_unknown_role_is_refused(role):
    with pytest.raises(ProtocolError, match=f"unknown role {role} in the preamble"):
        read_preamble(PREAMBLE.pack(b"DDLF", 1, 0, role, 0))


@pytest.mark.parametrize("flags", [0x02, 0x80, 0xFF])
def test_an_unknown_flag_is_refused(flags):
    with pytest.raises(ProtocolError, match=f"unknown flags {flags:#04x} in the preamble"):
        read_preamble(PREAMBLE.pack(b"DDLF", 1, 0, 1, flags))


@given(st.binary(min_size=8, max_size=8))
def test_any_first_bytes_give_a_role_or_a_refusal(data):
    try:
        assert isinstance(read_preamble(data), Role)
    except (ProtocolError, VersionError):
        return


@given(
    st.builds(
        Hello,
        role=st.sampled_from(Role),
        nonce=st.binary(min_size=32, max_size=32),
        max_message_bytes=st.integers(0, 2**64 - 1),
        key_id=st.binary(min_size=16, max_size=16),
        flags=st.sampled_from([0, FLAG_TLS]),
    )
)
def test_a_decoded_hello_equals_the_encoded_one(hello):
    assert decode_hello(hello.encode()) == hello


# --- Code that is reachable before the handshake ----------------------------------------------------------------------


def test_the_handshake_imports_no_parser():
    modules = subprocess.run(
        [sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, {str(package_root())!r}); {IMPORT_AND_LIST}"],
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_S,
    ).stdout.split()
    assert "ddlf.rpc.handshake" in modules
    assert not {
        "msgpack",
        "pickle",
        "_pickle",
        "cloudpickle",
        "numpy",
        "yaml",
        "json",
        "asyncio",
        "ddlf.rpc.code",
    } & set(modules)


IMPORT_AND_LIST = "import ddlf.rpc.handshake; print(*sys.modules)"


def package_root() -> Path:
    return Path(ddlf.rpc.handshake.__file__).parents[2]


def test_proofs_are_only_compared_in_constant_time():
    source = ast.parse(Path(ddlf.rpc.handshake.__file__).read_text())
    compared = [ast.unparse(node) for node in ast.walk(source) if isinstance(node, ast.Compare)]
    assert not [text for text in compared if "proof" in text or "given" in text]


# --- The document ----------------------------------------------------------------------------------------------------


def test_the_worked_example_of_the_document_equals_the_result_of_the_code(written_bytes):
    token = written_bytes["token"]
    key = auth_key(token)
    assert key == written_bytes["auth-key"]
    assert key_id(key) == written_bytes["key-id"]
    client, worker = written_bytes["client-hello"], written_bytes["worker-hello"]
    assert decode_hello(client) == Hello(Role.CONTROL, bytes(range(32)), 4 * 1024**3, key_id(key))
    assert decode_hello(worker) == Hello(Role.CONTROL, bytes(range(32, 64)), 4 * 1024**3, key_id(key))
    assert decode_hello(client).encode() == client
    assert proof(key, "S", client, worker) == written_bytes["worker-proof"]
    assert proof(key, "C", client, worker) == written_bytes["client-proof"]
    assert written_bytes["verdict"] == bytes([Verdict.ACCEPTED])
