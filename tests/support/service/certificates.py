"""Certificates that a test makes with openssl; skips where there is none."""

import shutil
import subprocess
from pathlib import Path

import pytest


def make_certificate(folder: Path, name: str = "server") -> tuple[Path, Path]:
    """A certificate of 127.0.0.1 that signs itself, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")
    certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost",
         "-out", str(certificate), "-keyout", str(key)],
        check=True, capture_output=True,
    )  # fmt: skip
    key.chmod(0o600)
    return certificate, key


def with_password(key: Path) -> Path:
    """The same key, encrypted."""
    locked = key.with_suffix(".locked")
    command = ["openssl", "ec", "-in", str(key), "-aes128", "-passout", "pass:secret", "-out", str(locked)]
    subprocess.run(command, check=True, capture_output=True)
    locked.chmod(0o600)
    return locked
