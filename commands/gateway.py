"""`weightcast gateway`: serve the control plane."""

from __future__ import annotations

import argparse
import json
import logging
import os
import ssl
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from weightcast.commands.options import Commands
from weightcast.gateway.addresses import advertised, http_url
from weightcast.transfer.errors import ControlError, InputError
from weightcast.transfer.transports.addresses import bare, is_loopback, is_unspecified, listen

if TYPE_CHECKING:
    from weightcast.gateway.server.tokens import Tokens

__all__ = ["add"]


def add(commands: Commands) -> None:
    """Adds the parser of `weightcast gateway`."""
    parser = commands.add_parser("gateway", help="serve the control plane over HTTP")
    parser.add_argument("--host", type=bare, default="127.0.0.1", help="address to bind, IPv4 or IPv6 (127.0.0.1)")
    parser.add_argument("--port", type=int, default=8900)
    parser.add_argument(
        "--advertise",
        default="",
        metavar="HOST",
        help="HOST, HOST:PORT or URL at which engines reach this gateway, if not --host; 0.0.0.0 and :: need one",
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
    host, scheme = arguments.host, "https" if arguments.tls_cert else "http"
    endpoint = advertised(arguments.advertise, host, arguments.port, scheme)
    tokens, new_tokens = _tokens()
    set_up(arguments.log or ("text" if sys.stderr.isatty() else "json"))
    store = Store(arguments.state)
    store.open()
    app = make_app(Gateway(*endpoint, store), tokens)
    server = make_server(app, arguments.tls_cert, arguments.tls_key)
    listener = listen(host, arguments.port)
    url = http_url(*endpoint) if is_unspecified(host) else http_url(f"{scheme}://{host}", arguments.port)
    if not arguments.tls_cert and not is_loopback(str(listener.getsockname()[0])):
        logging.getLogger("weightcast.gateway").warning(
            "%s is not loopback and not encrypted: tokens can be read on the way; use --tls-cert", url
        )
    if new_tokens and arguments.state:
        logging.getLogger("weightcast.gateway").warning(
            "another start makes other tokens, and who has these is refused then: set %s", ", ".join(new_tokens)
        )
    _show(url, new_tokens, as_json=arguments.json)
    with listener, suppress(KeyboardInterrupt):
        server.run(sockets=[listener])
    if not server.started:
        raise ControlError("the gateway did not start; its log says why")


def _tokens() -> tuple[Tokens, dict[str, str]]:
    """The gateway's tokens, and by variable those made here because the environment has no operator's token."""
    from weightcast.gateway.server.tokens import VARIABLES, Tokens, make_token

    values = {scope: os.environ.get(variable, "") for scope, variable in VARIABLES.items()}
    if values["operator"]:
        return Tokens(**values), {}
    tokens = {scope: token or make_token() for scope, token in values.items()}
    return Tokens(**tokens), {VARIABLES[scope]: tokens[scope] for scope in VARIABLES if not values[scope]}


def _show(url: str, made: dict[str, str], as_json: bool) -> None:
    """Prints the address, and this once the tokens that were made here; given ones are not repeated."""
    from weightcast.gateway.client import TOKEN_VARIABLE

    if as_json:
        print(json.dumps({"url": url, "token": made.get(TOKEN_VARIABLE), "tokens": made}), flush=True)
    elif made:
        lines = [f"weightcast gateway on {url}", *(f"{name}={token}" for name, token in made.items())]
        print("\n".join(lines), flush=True)
    else:
        print(f"weightcast gateway on {url}, token from {TOKEN_VARIABLE}", flush=True)


def _check_certificate(certificate: Path | None, key: Path | None) -> None:
    if certificate is None:
        if key is not None:
            raise InputError("--tls-key is of no use without --tls-cert")
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise InputError(f"cannot use certificate {certificate}: {error}") from None
