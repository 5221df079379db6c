"""Layouts of published mixture-of-experts models, for a trainer and for inference instances, as rank reports."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from weightcast.transfer.layout import NO_SLOT, LayoutNotes, RankReport, RegionTable, TensorSpec, TensorTable
from weightcast.transfer.placement import ExpertPlacement, RankPlacement

Shape = tuple[int, ...]
Box = tuple[Shape, Shape]
"""Offset and size."""

COLUMN, ROW, WHOLE = 0, 1, None
"""Which dimension of a dense tensor tensor parallelism cuts."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model as its checkpoint on the Hugging Face hub has them."""

    name: str
    layers: int
    dense_layers: int
    experts: int
    hidden: int
    expert_hidden: int
    vocabulary: int
    heads: int
    shared_experts: int = 0
    dense_hidden: int = 0
    kv_heads: int = 0
    """0 for multi-head latent attention."""

    def dense(self, layer: int) -> Iterator[tuple[str, Shape, int | None]]:
        """Name, shape and cut of every tensor of a layer that is no routed expert."""
        hidden = self.hidden
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{name}.weight", (hidden,), WHOLE
        if self.kv_heads:
            yield "self_attn.q_proj.weight", (self.heads * 128, hidden), COLUMN
            yield "self_attn.k_proj.weight", (self.kv_heads * 128, hidden), COLUMN
            yield "self_attn.v_proj.weight", (self.kv_heads * 128, hidden), COLUMN
            yield "self_attn.o_proj.weight", (hidden, self.heads * 128), ROW
            yield "self_attn.q_norm.weight", (128,), WHOLE
            yield "self_attn.k_norm.weight", (128,), WHOLE
        else:
            yield "self_attn.q_a_proj.weight", (1536, hidden), WHOLE
            yield "self_attn.q_a_layernorm.weight", (1536,), WHOLE
            yield "self_attn.q_b_proj.weight", (self.heads * 192, 1536), COLUMN
            yield "self_attn.kv_a_proj_with_mqa.weight", (576, hidden), WHOLE
            yield "self_attn.kv_a_layernorm.weight", (512,), WHOLE
            yield "self_attn.kv_b_proj.weight", (self.heads * 256, 512), COLUMN
            yield "self_attn.o_proj.weight", (hidden, self.heads * 128), ROW
        if layer < self.dense_layers:
            yield from self._mlp("mlp", self.dense_hidden)
            return
        yield "mlp.gate.weight", (self.experts, hidden), WHOLE
        if self.shared_experts:
            yield "mlp.gate.e_score_correction_bias", (self.experts,), WHOLE
            yield from self._mlp("mlp.shared_experts", self.shared_experts * self.expert_hidden)

    def _mlp(self, prefix: str, width: int) -> Iterator[tuple[str, Shape, int | None]]:
        yield f"{prefix}.gate_proj.weight", (width, self.hidden), COLUMN
        yield f"{prefix}.up_proj.weight", (width, self.hidden), COLUMN
        yield f"{prefix}.down_proj.weight", (self.hidden, width), ROW

    def outer(self) -> Iterator[tuple[int, str, Shape, int | None]]:
        """Tensors outside of layers, with the layer beside which a pipeline keeps them."""
        yield 0, "model.embed_tokens.weight", (self.vocabulary, self.hidden), COLUMN
        yield self.layers - 1, "model.norm.weight", (self.hidden,), WHOLE
        yield self.layers - 1, "lm_head.weight", (self.vocabulary, self.hidden), COLUMN

    def expert(self, layer: int, expert: int) -> Iterator[tuple[str, Shape]]:
        """Name and shape of each tensor of a routed expert."""
        prefix = f"model.layers.{layer}.mlp.experts.{expert}"
        yield f"{prefix}.gate_proj.weight", (self.expert_hidden, self.hidden)
        yield f"{prefix}.up_proj.weight", (self.expert_hidden, self.hidden)
        yield f"{prefix}.down_proj.weight", (self.hidden, self.expert_hidden)


SHAPES = {
    shape.name: shape
    for shape in (
        ModelShape("qwen3-30b", 48, 0, 128, 2048, 768, 151936, heads=32, kv_heads=4),
        ModelShape("qwen3-235b", 94, 0, 128, 4096, 1536, 151936, heads=64, kv_heads=4),
        ModelShape("deepseek-v3", 61, 3, 256, 7168, 2048, 129280, heads=128, shared_experts=1, dense_hidden=18432),
        ModelShape("kimi-k2", 61, 1, 384, 7168, 2048, 163840, heads=64, shared_experts=1, dense_hidden=18432),
    )
}


@dataclass
class _Rank:
    """The regions of a rank, as they are added."""

    specs: dict[str, TensorSpec] = field(default_factory=dict)
    boxes: list[Box] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)

    def add(self, name: str, shape: Shape, box: Box, slot: int = NO_SLOT) -> None:
        self.specs.setdefault(name, TensorSpec(shape, "bfloat16"))
        self.names.append(name)
        self.boxes.append(box)
        self.slots.append(slot)

    def table(self) -> RegionTable:
        tensors = TensorTable.from_specs(self.specs)
        index = {name: row for row, name in enumerate(tensors.names)}
        offset = np.zeros((len(self.names), tensors.width), dtype=np.int64)
        size = np.ones_like(offset)
        for row, (low, extent) in enumerate(self.boxes):
            offset[row, : len(low)], size[row, : len(extent)] = low, extent
        tensor = np.array([index[name] for name in self.names], dtype=np.int64)
        table = RegionTable(tensors, tensor, offset, size, np.array(self.slots, dtype=np.int64))
        table.validate()
        return table


def _whole(shape: Shape) -> Box:
    return (0,) * len(shape), shape


def _part(shape: Shape, dim: int, parts: int, part: int) -> Box:
    """Chunks of ceil(n / parts), as FSDP and tensor parallelism cut."""
    step = -(-shape[dim] // parts)
    low = min(part * step, shape[dim])
    high = min(low + step, shape[dim])
    return (
        tuple(low if d == dim else 0 for d in range(len(shape))),
        tuple(high - low if d == dim else n for d, n in enumerate(shape)),
    )


@dataclass(frozen=True)
class TrainerShape:
    """PP x EP x DP ranks, dense weights of a stage on all its ranks; or, with `fsdp`, shards of every tensor on `fsdp`
    ranks, `dp` times."""

    pp: int = 1
    ep: int = 1
    dp: int = 1
    fsdp: int = 0

    @property
    def world(self) -> int:
        return self.dp * (self.fsdp or self.pp * self.ep)

    def __str__(self) -> str:
        text = f"FSDP{self.fsdp}" if self.fsdp else f"PP{self.pp}xEP{self.ep}"
        return text + (f"xDP{self.dp}" if self.dp > 1 else "")


def trainer_reports(model: ModelShape, shape: TrainerShape) -> list[RankReport]:
    """Reports of all trainer ranks."""
    tables = _sharded(model, shape.fsdp) if shape.fsdp else _staged(model, shape.pp, shape.ep)
    tables *= shape.dp
    return [RankReport(rank, len(tables), f"trainer-{rank // 8}", table) for rank, table in enumerate(tables)]


def _staged(model: ModelShape, pp: int, ep: int) -> list[RegionTable]:
    tables = []
    for stage in range(pp):
        span = range(model.layers * stage // pp, model.layers * (stage + 1) // pp)
        for rank in range(ep):
            made = _Rank()
            for beside, name, shape, _ in model.outer():
                if beside in span:
                    made.add(name, shape, _whole(shape))
            mine = range(model.experts * rank // ep, model.experts * (rank + 1) // ep)
            for layer in span:
                for name, shape, _ in model.dense(layer):
                    made.add(f"model.layers.{layer}.{name}", shape, _whole(shape))
                for expert in mine if layer >= model.dense_layers else ():
                    for name, shape in model.expert(layer, expert):
                        made.add(name, shape, _whole(shape))
            tables.append(made.table())
    return tables


def _sharded(model: ModelShape, parts: int) -> list[RegionTable]:
    ranks = [_Rank() for _ in range(parts)]

    def add(name: str, shape: Shape) -> None:
        for part, made in enumerate(ranks):
            made.add(name, shape, _part(shape, 0, parts, part))

    for _, name, shape, _ in model.outer():
        add(name, shape)
    for layer in range(model.layers):
        for name, shape, _ in model.dense(layer):
            add(f"model.layers.{layer}.{name}", shape)
        for expert in range(model.experts) if layer >= model.dense_layers else ():
            for name, shape in model.expert(layer, expert):
                add(name, shape)
    return [made.table() for made in ranks]


def random_maps(model: ModelShape, redundant: int, seed: int) -> np.ndarray:
    """(layers, slots) a random expert in each redundant slot, all slots shuffled: so some replicas share a rank."""
    rng = np.random.default_rng(seed)
    extra = rng.integers(0, model.experts, (model.layers, redundant))
    every = np.broadcast_to(np.arange(model.experts), (model.layers, model.experts))
    return rng.permuted(np.concatenate([every, extra], axis=1), axis=1)


def same_rank_pairs(maps: np.ndarray, ep: int) -> int:
    """How many slots hold an expert that an earlier slot of their rank holds."""
    by_rank = np.sort(maps.reshape(maps.shape[0], ep, -1), axis=2)
    return int((by_rank[:, :, 1:] == by_rank[:, :, :-1]).sum())


def instance_reports(name: str, model: ModelShape, maps: np.ndarray, ep: int, tp: int = 1) -> list[RankReport]:
    """Reports of all ranks of an instance: experts over all `ep` ranks, dense weights cut over groups of `tp`."""
    placement = ExpertPlacement(maps, model.experts, ep)
    slots = placement.slots_per_rank
    reports = []
    for rank in range(ep):
        made = _Rank()

        def add(name: str, shape: Shape, dim: int | None, made: _Rank = made, part: int = rank % tp) -> None:
            made.add(name, shape, _whole(shape) if dim is None or tp == 1 else _part(shape, dim, tp, part))

        for _, tensor, shape, dim in model.outer():
            add(tensor, shape, dim)
        for layer in range(model.layers):
            for tensor, shape, dim in model.dense(layer):
                add(f"model.layers.{layer}.{tensor}", shape, dim)
            if layer < model.dense_layers:
                continue
            for slot, expert in enumerate(maps[layer].reshape(ep, -1)[rank].tolist()):
                for tensor, shape in model.expert(layer, expert):
                    made.add(tensor, shape, _whole(shape), slot)
        held = RankPlacement(placement, rank, slots, placement.num_physical)
        table = made.table()
        notes = LayoutNotes(parameter_bytes=int(table.nbytes.sum()))
        reports.append(RankReport(rank, ep, f"{name}-{rank // 8}", table, held, notes))
    return reports
