"""`weightcast gateway`: serve the control plane."""

from __future__ import annotations

import argparse
import ipaddress
import json
import logging
import os
import socket
import ssl
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from weightcast.commands.options import Commands
from weightcast.transfer.errors import ControlError, InputError

if TYPE_CHECKING:
    from weightcast.gateway.server.tokens import Tokens

__all__ = ["add"]

SCOPES = {
    "operator": "WEIGHTCAST_TOKEN",
    "worker": "WEIGHTCAST_WORKER_TOKEN",
    "read": "WEIGHTCAST_READ_TOKEN",
    "ready": "WEIGHTCAST_READY_TOKEN",
}
"""The environment variable with the token of each scope. Whoever asks the gateway has its own in WEIGHTCAST_TOKEN."""


def add(commands: Commands) -> None:
    """Adds the parser of `weightcast gateway`."""
    parser = commands.add_parser("gateway", help="serve the control plane over HTTP")
    parser.add_argument("--host", default="127.0.0.1", help="address to bind; loopback unless told otherwise")
    parser.add_argument("--port", type=int, default=8900)
    parser.add_argument(
        "--advertise", default="", metavar="HOST", help="address at which engines reach this gateway, if not --host"
    )
    parser.add_argument(
        "--state", type=Path, metavar="FILE", help="remember pairs, versions and fences there over a restart"
    )
    parser.add_argument("--tls-cert", type=Path, metavar="FILE", help="serve HTTPS with this certificate chain")
    parser.add_argument("--tls-key", type=Path, metavar="FILE", help="its private key, if not in the same file")
    parser.add_argument("--log", choices=("json", "text"), help="how to log to stderr; text on a terminal, else json")
    parser.add_argument("--json", action="store_true", help="print address and tokens as JSON")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> None:
    from weightcast.gateway.control.gateway import Gateway
    from weightcast.gateway.control.store import Store
    from weightcast.gateway.server.app import make_app
    from weightcast.gateway.server.logs import set_up
    from weightcast.gateway.server.run import make_server

    if not 0 < arguments.port < 65536:
        raise InputError(f"port {arguments.port} is not in 1..65535")
    _check_certificate(arguments.tls_cert, arguments.tls_key)
    tokens, new_tokens = _tokens()
    set_up(arguments.log or ("text" if sys.stderr.isatty() else "json"))
    store = Store(arguments.state)
    store.open()
    app = make_app(Gateway(arguments.advertise or arguments.host, arguments.port, store), tokens)
    url = f"http{'s' if arguments.tls_cert else ''}://{arguments.host}:{arguments.port}"
    server = make_server(app, arguments.tls_cert, arguments.tls_key)
    try:
        listener = socket.create_server((arguments.host, arguments.port), backlog=2048)
    except OSError as error:
        raise ControlError(f"cannot listen on {url}: {error.strerror}; choose another --port") from None
    if not arguments.tls_cert and not _is_loopback(listener):
        logging.getLogger("weightcast.gateway").warning(
            "%s is not loopback and not encrypted: tokens can be read on the way; use --tls-cert", url
        )
    _show(url, new_tokens, as_json=arguments.json)
    with listener, suppress(KeyboardInterrupt):
        server.run(sockets=[listener])
    if not server.started:
        raise ControlError("the gateway did not start; its log says why")


def _tokens() -> tuple[Tokens, dict[str, str]]:
    """The gateway's tokens, and by variable those made here because the environment has no operator's token."""
    from weightcast.gateway.server.tokens import Tokens, make_token

    values = {scope: os.environ.get(variable, "") for scope, variable in SCOPES.items()}
    if values["operator"]:
        return Tokens(**values), {}
    tokens = {scope: token or make_token() for scope, token in values.items()}
    return Tokens(**tokens), {SCOPES[scope]: tokens[scope] for scope in SCOPES if not values[scope]}


def _show(url: str, made: dict[str, str], as_json: bool) -> None:
    """Prints the address, and this once the tokens that were made here; given ones are not repeated."""
    if as_json:
        print(json.dumps({"url": url, "token": made.get(SCOPES["operator"]), "tokens": made}), flush=True)
    elif made:
        lines = [f"weightcast gateway on {url}", *(f"{name}={token}" for name, token in made.items())]
        print("\n".join(lines), flush=True)
    else:
        print(f"weightcast gateway on {url}, token from {SCOPES['operator']}", flush=True)


def _check_certificate(certificate: Path | None, key: Path | None) -> None:
    if certificate is None:
        if key is not None:
            raise InputError("--tls-key is of no use without --tls-cert")
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise InputError(f"cannot use certificate {certificate}: {error}") from None


def _is_loopback(listener: socket.socket) -> bool:
    return ipaddress.ip_address(str(listener.getsockname()[0])).is_loopback
