"""A real gateway process for tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

from spawn_support import free_port

from weightcast.gateway.addresses import http_url
from weightcast.gateway.client import TOKEN_VARIABLE
from weightcast.gateway.server.tokens import make_token

__all__ = ["running_gateway"]


@contextmanager
def running_gateway(
    *options: str, host: str = "127.0.0.1", port: int = 0, token: str = "", stderr: IO[bytes] | None = None
) -> Iterator[tuple[str, str]]:
    """URL and token of a gateway that runs until the block ends; both are new ones unless given."""
    token, port = token or make_token(), port or free_port()
    command = [sys.executable, "-m", "weightcast", "gateway", "--json", "--host", host, "--port", str(port), *options]
    environment = {**os.environ, TOKEN_VARIABLE: token}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=stderr, text=True) as process:
        try:
            assert process.stdout is not None
            said = json.loads(process.stdout.readline())
            assert said == {"url": http_url(host, port), "token": None, "tokens": {}}
            yield said["url"], token
        finally:
            process.terminate()
            process.wait(10)
