"""What `inspect` shows of an instance."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from layout_support import TINY, moe_report

from weightcast.gateway.layouts.inspection import (
    DispatchAudit,
    InspectTable,
    SameRankPair,
    SlotSummary,
    inspect_instance,
)
from weightcast.gateway.layouts.merge import merge_instance
from weightcast.transfer.layout.placement import ExpertPlacement
from weightcast.transfer.layout.tables import RankReport, Region, RegionTable, TensorSpec

PAIR = ExpertPlacement(np.array([[0, 1, 2, 3, 3, 0], [3, 2, 1, 0, 0, 1]]), num_logical=4, ep_size=2)


@pytest.fixture
def table() -> InspectTable:
    return inspect_instance(merge_instance("rollout-0", [moe_report(TINY, rank, PAIR) for rank in (0, 1)]))


def test_same_rank_pairs_are_listed(table: InspectTable) -> None:
    assert table.same_rank_pairs == (SameRankPair(0, 3, 1, (0, 1)), SameRankPair(1, 0, 1, (0, 1)))


def test_slots_and_dispatch(table: InspectTable) -> None:
    assert table.slots == SlotSummary(layers=2, logical_experts=4, physical_slots=6, ep_size=2, replicated=4)
    assert table.dispatch == DispatchAudit(ranks=2, entries=24, shared=True)


def test_ranks(table: InspectTable) -> None:
    # Nine expert regions of 64 bytes in each of two layers, two dense tensors (one cut), the head of 1024 bytes.
    assert [(r.rank, r.regions, r.region_bytes, r.padding_bytes) for r in table.ranks] == [
        (0, 23, 2 * (9 * 64 + 16 + 64) + 1024, 4096),
        (1, 23, 2 * (9 * 64 + 16 + 64) + 1024, 4096),
    ]
    assert [r.slots_per_layer for r in table.ranks] == [((3, (0, 1)),)] * 2


def test_json_is_json(table: InspectTable) -> None:
    shown = json.loads(json.dumps(table.to_json()))
    assert shown["complete"] is True
    assert shown["same_rank_pairs"][0] == {"layer": 0, "expert": 3, "rank": 1, "slots": [0, 1]}
    assert shown["left_out"] == {"model.layers.61.eh_proj.weight": "MTP layer, not loaded"}


def test_text(table: InspectTable) -> None:
    text = table.to_text()
    assert text.splitlines() == [
        f"instance rollout-0, layout {table.fingerprint}",
        "coverage: complete, 29 tensors of 2.8 KiB",
        "",
        "rank  host    storage rank  regions  bytes    parameters  padding  slots",
        "0     node-0  0             23       2.3 KiB  6.3 KiB     4.0 KiB  3 in layers 0-1",
        "1     node-0  1             23       2.3 KiB  6.3 KiB     4.0 KiB  3 in layers 0-1",
        "",
        "experts: 4 in 6 slots over 2 EP ranks, 2 layers in the map; 4 times an expert of a layer has replicas, "
        "2 times on one rank",
        "",
        "layer  expert  rank  slots",
        "0      3       1     0,1",
        "1      0       1     0,1",
        "",
        "dispatch audit: 24 entries of 2 ranks agree, all ranks have the same table",
        "computed from parameters after an update: layers 0-1, self_attn.w_kc",
        "left out: layers 61, eh_proj (MTP layer, not loaded)",
    ]


def test_an_instance_without_experts() -> None:
    held = RegionTable.from_regions({"a": TensorSpec((4,), "float32")}, [Region("a", (0,), (4,))])
    table = inspect_instance(merge_instance("rollout-0", [RankReport(0, 1, "", held)]))
    assert table.slots is None
    assert table.dispatch is None
    assert "no routed experts" in table.to_text()
    assert "0     -     -             1        16 B   0 B         0 B      -" in table.to_text()


def test_many_pairs_are_cut_short_for_people_only() -> None:
    shape = dataclasses.replace(TINY, layers=12)
    doubled = ExpertPlacement(np.tile(np.repeat(np.arange(4), 2), (12, 1)), 4, 2)
    layout = merge_instance("rollout-0", [moe_report(shape, rank, doubled) for rank in (0, 1)])
    table = inspect_instance(layout)
    assert len(table.same_rank_pairs) == 48
    assert len(table.to_json()["same_rank_pairs"]) == 48
    assert "5      0       0     0,1\n" not in table.to_text()
    assert "and 28 more same-rank pairs\n" in table.to_text()
