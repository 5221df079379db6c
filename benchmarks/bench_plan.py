"""Planning at the size of published models: merge, plan, parts, wire and memory, beside Awex's planner.

    make bench                              # all cases, with Awex 0.9.0
    python benchmarks/bench_plan.py --case k2-equal --awex DIR
    python benchmarks/bench_plan.py --model deepseek-v3 --trainer pp8xep16 --instances 4 --instance-ep 32 --redundant 32

Every case runs in processes of its own: one makes the rank reports, one is the gateway and gets nothing but their
bytes, one is Awex's planner. Times are CPU and wall seconds, the least of some runs. All is on one core.

- merge: from decoded reports to layouts, all ranks of a side (the fingerprints of the tables are made here).
- plan: `plan_transfer` for all instances together, its invariants proved. parts: those of every rank of every instance.

Awex plans on every rank by itself. It is measured on a few ranks of each side and scaled to all of them. It gets the
same layouts but for redundant slots, which it cannot express, and takes every instance to be like the first.
"""

from __future__ import annotations

import argparse
import gc
import math
import multiprocessing
import os
import platform
import re
import resource
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

os.environ.setdefault("OMP_NUM_THREADS", "1")

import awex_plan
import numpy as np
from plan_layouts import instance_reports, random_maps, same_rank_pairs, trainer_reports

from weightcast.gateway.layouts.merge import merge_instance, merge_trainer
from weightcast.gateway.server.run import keep_freed_memory
from weightcast.offline.models import MODELS, ModelShape
from weightcast.transfer.layout.joined import JoinedRanks
from weightcast.transfer.plan.operations import TransferPlan
from weightcast.transfer.plan.parts import PlanParts
from weightcast.transfer.plan.traffic import traffic_of
from weightcast.transfer.planner.planner import plan_transfer
from weightcast.transfer.wire.messages import decode_part, decode_report, encode_part, encode_report

T = TypeVar("T")
Sides = dict[str, JoinedRanks]


@dataclass(frozen=True)
class Case:
    """A trainer and `instances` instances of `ep` ranks; `different` maps or one map for all."""

    name: str
    model: ModelShape
    trainer: str
    instances: int
    ep: int
    tp: int = 1
    redundant: int = 0
    different: bool = True

    @property
    def trainer_world(self) -> int:
        return math.prod(int(n) for n in re.findall(r"\d+", self.trainer))

    def maps(self, instance: int) -> np.ndarray:
        return random_maps(self.model, self.redundant, instance if self.different else 0)

    def __str__(self) -> str:
        m = self.model
        maps = "different maps" if self.different else "one map"
        return (
            f"{self.name} {m.moe_layers}x{m.experts}, trainer {self.trainer} ({self.trainer_world}), "
            f"{self.instances} x EP{self.ep}{f'/TP{self.tp}' if self.tp > 1 else ''}, "
            f"{self.redundant} redundant slots, {maps}"
        )


K2 = MODELS["kimi-k2"]
TWICE_K2 = replace(K2, moe_layers=2 * K2.moe_layers, dense_layers=2 * K2.dense_layers)
CASES = {
    "k2-equal": Case("kimi-k2", K2, "pp8xep32", 8, 16, redundant=16, different=False),
    "k2-different": Case("kimi-k2", K2, "pp8xep32", 8, 16, redundant=16),
    "k2-twice": Case("kimi-k2, layers twice", TWICE_K2, "pp8xep32", 8, 16, redundant=16),
    "k2-1024": Case("kimi-k2", K2, "pp8xep32xdp4", 64, 16, redundant=16, different=False),
    "k2-1024-wide": Case("kimi-k2", K2, "pp8xep32xdp4", 16, 64, redundant=64),
    "deepseek": Case("deepseek-v3", MODELS["deepseek-v3"], "pp8xep16", 4, 32, tp=8, redundant=32),
    "qwen3-235b": Case("qwen3-235b-a22b", MODELS["qwen3-235b-a22b"], "pp4xep8xdp4", 4, 16, tp=4, redundant=32),
    "qwen3-30b": Case("qwen3-30b-a3b", MODELS["qwen3-30b-a3b"], "fsdp32xdp2", 4, 8, tp=4, redundant=16),
}
DEFAULT = tuple(CASES)

TARGETS = {
    "plan, invariants proved": {"k2-equal": "0.5 s", "k2-different": "1.5 s", "k2-1024": "5 s", "k2-1024-wide": "5 s"},
    "merge of all instance reports": {"k2-equal": "1 s", "k2-different": "1 s"},
    "decode the reports of an instance": {"k2-equal": "0.2 s", "k2-different": "0.2 s"},
    "reports of an instance": {"k2-equal": "2 MB", "k2-different": "2 MB"},
    "largest part": {"k2-equal": "1 MB", "k2-different": "1 MB"},
    "peak memory of the gateway": {"k2-equal": "2 GB", "k2-different": "2 GB"},
}
"""What has to hold on one core, for the cases for which it was said."""


@dataclass(frozen=True)
class Encoded:
    """The reports of all ranks as bytes: those of the trainer and of each instance."""

    trainer: list[bytes]
    instances: dict[str, list[bytes]]
    pairs: int


def describe(case: Case) -> Encoded:
    """Runs in a process of its own, so that what it takes to make the layouts is not counted."""
    instances: dict[str, list[bytes]] = {}
    for i in range(case.instances):
        same = instances.get("rollout-0")
        name = f"rollout-{i}"
        if same and not case.different:
            instances[name] = same
        else:
            instances[name] = [
                encode_report(r) for r in instance_reports(name, case.model, case.maps(i), case.ep, case.tp)
            ]
    trainer = [encode_report(r) for r in trainer_reports(case.model, case.trainer)]
    return Encoded(trainer, instances, same_rank_pairs(case.maps(0), case.ep))


@dataclass
class Measured:
    """Times by name as (CPU, wall), and other figures by name as they are shown."""

    seconds: dict[str, tuple[float, float]] = field(default_factory=dict)
    figures: dict[str, str] = field(default_factory=dict)
    peak: float = 0.0

    def time(self, name: str, what: Callable[[], T], repeat: int = 1) -> T:
        """Runs something; the least of the times counts."""
        best = self.seconds.get(name, (float("inf"), float("inf")))
        for _ in range(repeat):
            cpu, wall = time.process_time(), time.perf_counter()
            made = what()
            best = min(best[0], time.process_time() - cpu), min(best[1], time.perf_counter() - wall)
        self.seconds[name] = best
        return made


def gateway(case: Case, encoded: Encoded, repeat: int) -> Measured:
    """What the gateway does, from the bytes of reports to the bytes of parts."""
    keep_freed_memory()
    m = Measured()
    first = next(iter(encoded.instances))
    decoded = {name: [decode_report(data) for data in reports] for name, reports in encoded.instances.items()}
    m.time("decode the reports of an instance", lambda: [decode_report(d) for d in encoded.instances[first]], repeat)
    reports = [decode_report(data) for data in encoded.trainer]
    gc.collect()
    gc.freeze()

    trainer = m.time("merge of all trainer reports", lambda: merge_trainer(reports)).joined

    def merged() -> Sides:
        layouts = [merge_instance(name, ranks, trainer.tensors) for name, ranks in decoded.items()]
        return {layout.name: layout.joined for layout in layouts}

    instances = m.time("merge of all instance reports", merged)
    plan = m.time("plan, invariants proved", lambda: plan_transfer(trainer, instances), repeat)
    m.time("plan, not proved", lambda: plan_transfer(trainer, instances, check=False), repeat)
    m.time("parts of all ranks", lambda: all_parts(PlanParts(plan), plan), repeat)
    _wire(m, encoded, plan)
    _figures(m, encoded, plan)
    return m


def all_parts(parts: PlanParts, plan: TransferPlan) -> int:
    made = 0
    for party in plan.instances:
        made += len([parts.instance_part(party.name, rank) for rank in range(party.world)])
        made += len([parts.trainer_part(party.name, rank) for rank in parts.trainer_ranks(party.name)])
    return made


def _wire(m: Measured, encoded: Encoded, plan: TransferPlan) -> None:
    parts, party = PlanParts(plan, 64 << 20), plan.instances[0]
    name = party.name
    made = [parts.instance_part(name, rank) for rank in range(party.world)]
    made += [parts.trainer_part(name, rank) for rank in parts.trainer_ranks(name)]
    data = [encode_part(part) for part in made]
    largest = max(data, key=len)
    m.time("decode the largest part", lambda: decode_part(largest), 3)
    m.time("decode all parts of an instance", lambda: [decode_part(d) for d in data])
    m.figures["reports of an instance"] = f"{sum(map(len, encoded.instances[name])) / 1e6:.2f} MB"
    m.figures["reports of the trainer"] = f"{sum(map(len, encoded.trainer)) / 1e6:.2f} MB"
    m.figures["largest part"] = f"{len(largest) / 1e6:.3f} MB"
    m.figures["all parts of an instance"] = f"{sum(map(len, data)) / 1e6:.2f} MB"


def _figures(m: Measured, encoded: Encoded, plan: TransferPlan) -> None:
    traffic = traffic_of(plan)
    sent = traffic.trainer_sent
    m.figures["operations"] = f"{len(plan.operations):,}"
    m.figures["copies on a rank"] = f"{traffic.copies:,}"
    m.figures["digest rows"] = f"{len(plan.digests):,}"
    m.figures["same-rank replicas of an instance"] = f"{encoded.pairs:,}"
    m.figures["trainer rank sends, mean and most"] = f"{sent.mean() / 1e9:.2f} and {sent.max() / 1e9:.2f} GB"
    m.peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    m.figures["peak memory of the gateway"] = f"{m.peak:.2f} GB"


def peer(case: Case, encoded: Encoded, folder: Path | None, ranks: int) -> tuple[str, float, list[float]] | str:
    """Awex's version, its seconds for all ranks, and those of the ranks measured: inference first, then trainer."""
    awex = awex_plan.load(folder)
    if isinstance(awex, str):
        return awex
    module, version = awex
    trainer = [decode_report(data) for data in encoded.trainer]
    maps = random_maps(case.model, 0, 0)
    instance = instance_reports("rollout-0", case.model, maps, case.ep, case.tp)
    inference = case.instances * case.ep
    some = [inference * i // ranks for i in range(ranks)]
    some += [inference + case.trainer_world * i // ranks for i in range(ranks)]
    seconds = awex_plan.seconds_per_rank(module, trainer, instance, case.instances, some)
    total = np.mean(seconds[:ranks]) * inference + np.mean(seconds[ranks:]) * case.trainer_world
    return version, float(total), seconds


def _alone(what: Callable[..., T], *arguments: object) -> T:
    """In a process of its own."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(what, *arguments).result()


def show(name: str, case: Case, m: Measured, awex: tuple[str, float, list[float]] | str) -> None:
    """A table of one case."""
    print(f"\n{name}: {case}; {case.trainer_world + case.instances * case.ep} ranks")
    print(f"  {'':36} {'CPU':>9} {'wall':>9}   target")
    for row, (cpu, wall) in m.seconds.items():
        print(f"  {row:36} {cpu:7.3f} s {wall:7.3f} s   {TARGETS.get(row, {}).get(name, '')}".rstrip())
    for row, figure in m.figures.items():
        print(f"  {row:36} {figure:>21}   {TARGETS.get(row, {}).get(name, '')}".rstrip())
    if isinstance(awex, str):
        print(f"  Awex: not measured: {awex}")
        return
    version, total, seconds = awex
    half = len(seconds) // 2
    ours, wall = m.seconds["plan, invariants proved"]
    parts, parts_wall = m.seconds["parts of all ranks"]
    print(
        f"  Awex {version}, without redundant slots: {np.mean(seconds[:half]):.2f} s an inference rank, "
        f"{np.mean(seconds[half:]):.2f} s a trainer rank ({half} of each measured)"
    )
    print(f"  {'Awex, all ranks (scaled)':36} {total:7.0f} s")
    print(f"  {'ratio to the plan':36} {total / ours:7.0f} x {'':10}   500 x")
    print(f"  {'ratio to the plan and all parts':36} {total / (ours + parts):7.0f} x")
    # Their ranks plan at the same time, each for itself; ours is planned by one process for all.
    print(f"  {'Awex, one rank, by wall clock':36} {'':9} {max(seconds):7.3f} s")
    print(f"  {'ratio to the plan and all parts':36} {'':9} {max(seconds) / (wall + parts_wall):7.1f} x")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs="+", choices=sorted(CASES), default=None, metavar="NAME", help=", ".join(CASES))
    parser.add_argument("--model", choices=sorted(MODELS), help="a case of your own")
    parser.add_argument("--trainer", default="pp1xep1", help="its ranks, as in `weightcast plan --shape`")
    for option, default in (("instances", 1), ("instance-ep", 8), ("instance-tp", 1), ("redundant", 0)):
        parser.add_argument(f"--{option}", type=int, default=default)
    parser.add_argument("--maps", choices=["equal", "different"], default="different")
    parser.add_argument("--repeat", type=int, default=3, help="runs, of which the fastest counts")
    parser.add_argument("--awex", type=Path, metavar="DIR", help=f"folder with Awex: {awex_plan.HOW_TO_GET_IT}")
    parser.add_argument("--awex-ranks", type=int, default=2, help="ranks of each side on which Awex is measured")
    a = parser.parse_args()
    cases = {name: CASES[name] for name in a.case or DEFAULT}
    if a.model:
        model, different = MODELS[a.model], a.maps == "different"
        own = Case(a.model, model, a.trainer, a.instances, a.instance_ep, a.instance_tp, a.redundant, different)
        cases = {"own": own}
    print(f"{_processor()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; {platform.system()}")
    print(f"Python {platform.python_version()}, numpy {np.__version__}; all on one core, the least of {a.repeat} runs")
    measured: dict[str, Measured] = {}
    for name, case in cases.items():
        encoded = _alone(describe, case)
        measured[name] = _alone(gateway, case, encoded, a.repeat)
        awex = _alone(peer, case, encoded, a.awex, a.awex_ranks)
        show(name, case, measured[name], awex)
        sys.stdout.flush()
    if {"k2-different", "k2-twice"} <= set(measured):
        once, twice = measured["k2-different"], measured["k2-twice"]
        row = "plan, invariants proved"
        print(
            f"\ntwice the layers: {twice.seconds[row][0] / once.seconds[row][0]:.2f} x the time of the plan, ", end=""
        )
        print(f"{twice.peak / once.peak:.2f} x the memory of the gateway   2.2 x")
    return 0


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


if __name__ == "__main__":
    sys.exit(main())
