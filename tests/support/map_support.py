"""Layered mixture-of-experts layouts whose expert maps can be changed: a trainer of PP x EP x DP or sharded ranks, and
instances of EP x TP ranks with redundant slots."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from plan_support import tables_of

from weightcast.transfer.layout.tables import Region, RegionTable, TensorSpec

Maps = list[np.ndarray]
"""For each layer the expert in each slot, (ep, slots)."""

ROWS, COLUMNS = 8, 4


@dataclass(frozen=True)
class Model:
    layers: int = 3
    experts: int = 4
    pp: int = 1
    ep: int = 2
    dp: int = 1
    shards: int = 1
    """Instead of PP x EP, every tensor cut into so many shards, each on `dp` ranks."""

    def specs(self, dtype: str = "bfloat16") -> dict[str, TensorSpec]:
        names = ["model.embed_tokens.weight"]
        for layer in range(self.layers):
            names += [f"model.layers.{layer}.self_attn.{p}.weight" for p in ("q_proj", "o_proj")]
            names += [self.expert(layer, e, p) for e in range(self.experts) for p in ("up_proj", "down_proj")]
        return {name: TensorSpec((ROWS, COLUMNS), dtype) for name in names}

    @staticmethod
    def expert(layer: int, expert: int, part: str) -> str:
        return f"model.layers.{layer}.mlp.experts.{expert}.{part}.weight"

    def trainer(self) -> list[RegionTable]:
        specs = self.specs()
        if self.shards > 1:
            step = -(-ROWS // self.shards)
            boxes = [
                ((min(i * step, ROWS), 0), (max(0, min(step, ROWS - i * step)), COLUMNS)) for i in range(self.shards)
            ]
            return tables_of(specs, [[Region(name, *box) for name in specs] for box in boxes] * self.dp)
        ranks = []
        for _ in range(self.dp):
            for stage in range(self.pp):
                for rank in range(self.ep):
                    ranks.append([r for name in specs if (r := self._held(name, stage, rank)) is not None])
        return tables_of(specs, ranks)

    def _held(self, name: str, stage: int, rank: int) -> Region | None:
        parts = name.split(".")
        layer = int(parts[2]) if parts[1] == "layers" else 0
        if layer * self.pp // self.layers != stage:
            return None
        if "experts" in parts and int(parts[5]) * self.ep // self.experts != rank:
            return None
        return Region(name, (0, 0), (ROWS, COLUMNS))

    def random_maps(self, rng: np.random.Generator, ep: int, redundant: int) -> Maps:
        return [self.random_map(rng, ep, redundant) for _ in range(self.layers)]

    def random_map(self, rng: np.random.Generator, ep: int, redundant: int) -> np.ndarray:
        experts = np.concatenate([np.arange(self.experts), rng.integers(0, self.experts, redundant)])
        return rng.permutation(experts).reshape(ep, -1)

    def instance(self, maps: Maps, tp: int = 1, dtype: str = "bfloat16") -> list[RegionTable]:
        specs, ep = self.specs(dtype), maps[0].shape[0]
        ranks = []
        for rank in range(ep):
            for part in range(tp):
                box = (0, COLUMNS // tp * part), (ROWS, COLUMNS // tp)
                rows = [Region(name, *box) for name in specs if "experts" not in name]
                for layer, slots in enumerate(maps):
                    for slot, e in enumerate(slots[rank].tolist()):
                        rows += [Region(self.expert(layer, e, p), *box, slot) for p in ("up_proj", "down_proj")]
                ranks.append(rows)
        return tables_of(specs, ranks)


def with_layer(maps: Maps, layer: int, new: np.ndarray) -> Maps:
    return [new if i == layer else old for i, old in enumerate(maps)]


def random_model(rng: np.random.Generator) -> Model:
    model = Model(
        layers=int(rng.integers(1, 5)), experts=4, ep=int(rng.choice([1, 2, 4])), dp=int(rng.choice([1, 2, 3]))
    )
    if rng.random() < 0.3:
        return replace(model, shards=int(rng.choice([2, 3])))
    return replace(model, pp=int(rng.integers(1, model.layers + 1)))
