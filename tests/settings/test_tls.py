"""Certificates are checked when they are read, and errors are one sentence."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from proxy.settings import LoadedSettings, SettingsError, load_settings
from proxy.settings.tls import make_server_context
from tests.certificates import Certificates

DAY_SECONDS = 24 * 3600.0


def _load(certificate: Path, key: Path | None = None, **options: str) -> LoadedSettings:
    environ = {"PROXY_LISTEN__TLS_CERTIFICATE": str(certificate), **options}
    if key is not None:
        environ["PROXY_LISTEN__TLS_KEY"] = str(key)
    return load_settings(["--connector", "plain", "--decode", "10.0.0.1:1"], environ)


def _refusal(certificate: Path, key: Path | None = None, **options: str) -> str:
    with pytest.raises(SettingsError) as refused:
        _load(certificate, key, **options)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def _openssl(directory: Path, name: str, *words: str) -> tuple[Path, Path]:
    certificate, key = directory / f"{name}.pem", directory / f"{name}.key"
    files = ("-keyout", str(key), "-out", str(certificate))
    command = ("openssl", "req", "-x509", "-nodes", "-subj", "/CN=x", "-days", "3", *files, *words)
    subprocess.run(command, check=True, capture_output=True)
    return certificate, key


def test_certificate_has_its_expiry(certificates: Certificates) -> None:
    loaded = _load(*certificates.issue("good", days=30))
    (expiry,) = loaded.tls.expiries.values()
    assert abs(expiry - time.time() - 30 * DAY_SECONDS) < DAY_SECONDS


def test_key_may_be_in_the_file_of_the_certificate(certificates: Certificates) -> None:
    certificate, key = certificates.issue("good")
    certificate.write_text(certificate.read_text() + key.read_text())
    loaded = _load(certificate)
    assert make_server_context("listen", loaded.tls) is not None


def test_expired_certificate_is_rejected(certificates: Certificates) -> None:
    certificate, key = certificates.issue("old", days=-1)
    assert _refusal(certificate, key) == (
        f"listen.tls_certificate {certificate} with the key {key} cannot be used: certificate has expired"
    )


def test_key_of_another_certificate_is_rejected(certificates: Certificates) -> None:
    certificate, _ = certificates.issue("good")
    _, key = certificates.issue("other")
    assert _refusal(certificate, key).endswith("cannot be used: the key does not belong to the certificate")


@pytest.mark.parametrize("cut", ["certificate", "key"])
def test_half_written_file_is_rejected(certificates: Certificates, cut: str) -> None:
    certificate, key = certificates.issue("good")
    path = certificate if cut == "certificate" else key
    path.write_bytes(path.read_bytes()[:150])
    assert _refusal(certificate, key).endswith("cannot be used: it is not complete PEM text")


def test_missing_file_is_rejected(certificates: Certificates, tmp_path: Path) -> None:
    certificate, _ = certificates.issue("good")
    key = tmp_path / "missing.key"
    assert _refusal(certificate, key) == f"listen.tls_key {key} cannot be read: no such file or directory"


def test_short_key_is_rejected(tmp_path: Path) -> None:
    refusal = _refusal(*_openssl(tmp_path, "weak", "-newkey", "rsa:1024"))
    assert refusal.endswith("cannot be used: the key of the certificate is too short")


def test_certificate_for_clients_is_rejected_at_a_listener(tmp_path: Path) -> None:
    words = ("-newkey", "rsa:2048", "-addext", "extendedKeyUsage=clientAuth")
    assert _refusal(*_openssl(tmp_path, "client", *words)).endswith("cannot be used: unsuitable certificate purpose")


def test_encrypted_key_is_rejected_without_asking_for_a_password(certificates: Certificates, tmp_path: Path) -> None:
    certificate, key = certificates.issue("good")
    locked = tmp_path / "locked.key"
    command = ["openssl", "pkey", "-in", str(key), "-aes256", "-passout", "pass:secret", "-out", str(locked)]
    subprocess.run(command, check=True, capture_output=True)
    assert "cannot be used: the key is encrypted" in _refusal(certificate, locked)


def test_authorities_that_are_no_certificates_are_rejected(certificates: Certificates, tmp_path: Path) -> None:
    nonsense = tmp_path / "ca.pem"
    nonsense.write_text("nonsense")
    refusal = _refusal(*certificates.issue("good"), PROXY_LISTEN__TLS_CLIENT_CA=str(nonsense))
    assert refusal == f"listen.tls_client_ca {nonsense} cannot be used: it is not complete PEM text"


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        ({"LISTEN__TLS_KEY": "a"}, "listen.tls_key is given without listen.tls_certificate"),
        ({"ADMIN__TLS_CLIENT_CA": "a"}, "admin.tls_client_ca is given without admin.tls_certificate"),
        ({"ADMIN__TLS_CERTIFICATE": "a"}, "admin.tls_certificate is given without admin.port"),
    ],
)
def test_option_without_its_partner_is_rejected(options: dict[str, str], refusal: str) -> None:
    with pytest.raises(SettingsError, match=refusal):
        load_settings(
            ["--connector", "plain", "--decode", "h:1"], {f"PROXY_{name}": value for name, value in options.items()}
        )
