"""Orders of all instances at once, on a trainer rank: one poll for all, and a thread for each instance."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from queue import SimpleQueue
from typing import TypeAlias

from weightcast.gateway.client import POLL, GatewayClient
from weightcast.gateway.records import Order, wait_lines
from weightcast.gateway.reminder import SAY_SECONDS
from weightcast.transfer.errors import ControlError, DeadlineError, WeightcastError

__all__ = ["Follow", "OrderFeed", "say_who_is_missing"]

log = logging.getLogger("weightcast.worker")

Follow: TypeAlias = Callable[[str, Callable[[], Order]], None]
"""Work for one instance, given its name and a call that waits for its next order."""


def say_who_is_missing(client: GatewayClient, pair: str, who: str, instance: str = "") -> None:
    """Logs the waits of a pair, or those for an instance alone, that have taken a while; `who` is the rank that waits.

    Says nothing when the gateway does not answer: the request that the rank itself makes next tells that.
    """
    with suppress(WeightcastError):
        waits = [wait for wait in client.waiting(pair, instance) if wait.seconds >= SAY_SECONDS / 2]
        for line in wait_lines(waits):
            log.warning("%s: pair %s: %s", who, pair, line)


class OrderFeed:
    """The orders of a pair from number `after` on, for one connect or update, which is over by `deadline`.

    `boot` is the life of the pair that numbered them.
    """

    def __init__(self, client: GatewayClient, pair: str, after: int, boot: str, deadline: float) -> None:
        self._client, self._pair = client, pair
        self._after, self._boot, self._deadline = after, boot, deadline

    def follow(
        self,
        names: Collection[str],
        work: Follow,
        last: Callable[[Order], bool],
        seen: Callable[[Order], None] = lambda order: None,
        lost: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        """Runs `work` for all instances at once, so that none waits for another, until each has had its `last` order.

        `seen` is told of each order as it comes, while the work for its instance may be busy with one before. `lost` is
        told why no further order can come.

        Raises the first failure after all have ended. Raises DeadlineError when an order does not come, ControlError
        when the gateway was restarted or the pair created again.
        """
        if not names:
            return
        queues: dict[str, SimpleQueue[Order | BaseException]] = {name: SimpleQueue() for name in names}

        def taker(name: str) -> Callable[[], Order]:
            def take() -> Order:
                item = queues[name].get()
                if isinstance(item, BaseException):
                    raise item
                return item

            return take

        with ThreadPoolExecutor(max_workers=len(names), thread_name_prefix="weightcast") as pool:
            try:  # also around the start of threads: Ctrl-C in it leaves one that waits for orders
                futures = [pool.submit(work, name, taker(name)) for name in names]
                self._deal(queues, last, seen)
            except BaseException as error:
                lost(error)
                for queue in queues.values():
                    queue.put(error)
                raise
        for future in futures:
            future.result()

    def _deal(
        self,
        queues: dict[str, SimpleQueue[Order | BaseException]],
        last: Callable[[Order], bool],
        seen: Callable[[Order], None],
    ) -> None:
        names = set(queues)
        while names:
            for order in self._next(names):
                name = order.instance
                if name in names:
                    seen(order)
                    queues[name].put(order)
                    if last(order):
                        names.discard(name)

    def _next(self, names: Collection[str]) -> list[Order]:
        seconds = self._deadline - time.monotonic()
        if seconds <= 0:
            raise DeadlineError(f"pair {self._pair}: no order for {', '.join(sorted(names))} came in time")
        answer = self._client.pair_orders(self._pair, self._after, min(POLL, seconds), self._boot)
        if answer.boot != self._boot:
            raise ControlError(
                f"pair {self._pair}: the gateway was restarted or the pair created again while "
                f"{', '.join(sorted(names))} were connected or updated; offer a greater version"
            )
        self._after += len(answer.orders)
        return answer.orders
