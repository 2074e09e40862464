"""Encryption of connections to other machines: TLS 1.3 from the standard library. Runs on both sides.

The token proves the identity of the other side, like on a plaintext connection. The SHA-256 of the certificate that the
client sees goes into both proofs of the handshake. An attacker in the middle with another certificate is therefore
refused. For this reason a worker can sign its own certificate, and nobody has to manage certificates. A user who has an
organisation's certificates can require them in addition (``Security``).

TLS begins after the preambles of both sides (8 bytes each). It begins in the process that uses the connection, so TLS
state never moves between processes.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import ipaddress
import os
import re
import socket
import ssl
import stat
import time
from dataclasses import dataclass
from pathlib import Path

from ddlf.errors import AuthError, ConfigError, ProtocolError
from ddlf.rpc.stream import ready
from ddlf.rpc.tokens import create_private, is_private

LIFETIME_DAYS = 3650

_EXPIRED, _NOT_YET = 10, 9  # OpenSSL's X509_V_ERR_CERT_HAS_EXPIRED and X509_V_ERR_CERT_NOT_YET_VALID
_OTHER_HOST = (62, 64)  # X509_V_ERR_HOSTNAME_MISMATCH, X509_V_ERR_IP_ADDRESS_MISMATCH


@dataclass(frozen=True, slots=True)
class Security:
    """How one side protects its connections, besides the token.

    Args:
        tls_ca: File with the certificates that must have signed the other side's certificate. With None the token is
            the only proof.
        tls_cert: File with this side's certificate. With None a worker makes its own, and a master shows none.
        tls_key: File with its private key.
        insecure_plaintext: Encrypt nothing, for links that nobody else can read.
    """

    tls_ca: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    insecure_plaintext: bool = False

    def __post_init__(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("tls_cert and tls_key belong together", hint="set both of them, or none")
        if self.insecure_plaintext and (self.tls_ca or self.tls_cert):
            raise ConfigError("insecure_plaintext and certificates exclude each other", hint="set only one of them")


TOKEN_ONLY = Security()
"""The default protection: only the token proves the identity of a side."""


@dataclass(frozen=True, slots=True)
class WorkerTLS:
    """The objects that a worker needs to encrypt.

    Args:
        context: Context of the standard library.
        certificate: SHA-256 of its certificate in DER, for the proofs.
    """

    context: ssl.SSLContext
    certificate: bytes


def worker_tls(own_certificate: Path, security: Security) -> WorkerTLS:
    """Load a worker's certificate and key, and return the objects for encryption.

    Args:
        own_certificate: File with a self-signed certificate and its key, made by ``make_certificate``. Used if ``security`` names
            no certificate.
        security: Certificates of an organisation.

    Raises:
        ConfigError: A file cannot be used. The text says which file and why.
    """
    certificate, key = security.tls_cert or own_certificate, security.tls_key or own_certificate
    context = _context(ssl.PROTOCOL_TLS_SERVER, security.tls_ca, certificate, key)
    context.num_tickets = 0  # No client resumes a session, because a connection lives as long as its master.
    if security.tls_ca:
        context.verify_mode = ssl.CERT_REQUIRED
    return WorkerTLS(context, hashlib.sha256(_der(certificate)).digest())


@functools.lru_cache(maxsize=16)
def client_context(security: Security) -> ssl.SSLContext:
    """Return the TLS context of the connecting side. Without a certificate authority it accepts any certificate,
    because the proofs of the handshake show the owner.

    Raises:
        ConfigError: A file cannot be used. The text says which file and why.
    """
    context = _context(ssl.PROTOCOL_TLS_CLIENT, security.tls_ca, security.tls_cert, security.tls_key)
    if security.tls_ca is None:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def certificate_seen(sock: ssl.SSLSocket) -> bytes:
    """Return the SHA-256 of the other side's certificate in DER."""
    der = sock.getpeercert(binary_form=True)
    if der is None:
        raise ProtocolError("the other side showed no certificate")
    return hashlib.sha256(der).digest()


def begin_client(sock: socket.socket, context: ssl.SSLContext, host: str) -> ssl.SSLSocket:
    """Wrap the client's connected socket for TLS. The result owns the socket from then on."""
    name = host if context.check_hostname else None
    return context.wrap_socket(sock, server_hostname=name, do_handshake_on_connect=False)


def begin_worker(sock: socket.socket, tls: WorkerTLS) -> ssl.SSLSocket:
    """Wrap the worker's accepted socket for TLS. The result owns the socket from then on."""
    return tls.context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)


async def finish(sock: ssl.SSLSocket) -> None:
    """Complete the TLS handshake on a socket of ``begin_client`` or ``begin_worker``. The caller limits the time.

    Raises:
        AuthError: A certificate is not accepted. The text says why.
        ProtocolError: The other side does not speak TLS 1.3.
        OSError: The connection ended.
    """
    while True:
        try:
            sock.do_handshake()
            return
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
            await ready(sock, to_send=isinstance(error, ssl.SSLWantWriteError))
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLSyscallError):
            raise ConnectionResetError("closed during the TLS handshake") from None
        except ssl.SSLError as error:
            raise explained(error) from None


def explained(error: ssl.SSLError) -> AuthError | ProtocolError:
    """Convert an error of OpenSSL to an error of DDLF with an explanation."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return AuthError(f"the other side's certificate {_reason_of(error)}", hint="renew it, or correct tls_ca")
    reason = (error.reason or str(error)).replace("_", " ").lower()
    if "alert" in reason and any(word in reason for word in ("certificate", "unknown ca")):
        return AuthError(
            f"the other side does not accept this side's certificate ({reason})",
            hint="give tls_cert and tls_key that its tls_ca has signed",
        )
    if "peer did not return a certificate" in reason:
        return AuthError("the client shows no certificate", hint="give tls_cert and tls_key on the master")
    return ProtocolError(f"TLS failed ({reason})")


def _reason_of(error: ssl.SSLCertVerificationError) -> str:
    if error.verify_code == _EXPIRED:
        return "has expired"
    if error.verify_code == _NOT_YET:
        return "is not valid yet: compare the clocks"
    if error.verify_code in _OTHER_HOST:
        return "is for another host"
    return f"is not signed by tls_ca ({error.verify_message})"


def is_local(sock: socket.socket) -> bool:
    """Return whether the other end is on this machine, so that the data never reaches a network."""
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return True
    with contextlib.suppress(OSError):  # it has already disconnected
        return is_loopback(sock.getpeername()[0])
    return False


def is_loopback(address: str) -> bool:
    """Return whether an IP address belongs to this machine alone. An IPv4 address inside IPv6 counts as IPv4."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return (mapped or parsed).is_loopback


def make_certificate(path: Path) -> None:
    """Create a self-signed certificate and its key (ECDSA, P-256) in one file, unless the file exists.

    It is valid for ten years, starting yesterday, because clocks differ. Only its owner can read the file.

    Raises:
        OSError: The file cannot be written.
    """
    if path.exists():
        return
    # Imported here, because it takes longer to import than all the rest of the daemon.
    import datetime

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "ddlf-worker")])
    begin = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1)
    certificate = (
        x509.CertificateBuilder(issuer_name=name, subject_name=name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after(begin + datetime.timedelta(days=LIFETIME_DAYS))
        .sign(key, hashes.SHA256())
    )
    encoded = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ) + certificate.public_bytes(serialization.Encoding.PEM)
    with contextlib.suppress(FileExistsError):  # of workers that start at the same time, one wins
        create_private(path, encoded)


def _context(kind: int, ca: Path | None, certificate: Path | None, key: Path | None) -> ssl.SSLContext:
    context = ssl.SSLContext(kind)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    if ca is not None:
        _check_readable(ca, "tls_ca")
        try:
            context.load_verify_locations(ca)
        except ssl.SSLError:
            raise ConfigError(f"tls_ca {ca} contains no certificate", hint="name a file in PEM format") from None
        for authority in context.get_ca_certs():
            if ssl.cert_time_to_seconds(str(authority["notAfter"])) < time.time():
                raise ConfigError(f"tls_ca {ca} has expired ({authority['notAfter']})", hint="renew it")
    if certificate is not None and key is not None:
        _check_readable(certificate, "tls_cert")
        _check_key(key)
        try:
            context.load_cert_chain(certificate, key, password="")
        except ssl.SSLError as error:
            raise ConfigError(_unusable(certificate, key, error), hint="both are files in PEM form") from None
        if certificate != key:
            _check_lifetime(certificate)
    return context


def _unusable(certificate: Path, key: Path, error: ssl.SSLError) -> str:
    if error.reason == "KEY_VALUES_MISMATCH":
        return f"tls_key {key} does not belong to tls_cert {certificate}"
    if "ENCRYPTED" in key.read_text(errors="replace"):
        return f"tls_key {key} is protected by a password, which cannot be entered here"
    return f"tls_cert {certificate} with tls_key {key} cannot be used ({(error.reason or str(error)).lower()})"


def _check_readable(path: Path, label: str) -> None:
    try:
        with open(path, "rb"):
            return
    except OSError as error:
        raise ConfigError(f"{label} {path} cannot be read: {error.strerror}", hint="check the path") from None


def _check_key(path: Path) -> None:
    _check_readable(path, "tls_key")
    status = path.stat()
    if os.name == "posix" and not is_private(status):
        mode = stat.S_IMODE(status.st_mode)
        raise ConfigError(f"key {path} is readable by others ({mode:04o})", hint=f"run 'chmod 600 {path}'")


def _check_lifetime(certificate: Path) -> None:
    """Check that this side's own certificate is valid now. The standard library does not check it, and the other side's
    refusal would come too late.
    """
    import datetime

    from cryptography import x509

    now, parsed = datetime.datetime.now(datetime.UTC), x509.load_der_x509_certificate(_der(certificate))
    if parsed.not_valid_after_utc < now:
        raise ConfigError(
            f"tls_cert {certificate} has expired ({parsed.not_valid_after_utc:%Y-%m-%d})", hint="renew it"
        )
    if parsed.not_valid_before_utc > now:
        raise ConfigError(
            f"tls_cert {certificate} is not valid before {parsed.not_valid_before_utc:%Y-%m-%d}",
            hint="compare the clocks",
        )


def _der(certificate: Path) -> bytes:
    """Return the first certificate of a file. This is the certificate that the other side sees."""
    match = re.search(r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", certificate.read_text(), re.DOTALL)
    if match is None:
        raise ConfigError(f"tls_cert {certificate} contains no certificate", hint="name a file in PEM format")
    return ssl.PEM_cert_to_DER_cert(match[0])
