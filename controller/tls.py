"""The sidecar's certificate, and whose it takes: PEM files, followed as they change."""

from __future__ import annotations

import contextlib
import logging
import os
import ssl
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc

log = logging.getLogger("parlay.controller")


class ServerTls:
    """A certificate and its key; client_ca: who signs clients' certificates (mTLS), None asks none.

    Raises OSError for a file that cannot be read, ValueError for one that is no PEM, is encrypted,
    or does not belong to the other. A new connection gets the newest files that fit together; while
    they do not, as in the midst of a rotation, those before.
    """

    def __init__(self, cert: Path, key: Path, client_ca: Path | None = None) -> None:
        self.cert, self.key, self.client_ca = cert, key, client_ca
        self._seen = self._mark()
        self._first = self._read()

    def credentials(self) -> grpc.ServerCredentials:
        """Return what a server listens with."""
        required = self.client_ca is not None
        return grpc.dynamic_ssl_server_credentials(self._first, self._newest, required)

    def _newest(self) -> Any:
        """Return changed files' configuration, None for the one in use; gRPC asks at each dial."""
        try:
            seen = self._mark()
            if seen == self._seen:
                return None
            found = self._read()
        except (OSError, ValueError) as error:
            log.error("certificate not read anew, the one before is shown error=%r", str(error))
            return None
        self._seen = seen
        log.warning("certificate read anew path=%s", self.cert)
        return found

    def _read(self) -> Any:
        check_pair(self.cert, self.key)
        pair = (self.key.read_bytes(), self.cert.read_bytes())
        signer = None
        if self.client_ca is not None:
            check_authority(self.client_ca)
            signer = self.client_ca.read_bytes()
        return grpc.ssl_server_certificate_configuration([pair], signer)

    def _mark(self) -> list[tuple[int, int, int]]:
        files = [self.cert, self.key, *([self.client_ca] if self.client_ca else [])]
        found = [os.stat(file) for file in files]
        return [(one.st_ino, one.st_mtime_ns, one.st_size) for one in found]


class PageTls:
    """A certificate for the page, whose server takes a context; raises as ServerTls does."""

    def __init__(self, cert: Path, key: Path) -> None:
        self.files = ServerTls(cert, key)
        self.context = check_pair(cert, key)

    def refresh(self) -> None:
        """Show who connects from now on the newest files that fit together."""
        if self.files._newest() is not None:
            with contextlib.suppress(OSError):  # replaced once more, just now: the next time
                self.context.load_cert_chain(self.files.cert, self.files.key, password=lambda: "")


def check_pair(cert: Path, key: Path) -> ssl.SSLContext:
    """Return a context that shows the certificate; raises OSError or ValueError, see ServerTls."""
    for file in (cert, key):
        with file.open("rb"):
            pass
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # Without a password at hand OpenSSL would ask for one on the terminal.
        context.load_cert_chain(cert, key, password=lambda: "")
    except ssl.SSLError as error:
        what = "are no pair of a certificate and its key"
        if "MISMATCH" in str(error.reason):
            what = "do not belong together"
        raise ValueError(f"{cert} and {key} {what} (PEM, not encrypted)") from None
    return context


def check_authority(file: Path) -> None:
    """Raise OSError or ValueError where a file holds no authority's certificate."""
    with file.open("rb"):
        pass
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(file)
    except ssl.SSLError:
        raise ValueError(f"{file} holds no certificates (PEM)") from None
    if not context.get_ca_certs():
        raise ValueError(f"{file} holds no authority's certificate")


def ends_at(cert: Path, key: Path) -> datetime:
    """Return when a certificate expires: shakes hands with itself in memory, as a client would.

    Raises OSError or ValueError, see ServerTls, and where a client would not take it any more.
    """
    server, client = check_pair(cert, key), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN
    client.load_verify_locations(cert)
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    asks, shows = client.wrap_bio(down, up), server.wrap_bio(up, down, server_side=True)
    try:
        for end in (asks, shows, asks):
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
        found = asks.getpeercert()
    except ssl.SSLCertVerificationError as error:
        raise ValueError(f"{cert}: {error.verify_message}") from None
    assert found is not None
    return _time(found)


def authority_ends_at(file: Path) -> datetime:
    """Return when the first of an authorities' file's certificates expires; raises as above."""
    check_authority(file)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(file)
    return min(_time(found) for found in context.get_ca_certs())


def _time(found: Any) -> datetime:
    return datetime.fromtimestamp(ssl.cert_time_to_seconds(found["notAfter"]), UTC)
