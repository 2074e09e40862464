"""Tests of encryption.

An attacker on the network cannot read, alter or take over a connection. An invalid certificate is named with its reason.
"""

import asyncio
import datetime
import hashlib
import socket
import ssl
import stat
import subprocess
import sys

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from ddlf.errors import AuthError, ConfigError, ConnectError
from ddlf.rpc import dial as dial_module
from ddlf.rpc import listen as listen_module
from ddlf.rpc import tls
from ddlf.rpc.dial import dial
from ddlf.rpc.handshake import NO_CERTIFICATE, PREAMBLE, Role, read_preamble, short_answer
from ddlf.rpc.listen import answer, listening_socket, refusal_of_preamble
from ddlf.rpc.stream import ready, receive_exactly, send_all
from ddlf.rpc.tls import TOKEN_ONLY, Security, client_context, is_loopback, make_certificate, worker_tls
from tests.patience import PATIENCE_S
from tests.tls import Authority, Relay, encrypted_pair, far_apart, own_certificate

TOKEN, OTHER = b"t" * 43, b"o" * 43


class Worker:
    """A listener that answers each connection like a daemon, and sends ``hello`` after the handshake."""

    def __init__(self, encryption=None, *, insecure_plaintext=False):
        self._encryption = encryption
        self._insecure_plaintext = insecure_plaintext
        self.errors = []
        self.tasks = set()

    async def __aenter__(self):
        self._listener = listening_socket("127.0.0.1", 0)
        self.port = self._listener.getsockname()[1]
        self._accepting = asyncio.create_task(self._accept())
        return self

    async def __aexit__(self, *exc):
        for task in (self._accepting, *self.tasks):
            task.cancel()
        await asyncio.gather(self._accepting, *self.tasks, return_exceptions=True)
        self._listener.close()

    async def _accept(self):
        while True:
            sock, _ = await asyncio.get_running_loop().sock_accept(self._listener)
            self.tasks.add(asyncio.create_task(self._greet(sock)))

    async def _greet(self, sock):
        encrypts = self._encryption is not None
        try:
            preamble = await receive_exactly(sock, PREAMBLE.size)
            read_preamble(preamble)
            if refusal_of_preamble(sock, preamble, encrypts=encrypts, insecure_plaintext=self._insecure_plaintext):
                await send_all(sock, short_answer(tls=encrypts))
                return
            sock, _ = await answer(sock, preamble, (TOKEN,), 1000, self._encryption, delay_s=0)
            await send_all(sock, b"hello")
            with sock:
                await receive_exactly(sock, 1000)
        except OSError as error:
            self.errors.append(error)
        finally:
            sock.close()


async def call(port, token=TOKEN, **security):
    """Dial, and read the first bytes of the worker."""
    sock, _ = await dial("127.0.0.1", port, Role.DATA, token, max_message_bytes=1000, security=Security(**security))
    with sock:
        return sock, await receive_exactly(sock, 5)


@pytest.fixture
def different_machines():
    with far_apart():
        yield


# --- Encrypted connections --------------------------------------------------------------------------------------------


async def test_another_machine_is_reached_with_tls_1_3_and_nothing_older(different_machines):
    async with Worker(own_certificate()) as worker:
        sock, greeting = await call(worker.port)
    assert greeting == b"hello"
    assert isinstance(sock, ssl.SSLSocket)
    for context in (own_certificate().context, client_context(TOKEN_ONLY)):
        assert context.minimum_version == ssl.TLSVersion.TLSv1_3
    assert own_certificate().context.num_tickets == 0


async def test_this_machine_is_reached_without_tls():
    async with Worker(own_certificate()) as worker:
        sock, greeting = await call(worker.port)
    assert greeting == b"hello"
    assert not isinstance(sock, ssl.SSLSocket)


async def test_a_client_never_goes_back_to_plaintext(different_machines):
    async with Worker(insecure_plaintext=True) as worker:
        with pytest.raises(ConnectError, match="the worker does not encrypt connections from this address"):
            await call(worker.port)
        assert len(worker.tasks) == 1, "it did not try again"
        _, greeting = await call(worker.port, insecure_plaintext=True)
    assert greeting == b"hello"


async def test_a_worker_takes_no_plaintext_from_another_machine(different_machines):
    async with Worker(own_certificate()) as worker:
        with pytest.raises(ConnectError, match="the worker demands encryption, which is switched off on this side"):
            await call(worker.port, insecure_plaintext=True)


async def test_a_forwarded_port_of_this_machine_is_encrypted_because_the_worker_wants_it(monkeypatch):
    # For the master, the address is on this machine; for the worker, the master is on another one. A forwarded port of
    # a container has this effect.
    monkeypatch.setattr(listen_module.tls, "is_local", lambda sock: sock.getsockname()[1] != worker.port)
    async with Worker(own_certificate()) as worker:
        sock, greeting = await call(worker.port)
    assert (type(sock), greeting) == (ssl.SSLSocket, b"hello")


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1", True),
        ("127.1.2.3", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("10.0.0.1", False),
        ("fe80::1%eth0", False),
        ("::ffff:10.0.0.1", False),
        ("0.0.0.0", False),
    ],
)
def test_only_addresses_of_loopback_are_this_machine(address, expected):
    assert is_loopback(address) is expected


async def refusal_by_a_program_that_says(data):
    """Return the error text of a master when another program answers its preamble and its start of TLS."""

    async def serve():
        sock, _ = await asyncio.get_running_loop().sock_accept(listener)
        with sock:
            await receive_exactly(sock, 8)
            await send_all(sock, data)
            await ready(sock, to_send=False)

    with listening_socket("127.0.0.1", 0) as listener:
        serving = asyncio.create_task(serve())
        with pytest.raises(OSError, match=r"127\.0\.0\.1") as caught:
            await call(listener.getsockname()[1])
        await serving
    return str(caught.value)


async def test_a_worker_of_another_version_is_named_after_tls_has_begun(different_machines):
    refusal = await refusal_by_a_program_that_says(b"DDLF\x07\x01\x01\x00")
    assert "the other side speaks protocol 7.1, this side 1.1; install the same version of ddlf on both" in refusal


@pytest.mark.parametrize("first_bytes", [b"SSH-2.0-OpenSSH_9.2\r\n", b"HTTP/1.1 400 Bad Request\r\n\r\n", bytes(64)])
async def test_another_program_is_named_after_tls_has_begun(different_machines, first_bytes):
    assert "another program listens there, not a DDLF worker" in await refusal_by_a_program_that_says(first_bytes)


async def test_another_program_that_speaks_tls_is_named(different_machines):
    listener = listening_socket("127.0.0.1", 0)

    async def serve():
        sock, _ = await asyncio.get_running_loop().sock_accept(listener)
        await receive_exactly(sock, 8)
        await send_all(sock, short_answer(tls=True))
        with tls.begin_worker(sock, own_certificate()) as encrypted:
            await tls.finish(encrypted)
            await send_all(encrypted, b"HTTP/1.1 400 Bad Request\r\n\r\n")
            await receive_exactly(encrypted, 56)

    serving = asyncio.create_task(serve())
    with listener, pytest.raises(ConnectError, match="another program listens there, not a DDLF worker"):
        await call(listener.getsockname()[1])
    await serving


# --- An attacker on the network ----------------------------------------------------------------------------------------


async def test_another_token_is_refused_under_tls_too(different_machines):
    async with Worker(own_certificate()) as worker:
        with pytest.raises(AuthError, match="the worker has another token than this side"):
            await call(worker.port, OTHER)


@pytest.fixture
def relays_certificate(tmp_path):
    make_certificate(tmp_path / "his.pem")
    return worker_tls(tmp_path / "his.pem", TOKEN_ONLY)


async def test_a_relay_with_its_own_certificate_is_refused(different_machines, relays_certificate):
    async with Worker(own_certificate()) as worker, Relay(worker.port, relays_certificate) as relay:
        with pytest.raises(
            AuthError, match="the handshake was altered on the network, although both sides use the same"
        ):
            await call(relay.port)
    assert b"hello" not in relay.heard


async def test_a_relay_would_succeed_without_the_certificate_in_the_proofs(
    different_machines, relays_certificate, monkeypatch
):
    # This is the control of the test above: without the binding, the same relay reads everything.
    monkeypatch.setattr(dial_module.tls, "certificate_seen", lambda sock: NO_CERTIFICATE)
    unbound = tls.WorkerTLS(own_certificate().context, NO_CERTIFICATE)
    async with Worker(unbound) as worker, Relay(worker.port, relays_certificate) as relay:
        _, greeting = await call(relay.port)
    assert greeting == b"hello"
    assert b"hello" in relay.heard


async def test_a_relay_cannot_remove_the_flag_for_tls(different_machines, monkeypatch):
    monkeypatch.setattr("ddlf.rpc.dial.HANDSHAKE_TIMEOUT_S", 1.0)

    def strip(data):
        return data[:7] + b"\0" + data[8:] if data.startswith(b"DDLF") else data

    async with Worker(insecure_plaintext=True) as worker, Relay(worker.port, alter=strip) as relay:
        with pytest.raises(ConnectError):
            await call(relay.port)


@pytest.mark.parametrize("position", [4, 5, 6, 7])
async def test_an_altered_preamble_is_refused_although_tls_does_not_cover_it(different_machines, position):
    def alter(data):
        if not data.startswith(b"DDLF"):
            return data
        changed = bytearray(data)
        changed[position] ^= 3 if position == 6 else 1
        return bytes(changed)

    async with Worker(own_certificate()) as worker, Relay(worker.port, alter=alter) as relay:
        with pytest.raises(OSError, match=r"127\.0\.0\.1"):
            await call(relay.port)


async def test_who_only_listens_learns_neither_the_token_nor_what_is_said(different_machines):
    async with Worker(own_certificate()) as worker, Relay(worker.port) as relay:
        _, greeting = await call(relay.port)
    assert greeting == b"hello"
    assert len(relay.heard) > 500
    assert b"hello" not in relay.heard
    assert TOKEN not in relay.heard


# --- Certificates -----------------------------------------------------------------------------------------------------


def test_a_worker_signs_its_own_certificate_once_for_ten_years_and_keeps_the_key_to_itself(tmp_path):
    path = tmp_path / "certificate.pem"
    make_certificate(path)
    pem = path.read_bytes()
    make_certificate(path)
    assert path.read_bytes() == pem
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]
    certificate = x509.load_pem_x509_certificate(pem[pem.index(b"-----BEGIN CERT") :])
    key = certificate.public_key()
    assert isinstance(key, ec.EllipticCurvePublicKey)
    assert key.curve.name == "secp256r1"
    now = datetime.datetime.now(datetime.UTC)
    begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    assert datetime.timedelta(hours=23) < now - begin < datetime.timedelta(hours=25)
    assert end - begin == datetime.timedelta(days=3650)
    encryption = worker_tls(path, TOKEN_ONLY)
    der = ssl.PEM_cert_to_DER_cert(pem[pem.index(b"-----BEGIN CERT") :].decode())
    assert encryption.certificate == hashlib.sha256(der).digest()


def test_workers_that_start_at_once_agree_on_one_certificate(tmp_path):
    code = f"from pathlib import Path; from ddlf.rpc.tls import *; make_certificate(Path({str(tmp_path / 'c.pem')!r}))"
    processes = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(4)]
    assert [process.wait(PATIENCE_S) for process in processes] == [0] * 4
    assert [path.name for path in tmp_path.iterdir()] == ["c.pem"]
    worker_tls(tmp_path / "c.pem", TOKEN_ONLY)


@pytest.fixture
def authority(tmp_path):
    return Authority(tmp_path)


async def meet(worker: Security, tmp_path, client: Security, host="127.0.0.1"):
    """Make one connection between two sides with certificates of an organisation."""
    make_certificate(tmp_path / "own.pem")
    async with Worker(worker_tls(tmp_path / "own.pem", worker)) as listener:
        try:
            sock, _ = await dial(
                host, listener.port, Role.DATA, TOKEN, max_message_bytes=1000, timeout_s=5, security=client
            )
            with sock:
                return await receive_exactly(sock, 5)
        finally:
            for task in listener.tasks:
                task.cancel()
            meet.errors = listener.errors


async def test_certificates_of_an_organisation_are_checked_on_top_of_the_token(different_machines, authority, tmp_path):
    worker = Security(authority.file, *authority.issue("worker"))
    client = Security(authority.file, *authority.issue("master"))
    assert await meet(worker, tmp_path, client) == b"hello"


@pytest.mark.parametrize(
    ("signed", "sentence"),
    [
        (lambda ca, other: ca.issue("w", ends_in=datetime.timedelta(days=-1)), "tls_cert .*w.pem has expired"),
        (lambda ca, other: ca.issue("w", host="10.9.9.9"), "the other side's certificate is for another host"),
        (lambda ca, other: other.issue("w"), "the other side's certificate is not signed by tls_ca"),
    ],
)
async def test_an_invalid_certificate_of_a_worker_is_named_with_its_reason(
    different_machines, authority, tmp_path, signed, sentence
):
    (tmp_path / "other").mkdir()
    worker = Security(None, *signed(authority, Authority(tmp_path / "other")))
    with pytest.raises((AuthError, ConfigError), match=sentence):
        await meet(worker, tmp_path, Security(authority.file))


async def test_a_certificate_that_expires_while_the_worker_runs_is_named(
    different_machines, authority, tmp_path, monkeypatch
):
    worker = Security(None, *authority.issue("w", ends_in=datetime.timedelta(days=-1)))
    monkeypatch.setattr(tls, "_check_lifetime", lambda certificate: None)
    with pytest.raises(AuthError, match="the other side's certificate has expired; renew it"):
        await meet(worker, tmp_path, Security(authority.file))


async def test_a_master_without_a_certificate_is_refused_by_a_worker_that_demands_one(
    different_machines, authority, tmp_path
):
    worker = Security(authority.file, *authority.issue("worker"))
    with pytest.raises(AuthError, match="the other side does not accept this side's certificate"):
        await meet(worker, tmp_path, Security(authority.file))
    assert "the client shows no certificate" in str(meet.errors[0])


async def test_a_master_with_another_organisations_certificate_is_refused(different_machines, authority, tmp_path):
    (tmp_path / "other").mkdir()
    worker = Security(authority.file, *authority.issue("worker"))
    with pytest.raises(AuthError, match="the other side does not accept this side's certificate"):
        await meet(worker, tmp_path, Security(authority.file, *Authority(tmp_path / "other", "other").issue("m")))


def bad_files(tmp_path):
    """Return unusable files, each with the reason."""
    ca = Authority(tmp_path)
    certificate, key = ca.issue("right")
    _, other_key = ca.issue("other")
    open_key = tmp_path / "open.key"
    open_key.write_bytes(key.read_bytes())
    open_key.chmod(0o644)
    text = tmp_path / "text.pem"
    text.write_text("no certificate")
    text.chmod(0o600)
    secret = tmp_path / "secret.key"
    subprocess.run(
        ["openssl", "ec", "-in", key, "-aes256", "-passout", "pass:x", "-out", secret], check=True, capture_output=True
    )
    secret.chmod(0o600)
    expired = Authority(tmp_path, "expired", datetime.timedelta(days=-1))
    return [
        ((None, certificate, other_key), f"tls_key {other_key} does not belong to tls_cert {certificate}; both are"),
        ((None, *expired.issue("old", ends_in=datetime.timedelta(days=-3))), "old.pem has expired (20"),
        ((None, *ca.issue("new", ends_in=3 * datetime.timedelta(days=365))), "new.pem is not valid before 20"),
        ((expired.file, None, None), f"tls_ca {expired.file} has expired ("),
        ((text, None, None), f"tls_ca {text} contains no certificate; name a file in PEM format"),
        ((tmp_path / "none.pem", None, None), f"tls_ca {tmp_path}/none.pem cannot be read: No such file or directory"),
        ((None, certificate, open_key), f"key {open_key} is readable by others (0644); run 'chmod 600 {open_key}'"),
        ((None, certificate, secret), f"tls_key {secret} is protected by a password, which cannot be entered here"),
        ((None, text, key), f"tls_cert {text} with tls_key {key} cannot be used ("),
    ]


@pytest.mark.parametrize("case", range(9))
def test_a_file_that_cannot_be_used_is_named_before_anything_is_sent(tmp_path, case):
    files, sentence = bad_files(tmp_path)[case]
    make_certificate(tmp_path / "own.pem")
    for load in (client_context, lambda security: worker_tls(tmp_path / "own.pem", security)):
        with pytest.raises(ConfigError) as caught:
            load(Security(*files))
        assert sentence in str(caught.value)


# --- The socket afterwards --------------------------------------------------------------------------------------------


async def test_bytes_that_tls_decrypts_with_the_handshake_are_not_lost():
    client, worker = await encrypted_pair()
    with client, worker:
        await send_all(client, b"12345678" + b"first frame")
        assert await receive_exactly(worker, 8) == b"12345678"
        assert worker.pending() == len(b"first frame")
        assert await receive_exactly(worker, 11) == b"first frame"


async def test_an_end_during_the_start_of_tls_is_a_connection_error():
    left, right = socket.socketpair()
    left.setblocking(False)
    sock = tls.begin_worker(left, own_certificate())
    right.close()
    with sock, pytest.raises(ConnectionError):
        await tls.finish(sock)
