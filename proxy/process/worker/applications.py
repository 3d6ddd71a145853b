"""The applications behind the listeners of clients, operators and engines, and their listeners."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import web

from proxy.api.credentials import Administrators
from proxy.listener import replies
from proxy.listener.http_listener import HttpListener
from proxy.process.configuration import text_of_secret
from proxy.settings.tls import TlsFiles, make_server_context

if TYPE_CHECKING:
    from collections.abc import Callable

    from proxy.process.worker.basis import WorkerBasis
    from proxy.settings import Listen, Settings


def make_application(basis: WorkerBasis) -> web.Application:
    """Return an application without routes that answers errors in the gateway's form, and counts refusals."""
    app = web.Application()
    replies.install_replies(app, basis.metrics)
    return app


def administrators_of(basis: WorkerBasis, host: str, *, trusts_local: bool = False) -> Administrators:
    """Return the check for administrators on the listener of this host.

    `trusts_local`: clients do not use the listener.
    """

    return Administrators(
        lambda: text_of_secret(basis.settings.auth.admin_key),
        listens_on=host,
        trusts_local=lambda: trusts_local or basis.settings.admin.trust_local,
        trusted_proxies=lambda: basis.settings.listen.trusted_proxies,
    )


def make_http_listener(
    basis: WorkerBasis,
    app: web.Application,
    limits: Callable[[Settings], Listen] = lambda settings: settings.listen,
    tls_section: str | None = None,
) -> HttpListener:
    """Return a listener for an application, which does not listen yet.

    Args:
        basis: The basis of the worker.
        app: The application.
        limits: Returns the limits in the settings, also after a reload.
        tls_section: Section of the settings with the certificate. None: the listener has no TLS.
    """
    made = HttpListener(app, limits(basis.settings), basis.metrics)
    files: TlsFiles | None = None

    def on_change(new: Settings) -> None:
        nonlocal files
        made.set_limits(limits(new))
        if tls_section is not None and basis.live_configuration.current_snapshot.tls_files != files:
            files = basis.live_configuration.current_snapshot.tls_files
            made.tls = make_server_context(tls_section, files)

    on_change(basis.settings)
    basis.live_configuration.call_on_change(on_change)
    if tls_section is not None:
        basis.watch_expiry(tls_section, f"{tls_section}.tls_certificate")
    return made


def callback_limits(settings: Settings) -> Listen:
    """Return the limits of clients without the number of connections.

    An engine takes any answer for success, and would wait for a message that was refused.
    """
    return settings.listen.model_copy(update={"max_connections": None})
