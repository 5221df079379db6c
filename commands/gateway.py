"""`weightcast gateway`: serve the control plane."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import TypeAlias

from weightcast.transfer.errors import InputError

__all__ = ["add"]

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

TOKEN_VARIABLE = "WEIGHTCAST_TOKEN"


def add(commands: Commands) -> None:
    """`weightcast gateway`."""
    parser = commands.add_parser("gateway", help="serve the control plane over HTTP")
    parser.add_argument("--host", default="127.0.0.1", help="address to bind; loopback unless told otherwise")
    parser.add_argument("--port", type=int, default=8900)
    parser.add_argument(
        "--advertise", default="", metavar="HOST", help="address at which engines reach this gateway, if not --host"
    )
    parser.add_argument("--json", action="store_true", help="print address and token as JSON")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    import uvicorn

    from weightcast.gateway.app import Gateway, make_app, make_token

    if not 0 < arguments.port < 65536:
        raise InputError(f"port {arguments.port} is not in 1..65535")
    given = os.environ.get(TOKEN_VARIABLE, "")
    token = given or make_token()
    app = make_app(Gateway(arguments.advertise or arguments.host, arguments.port), token)
    url = f"http://{arguments.host}:{arguments.port}"
    # A token that was made here is shown this once; a given one is not repeated.
    if arguments.json:
        print(json.dumps({"url": url, "token": None if given else token}), flush=True)
    elif given:
        print(f"weightcast gateway on {url}, token from {TOKEN_VARIABLE}", flush=True)
    else:
        print(f"weightcast gateway on {url}\n{TOKEN_VARIABLE}={token}", flush=True)
    server = uvicorn.Server(
        uvicorn.Config(app, host=arguments.host, port=arguments.port, log_level="warning", access_log=False)
    )
    try:
        server.run()
    except SystemExit:
        # uvicorn has logged why it could not start, and leaves the status to its caller.
        print(f"weightcast gateway: cannot listen on {url}; is the port in use?", file=sys.stderr)
        return 4
    except KeyboardInterrupt:
        pass
    return 0
