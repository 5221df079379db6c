"""Contenders of a benchmark by turns: each has as many, one after the other, and ratios come from paired turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median

__all__ = ["Turns", "by_turns", "percent", "times"]


@dataclass(frozen=True, slots=True)
class Turns:
    """Wall and CPU seconds of each turn of one contender."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Wall seconds of the median turn."""
        return median(self.wall)

    def ratio(self, other: Turns) -> tuple[float, float]:
        """Returns how many times as long as `other` it took: the median of the turns, and best by best."""
        paired = [mine / theirs for mine, theirs in zip(self.wall, other.wall, strict=True)]
        return median(paired), min(self.wall) / min(other.wall)


def by_turns(runs: int, meet: Callable[[], object], calls: Mapping[str, Callable[[], object]]) -> dict[str, Turns]:
    """Runs all calls in turn, `runs` times and once before to warm up: the machine may be busier a moment later.

    All processes `meet` before each call.
    """
    turns = {name: Turns() for name in calls}
    for run in range(runs + 1):
        for name, call in calls.items():
            meet()
            wall, cpu = time.perf_counter(), time.process_time()
            call()
            if run:
                turns[name].wall.append(time.perf_counter() - wall)
                turns[name].cpu.append(time.process_time() - cpu)
    return turns


def percent(ratio: tuple[float, float]) -> str:
    """Writes the median and the best ratio."""
    return f"{ratio[0]:.0%} / {ratio[1]:.0%}"


def times(ratio: tuple[float, float]) -> str:
    """Writes the median and the best ratio of what takes many times as long."""
    return f"{ratio[0]:.1f}x / {ratio[1]:.1f}x"
