"""A rank's sign of life: a thread that tells the gateway, every few seconds, that its process lives."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from weightcast.gateway.client import GatewayClient
from weightcast.gateway.incarnations import Incarnation
from weightcast.transfer.errors import DisplacedError, WeightcastError

__all__ = ["Heartbeat"]

log = logging.getLogger("weightcast.worker")


class Heartbeat:
    """Beats until it is closed. `path` and `identity` are those of `GatewayClient.beat`.

    A thread, because a rank computes for minutes between two calls of ours. A beat that does not arrive is not
    repeated: the next one says the same. `told` is called with the `time.monotonic()` at which a beat was sent, and
    with what the gateway answered; `failed` with the seconds since the gateway answered last, and with the error.
    `incarnation` is that of the trainer rank that beats.
    """

    def __init__(
        self,
        url: str,
        token: str | None,
        path: str,
        identity: str,
        seconds: float,
        told: Callable[[float, int | None], None] = lambda sent, running: None,
        failed: Callable[[float, WeightcastError], None] = lambda seconds, error: None,
        incarnation: Incarnation | None = None,
    ) -> None:
        self._client = GatewayClient(url, token, timeout=max(seconds, 1.0))
        self._client.incarnation = incarnation  # before the first beat: a rank that dies before the second is missed
        self._path, self._identity, self._seconds = path, identity, seconds
        self._told, self._failed = told, failed
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="weightcast-heartbeat", daemon=True)
        self._thread.start()

    def speak_as(self, incarnation: Incarnation | None) -> None:
        """The incarnation of the trainer rank that beats from now on."""
        self._client.incarnation = incarnation

    def _run(self) -> None:
        answered = time.monotonic()
        refused = ""
        while True:
            sent = time.monotonic()
            try:
                running = self._client.beat(self._path, self._identity)
            except DisplacedError as error:
                if str(error) != refused:  # once: it is said until the process ends or connects anew
                    refused = str(error)
                    log.error("%s", error)
                self._failed(time.monotonic() - answered, error)
            except WeightcastError as error:
                log.debug("heartbeat of %s: %s", self._path, error)
                self._failed(time.monotonic() - answered, error)
            else:
                answered = time.monotonic()
                self._told(sent, running)
            if self._end.wait(self._seconds):
                break
        self._client.close()

    def close(self) -> None:
        """Beats no more. Does not wait for a beat under way."""
        self._end.set()
