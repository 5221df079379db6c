"""Ranks joined once: with the trainer's tensors as a catalog, without it, or by the planner, the plan is the same."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from plan_support import random_pair, tables_of

from weightcast.gateway.layouts.merge import merge_instance, merge_trainer
from weightcast.transfer.boxes.arrays import IntArray
from weightcast.transfer.errors import CoverageError, LayoutError
from weightcast.transfer.layout import joined as sides
from weightcast.transfer.layout.joined import JoinedRanks, join_pair, join_ranks
from weightcast.transfer.layout.tables import RankReport, Region, RegionTable, TensorSpec, TensorTable
from weightcast.transfer.plan.operations import TransferPlan
from weightcast.transfer.planner.planner import plan_transfer

SPECS = {name: TensorSpec((4, 4), "bfloat16") for name in ("a", "b", "c")}
PLANS = "1f02e342231a0149d78d4476bf70e5c2"
"""Hash of 40 plans as they were when the tables of a pair were joined twice, by two modules."""


def reports(tables: list[RegionTable]) -> list[RankReport]:
    return [RankReport(rank, len(tables), "", table) for rank, table in enumerate(tables)]


def whole(name: str) -> Region:
    return Region(name, (0, 0), (4, 4))


def hash_of(plan: TransferPlan) -> str:
    digest = hashlib.blake2b("\0".join(plan.tensors.names).encode(), digest_size=16)
    # The trainer was party -1 when the hash of 40 plans was taken.
    columns = [
        getattr(rows, name) - name.endswith("party")
        for rows in (plan.operations, plan.digests)
        for name in rows.__slots__
    ]
    for column in (*columns, *(party.dtype for party in plan.instances), plan.tensors.shape, plan.tensors.dtype):
        digest.update(column.astype("<i8").tobytes())
    return digest.hexdigest()


def test_plans_are_the_same_to_the_last_row() -> None:
    plans = [hash_of(plan_transfer(*random_pair(seed).tables())) for seed in range(40)]
    assert hashlib.blake2b("".join(plans).encode(), digest_size=16).hexdigest() == PLANS


@pytest.mark.parametrize("seed", range(30))
def test_one_plan_from_tables_and_from_joined_ranks(seed: int) -> None:
    trainer, instances = random_pair(seed).tables()
    sender = join_ranks("", trainer)
    # With the catalog, as in the gateway, or as sides that know nothing of each other.
    catalog = sender.tensors if seed % 2 else None
    receivers = {name: join_ranks(name, tables, catalog) for name, tables in instances.items()}
    assert hash_of(plan_transfer(sender, receivers)) == hash_of(plan_transfer(trainer, instances))


@pytest.mark.parametrize("seed", range(10))
def test_one_numbering_with_a_catalog_and_without(seed: int) -> None:
    """Also with one in which the tensors stand in another order, and that has more of them."""
    trainer, instances = random_pair(seed).tables()
    catalog = join_ranks("", trainer).tensors
    more = {"other": TensorSpec((2,), "bfloat16")} | dict(reversed(catalog.specs().items()))
    plain = join_ranks("rollout-0", instances["rollout-0"])
    for table in (catalog, TensorTable.from_specs(more)):
        joined = join_ranks("rollout-0", instances["rollout-0"], table)
        assert joined.tensors.names == plain.tensors.names
        assert np.array_equal(joined.tensor, plain.tensor)
        assert names_at(joined.rows_in(table), table) == list(joined.tensors.names)
        assert names_at(plain.rows_in(table), table) == list(joined.tensors.names)


def names_at(rows: IntArray, table: TensorTable) -> list[str]:
    return [table.names[row] for row in rows.tolist()]


def test_names_are_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the gateway's merge; planning what was merged looks up none."""
    halves = [[Region(name, (row, 0), (2, 4)) for name in names] for row, names in ((0, "abc"), (2, "cba"))]
    trainer = merge_trainer(reports(tables_of(SPECS, halves)))
    instance = merge_instance("rollout", reports(tables_of(SPECS, halves[::-1])), trainer.tensors)
    monkeypatch.setattr(sides, "find_names", None)
    monkeypatch.setattr(sides, "number_names", None)
    assert len(plan_transfer(trainer.joined, {"rollout": instance.joined}).operations) == 6


def test_tensors_that_only_instances_have_are_numbered_behind_the_trainers() -> None:
    """In the order of instances and ranks, by layer; then coverage refuses them."""
    names = ("x", "layers.1.b", "layers.0.c", "layers.1.a")
    specs = {name: TensorSpec((4, 4), "bfloat16") for name in names}
    trainer = tables_of(specs, [[whole("x"), whole("layers.1.a")]])
    engines = {
        "r0": tables_of(specs, [[whole("layers.1.b"), whole("x")], [whole("layers.0.c")]]),
        "r1": tables_of(specs, [[whole("layers.0.c"), whole("layers.1.b"), whole("layers.1.a")]]),
    }
    for joined in (engines, {name: join_ranks(name, tables) for name, tables in engines.items()}):
        pair = join_pair(trainer, joined)
        assert pair.tensors.names == ("x", "layers.0.c", "layers.1.a", "layers.1.b")
        assert [regions_of(side) for side in pair.instances] == [
            [(0, "layers.1.b"), (0, "x"), (1, "layers.0.c")],
            [(0, "layers.0.c"), (0, "layers.1.b"), (0, "layers.1.a")],
        ]
        with pytest.raises(CoverageError, match="on no trainer rank"):
            plan_transfer(trainer, joined)


def regions_of(side: JoinedRanks) -> list[tuple[int, str]]:
    return [(r, side.tensors.names[t]) for r, t in zip(side.rank.tolist(), side.tensor.tolist(), strict=True)]


def test_sides_that_differ_about_a_shape() -> None:
    """Joined with the catalog or not: the trainer's shape, the instance's, and its name."""
    (trainer,) = tables_of(SPECS, [[whole("a")]])
    (engine,) = tables_of({"a": TensorSpec((4, 5), "bfloat16")}, [[Region("a", (0, 0), (4, 5))]])
    text = r"^tensor 'a' has shape \[4, 4\] on the trainer and \[4, 5\] on rollout$"
    with pytest.raises(LayoutError, match=text):
        join_ranks("rollout", [engine], join_ranks("", [trainer]).tensors)
    for ranks in ([engine], join_ranks("rollout", [engine])):
        with pytest.raises(LayoutError, match=text):
            plan_transfer([trainer], {"rollout": ranks})


def test_equal_instances_share_their_columns() -> None:
    tables = tables_of(SPECS, [[whole("a")]])
    pair = join_pair(tables, {"r0": tables, "r1": tables})
    assert pair.instances[0].tensor is pair.instances[1].tensor
    assert [side.name for side in pair.instances] == ["r0", "r1"]


def test_a_table_may_be_its_own_catalog() -> None:
    boxes = [whole("a"), whole("b")]
    (table,) = tables_of(SPECS, [boxes])
    layout = merge_instance("rollout", reports([table]), join_ranks("", [table]).tensors)
    assert len(plan_transfer([table], {"rollout": layout.joined}).operations) == 2
