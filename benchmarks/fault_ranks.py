"""The processes of `faults.py`: a trainer rank and an inference rank, which stop where they are told to.

A rank that is armed with a phase stops there and says so; what happens to it then, or to another process, is done from
outside. Only what cannot be done from outside it does to itself: it drops its own connections, flips a bit of what it
sends, or writes into its own memory.
"""

from __future__ import annotations

import logging
import os
import random
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from fault_model import Seen, Sink, Source, fill

from weightcast.gateway.ranks.instance import InstanceWorker
from weightcast.gateway.ranks.membership import Member
from weightcast.gateway.ranks.trainer import TrainerWorker
from weightcast.transfer.copy.runs import memory_at
from weightcast.transfer.errors import PairStateError, WeightcastError

__all__ = ["PAIR", "run_engine", "run_trainer"]

PAIR = "main"


class Control:
    """The rank's end of the pipe to the script."""

    def __init__(self, pipe: Connection, acts: dict[str, Callable[..., object]]) -> None:
        self._pipe, self._acts = pipe, acts
        self._armed = ""
        self._lock = threading.Lock()

    def arm(self, phase: str) -> None:
        self._armed = phase

    def stops_at(self, phase: str) -> bool:
        """Whether `at` will stop."""
        return phase == self._armed

    def at(self, phase: str) -> None:
        """Stops here if this is the phase, does what it is told, and goes on when it is told to."""
        with self._lock:
            if phase != self._armed:
                return
            self._armed = ""
            self._pipe.send(("at", phase))
            while True:
                what, *arguments = self._pipe.recv()
                if what == "go":
                    return
                self._acts[what](*arguments)


class _Watched:
    """An executor that stops at the phase "transfer", when its first messages are under way."""

    def __init__(self, executor: Any, control: Control, flips: list[int]) -> None:
        self._executor, self._control, self._flips = executor, control, flips

    def run(self, *arguments: Any) -> Any:
        executor, control = self._executor, self._control
        finish, group = executor._finish, executor._group

        def stopping(*ended: Any) -> None:
            control.at("transfer")
            finish(*ended)

        executor._finish = stopping
        if self._flips:
            executor._group = _Flipping(group, self._flips.pop())
        try:
            return executor.run(*arguments)
        finally:
            executor._group = group
            del executor._finish


class _Flipping:
    """A group in which one bit of the first message that is sent changes on the way."""

    def __init__(self, group: Any, seed: int) -> None:
        self._group, self._random = group, random.Random(seed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def post(self, sends: Any, receives: Any) -> Any:
        if sends and self._random is not None:
            peer, message = sends[0]
            places = [memory_at(address, (n,), "|u1") for address, n in message.rows.tolist()]
            sent = torch.from_numpy(np.concatenate(places))
            sent[self._random.randrange(sent.numel())] ^= 1 << self._random.randrange(8)
            sends, self._random = [(peer, sent), *sends[1:]], None  # type: ignore[assignment]
        return self._group.post(sends, receives)


def watch_executors(control: Control, flips: list[int], wanted: Callable[[Member], bool]) -> None:
    executor_for = Member.executor_for

    def watched(member: Member, *arguments: Any) -> Any:
        executor = executor_for(member, *arguments)
        return _Watched(executor, control, flips) if executor is not None and wanted(member) else executor

    Member.executor_for = watched  # type: ignore[method-assign]


def before(owner: Any, name: str, act: Callable[[], None]) -> None:
    """Makes a method of an object do something first."""
    inner = getattr(owner, name)

    def outer(*arguments: Any, **keywords: Any) -> Any:
        act()
        return inner(*arguments, **keywords)

    setattr(owner, name, outer)


def step(source: Source, version: int, seed: int) -> None:
    """Weights take the step to `version` one after the other, the first at once, the others beside the caller."""
    chance, pieces = random.Random(seed), list(source.pieces)
    chance.shuffle(pieces)
    fill(pieces[:1], version)

    def rest() -> None:
        for piece in pieces[1:]:
            time.sleep(chance.choice((0.0, 0.001, 0.01)))
            fill([piece], version)

    threading.Thread(target=rest).start()


def drop(port: int, gateway: bool) -> None:
    """Cuts this process's connections: those to the gateway at `port`, or all others."""
    for name in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(name))) as one:
                if one.type == socket.SOCK_STREAM and (one.getpeername()[1] == port) == gateway:
                    one.shutdown(socket.SHUT_RDWR)
        except (OSError, IndexError):
            continue  # no socket, or one that is not connected


def run_trainer(rank: int, world: int, url: str, token: str, options: dict[str, Any], pipe: Connection) -> None:
    """Serves the script: ("connect",), ("update", version, the version whose content it holds then), ("torn", version,
    seed), ("arm", phase, instance), ("ended?",), ("end",). A rank that is told to connect again does.

    In a torn update the weights are those of the version before; with a seed they take their step when the rank has
    reported digests for the first time.
    """
    _quiet()
    port = int(url.rpartition(":")[2])
    source = Source(rank)
    flips: list[int] = []
    watched = [""]
    steps: list[Callable[[], None]] = []
    acts: dict[str, Callable[..., object]] = {
        "drop": lambda gateway: drop(port, gateway),
        "flip": flips.append,
        "step": lambda version: fill(source.pieces, version),
    }
    control = Control(pipe, acts)
    worker = TrainerWorker(url, PAIR, source, rank=rank, world_size=world, token=token, **options)
    watch_executors(control, flips, lambda member: member.part.instance == watched[0])
    before(worker._client, "offer", lambda: control.at("offer"))
    before(worker._client, "begun", lambda: control.at("begun"))
    report = worker._client.digests

    def stepping(*arguments: Any, **which: Any) -> Any:
        answer = report(*arguments, **which)
        with suppress(IndexError):
            steps.pop()()
        return answer

    worker._client.digests = stepping  # type: ignore[method-assign]

    def named(method: str, phase: str, name_of: Callable[[Any], str], last: str = "") -> None:
        inner = getattr(worker, method) if hasattr(worker, method) else getattr(worker._client, method)

        def outer(*arguments: Any, **which: Any) -> Any:
            mine = name_of(arguments[0]) == watched[0] and not which.get("first")
            if mine:
                control.at(phase)
            result = inner(*arguments, **which)
            if mine and last:
                control.at(last)
            return result

        setattr(worker if hasattr(worker, method) else worker._client, method, outer)

    named("_join", "join", str)
    named("_run", "run", str)
    named("digests", "verify", lambda seat: str(seat.instance), "commit")
    while True:
        what, *arguments = pipe.recv()
        if what == "end":
            return
        if what == "arm":
            watched[0] = arguments[1]
            control.arm(arguments[0])
            pipe.send(("armed",))
        elif what == "ended?":
            pipe.send(("ended",))
        elif what in ("connect", "update", "torn"):
            if what == "torn" and arguments[1] is not None:
                steps.append(partial(step, source, *arguments))
            pipe.send(_answer(worker, source, what, *arguments))


def _answer(
    worker: TrainerWorker, source: Source, what: str, version: int = 0, content: int | None = 0
) -> tuple[str, Any]:
    try:
        if what == "connect":
            return "done", worker.connect()
        if what == "update" and content is not None:
            fill(source.pieces, content)
        return "done", worker.update(version).instances
    except WeightcastError as error:
        if isinstance(error, PairStateError) and "call connect() again" in str(error):
            with suppress(WeightcastError):
                worker.connect()
        return "failed", f"{type(error).__name__}: {error}"


def run_engine(
    name: str, rank: int, world: int, number: int, url: str, token: str, backend: str, pipe: Connection
) -> None:
    """Serves orders of the gateway and the script: ("see",), ("arm", phase), ("end",)."""
    _quiet()
    port = int(url.rpartition(":")[2])
    sink = Sink(name, rank)
    sink.map = number
    kept: dict[str, torch.Tensor] = {}
    acts: dict[str, Callable[..., object]] = {
        "drop": lambda gateway: drop(port, gateway),
        "move": lambda number: setattr(sink, "map", number),
        "corrupt": lambda seed: _corrupt(sink, seed),
        "swap": lambda: _swap(sink),
        "keep": lambda: kept.update(slot=sink.slots[0, 0].clone()),
        "skip": lambda: sink.slots[0, 0].copy_(kept["slot"]),
    }
    control = Control(pipe, acts)
    worker = InstanceWorker(url, PAIR, name, sink, rank=rank, world_size=world, token=token, backend=backend)
    watch_executors(control, [], lambda _: True)
    before(worker, "_register", lambda: control.at("register"))
    before(worker, "_join", lambda: control.at("join"))
    before(worker, "transfer", lambda: control.at("prepare"))
    before(worker, "verify", lambda: control.at("verify"))
    report = worker._client.digests

    def digests(*arguments: Any, **waiting: Any) -> Any:
        """At "commit" all is reported, and what came of it is not known yet."""
        if not control.stops_at("commit"):
            return report(*arguments, **waiting)
        report(*arguments)
        return control.at("commit")

    worker._client.digests = digests  # type: ignore[method-assign]
    while True:
        if pipe.poll(0.0):
            what, *arguments = pipe.recv()
            if what == "end":
                return
            if what == "arm":
                control.arm(arguments[0])
                pipe.send(("armed",))
            elif what == "see":
                seen: list[Seen] = sink.seen()
                pipe.send(("saw", None if worker.fenced else worker.version, worker.fenced, seen))
            else:
                acts[what](*arguments)
        try:
            worker.serve(wait=0.05)
        except WeightcastError:
            time.sleep(0.1)  # the gateway is not there; it may come back


def _corrupt(sink: Sink, seed: int) -> None:
    """One bit of one element of one region."""
    chance = random.Random(seed)
    raw = chance.choice(sink.pieces()).view.view(torch.int32)
    index = tuple(chance.randrange(n) for n in raw.shape)
    raw[index] ^= 1 << chance.randrange(31)


def _swap(sink: Sink) -> None:
    """The contents of two slots with different experts."""
    experts = sink.placement().experts(0).tolist()
    other = next(slot for slot, expert in enumerate(experts) if expert != experts[0])
    first = sink.slots[0, 0].clone()
    sink.slots[0, 0].copy_(sink.slots[0, other])
    sink.slots[0, other].copy_(first)


def _quiet() -> None:
    """The failures that are played are counted, not read."""
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
