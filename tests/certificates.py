"""Certificates for tests, issued by an authority that each test session creates."""

from __future__ import annotations

import datetime
import ssl
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import trustme

if TYPE_CHECKING:
    from pathlib import Path

_DAY = datetime.timedelta(days=1)
NAMES = ("localhost", "127.0.0.1")


@dataclass
class Certificates:
    """An authority and the files of its certificates, in one directory."""

    directory: Path
    authority: trustme.CA = field(default_factory=trustme.CA)

    @property
    def ca(self) -> Path:
        """Return the file of the authority's certificate."""
        path = self.directory / "ca.pem"
        self.authority.cert_pem.write_to_path(str(path))
        return path

    def issue(self, name: str, *identities: str, days: int = 30) -> tuple[Path, Path]:
        """Write a certificate and its key; return their paths. `days` until the end of its validity, from now."""
        now = datetime.datetime.now(datetime.UTC)
        issued = self.authority.issue_cert(
            *(identities or NAMES), not_before=now - 400 * _DAY, not_after=now + days * _DAY
        )
        certificate, key = self.directory / f"{name}.pem", self.directory / f"{name}.key"
        # One replacement each, as tools that rotate certificates do it.
        for path, text in (
            (certificate, b"".join(blob.bytes() for blob in issued.cert_chain_pems)),
            (key, issued.private_key_pem.bytes()),
        ):
            new = path.with_suffix(".new")
            new.write_bytes(text)
            new.replace(path)
        return certificate, key

    def client(self, certificate: tuple[Path, Path] | None = None) -> ssl.SSLContext:
        """Return the context of a client that trusts the authority, and presents a certificate if one is given."""
        context = ssl.create_default_context(cafile=str(self.ca))
        if certificate is not None:
            context.load_cert_chain(*certificate)
        return context
