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
    """A thread that waits for its caller, which may give up.

    Gloo (torch 2.13) does not end the wait for a message that is partly sent or received when its connection is lost.
    Nor does it when the connection is closed on purpose: the wait ends when its time is over. A thread that was left
    sits that out alone.
    """

    def __init__(self) -> None:
        self._work: _Asked | None = None
        self._answer: _Answers | None = None
        self._given_up = False
        self._lock = threading.Lock()

    def run(self, wait: Callable[[], None]) -> bool:
        """Waits, and returns False if the wait was given up. Raises the error of `wait`."""
        with self._lock:
            if self._given_up:
                return False
            if self._work is None:
                work: _Asked = SimpleQueue()
                threading.Thread(target=_wait_for, args=(work,), name="weightcast-wait", daemon=True).start()
                self._work = work
            answer = self._answer = SimpleQueue()
            self._work.put((wait, answer))
        outcome = answer.get()
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def give_up(self) -> None:
        """Ends the wait under way, and every later one at once."""
        with self._lock:
            self._given_up = True
            if self._answer is not None:
                self._answer.put(False)
            if self._work is not None:
                self._work.put(None)


def _wait_for(work: _Asked) -> None:
    while (request := work.get()) is not None:
        wait, answer = request
        try:
            wait()
        except BaseException as error:
            answer.put(error)
        else:
            answer.put(True)
        del request, wait, answer  # they hold the memory of the messages
