"""How the gateway's application is served, whoever starts it: the command line or an actor.

Its process keeps the memory that plans take, so that the next plan finds it.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import uvicorn

    from weightcast.gateway.server.app import Application

__all__ = ["keep_freed_memory", "make_server"]

# From glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_LARGEST_BLOCK = 1 << 30
_NEVER = (1 << 31) - 1


def make_server(app: Application, tls_cert: Path | None = None, tls_key: Path | None = None) -> uvicorn.Server:
    """A server for sockets that listen already; with a certificate it speaks HTTPS."""
    import uvicorn

    keep_freed_memory()
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


def keep_freed_memory() -> bool:
    """Tells the C library to give no freed memory back to the system; False where it is not glibc, and nothing is done.

    A plan for a model of a trillion parameters is made of columns of tens of MB. Given back after each plan, they are
    cleared by the system, page by page, for the next: up to a fifth of the time of planning, and more the larger the
    plan. The process stays as large as its largest plan made it. One arena for all threads, because plans are made in
    threads and those of glibc's own arenas give back what they free whatever the thresholds say.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    settings = ((_M_MMAP_THRESHOLD, _LARGEST_BLOCK), (_M_TRIM_THRESHOLD, _NEVER), (_M_ARENA_MAX, 1))
    return all([mallopt(option, value) == 1 for option, value in settings])
