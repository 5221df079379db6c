"""Waits that can be given up, where those of a library cannot."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeAlias

__all__ = ["Waiter"]

_Answers: TypeAlias = "SimpleQueue[BaseException | bool]"
_Asked: TypeAlias = "SimpleQueue[tuple[Callable[[], None], _Answers] | None]"


class Waiter:
    """A thread that waits in its caller's place, who may give up.

    Gloo (torch 2.13) does not end the wait for a message that is partly sent or received, neither when its connection
    is lost nor when it is closed on purpose: it ends when its time is over. A thread that was left does that alone.
    """

    def __init__(self) -> None:
        self._work: _Asked | None = None
        self._answer: _Answers | None = None
        self._given_up = False
        self._lock = threading.Lock()

    def run(self, wait: Callable[[], None]) -> bool:
        """Waits; False if it was given up before. Raises what `wait` raised."""
        with self._lock:
            if self._given_up:
                return False
            if self._work is None:
                work: _Asked = SimpleQueue()
                threading.Thread(target=_wait_for, args=(work,), name="weightcast-wait", daemon=True).start()
                self._work = work
            answer = self._answer = SimpleQueue()
            self._work.put((wait, answer))
        found = answer.get()
        if isinstance(found, BaseException):
            raise found
        return found

    def give_up(self) -> None:
        """Nobody waits any longer."""
        with self._lock:
            self._given_up = True
            if self._answer is not None:
                self._answer.put(False)
            if self._work is not None:
                self._work.put(None)


def _wait_for(work: _Asked) -> None:
    while (asked := work.get()) is not None:
        wait, answer = asked
        try:
            wait()
        except BaseException as error:
            answer.put(error)
        else:
            answer.put(True)
        del asked, wait, answer  # they hold the memory of the messages
