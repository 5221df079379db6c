"""A process that has imported SGLang once and forks the ranks of one test after another: an import takes half a minute.

with Nest() as nest:
    results = nest.run(worker, 2, "argument")    # worker(rank, world, port, "argument") in two new processes
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Self

from spawn_support import RankFailedError, free_port

__all__ = ["Nest"]

START_SECONDS = 240.0


class Nest:
    """Starts the importing process on entry and ends it on exit. With `deep_ep` the DeepEP stand-in is importable.

    With `models` all of SGLang's model classes are imported once, not in each process that builds one.
    """

    def __init__(self, deep_ep: bool = False, models: bool = False) -> None:
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, deep_ep, models))
        self._theirs = theirs

    def __enter__(self) -> Self:
        self._process.start()
        self._theirs.close()
        self._answer(START_SECONDS)
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()  # The nest reads the end of the pipe and leaves.
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def run(self, fn: Callable[..., Any], world: int, *args: Any, timeout: float = 300.0) -> list[Any]:
        """`fn(rank, world, port, *args)` in `world` processes; their results by rank. Raises RankFailedError."""
        self._pipe.send((fn, world, args, timeout))
        return self._answer(timeout + 30)

    def _answer(self, timeout: float) -> list[Any]:
        if not self._pipe.poll(timeout):
            raise RankFailedError(f"no answer within {timeout:g} s")
        passed, value = self._pipe.recv()
        if not passed:
            raise RankFailedError(value)
        return list(value)


def _serve(pipe: Connection, deep_ep: bool, models: bool) -> None:
    if deep_ep:
        sys.path.insert(0, str(Path(__file__).parent.parent / "stand_ins"))
    try:
        import sglang_support

        sglang_support.environment()
        sglang_support.preload(models)
    except BaseException:
        pipe.send((False, traceback.format_exc()))
        return
    pipe.send((True, []))
    while True:
        try:
            fn, world, args, timeout = pipe.recv()
        except EOFError:
            return
        pipe.send(_fork_ranks(fn, world, args, timeout))


def _fork_ranks(fn: Callable[..., Any], world: int, args: tuple[Any, ...], timeout: float) -> tuple[bool, Any]:
    context = get_context("fork")
    port = free_port()
    ranks: dict[Connection, int] = {}
    processes = []
    for rank in range(world):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_run_rank, args=(theirs, fn, rank, world, port, args))
        process.start()
        theirs.close()
        ranks[ours] = rank
        processes.append(process)
    try:
        return _collect(ranks, time.monotonic() + timeout)
    finally:
        for process in processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()


def _collect(ranks: dict[Connection, int], deadline: float) -> tuple[bool, Any]:
    found: dict[int, Any] = {}
    while len(found) < len(ranks):
        waiting = [c for c, rank in ranks.items() if rank not in found]
        ready = wait(waiting, max(0.0, deadline - time.monotonic()))
        if not ready:
            return False, f"ranks {sorted(ranks[c] for c in waiting)} did not finish"
        for connection in ready:
            rank = ranks[connection]  # type: ignore[index]
            try:
                passed, value = connection.recv()  # type: ignore[union-attr]
            except EOFError:
                passed, value = False, "died without a word"
            if not passed:
                return False, f"rank {rank}: {value}"
            found[rank] = value
    return True, [found[rank] for rank in range(len(ranks))]


def _run_rank(
    pipe: Connection, fn: Callable[..., Any], rank: int, world: int, port: int, args: tuple[Any, ...]
) -> None:
    try:
        pipe.send((True, fn(rank, world, port, *args)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    pipe.close()
    os._exit(0)  # Groups and threads of the engine have no orderly end here.
