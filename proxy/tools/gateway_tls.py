"""Flags for gateways with TLS, and the context that they describe."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING

from proxy.settings import SettingsError

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace


def add_tls_flags(parser: ArgumentParser) -> None:
    """Add the flags for gateways whose URL begins with https://."""
    add = parser.add_argument
    add(
        "--ca-file",
        metavar="FILE",
        help="PEM file with the authorities of the gateways' certificates. Default: those of the system.",
    )
    add(
        "--client-certificate",
        metavar="FILE",
        help="PEM file with a certificate and its key, for gateways that require one.",
    )


def make_tls_context(flags: Namespace) -> ssl.SSLContext:
    """Return the context that these flags describe. Raises SettingsError."""
    what, contents = "--ca-file", "certificates"
    try:
        context = ssl.create_default_context(cafile=flags.ca_file)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if flags.client_certificate is not None:
            what, contents = "--client-certificate", "a certificate and its key"
            context.load_cert_chain(flags.client_certificate, password=_reject_password)
    except ssl.SSLError:
        raise SettingsError(f"{what} must be a PEM file with {contents}") from None
    except ValueError:
        raise SettingsError(f"{what} must have a key without a password") from None
    except OSError as error:
        raise SettingsError(f"{what} cannot be read: {(error.strerror or str(error)).lower()}") from None
    return context


def _reject_password() -> str:
    raise ValueError
