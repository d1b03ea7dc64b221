"""Certificates for TLS on this host, made by openssl."""

from __future__ import annotations

import subprocess
from pathlib import Path

KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-noenc", "-days", "2")


def make_certificates(folder: Path) -> Path:
    """Writes ca.pem, and cert.pem with key.pem for both sides; returns the folder."""
    folder.mkdir()
    for arguments in (
        ("-subj", "/CN=test-ca", "-keyout", "ca-key.pem", "-out", "ca.pem"),
        (
            *("-subj", "/CN=test", "-keyout", "key.pem", "-out", "cert.pem"),
            *("-CA", "ca.pem", "-CAkey", "ca-key.pem", "-addext", "subjectAltName=IP:127.0.0.1"),
        ),
    ):
        subprocess.run(
            ["openssl", "req", "-x509", *KEY, *arguments],
            cwd=folder, check=True, capture_output=True,
        )  # fmt: skip
    return folder
