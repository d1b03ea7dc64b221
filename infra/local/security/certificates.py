"""Makes certificates for one stack: an authority, and what it signs. The authority's key is kept
nowhere, so nobody can sign another certificate later."""

from __future__ import annotations

import datetime
import ipaddress
from typing import TYPE_CHECKING

from headrace.errors import UsageError

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

VALID_S = 30 * 86_400
"""How long a certificate is valid."""
EARLIER_S = 300
"""A certificate is valid from so many seconds ago, in case a clock is set back a little."""
HOST = "127.0.0.1"


class CertificateAuthority:
    """An authority that exists as long as this object. Keys are of the curve P-256."""

    def __init__(self, name: str, now: float) -> None:
        """`now` is the time in Unix seconds. Raises UsageError without the package cryptography."""
        try:
            import cryptography.x509  # noqa: F401
        except ImportError as error:
            raise UsageError(
                "the certificates of a secure local stack need the package cryptography: "
                "pip install 'headrace[signatures]'"
            ) from error
        self._begin = datetime.datetime.fromtimestamp(now - EARLIER_S, datetime.UTC)
        self._end = datetime.datetime.fromtimestamp(now + VALID_S, datetime.UTC)
        self._key = _new_key()
        self._certificate = self._sign(name, self._key, None, server=False)

    @property
    def pem(self) -> bytes:
        """The authority's own certificate."""
        return _pem_of(self._certificate)

    def issue(self, name: str, *, server: bool = False) -> bytes:
        """Returns a new key (PKCS #8, not encrypted) and its certificate for `CN=name`, as PEM.

        Every certificate is for clients. With `server`, it is also for a server on 127.0.0.1.
        """
        key = _new_key()
        return _pem_of_key(key) + _pem_of(self._sign(name, key, self._certificate, server=server))

    def self_signed(self, name: str) -> bytes:
        """Returns a key and a certificate that no authority signs: trust the certificate itself."""
        key = _new_key()
        return _pem_of_key(key) + _pem_of(self._sign(name, key, None, server=True))

    def _sign(
        self,
        name: str,
        key: EllipticCurvePrivateKey,
        issuer: x509.Certificate | None,
        *,
        server: bool,
    ) -> x509.Certificate:
        """Signs a key. Without an issuer it signs itself; then it is an authority, or a server."""
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes
        from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

        authority = issuer is None and not server
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        signer = self._key if issuer is not None else key
        identity = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
        builder = (
            x509.CertificateBuilder(
                issuer.subject if issuer is not None else subject, subject, key.public_key()
            )
            .serial_number(x509.random_serial_number())
            .not_valid_before(self._begin)
            .not_valid_after(self._end)
            .add_extension(x509.BasicConstraints(authority, 0 if authority else None), True)
            .add_extension(_usage(authority=authority), True)
            .add_extension(identity, False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), False
            )
        )
        if not authority:
            uses = [ExtendedKeyUsageOID.CLIENT_AUTH]
            names: list[x509.GeneralName] = [x509.DNSName(name)]
            if server:
                uses.append(ExtendedKeyUsageOID.SERVER_AUTH)
                names = [x509.IPAddress(ipaddress.ip_address(HOST)), x509.DNSName("localhost")]
            builder = builder.add_extension(x509.ExtendedKeyUsage(uses), False)
            builder = builder.add_extension(x509.SubjectAlternativeName(names), False)
        return builder.sign(signer, hashes.SHA256())


def _usage(*, authority: bool) -> x509.KeyUsage:
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not authority,
        key_cert_sign=authority,
        crl_sign=authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _new_key() -> EllipticCurvePrivateKey:
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP256R1())


def _pem_of(certificate: x509.Certificate) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding

    return certificate.public_bytes(Encoding.PEM)


def _pem_of_key(key: EllipticCurvePrivateKey) -> bytes:
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        NoEncryption,
        PrivateFormat,
    )

    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
