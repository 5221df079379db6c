"""The cycle of colocated RL: trainer and engines take turns on the same devices, one call an iteration.

    cycle = ColocatedCycle([SGLangMemory("rollout-0", url)], hooks)
    steps = cycle.run(version)          # pause, release, train, ..., transfer, ..., continue

The engine gives up its KV cache and weights by its own API while the trainer trains. Then the trainer frees what it
does not need, and the engine takes its weights back and is updated. At last the trainer makes room, and the engine
takes its KV cache back and goes on.

The steps with their tags are a list of words, ORDER, that is checked before anything is done. Every step is reported
with the memory in use before and after. A step that fails leaves a state that `state` names. The next `run` of that
version goes on with that step, and asks no engine for what it has already done.

The engine's record in the pair needs `"hold": true`: else the gateway would let it generate without its KV cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from weightcast.gateway.colocated.engine_memory import EngineMemory, UncertainError
from weightcast.transfer.errors import InputError, PairStateError, UpdateError

__all__ = ["ORDER", "ColocatedCycle", "MemoryUse", "StepReport", "TrainerHooks", "check_order"]

ORDER = (
    "pause", "release kv_cache", "release weights", "train", "free",
    "resume weights", "transfer", "offload", "resume kv_cache", "continue",
)  # fmt: skip
"""The steps. `release TAG` and `resume TAG` are asked of the engines, with the engine's own tags."""

_ENGINE_STEPS = ("pause", "release", "resume", "continue")
_TRAINER_STEPS = ("train", "free", "transfer", "offload")


class TrainerHooks(Protocol):
    """The trainer's part, on all its ranks."""

    def train(self, version: int) -> None:
        """Runs the optimizer steps of a version, and brings back all that they need."""

    def free(self) -> None:
        """Frees or offloads optimizer states and gradients; the weights stay."""

    def transfer(self, version: int) -> None:
        """Calls `TrainerWorker.update` with the version on every rank.

        The first version of a trainer that resumes from an older step needs `restart=True` there.
        """

    def offload(self) -> None:
        """Makes room for the KV cache: offloads the weights, or nothing where they may stay."""


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes in use: by this process, on this host, and on this process's GPU, 0 without one."""

    process: int
    host: int
    device: int

    @classmethod
    def now(cls) -> MemoryUse:
        """Bytes in use at present, read from /proc and CUDA."""
        fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        host = int(fields["MemTotal"].split()[0]) - int(fields["MemAvailable"].split()[0])
        status = Path("/proc/self/status").read_text().splitlines()
        resident = next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))
        return cls(resident << 10, host << 10, _device_bytes())


def _device_bytes() -> int:
    import sys

    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return 0
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    return int(total_bytes - free_bytes)


@dataclass(frozen=True, slots=True)
class StepReport:
    """One step: memory in use before and after it, and seconds."""

    step: str
    before: MemoryUse
    after: MemoryUse
    seconds: float


class ColocatedCycle:
    """One iteration of colocated training at a time.

    With several trainer ranks every rank has a cycle and calls `run` alike. The one with `leads` speaks to the engines.
    After each step `agree` gets what failed on this rank ("" for nothing), and returns what failed anywhere. `report`
    gets each step as it ends.
    """

    def __init__(
        self,
        engines: Sequence[EngineMemory],
        trainer: TrainerHooks,
        order: Sequence[str] = ORDER,
        *,
        leads: bool = True,
        agree: Callable[[str], str] = lambda failure: failure,
        report: Callable[[StepReport], None] = lambda _: None,
        measure: Callable[[], MemoryUse] = MemoryUse.now,
    ) -> None:
        check_order(order)
        self._engines, self._trainer, self._order = list(engines), trainer, tuple(order)
        self._leads, self._agree, self._report, self._measure = leads, agree, report, measure
        self._version: int | None = None
        self._done: list[StepReport] = []
        self._asked: set[str] = set()
        self._uncertain: tuple[str, str] | None = None
        self.released: dict[str, set[str]] = {engine.name: set() for engine in engines}

    @property
    def state(self) -> str:
        """State of the cycle in one line."""
        if self._version is None:
            return "at rest: the engines generate"
        phrases = [f"{name} without {' and '.join(sorted(tags))}" for name, tags in self.released.items() if tags]
        step = f"{len(self._done)} of {len(self._order)} steps of version {self._version} are done"
        return f"{step}, next is {self._order[len(self._done)]!r}; {', '.join(phrases) or 'nothing is released'}"

    def run(self, version: int) -> list[StepReport]:
        """Runs all steps, or those that remain of a failed run of this version. Returns the reports of all.

        Raises UpdateError naming step and state when a step fails. Raises PairStateError for another version than the
        one that is under way, or while nobody knows if an engine did a step: see `settle`.
        """
        if self._version not in (None, version):
            raise PairStateError(f"version {self._version} is under way, not {version}: {self.state}")
        # Only the rank that leads has asked; the others must not wait for it in the next step.
        uncertain = self._agree("" if self._uncertain is None else self._uncertain[1])
        if uncertain:
            raise PairStateError(f"{uncertain}; find out, and call settle(done=...) on every rank: {self.state}")
        self._version = version
        while len(self._done) < len(self._order):
            self._do(self._order[len(self._done)], version)
        reports, self._done, self._version = self._done, [], None
        return reports

    def settle(self, done: bool) -> None:
        """Says if the engine's step that broke off was done. Raises PairStateError when there is none.

        Called on every rank, like `run`; one that does not lead has nothing to note.
        """
        if not self._leads:
            return
        if self._uncertain is None:
            raise PairStateError(f"every step is settled: {self.state}")
        name, self._uncertain = self._uncertain[0], None
        if done:
            self._note(self._order[len(self._done)], name)

    def _do(self, step: str, version: int) -> None:
        memory, start, failure = self._measure(), time.monotonic(), ""
        cause: Exception | None = None
        try:
            self._act(step, version)
        except Exception as error:  # whatever it is, the other ranks have to hear of it
            cause, failure = error, " ".join(f"{type(error).__name__}: {error}".split())
        failures = self._agree(failure)
        if failures:
            raise UpdateError(
                f"colocated cycle: {step!r} failed: {failures}; {self.state}; run it again to go on"
            ) from cause
        if step.split()[0] in _ENGINE_STEPS:
            for engine in self._engines:
                self._note(step, engine.name)
        report = StepReport(step, memory, self._measure(), time.monotonic() - start)
        self._done.append(report)
        self._asked.clear()
        self._report(report)

    def _act(self, step: str, version: int) -> None:
        verb, _, tag = step.partition(" ")
        if verb in _ENGINE_STEPS:
            for engine in self._engines if self._leads else ():
                if engine.name not in self._asked:
                    self._ask(engine, step, verb, tag)
        elif verb in ("train", "transfer"):
            getattr(self._trainer, verb)(version)
        else:
            getattr(self._trainer, verb)()

    def _ask(self, engine: EngineMemory, step: str, verb: str, tag: str) -> None:
        try:
            if verb == "pause":
                engine.pause()
            elif verb == "continue":
                engine.proceed()
            elif verb == "release":
                engine.release(tag)
            else:
                engine.resume(tag)
        except UncertainError as error:
            if tag:  # pausing and going on twice does no harm
                self._uncertain = engine.name, str(error)
            raise
        self._note(step, engine.name)

    def _note(self, step: str, name: str) -> None:
        """Notes that an engine has done a step."""
        verb, _, tag = step.partition(" ")
        self._asked.add(name)
        if verb == "release":
            self.released[name].add(tag)
        elif verb == "resume":
            self.released[name].discard(tag)


def check_order(order: Sequence[str]) -> None:
    """Raises InputError for an order in which an engine would be asked for what it cannot do."""
    released_tags: set[str] = set()
    paused = False
    for index, step in enumerate(order):
        verb, _, tag = step.partition(" ")
        is_step = (verb in ("release", "resume")) == bool(tag) and verb in (*_ENGINE_STEPS, *_TRAINER_STEPS)
        fault = "" if is_step else f"is none of {', '.join(ORDER)}"
        if verb == "pause":
            paused = True
        elif verb == "continue":
            fault = fault or (f"comes while {', '.join(sorted(released_tags))} is released" if released_tags else "")
            paused = False
        elif verb == "release":
            fault = fault or ("comes before 'pause'" if not paused else "comes twice" if tag in released_tags else "")
            released_tags.add(tag)
        elif verb == "resume":
            fault = fault or ("" if tag in released_tags else "comes before its release")
            released_tags.discard(tag)
        elif verb == "transfer" and "weights" in released_tags:
            fault = "comes while weights are released"
        if fault:
            raise InputError(f"colocated cycle: step {index + 1}, {step!r}, {fault}")
    if not order or order[-1] != "continue":
        raise InputError("colocated cycle: the last step has to be 'continue', so that the engines go on")
