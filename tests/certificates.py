"""Certificates for tests, made by openssl: an authority, and whom it signs."""

from __future__ import annotations

import subprocess
from pathlib import Path

NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


def authority(folder: Path, name: str = "ca") -> Path:
    """Return the PEM file of a new authority; its key lies beside it."""
    return _made(folder, name, "-addext", "basicConstraints=critical,CA:TRUE")


def signed(folder: Path, ca: Path, name: str, *more: str, days: int = 30) -> tuple[Path, Path]:
    """Return the files of a new certificate, for this host and with `name`, and of its key."""
    cert = _made(
        folder,
        name,
        *("-CA", str(ca), "-CAkey", str(ca.with_suffix(".key"))),
        *("-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"),
        *("-addext", "basicConstraints=critical,CA:FALSE"),
        *more,
        days=days,
    )
    return cert, cert.with_suffix(".key")


def ended(folder: Path) -> tuple[Path, Path]:
    """Return a certificate that has expired, signed by itself, and its key."""
    cert, key, asks = (folder / f"ended.{what}" for what in ("pem", "key", "csr"))
    for command in (
        ("openssl", "req", "-new", *NEW_KEY, "-keyout", key, "-out", asks, "-subj", "/CN=ended"),
        ("openssl", "x509", "-req", "-in", asks, "-signkey", key, "-days", "-1", "-out", cert),
    ):
        subprocess.run(command, check=True, capture_output=True, timeout=30)
    return cert, key


def _made(folder: Path, name: str, *more: str, days: int = 30) -> Path:
    cert = folder / f"{name}.pem"
    files = ("-keyout", str(cert.with_suffix(".key")), "-out", str(cert))
    command = ("openssl", "req", "-x509", *NEW_KEY, *files, "-subj", f"/CN={name}")
    subprocess.run(
        [*command, "-days", str(days), *more], check=True, capture_output=True, timeout=30
    )
    return cert
