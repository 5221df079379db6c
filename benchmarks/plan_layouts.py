"""Rank reports in the shapes of published models, for a trainer and for inference instances."""

from __future__ import annotations

import numpy as np

from weightcast.offline.models import ModelShape, instance_tables, trainer_tables
from weightcast.transfer.layout.placement import ExpertPlacement, RankPlacement
from weightcast.transfer.layout.tables import LayoutNotes, RankReport, RegionTable

RANKS_PER_HOST = 8


def trainer_reports(model: ModelShape, parallel: str) -> list[RankReport]:
    """Reports of all trainer ranks; `parallel` as in `trainer_tables`."""
    tables = trainer_tables(model, parallel)
    return [
        RankReport(rank, len(tables), f"trainer-{rank // RANKS_PER_HOST}", table) for rank, table in enumerate(tables)
    ]


def random_maps(model: ModelShape, redundant: int, seed: int) -> np.ndarray:
    """(layers, slots) a random expert in each redundant slot, all slots shuffled: so some replicas share a rank. Rows
    of dense layers mean nothing."""
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
    dense = "replicated" if tp == 1 else "tensor"
    tables = instance_tables(model, ep, maps[model.dense_layers :], dense, dense_ranks=tp)
    return [_report(name, placement, rank, table) for rank, table in enumerate(tables)]


def _report(name: str, placement: ExpertPlacement, rank: int, table: RegionTable) -> RankReport:
    held = RankPlacement(placement, rank, placement.slots_per_rank, placement.num_physical)
    notes = LayoutNotes(parameter_bytes=int(table.nbytes.sum()))
    return RankReport(rank, placement.ep_size, f"{name}-{rank // RANKS_PER_HOST}", table, held, notes)
