"""Certificates and keys for TLS: reading, checking, and the contexts made of them.

The files are read together with the settings. Their texts are shared with the settings, so that all workers serve the
same certificate, whatever the files contain later. A certificate is checked by a handshake in memory, in which the
other side trusts nothing else.
"""

from __future__ import annotations

import os
import ssl
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NoReturn

from proxy.settings.mistakes import SettingsError
from proxy.settings.sources import TLS_FILE_OPTIONS, read_key_file, read_option

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from proxy.settings.model import Engines, Settings

_CERTIFICATE_OPTION_PAIRS: Final = {
    "listen.tls_certificate": "listen.tls_key",
    "admin.tls_certificate": "admin.tls_key",
    "engines.client_certificate": "engines.client_key",
}
_AUTHORITY_OPTIONS: Final = ("listen.tls_client_ca", "admin.tls_client_ca", "engines.ca_file")
_ALPN_PROTOCOLS: Final = ["http/1.1"]
# Forward secrecy and authenticated encryption, as the "intermediate" profile of Mozilla has it for TLS 1.2. All
# ciphers of TLS 1.3 qualify.
_CIPHERS: Final = "ECDHE+AESGCM:ECDHE+CHACHA20"
# A handshake takes two steps of each side; a handshake that fails takes fewer.
_MAX_STEPS: Final = 8

# Errors of OpenSSL by reason, as a part of a sentence about the certificate.
_TLS_ERROR_REASONS: Final = {
    "KEY_VALUES_MISMATCH": "the key does not belong to the certificate",
    "KEY_TYPE_MISMATCH": "the key does not belong to the certificate",
    "EE_KEY_TOO_SMALL": "the key of the certificate is too short",
    "CA_KEY_TOO_SMALL": "the key of an authority in the file is too short",
    "CA_MD_TOO_WEAK": "the certificate is signed with an algorithm that is too weak",
}


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """The contents of the configured TLS files."""

    texts: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Text of each file, by option. Keys are among them."""
    expiries: Mapping[str, float] = field(default_factory=dict)
    """End of the validity of each certificate, by option, in seconds since the epoch."""


def load_tls(settings: Settings) -> TlsFiles:
    """Read and check the configured TLS files. Raises SettingsError."""
    paths = {option: path for option in TLS_FILE_OPTIONS if (path := read_option(settings, option)) is not None}
    texts = {option: read_key_file(option, path) for option, path in paths.items()}
    expiries = {}
    for option in _AUTHORITY_OPTIONS:
        if option in texts:
            with _explain_tls_errors(f"{option} {paths[option]}"):
                ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=texts[option])
    for option, key_option in _CERTIFICATE_OPTION_PAIRS.items():
        if option in texts:
            key_path = paths.get(key_option)
            with _explain_tls_errors(f"{option} {paths[option]}" + (f" with the key {key_path}" if key_path else "")):
                expiries[option] = _read_expiry(texts, option, is_client=option.startswith("engines."))
    return TlsFiles(texts, expiries)


def make_server_context(section: str, files: TlsFiles) -> ssl.SSLContext | None:
    """Return a new context for the listener of a section, `listen` or `admin`, or None if it has no certificate."""
    option = f"{section}.tls_certificate"
    if option not in files.texts:
        return None
    context = _load_certificate(ssl.PROTOCOL_TLS_SERVER, files.texts, option)
    context.options |= ssl.OP_CIPHER_SERVER_PREFERENCE
    authorities = files.texts.get(f"{section}.tls_client_ca")
    if authorities is not None:
        context.load_verify_locations(cadata=authorities)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def make_engine_context(engines: Engines, files: TlsFiles) -> ssl.SSLContext:
    """Return a new context for connections to engines."""
    option = "engines.client_certificate"
    if option in files.texts:
        context = _load_certificate(ssl.PROTOCOL_TLS_CLIENT, files.texts, option)
    else:
        context = _make_context(ssl.PROTOCOL_TLS_CLIENT)
    if not engines.verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    elif "engines.ca_file" in files.texts:
        context.load_verify_locations(cadata=files.texts["engines.ca_file"])
    else:
        context.load_default_certs(ssl.Purpose.SERVER_AUTH)
    return context


class EngineTls:
    """TLS to engines by the present settings. Its context is made at the first use, and again after a change."""

    def __init__(self, current: Callable[[], tuple[Engines, TlsFiles]]) -> None:
        """Store the function that returns the current settings and files."""
        self._current = current
        self._context_files: tuple[Engines, TlsFiles] | None = None
        self._context: ssl.SSLContext

    @property
    def current_context(self) -> ssl.SSLContext:
        """Return the TLS context for a new connection to an engine."""
        current = self._current()
        if current != self._context_files:
            self._context, self._context_files = make_engine_context(*current), current
        return self._context

    @property
    def server_name(self) -> str | None:
        """Return the name that certificates must contain, or None for the host of each engine."""
        name: str | None = self._current()[0].server_name
        return name


def describe_tls_problem(error: ssl.SSLError) -> str:
    """Return why a handshake failed, as part of a sentence, without values of the other side."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"certificate not accepted: {error.verify_message.removesuffix('.')}"
    reason = (error.reason or "").removeprefix("SSLV3_").removeprefix("TLSV1_").removeprefix("TLSV13_")
    if reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "PACKET_LENGTH_TOO_LONG", "UNKNOWN_PROTOCOL"):
        return "the other side does not speak TLS"
    return reason.replace("_", " ").lower() or "the connection ended in the handshake"


def _make_context(protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
    context.set_ciphers(_CIPHERS)
    context.set_alpn_protocols(_ALPN_PROTOCOLS)
    return context


def _load_certificate(protocol: int, texts: Mapping[str, str], option: str) -> ssl.SSLContext:
    """Return a context with a certificate and its key. Raises ssl.SSLError, or ValueError for an encrypted key."""
    context = _make_context(protocol)
    certificate = texts[option]
    # The module ssl reads keys from paths only. The text is not written to a disk.
    with (
        _written_to_file(certificate) as path,
        _written_to_file(texts.get(_CERTIFICATE_OPTION_PAIRS[option], certificate)) as key_path,
    ):
        context.load_cert_chain(path, key_path, password=_reject_password)
    return context


@contextmanager
def _written_to_file(text: str) -> Iterator[str]:
    descriptor = os.memfd_create("pem", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, text.encode())
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def _reject_password() -> NoReturn:
    raise ValueError("the key is encrypted: decrypt it, and let only the user of the gateway read it")


def _read_expiry(texts: Mapping[str, str], option: str, *, is_client: bool) -> float:
    """Return the end of a certificate's validity. Raises ssl.SSLError or ValueError if it cannot be used now."""
    server = _load_certificate(ssl.PROTOCOL_TLS_SERVER, texts, option)
    client = _make_context(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    verifying = server if is_client else client
    if is_client:
        client = _load_certificate(ssl.PROTOCOL_TLS_CLIENT, texts, option)
        client.check_hostname = False
        client.verify_mode = ssl.CERT_NONE
        server.verify_mode = ssl.CERT_REQUIRED
    verifying.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    verifying.load_verify_locations(cadata=texts[option])
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = (
        client.wrap_bio(to_client, to_server),
        server.wrap_bio(to_server, to_client, server_side=True),
    )
    for _ in range(_MAX_STEPS):
        for side in sides:
            with suppress(ssl.SSLWantReadError):
                side.do_handshake()
    peer = sides[is_client].getpeercert() or {}
    return float(ssl.cert_time_to_seconds(str(peer["notAfter"])))


@contextmanager
def _explain_tls_errors(what: str) -> Iterator[None]:
    """Turn errors about the file `what` into a SettingsError of one sentence."""
    try:
        yield
    except ssl.SSLCertVerificationError as error:
        raise SettingsError(f"{what} cannot be used: {error.verify_message}") from None
    except ssl.SSLError as error:
        reason = _TLS_ERROR_REASONS.get(error.reason or "", "it is not complete PEM text")
        raise SettingsError(f"{what} cannot be used: {reason}") from None
    except ValueError as problem:  # an encrypted key, or a PEM file without a certificate
        raise SettingsError(f"{what} cannot be used: {str(problem) or 'it is not complete PEM text'}") from None
