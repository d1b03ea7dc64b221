"""Makes Python's TLS context of librdkafka's properties."""

from __future__ import annotations

import os
import ssl
import tempfile
from collections.abc import Mapping
from pathlib import Path

from headrace.errors import UsageError
from headrace.services.kafka.security.client_security import ClientSecurity


def ssl_context(security: ClientSecurity) -> ssl.SSLContext | None:
    """Returns the context of a client's connections; None without TLS.

    Supports files and texts in PEM, and key stores (PKCS #12). Raises UsageError if one of them
    can't be read, does not fit its key, or has another password.
    """
    if not security.tls:
        return None
    get = security.properties.get
    try:
        context = ssl.create_default_context()
        if location := get("ssl.ca.location"):
            folder = Path(location).is_dir()
            context = ssl.create_default_context(
                capath=location if folder else None, cafile=None if folder else location
            )
        elif pem := get("ssl.ca.pem"):
            context = ssl.create_default_context(cadata=pem)
        context.check_hostname = get("ssl.endpoint.identification.algorithm", "https") != "none"
        if get("enable.ssl.certificate.verification", "true").lower() == "false":
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        _load_certificate(context, security.properties)
    except (OSError, ValueError) as error:  # SSLError is an OSError.
        names = sorted(name for name in security.properties if name.startswith("ssl."))
        raise UsageError(
            f"the files of TLS can't be used: {error}. Check {', '.join(names) or 'ssl.*'}"
        ) from error
    return context


def https_context(security: ClientSecurity) -> ssl.SSLContext:
    """Returns the context for the endpoint of tokens. Raises UsageError for a wrong authority."""
    get = security.properties.get
    try:
        return ssl.create_default_context(
            cafile=get("https.ca.location") or None, cadata=get("https.ca.pem") or None
        )
    except (OSError, ValueError) as error:
        raise UsageError(
            f"the authority of the token endpoint can't be used: {error}. Check https.ca.location "
            "and https.ca.pem"
        ) from error


def _load_certificate(context: ssl.SSLContext, properties: Mapping[str, str]) -> None:
    get = properties.get
    password = get("ssl.key.password")
    if location := get("ssl.certificate.location"):
        if (pem := get("ssl.key.pem")) is None:
            context.load_cert_chain(location, get("ssl.key.location"), password)
        else:
            _load_text(context, f"{pem}\n{Path(location).read_text()}", password)
    elif certificate := get("ssl.certificate.pem"):
        key = get("ssl.key.pem") or Path(properties.get("ssl.key.location", "")).read_text()
        _load_text(context, f"{key}\n{certificate}", password)
    elif location := get("ssl.keystore.location"):
        _load_text(context, _of_key_store(location, get("ssl.keystore.password")), None)


def _load_text(context: ssl.SSLContext, pem: str, password: str | None) -> None:
    """Loads a key and its certificates. Python's module takes only files: it is deleted at once."""
    handle, name = tempfile.mkstemp()  # Its mode is 0600.
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(pem)
        context.load_cert_chain(name, password=password)
    finally:
        os.unlink(name)


def _of_key_store(location: str, password: str | None) -> str:
    """Returns the key and the certificates of a PKCS #12 file as PEM."""
    try:
        from cryptography.hazmat.primitives.serialization import (
            Encoding,
            NoEncryption,
            PrivateFormat,
            pkcs12,
        )
    except ImportError as error:
        raise UsageError(
            "ssl.keystore.location needs the package cryptography: "
            "pip install 'headrace[signatures]', or name the files as PEM"
        ) from error
    store = pkcs12.load_pkcs12(Path(location).read_bytes(), (password or "").encode() or None)
    if store.key is None or store.cert is None:
        raise ValueError(f"{location} has no key with a certificate")
    parts = [store.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())]
    chain = (store.cert, *store.additional_certs)
    parts += [one.certificate.public_bytes(Encoding.PEM) for one in chain]
    return b"".join(parts).decode()
