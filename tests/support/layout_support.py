"""Rank reports of mixture-of-experts instances in the published shapes, made in columns and without an engine."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from weightcast.transfer.boxes.arrays import IntArray
from weightcast.transfer.layout.dtypes import dtype_code
from weightcast.transfer.layout.placement import ExpertPlacement, RankPlacement
from weightcast.transfer.layout.tables import NO_SLOT, LayoutNotes, RankReport, RegionTable, TensorTable

PARTS = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Shape:
    """An MoE model: `dense` names (per layer, suffix -> shape) are cut along dimension 0 over the ranks."""

    layers: int
    experts: int
    hidden: int
    intermediate: int
    dense: tuple[tuple[str, tuple[int, ...]], ...]


TINY = Shape(2, 4, 8, 4, (("input_layernorm.weight", (8,)), ("self_attn.o_proj.weight", (8, 8))))

K2 = Shape(
    60, 384, 7168, 2048,
    (
        ("input_layernorm.weight", (7168,)), ("post_attention_layernorm.weight", (7168,)),
        ("self_attn.q_a_proj.weight", (1536, 7168)), ("self_attn.q_a_layernorm.weight", (1536,)),
        ("self_attn.q_b_proj.weight", (12288, 1536)), ("self_attn.kv_a_proj_with_mqa.weight", (576, 7168)),
        ("self_attn.kv_a_layernorm.weight", (512,)), ("self_attn.kv_b_proj.weight", (16384, 512)),
        ("self_attn.o_proj.weight", (7168, 8192)), ("mlp.gate.weight", (384, 7168)),
        ("mlp.gate.e_score_correction_bias", (384,)), ("mlp.shared_experts.gate_proj.weight", (2048, 7168)),
        ("mlp.shared_experts.up_proj.weight", (2048, 7168)), ("mlp.shared_experts.down_proj.weight", (7168, 2048)),
    ),
)  # fmt: skip


def random_placement(shape: Shape, ep_size: int, redundant: int, seed: int = 0) -> ExpertPlacement:
    """Every expert once and `redundant` random ones once more, shuffled in each layer."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(shape.layers):
        row = np.concatenate([np.arange(shape.experts), rng.integers(0, shape.experts, redundant)])
        rng.shuffle(row)
        rows.append(row)
    return ExpertPlacement(np.stack(rows), shape.experts, ep_size)


def moe_report(shape: Shape, rank: int, placement: ExpertPlacement, *, dispatch: bool = True) -> RankReport:
    """What one EP rank reports: its expert slots whole, its cut of every dense tensor, `dispatch` to all replicas."""
    world, slots = placement.ep_size, placement.slots_per_rank
    names: dict[str, int] = {}
    shapes: list[tuple[int, ...]] = []
    tensor, offset, size, slot = [], [], [], []

    def add(name: str, full: tuple[int, ...], start: int, count: int, at: int) -> None:
        row = names.setdefault(name, len(names))
        if row == len(shapes):
            shapes.append(full)
        rest = full[1:] + (1,) * (2 - len(full))
        tensor.append(row)
        offset.append((start, 0))
        size.append((count, *rest))
        slot.append(at)

    for layer in range(shape.layers):
        for suffix, full in shape.dense:
            cut = full[0] // world if full[0] % world == 0 and len(full) > 1 else 0
            start, count = (rank * cut, cut) if cut else (0, full[0])
            add(f"model.layers.{layer}.{suffix}", full, start, count, NO_SLOT)
        for local, expert in enumerate(placement.local_experts(layer, rank).tolist()):
            for part in PARTS:
                full = (shape.hidden, shape.intermediate) if part == "down_proj" else (shape.intermediate, shape.hidden)
                add(f"model.layers.{layer}.mlp.experts.{expert}.{part}.weight", full, 0, full[0], local)
    add("lm_head.weight", (64, shape.hidden), 0, 64, NO_SLOT)
    ndim = np.array([len(full) for full in shapes], dtype=np.int64)
    columns = np.array([full + (1,) * (2 - len(full)) for full in shapes], dtype=np.int64)
    dtype = np.full(len(names), dtype_code("bfloat16"), dtype=np.int64)
    table = RegionTable(
        TensorTable(tuple(names), columns, ndim, dtype),
        np.array(tensor, dtype=np.int64),
        np.array(offset, dtype=np.int64),
        np.array(size, dtype=np.int64),
        np.array(slot, dtype=np.int64),
    )
    notes = LayoutNotes(
        parameter_bytes=int(table.nbytes.sum()) + 4096,
        padding_bytes=4096,
        derived=tuple(f"model.layers.{layer}.self_attn.w_kc" for layer in range(shape.layers)),
        left_out=(("model.layers.61.eh_proj.weight", "MTP layer, not loaded"),),
        dispatch=dispatch_table(placement) if dispatch else np.empty((0, 3), dtype=np.int64),
        dispatch_shared=dispatch,
    )
    rank_placement = RankPlacement(placement, rank, slots, placement.num_physical, 0)
    return RankReport(rank, world, f"node-{rank // 8}", table, rank_placement, notes)


def dispatch_table(placement: ExpertPlacement) -> IntArray:
    """(layer, expert, slot) of every slot of every expert."""
    layers, slots = placement.physical_to_logical.shape
    layer, slot = np.divmod(np.arange(layers * slots, dtype=np.int64), slots)
    expert = placement.physical_to_logical.reshape(-1)
    order = np.lexsort((slot, expert, layer))
    return np.stack([layer, expert, slot], axis=1)[order]


def moe_instance(shape: Shape, ep_size: int, redundant: int, seed: int = 0, **options: bool) -> list[RankReport]:
    """The reports of all ranks of one instance."""
    placement = random_placement(shape, ep_size, redundant, seed)
    return [moe_report(shape, rank, placement, **options) for rank in range(ep_size)]
