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

    It is a thread, because a rank computes for minutes between two calls of ours. A beat that does not arrive is not
    repeated: the next one says the same. After an answer `told` gets the `time.monotonic()` at which the beat was sent,
    and what the gateway answered. After an error `failed` gets the seconds since the last answer, and the error.
    `incarnation` is that of the trainer rank that beats.
    """

    def __init__(
        self,
        url: str,
        token: str | None,
        path: str,
        identity: str,
        seconds: float,
        told: Callable[[float, int | None], None] = lambda moment, running: None,
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
        """Sets the incarnation of the trainer rank that beats from now on."""
        self._client.incarnation = incarnation

    def _run(self) -> None:
        answered_at = time.monotonic()
        refusal = ""
        while True:
            sent_at = time.monotonic()
            try:
                running = self._client.beat(self._path, self._identity)
            except DisplacedError as error:
                if str(error) != refusal:  # once: every beat gets it until the process ends or connects anew
                    refusal = str(error)
                    log.error("%s", error)
                self._failed(time.monotonic() - answered_at, error)
            except WeightcastError as error:
                log.debug("heartbeat of %s: %s", self._path, error)
                self._failed(time.monotonic() - answered_at, error)
            else:
                answered_at = time.monotonic()
                self._told(sent_at, running)
            if self._end.wait(self._seconds):
                break
        self._client.close()

    def close(self) -> None:
        """Ends the beats. Does not wait for one under way."""
        self._end.set()
