"""Orders of a trainer rank, when it is interrupted at an unlucky moment."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, cast

import pytest

from weightcast.gateway.client import GatewayClient
from weightcast.gateway.ranks import orders
from weightcast.gateway.ranks.orders import OrderFeed


class Interrupted(ThreadPoolExecutor):
    """Ctrl-C while it starts a thread: the thread runs, and the executor does not know it."""

    def submit(self, *work: Any, **options: Any) -> Future[Any]:
        super().submit(*work, **options)
        self._threads.clear()
        raise KeyboardInterrupt


def test_no_thread_waits_for_orders_after_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    """It kept the process alive for ever."""
    monkeypatch.setattr(orders, "ThreadPoolExecutor", Interrupted)
    ended = threading.Event()

    def work(name: str, take: Any) -> None:
        try:
            take()
        finally:
            ended.set()

    client = cast("GatewayClient", None)  # nothing is asked before the work has begun
    with pytest.raises(KeyboardInterrupt):
        OrderFeed(client, "main", 0, "", time.monotonic() + 60.0).follow(["rollout-0"], work, lambda order: False)
    try:
        assert ended.wait(20.0)
    finally:
        for thread in threading.enumerate():
            if thread.name.startswith("weightcast_"):
                thread.join(20.0)
