"""Processes of a trainer's ranks, and which of them are believed. Pure: no waits, no I/O.

A trainer rank gets its incarnation when it registers, and everything that it says afterwards carries it. Of each rank
one process is believed: the one that registered last. Another process that registers for the rank displaces it for
good. The displaced one is refused also when it registers again, unless it takes over. A generation is one start of the
whole trainer. A rank that starts again begins another one, which every rank has to join by registering.

A gateway that was restarted without its state knows of no process. Then ranks name the generation that they were of,
and the greatest wins. A process that registers for the first time is greater than all of them. Ranks of instances name
the generation that they have followed, so that an older one does not come back. Numbers of generations grow with the
clock: the next life of the gateway gives no smaller ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from weightcast.transfer.deadline import utc
from weightcast.transfer.errors import DisplacedError, InputError, PairStateError, UnregisteredError

__all__ = ["HEADER", "KEPT", "Admission", "Incarnation", "Incarnations", "Standing", "TrainerProcess", "process_of"]

HEADER = "Weightcast-Incarnation"
"""Header of a request with the incarnation of the trainer rank that makes it."""
KEPT = 1000
"""Number of displaced processes of a pair that are known by name; those before them are refused all the same."""
_FOR_CERTAIN = math.inf
"""The claim of a process that this gateway, or its state file, has seen take its rank."""


class Incarnation(NamedTuple):
    """One start of a trainer rank, in a generation of the trainer; `boot` is the life of the pair that gave it.

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
        """The incarnation that a header names. Raises InputError for any other text."""
        parts = text.split("/")
        if len(parts) == 4 and all(part.isascii() and part.isdigit() and len(part) < 19 for part in parts[:2]):
            return cls(int(parts[0]), int(parts[1]), *parts[2:])
        raise InputError(f"header {HEADER} is {text[:80]!r}, expected RANK/GENERATION/BOOT/START as registered")


def process_of(start: str) -> str:
    """Identity of the process that a start belongs to."""
    return start.rpartition(".")[0] or start


@dataclass(frozen=True, slots=True)
class TrainerProcess:
    """A process that registered for a rank: its last start, its host and number, and the time (seconds since 1970).

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

    @property
    def place(self) -> str:
        """The process in words, without its rank."""
        return f"process {self.pid} on {self.host or 'an unnamed host'} (registered {utc(self.registered)})"

    def __str__(self) -> str:
        return f"trainer rank {self.rank}, {self.place}"


class Standing(NamedTuple):
    """A process, and the one that has displaced it; None for one that is believed."""

    process: TrainerProcess
    by: TrainerProcess | None = None


class Admission(NamedTuple):
    """Outcome of a registration. `begins` says that the trainer starts anew by it, `changed` who stands otherwise than
    before. `forgotten` are identities of displaced processes that are no longer known by name.
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
        for standing in sorted(saved, key=lambda entry: entry.process.registered):
            if standing.by is None:
                self._believed[standing.process.rank] = standing.process
            else:
                self._displaced[standing.process.process] = standing
        processes = (*self._believed.values(), *(standing.process for standing in self._displaced.values()))
        self.generation = max((process.generation for process in processes), default=0)
        # The generation that is named by ranks which go on after a restart of the gateway.
        self._resumed = self.generation
        self._followed = 0

    def standings(self) -> list[Standing]:
        """All processes that are known by name."""
        return [*map(Standing, self._believed.values()), *self._displaced.values()]

    def believed(self, rank: int) -> TrainerProcess | None:
        """The process of a rank, None before one has registered."""
        return self._believed.get(rank)

    def check(self, said: Incarnation, boot: str) -> None:
        """Raises unless `said` is an incarnation that is believed.

        DisplacedError names both processes. PairStateError is for an older generation, UnregisteredError for an
        incarnation that `boot` of the gateway does not know.
        """
        process = process_of(said.start)
        if (standing := self._displaced.get(process)) is not None:
            raise self._replaced(*standing)
        holder = self._believed.get(said.rank)
        if holder is None and said.generation < self._followed:
            raise self._replaced(f"trainer rank {said.rank} of generation {said.generation}", self._followed_one)
        if holder is None or said.boot != boot:
            raise UnregisteredError(
                f"pair {self._pair}: trainer rank {said.rank} has not registered since the gateway was started or the "
                "pair was made; register first"
            )
        if holder.process != process:
            raise self._replaced(f"trainer rank {said.rank}, an earlier process of start {said.start[:64]}", holder)
        if (holder.start, holder.generation) != (said.start, said.generation):
            raise PairStateError(
                f"pair {self._pair}: {holder}, has connected again since; what was begun before that is over"
            )
        if holder.generation != self.generation:
            raise self._older(holder)

    def follow(self, generation: int) -> bool:
        """Notes that a rank of an instance has followed the trainer in `generation`.

        Processes of an older one that were believed on their word alone are believed no more. True if there were any.
        """
        self._followed = max(self._followed, generation)
        old_ranks = [process.rank for process in self._believed.values() if process.claim < self._followed]
        for rank in old_ranks:
            del self._believed[rank]
        return bool(old_ranks)

    def admit(self, newcomer: TrainerProcess, *, was: int | None, resumes: bool, takeover: bool) -> Admission:
        """Takes the registration of a process.

        `was` is the generation that it was given before, None for a process that registers for the first time.
        `resumes` says that it goes on where it was, instead of connecting again. With `takeover` no other process
        stands in its way.

        Raises DisplacedError naming both processes, PairStateError when the trainer has started anew since `was`.
        """
        rank, holder = newcomer.rank, self._believed.get(newcomer.rank)
        rival = holder if holder is not None and holder.process != newcomer.process else None
        claim = _FOR_CERTAIN
        if was is not None and not takeover:
            claim = was if holder is None or rival is not None else holder.claim
        if not takeover:
            self._refuse(newcomer, rival, claim)
        lower_claims = [
            process for process in self._believed.values() if process.claim < claim and process.rank != rank
        ]
        begins = bool(lower_claims) or not self._believed
        if resumes:
            last_generation = was or 0
            if last_generation < self._resumed and not begins:
                raise self._older(replace(newcomer, generation=last_generation))
            begins = begins or last_generation > self._resumed
            generation = max(self.generation + 1, last_generation) if begins else self.generation
            self._resumed = last_generation
        else:
            begins = begins or (holder is not None and holder.generation == self.generation)
            # Others of its generation go on: they have to connect anew as well.
            begins = begins or (not takeover and (was or 0) >= self._resumed)
            if begins:
                generation = max(self.generation + 1, (was or 0) + 1, int(newcomer.registered))
            else:
                generation = self.generation
            self._resumed = generation
        self.generation = generation
        newcomer = replace(newcomer, generation=generation, claim=claim)
        self._displaced.pop(newcomer.process, None)
        standings = [Standing(process, newcomer) for process in ([rival] if rival is not None else []) + lower_claims]
        for standing in standings:
            self._believed.pop(standing.process.rank, None)
            self._displaced[standing.process.process] = standing
        self._believed[rank] = newcomer
        identities = list(self._displaced)[: max(0, len(self._displaced) - KEPT)]
        for process in identities:
            del self._displaced[process]
        return Admission(begins, [*standings, Standing(newcomer)], identities)

    def _refuse(self, newcomer: TrainerProcess, other: TrainerProcess | None, claim: float) -> None:
        """Raises DisplacedError for a process that is displaced, whose rank is taken, or whose generation is past."""
        if (standing := self._displaced.get(newcomer.process)) is not None:
            raise self._replaced(*standing)
        if claim == _FOR_CERTAIN:
            return
        if other is not None and claim <= other.claim:
            raise self._replaced(newcomer, other)
        if claim < self._followed:
            raise self._replaced(newcomer, self._followed_one)
        latest_process = max(self._believed.values(), key=lambda process: process.claim, default=None)
        if latest_process is not None and claim < latest_process.claim:
            raise self._replaced(newcomer, latest_process)

    @property
    def _followed_one(self) -> str:
        return f"a trainer of generation {self._followed}, which instances have followed"

    def _replaced(self, gone: object, by: object) -> DisplacedError:
        return DisplacedError(
            f"pair {self._pair}: {gone}, was replaced by {by}, and is believed no more; end it, or if it is the one "
            "that shall go on, connect it with TrainerWorker(..., takeover=True)"
        )

    def _older(self, process: TrainerProcess) -> PairStateError:
        latest_process = max(
            self._believed.values(), key=lambda entry: (entry.generation, entry.registered), default=None
        )
        return PairStateError(
            f"pair {self._pair}: {process}, is of generation {process.generation}, and the trainer has started anew: "
            f"{latest_process}, is of generation {self.generation}; call connect() again on all trainer ranks"
        )
