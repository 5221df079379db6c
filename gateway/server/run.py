"""How the gateway's application is served, whoever starts it: the command line or an actor."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import uvicorn

    from weightcast.gateway.server.app import Application

__all__ = ["make_server"]


def make_server(app: Application, tls_cert: Path | None = None, tls_key: Path | None = None) -> uvicorn.Server:
    """A server for sockets that listen already; with a certificate it speaks HTTPS."""
    import uvicorn

    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # else a guesser would choose the address that is throttled
        lifespan="on",
        timeout_graceful_shutdown=5,
        timeout_keep_alive=75,
        ssl_certfile=tls_cert,
        ssl_keyfile=tls_key,
    )
    return uvicorn.Server(config)
