"""How long it takes to plan a model of Kimi K2's shape, and how much memory.

    python benchmarks/bench_plan.py [--layers 60] [--experts 384] [--instances 8] [--maps equal|different]

Trainer: PP x EP ranks with the dense weights of a stage on all its EP ranks. Instances: EP ranks with redundant slots
and a random map with same-rank pairs, dense weights on every rank.
"""

from __future__ import annotations

import argparse
import gc
import platform
import resource
import time
from collections.abc import Iterator

import numpy as np

from weightcast.transfer.invariants import check_plan
from weightcast.transfer.layout import NO_SLOT, RegionTable, TensorSpec, TensorTable
from weightcast.transfer.parts import PlanParts
from weightcast.transfer.planner import plan_transfer
from weightcast.transfer.summary import traffic_of

HIDDEN, EXPERT_HIDDEN, VOCABULARY = 7168, 2048, 163840
PROJECTIONS = {
    "gate_proj": (EXPERT_HIDDEN, HIDDEN),
    "up_proj": (EXPERT_HIDDEN, HIDDEN),
    "down_proj": (HIDDEN, EXPERT_HIDDEN),
}
DENSE = {
    "input_layernorm": (HIDDEN,),
    "post_attention_layernorm": (HIDDEN,),
    "self_attn.q_a_proj": (1536, HIDDEN),
    "self_attn.q_a_layernorm": (1536,),
    "self_attn.q_b_proj": (64 * 192, 1536),
    "self_attn.kv_a_proj_with_mqa": (576, HIDDEN),
    "self_attn.kv_a_layernorm": (512,),
    "self_attn.kv_b_proj": (64 * 256, 512),
    "self_attn.o_proj": (HIDDEN, 64 * 128),
    "mlp.gate": (384, HIDDEN),
    "mlp.shared_experts.gate_proj": (EXPERT_HIDDEN, HIDDEN),
    "mlp.shared_experts.up_proj": (EXPERT_HIDDEN, HIDDEN),
    "mlp.shared_experts.down_proj": (HIDDEN, EXPERT_HIDDEN),
}


def dense_of(layers: range, first: bool, last: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    if first:
        yield "model.embed_tokens.weight", (VOCABULARY, HIDDEN)
    for layer in layers:
        for name, shape in DENSE.items():
            yield f"model.layers.{layer}.{name}.weight", shape
    if last:
        yield "model.norm.weight", (HIDDEN,)
        yield "lm_head.weight", (VOCABULARY, HIDDEN)


def table(entries: list[tuple[str, tuple[int, ...], int]]) -> RegionTable:
    """Whole tensors, each with its slot."""
    tensors = TensorTable.from_specs({name: TensorSpec(shape, "bfloat16") for name, shape, _ in entries})
    index = {name: row for row, name in enumerate(tensors.names)}
    rows = np.array([index[name] for name, _, _ in entries], dtype=np.int64)
    slot = np.array([slot for _, _, slot in entries], dtype=np.int64)
    return RegionTable(tensors, rows, np.zeros((len(rows), tensors.width), dtype=np.int64), tensors.shape[rows], slot)


def expert_entries(layer: int, expert: int, slot: int) -> Iterator[tuple[str, tuple[int, ...], int]]:
    for name, shape in PROJECTIONS.items():
        yield f"model.layers.{layer}.mlp.experts.{expert}.{name}.weight", shape, slot


def trainer_tables(layers: int, experts: int, pp: int, ep: int) -> list[RegionTable]:
    tables = []
    cuts = [layers * i // pp for i in range(pp + 1)]
    for stage in range(pp):
        span = range(cuts[stage], cuts[stage + 1])
        dense = [(name, shape, NO_SLOT) for name, shape in dense_of(span, stage == 0, stage == pp - 1)]
        for rank in range(ep):
            mine = range(experts * rank // ep, experts * (rank + 1) // ep)
            routed = [e for layer in span for x in mine for e in expert_entries(layer, x, NO_SLOT)]
            tables.append(table(dense + routed))
    return tables


def instance_tables(layers: int, experts: int, ep: int, redundant: int, seed: int) -> list[RegionTable]:
    rng = np.random.default_rng(seed)
    slots = (experts + redundant) // ep
    maps = [
        rng.permutation(np.concatenate([np.arange(experts), rng.integers(0, experts, redundant)])).reshape(ep, slots)
        for _ in range(layers)
    ]
    dense = [(name, shape, NO_SLOT) for name, shape in dense_of(range(layers), True, True)]
    return [
        table(
            dense
            + [
                entry
                for layer in range(layers)
                for slot, expert in enumerate(maps[layer][rank].tolist())
                for entry in expert_entries(layer, expert, slot)
            ]
        )
        for rank in range(ep)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=60)
    parser.add_argument("--experts", type=int, default=384)
    parser.add_argument("--pp", type=int, default=8)
    parser.add_argument("--ep", type=int, default=32)
    parser.add_argument("--instances", type=int, default=8)
    parser.add_argument("--instance-ep", type=int, default=16)
    parser.add_argument("--redundant", type=int, default=16)
    parser.add_argument("--maps", choices=["equal", "different"], default="different")
    parser.add_argument("--repeat", type=int, default=3)
    a = parser.parse_args()
    trainer = trainer_tables(a.layers, a.experts, a.pp, a.ep)
    seeds = [0] * a.instances if a.maps == "equal" else list(range(a.instances))
    made = {s: instance_tables(a.layers, a.experts, a.instance_ep, a.redundant, s) for s in set(seeds)}
    instances = {f"rollout-{i}": made[s] for i, s in enumerate(seeds)}
    regions = sum(map(len, trainer)) + sum(len(t) for tables in instances.values() for t in tables)
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, numpy {np.__version__}")
    sides = f"{len(trainer)} trainer ranks, {a.instances} x {a.instance_ep} instance ranks"
    print(f"{sides}, {a.maps} maps, {regions:,} regions")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    gc.freeze()
    begin = time.perf_counter()
    for tables in [trainer, *made.values()]:
        for each in tables:
            each.fingerprint  # noqa: B018
    rows = [("fingerprints of all tables", time.perf_counter() - begin)]
    for _ in range(a.repeat):
        begin = time.perf_counter()
        plan = plan_transfer(trainer, instances, check=False)
        rows.append(("plan", time.perf_counter() - begin))
        begin = time.perf_counter()
        check_plan(plan, trainer, instances)
        rows.append(("invariants, tables joined anew", time.perf_counter() - begin))
        begin = time.perf_counter()
        plan_transfer(trainer, instances)
        rows.append(("plan with invariants", time.perf_counter() - begin))
    begin = time.perf_counter()
    parts = PlanParts(plan)
    rows.append(("index of the parts", time.perf_counter() - begin))
    begin = time.perf_counter()
    for name, tables in instances.items():
        for rank in range(len(tables)):
            parts.instance_part(name, rank)
        for rank in parts.trainer_ranks(name):
            parts.trainer_part(name, rank)
    rows.append(("all parts", time.perf_counter() - begin))
    for name, seconds in rows:
        print(f"{name:32} {seconds:8.3f} s")
    traffic = traffic_of(plan)
    sent = traffic.trainer_sent
    print(f"{len(plan.operations):,} operations ({traffic.sends:,} sends), {len(plan.digests):,} digest rows")
    print(f"trainer rank sends {sent.mean() / 1e9:.2f} GB on average, {sent.max() / 1e9:.2f} GB at most")
    senders = [len(parts.trainer_ranks(name)) for name in instances]
    print(f"trainer ranks that send to an instance: {min(senders)}-{max(senders)}")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"peak memory {peak / 1e6:.2f} GB, of which the tables {before / 1e6:.2f} GB")


if __name__ == "__main__":
    main()
