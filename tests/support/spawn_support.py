"""Runs a function in several processes, as the ranks of a trainer or of an instance."""

from __future__ import annotations

import importlib
import importlib.util
import pickle
import socket
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

__all__ = ["RankFailedError", "free_port", "run_ranks"]


class RankFailedError(AssertionError):
    """A rank raised, died or did not finish; the message has its traceback."""


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on at this moment."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def run_ranks(fn: Callable[..., Any], world: int, *args: Any, timeout: float = 300.0) -> list[Any]:
    """Call `fn(rank, world, port, *args)` in `world` new processes and return their results by rank.

    fn must be defined at the top level of a module; `port` is the same free port for all. Raises RankFailedError for
    the first rank that fails, or when `timeout` seconds have passed; no process outlives the call.
    """
    import torch.multiprocessing

    context = torch.multiprocessing.get_context("spawn")
    source = sys.modules[fn.__module__].__file__
    call = pickle.dumps((fn, (world, free_port(), *args)))
    processes, results = [], {}
    for rank in range(world):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_run_rank, args=(rank, fn.__module__, source, call, sender), daemon=False)
        process.start()
        sender.close()
        processes.append(process)
        results[receiver] = rank
    try:
        deadline = time.monotonic() + timeout
        found = _collect(results, deadline, timeout)
        for process in processes:
            process.join(max(1.0, deadline - time.monotonic()))
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()
            process.close()
        for receiver in results:
            receiver.close()
    return [found[rank] for rank in range(world)]


def _collect(ranks: dict[Connection, int], deadline: float, timeout: float) -> dict[int, Any]:
    found: dict[int, Any] = {}
    pending = dict(ranks)
    while pending:
        ready = wait(list(pending), max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankFailedError(f"ranks {sorted(pending.values())} did not finish within {timeout:g} s")
        for receiver in ready:
            assert isinstance(receiver, Connection)
            rank = pending.pop(receiver)
            try:
                passed, value = receiver.recv()
            except EOFError:
                raise RankFailedError(f"rank {rank} died without a word") from None
            if not passed:
                raise RankFailedError(f"rank {rank} failed:\n{value}")
            found[rank] = value
    return found


def _run_rank(rank: int, module: str, source: str | None, call: bytes, sender: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    try:
        _import_from(module, source)
        fn, args = pickle.loads(call)
        answer = (True, fn(rank, *args))
    except BaseException:
        answer = (False, traceback.format_exc())
    try:
        sender.send(answer)
    except Exception:
        sender.send((False, traceback.format_exc()))


def _import_from(module: str, source: str | None) -> None:
    """pytest imports a test module by its path, under a name that means nothing in a new process: do the same here."""
    try:
        importlib.import_module(module)
    except ModuleNotFoundError:
        if source is None:
            raise
        spec = importlib.util.spec_from_file_location(module, source)
        assert spec is not None
        assert spec.loader is not None
        loaded = importlib.util.module_from_spec(spec)
        sys.modules[module] = loaded
        spec.loader.exec_module(loaded)
