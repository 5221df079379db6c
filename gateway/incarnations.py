"""Which processes the ranks of a trainer are, and which of them are believed. Pure: no waits, no I/O.

A trainer rank gets its incarnation when it registers, and everything that it says afterwards carries it. Of each rank
one process is believed: the one that registered last. Another process that registers for the rank displaces it for
good, also if it registers again, unless it takes over. A generation is one start of the whole trainer: a rank that
starts again begins another one, which every rank has to join by registering.

A gateway that was restarted without its state knows of no process. Then ranks say of which generation they were, and
the greatest wins; a process that registers for the first time is greater than all of them. Ranks of instances say which
generation they have followed, so that an older one does not come back. Numbers of generations grow with the clock: the
next life of the gateway gives no smaller ones.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from weightcast.transfer.errors import DisplacedError, InputError, PairStateError, UnregisteredError

__all__ = ["HEADER", "KEPT", "Admission", "Incarnation", "Incarnations", "Standing", "TrainerProcess", "process_of"]

HEADER = "Weightcast-Incarnation"
"""Header of a request in which a trainer rank says which incarnation it is."""
KEPT = 1000
"""How many displaced processes of a pair are known by name; those before them are refused all the same."""
_FOR_CERTAIN = math.inf
"""The claim of a process that this gateway, or its state file, has seen take its rank."""


class Incarnation(NamedTuple):
    """One start of a trainer rank: in which generation of the trainer, given by which start of the gateway.

    `start` is "PROCESS.N" for connect number N of a process, where PROCESS is an identity of its own.
    """

    rank: int
    generation: int
    boot: str
    start: str

    def __str__(self) -> str:
        return f"{self.rank}/{self.generation}/{self.boot}/{self.start}"

    @classmethod
    def parse(cls, text: str) -> Incarnation:
        """The incarnation that a header tells. Raises InputError."""
        parts = text.split("/")
        if len(parts) == 4 and all(part.isascii() and part.isdigit() and len(part) < 19 for part in parts[:2]):
            return cls(int(parts[0]), int(parts[1]), *parts[2:])
        raise InputError(f"header {HEADER} is {text[:80]!r}, expected RANK/GENERATION/BOOT/START as registered")


def process_of(start: str) -> str:
    """The process that a start is of."""
    return start.rpartition(".")[0] or start


@dataclass(frozen=True, slots=True)
class TrainerProcess:
    """A process that registered for a rank: its last start, where it runs, and when it registered (seconds since 1970).

    `claim` is the generation that it says it was of, to a gateway that has no record of it.
    """

    rank: int
    start: str
    host: str
    pid: int
    registered: float
    generation: int = 0
    claim: float = _FOR_CERTAIN

    @property
    def process(self) -> str:
        return process_of(self.start)

    def __str__(self) -> str:
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(self.registered))
        return f"trainer rank {self.rank}, process {self.pid} on {self.host or 'an unnamed host'} (registered {at} UTC)"


class Standing(NamedTuple):
    """A process, and the one that has displaced it, None for one that is believed."""

    process: TrainerProcess
    by: TrainerProcess | None = None


class Admission(NamedTuple):
    """Outcome of a registration: whether the trainer starts anew by it, who stands otherwise than before, and the
    identities of displaced processes that are no longer known by name.
    """

    begins: bool
    changed: list[Standing]
    forgotten: list[str]


class Incarnations:
    """The processes of the trainer of one pair. `generation` is the number of its last start, 0 before the first."""

    def __init__(self, pair: str, saved: Iterable[Standing] = ()) -> None:
        self._pair = pair
        self._believed: dict[int, TrainerProcess] = {}
        self._displaced: dict[str, Standing] = {}
        for standing in sorted(saved, key=lambda one: one.process.registered):
            if standing.by is None:
                self._believed[standing.process.rank] = standing.process
            else:
                self._displaced[standing.process.process] = standing
        known = (*self._believed.values(), *(standing.process for standing in self._displaced.values()))
        self.generation = max((process.generation for process in known), default=0)
        # The generation that ranks name who go on after a restart of the gateway.
        self._resumed = self.generation
        self._followed = 0

    def believed(self, rank: int) -> TrainerProcess | None:
        """The process of a rank, None before one has registered."""
        return self._believed.get(rank)

    def check(self, said: Incarnation, boot: str) -> None:
        """Raises unless `said` is an incarnation that is believed: DisplacedError naming both processes, PairStateError
        for one of an older generation, UnregisteredError for one that `boot` of the gateway does not know.
        """
        process = process_of(said.start)
        if (gone := self._displaced.get(process)) is not None:
            raise self._replaced(*gone)
        known = self._believed.get(said.rank)
        if known is None and said.generation < self._followed:
            raise self._replaced(f"trainer rank {said.rank} of generation {said.generation}", self._followed_one)
        if known is None or said.boot != boot:
            raise UnregisteredError(
                f"pair {self._pair}: trainer rank {said.rank} has not registered since the gateway was started or the "
                "pair was made; register first"
            )
        if known.process != process:
            raise self._replaced(f"trainer rank {said.rank}, an earlier process of start {said.start[:64]}", known)
        if (known.start, known.generation) != (said.start, said.generation):
            raise PairStateError(
                f"pair {self._pair}: {known}, has connected again since; what was begun before that is over"
            )
        if known.generation != self.generation:
            raise self._older(known)

    def follow(self, generation: int) -> bool:
        """A rank of an instance has followed the trainer in `generation`; whether processes that were believed on their
        word alone were of an older one, and are believed no more.
        """
        self._followed = max(self._followed, generation)
        older = [process.rank for process in self._believed.values() if process.claim < self._followed]
        for rank in older:
            del self._believed[rank]
        return bool(older)

    def admit(self, newcomer: TrainerProcess, *, was: int | None, resumes: bool, takeover: bool) -> Admission:
        """Takes the registration of a process. `was` is the generation that it was given before, None for a process
        that registers for the first time; `resumes` says that it goes on where it was, instead of connecting again.

        Raises DisplacedError naming both processes, PairStateError when the trainer has started anew since `was`.
        """
        rank, known = newcomer.rank, self._believed.get(newcomer.rank)
        other = known if known is not None and known.process != newcomer.process else None
        claim = _FOR_CERTAIN
        if was is not None and not takeover:
            claim = was if known is None or other is not None else known.claim
        if not takeover:
            self._refuse(newcomer, other, claim)
        lower = [process for process in self._believed.values() if process.claim < claim and process.rank != rank]
        begins = bool(lower) or not self._believed
        if resumes:
            named = was or 0
            if named < self._resumed and not begins:
                raise self._older(replace(newcomer, generation=named))
            begins = begins or named > self._resumed
            generation = max(self.generation + 1, named) if begins else self.generation
            self._resumed = named
        else:
            begins = begins or (known is not None and known.generation == self.generation)
            # Others of its generation go on: what it connects anew for, they have to as well.
            begins = begins or (not takeover and (was or 0) >= self._resumed)
            if begins:
                generation = max(self.generation + 1, (was or 0) + 1, int(newcomer.registered))
            else:
                generation = self.generation
            self._resumed = generation
        self.generation = generation
        newcomer = replace(newcomer, generation=generation, claim=claim)
        self._displaced.pop(newcomer.process, None)
        changed = [Standing(gone, newcomer) for gone in ([other] if other is not None else []) + lower]
        for standing in changed:
            self._believed.pop(standing.process.rank, None)
            self._displaced[standing.process.process] = standing
        self._believed[rank] = newcomer
        forgotten = list(self._displaced)[: max(0, len(self._displaced) - KEPT)]
        for process in forgotten:
            del self._displaced[process]
        return Admission(begins, [*changed, Standing(newcomer)], forgotten)

    def _refuse(self, newcomer: TrainerProcess, other: TrainerProcess | None, claim: float) -> None:
        """Raises DisplacedError for a process that is displaced, of which another one has the rank, or of whose
        generation the trainer is no longer.
        """
        if (gone := self._displaced.get(newcomer.process)) is not None:
            raise self._replaced(*gone)
        if claim == _FOR_CERTAIN:
            return
        if other is not None and claim <= other.claim:
            raise self._replaced(newcomer, other)
        if claim < self._followed:
            raise self._replaced(newcomer, self._followed_one)
        newest = max(self._believed.values(), key=lambda process: process.claim, default=None)
        if newest is not None and claim < newest.claim:
            raise self._replaced(newcomer, newest)

    @property
    def _followed_one(self) -> str:
        return f"a trainer of generation {self._followed}, which instances have followed"

    def _replaced(self, gone: object, by: object) -> DisplacedError:
        return DisplacedError(
            f"pair {self._pair}: {gone}, was replaced by {by}, and is believed no more; end it, or if it is the one "
            "that shall go on, connect it with TrainerWorker(..., takeover=True)"
        )

    def _older(self, process: TrainerProcess) -> PairStateError:
        newest = max(self._believed.values(), key=lambda known: (known.generation, known.registered), default=None)
        return PairStateError(
            f"pair {self._pair}: {process}, is of generation {process.generation}, and the trainer has started anew: "
            f"{newest}, is of generation {self.generation}; call connect() again on all trainer ranks"
        )
