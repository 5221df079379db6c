"""Trainer processes that are replaced and live on: in threads of one process, and in real ones that are stopped."""

from __future__ import annotations

import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from gateway_support import running_gateway
from plain_support import Piece, PlainSink

from weightcast.gateway.client import GatewayClient
from weightcast.gateway.ranks.instance import InstanceWorker
from weightcast.gateway.ranks.trainer import TrainerWorker, UpdateResult
from weightcast.transfer.errors import DisplacedError, PairStateError, UpdateError, WeightcastError

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

from fault_model import INSTANCES
from fault_world import SETTINGS, WRONG, Process, World

SIZE = 8
LONG = 120.0
QUICK = {"offer": 3.0, "silence": 5.0, "heartbeat": 0.5, "register": 10.0, "join": 10.0}


pytestmark = pytest.mark.usefixtures("quiet")


class Trainer:
    """Two ranks in threads, each with a half of `t`; `takeover` as of `TrainerWorker`."""

    def __init__(self, url: str, token: str, *, takeover: bool = False) -> None:
        self.halves = [torch.zeros(SIZE // 2) for _ in range(2)]
        self.ranks = [self.rank(url, token, rank, takeover) for rank in range(2)]

    def rank(self, url: str, token: str, rank: int, takeover: bool = False) -> TrainerWorker:
        source = PlainSink([Piece("t", (SIZE,), (SIZE // 2 * rank,), self.halves[rank])])
        where: Any = {"rank": rank, "world_size": 2, "token": token, "deadline": LONG}
        return TrainerWorker(url, "main", source, takeover=takeover, **where)

    def connect(self) -> list[object]:
        return together(*(rank.connect for rank in self.ranks))

    def update(self, version: int) -> list[object]:
        for half in self.halves:
            half.fill_(float(version))
        return together(*(lambda rank=rank: rank.update(version) for rank in self.ranks))

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()


def together(*calls: Callable[[], object]) -> list[object]:
    """What each call returns or raises, all at the same time."""

    def outcome(call: Callable[[], object]) -> object:
        try:
            return call()
        except WeightcastError as error:
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(outcome, calls))


def committed(said: list[object]) -> bool:
    return all(isinstance(one, UpdateResult) for one in said)


def displaced(said: list[object]) -> bool:
    return all(isinstance(one, DisplacedError) for one in said)


class Pair:
    """A gateway, an engine that serves in a thread, and trainers as a test makes them."""

    def __init__(self, stack: ExitStack) -> None:
        self.url, self.token = stack.enter_context(running_gateway())
        self.stack = stack
        self.client = stack.enter_context(GatewayClient(self.url, self.token))
        self.client.create_pair("main", 2, {"e": {"kind": "worker", "world_size": 1}}, QUICK)
        self.memory = torch.full((SIZE,), float("nan"))
        sink = PlainSink([Piece("t", (SIZE,), (0,), self.memory)])
        self.engine = InstanceWorker(self.url, "main", "e", sink, rank=0, world_size=1, token=self.token)
        self._end = threading.Event()
        serving = threading.Thread(target=self._serve)
        serving.start()
        stack.callback(serving.join)
        stack.callback(self._end.set)

    def _serve(self) -> None:
        while not self._end.is_set():
            with suppress(WeightcastError):
                self.engine.serve(wait=0.1)
        self.engine.close()

    def trainer(self, **options: bool) -> Trainer:
        trainer = Trainer(self.url, self.token, **options)
        self.stack.callback(trainer.close)
        return trainer

    def holds(self, version: int) -> bool:
        """Whether the engine serves a version, and its memory is that from end to end."""
        limit = time.monotonic() + 5.0
        while self.engine.version != version and time.monotonic() < limit:
            time.sleep(0.02)
        status = self.client.pair_status("main")["instances"]["e"]
        return status["version"] == self.engine.version == version and self.memory.tolist() == [float(version)] * SIZE


@pytest.fixture
def pair() -> Iterator[Pair]:
    with ExitStack() as stack:
        yield Pair(stack)


def test_halves_of_two_trainers_are_never_one_version(pair: Pair) -> None:
    old, new = pair.trainer(), pair.trainer()
    assert old.connect() == [None, None]
    assert committed(old.update(1))
    assert new.connect() == [None, None]
    assert committed(new.update(2))
    old.halves[0].fill_(111.0)
    new.halves[1].fill_(3.0)
    zombie, waiting = together(lambda: old.ranks[0].update(3), lambda: new.ranks[1].update(3))
    assert isinstance(zombie, DisplacedError)
    assert "trainer rank 0, process " in str(zombie)
    assert ", was replaced by trainer rank 0, process " in str(zombie)
    assert isinstance(waiting, UpdateError), "its own rank 0 has not offered"
    assert pair.holds(2)
    assert displaced(old.connect()), "nor does it help to connect again"
    assert displaced(old.update(4))
    assert committed(new.update(5))
    assert pair.holds(5)


def test_a_takeover_is_asked_for(pair: Pair) -> None:
    old, new = pair.trainer(takeover=True), pair.trainer()
    assert old.connect() == [None, None]
    assert new.connect() == [None, None]
    assert committed(new.update(1))
    assert displaced(old.update(2)), "an update takes nothing over"
    assert old.connect() == [None, None]
    assert displaced(new.update(2))
    assert displaced(new.connect())
    assert committed(old.update(2))
    assert pair.holds(2)


def test_one_rank_is_replaced_and_the_other_connects_again(pair: Pair) -> None:
    trainer = pair.trainer()
    assert trainer.connect() == [None, None]
    assert committed(trainer.update(1))
    zombie = trainer.ranks[1]
    trainer.ranks[1] = trainer.rank(pair.url, pair.token, 1)
    with ThreadPoolExecutor(1) as beside:
        connecting = beside.submit(trainer.ranks[1].connect)
        limit = time.monotonic() + 10.0
        while pair.client.pair_status("main")["trainer"]["registered"] != [1]:
            assert time.monotonic() < limit
            time.sleep(0.02)
        with pytest.raises(
            PairStateError, match=r"rank 0, process .* of generation .* rank 1, process .*; call connect"
        ):
            trainer.ranks[0].update(2)
        trainer.ranks[0].connect()
        connecting.result(20.0)
    assert committed(trainer.update(2))
    assert pair.holds(2)
    assert displaced(together(lambda: zombie.update(3), zombie.connect))
    assert committed(trainer.update(3))
    assert pair.holds(3)
    zombie.close()


def test_a_rank_that_waits_is_told_at_once_when_the_trainer_starts_anew(pair: Pair) -> None:
    """It waits for the other rank's offer. Where the new rank 1 registers first, rank 0 is not displaced yet."""
    old, new = pair.trainer(), pair.trainer()
    assert old.connect() == [None, None]
    with ThreadPoolExecutor(1) as beside:
        waiting = beside.submit(old.ranks[0].update, 1)
        limit = time.monotonic() + 10.0
        while not pair.client.pair_status("main")["offers"]:
            assert time.monotonic() < limit
            time.sleep(0.02)
        assert new.connect() == [None, None]
        with pytest.raises((DisplacedError, PairStateError), match=r"was replaced by|the trainer has started anew"):
            waiting.result(5.0)
    assert displaced(old.connect())
    assert committed(new.update(1))
    assert pair.holds(1)


# ---- real processes


PATIENT = {**SETTINGS, **dict.fromkeys(("offer", "register", "join", "prepare", "transfer", "verify", "silence"), 40.0)}
"""Seconds: the machine may be busy, and nothing here waits for a deadline."""


def go(process: Process, phase: str) -> None:
    process.send("go")


def connected(world: World) -> None:
    assert world.connect(LONG) == [("done", None)] * 2
    update(world)


def update(world: World) -> int:
    """The trainer's next version, on all instances."""
    version = world.begin()
    said = world.end(go, LONG)
    assert [kind for kind, _ in said] == ["done", "done"], said
    settled(world, version)
    return version


def settled(world: World, version: int) -> None:
    """All instances serve a version and every byte of their ranks is of it."""
    world.rest(LONG)
    assert {name: (i["version"], i["serves"]) for name, i in world.status()["instances"].items()} == dict.fromkeys(
        INSTANCES, (version, True)
    )
    seen = world.see()
    while any(reported != version for reported, _ in seen.values()):  # the end of an update is heard a little later
        seen = world.see()
    assert world.wrong() == []


def refused(answer: Any) -> bool:
    return answer[0] == "failed" and answer[1].startswith("DisplacedError: pair main: trainer rank ")


@pytest.mark.slow
def test_both_new_ranks_and_the_old_one_offer_the_same_version(tmp_path: Path) -> None:
    """Fifty times, the old one stopped and continued in between."""
    chance = random.Random(7)
    with World(tmp_path, settings=PATIENT) as world:
        connected(world)
        world.replace(0)
        (zombie,) = world.zombies.values()
        world.trainers[1].send("connect")
        assert [trainer.receive(LONG) for trainer in world.trainers] == [("done", None)] * 2
        for trial in range(50):
            asleep = chance.random() < 0.5
            world.version += 1
            version = world.version
            orders = [(trainer, (version, version)) for trainer in world.trainers]
            orders.append((zombie, (version, version + WRONG)))
            chance.shuffle(orders)
            if not asleep:
                zombie.signal(signal.SIGCONT)
            for process, what in orders:
                process.send("update", *what)
            if asleep:
                time.sleep(chance.uniform(0.0, 0.03))
                zombie.signal(signal.SIGCONT)
            said = world.end(go, LONG)
            assert [kind for kind, _ in said] == ["done", "done"], said
            assert refused(zombie.receive(LONG))
            settled(world, version)
            zombie.stop()
            if trial % 10 == 9:
                world.zombies[0].send("connect")
                zombie.signal(signal.SIGCONT)
                assert refused(zombie.receive(LONG))


def inodes(process: Process, *, opened: bool) -> set[str]:
    """Shared memory of weightcast that a process has open, or that it has mapped; in its own segments and others'."""
    folder = Path("/proc", str(process.pid))
    if opened:
        found = set()
        for entry in (folder / "fd").iterdir():
            with suppress(OSError):
                if "memfd:weightcast" in str(entry.readlink()):
                    found.add(str(entry.stat().st_ino))
        return found
    maps = (folder / "maps").read_text().splitlines()
    return {line.split()[4] for line in maps if "memfd:weightcast" in line}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "share", "phase"),
    [
        ("tcp", None, "transfer"),
        ("gloo", None, "transfer"),
        ("tcp", "in_place", "run"),
        ("tcp", "in_place", "verify"),
        ("tcp", "staged", "run"),
        ("tcp", "staged", "verify"),
    ],
)
def test_what_a_zombie_sends_reaches_no_memory(tmp_path: Path, backend: str, share: str | None, phase: str) -> None:
    """It is stopped in the middle of a transfer, replaced, and continued after the next commit."""
    with World(tmp_path, bucket_bytes=4 << 10, settings=PATIENT, backend=backend, share=share) as world:
        connected(world)
        stopped, name = world.trainers[0], "rollout-0"
        engines = world.instance(name)
        world.arm(stopped, phase, name)
        world.begin()
        read: set[str] = set()

        def at(process: Process, where: str) -> None:
            assert (process, where) == (stopped, phase)
            read.update(*(inodes(engine, opened=False) & inodes(stopped, opened=True) for engine in engines))
            world.replace(0, 1)

        said = world.end(at, LONG)
        assert said == [("done", None)] * 2, "both new ranks have connected"
        assert bool(read) is (share is not None), "the engine reads what it is said to read"
        version = update(world)
        lent = set().union(*(inodes(zombie, opened=True) for zombie in world.zombies.values()))
        assert not any(inodes(engine, opened=False) & lent for engine in engines), "the zombie's memory is let go"
        world.haunt(version + 1)
        answers = world.lay(LONG)
        assert len(answers) == 2
        for answer in answers:
            assert len(answer) == 4
            assert answer[0][0] == "failed"
            assert all(map(refused, answer[1:])), answer
        settled(world, version)
        update(world)


@pytest.mark.slow
@pytest.mark.parametrize("remembers", [True, False])
def test_no_zombie_gets_in_through_a_restart_of_the_gateway(tmp_path: Path, remembers: bool) -> None:
    """With a state file it is refused at once; without one by what the ranks of the instances have followed."""
    with World(tmp_path, settings=PATIENT, remembers=remembers) as world:
        connected(world)
        world.replace(0, 1)
        assert [trainer.receive(LONG) for trainer in world.trainers] == [("done", None)] * 2
        update(world)
        world.gateway.kill()
        world.start_gateway()
        world.create_pair()
        held = {key: seen for key, (_, seen) in world.see().items()}
        for zombie in world.zombies.values():
            zombie.signal(signal.SIGCONT)
            zombie.send("update", world.version + 1, world.version + 1 + WRONG)
        answers = [zombie.receive(LONG) for zombie in world.zombies.values()]
        assert {kind for kind, _ in answers} == {"failed"}, answers
        if remembers:
            assert all(map(refused, answers)), answers
        else:
            assert all("replaced by" in text and "of generation" in text for _, text in answers), answers
        world.rest(LONG)
        assert {key: seen for key, (_, seen) in world.see().items()} == held, "not a byte of it was written"
        update(world)
        world.haunt(world.version + 1)
        for answer in world.lay(LONG):
            assert all(map(refused, answer[-3:])), answer
        update(world)
