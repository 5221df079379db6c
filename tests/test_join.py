"""Tables that know their place in the joined one are planned for as those that do not."""

from __future__ import annotations

import numpy as np
import pytest
from plan_support import random_pair, tables_of

from weightcast.gateway.join import SideName, join_reports
from weightcast.gateway.merge import merge_instance, merge_trainer
from weightcast.transfer import sides
from weightcast.transfer.errors import WeightcastError
from weightcast.transfer.layout import RankReport, Region, RegionTable, TensorSpec, TensorTable
from weightcast.transfer.plan import TransferPlan
from weightcast.transfer.planner import plan_transfer


def reports(tables: list[RegionTable]) -> list[RankReport]:
    return [RankReport(rank, len(tables), "", table) for rank, table in enumerate(tables)]


def same_plans(left: TransferPlan, right: TransferPlan) -> bool:
    tables = ((left.operations, right.operations), (left.digests, right.digests))
    columns = [(getattr(a, name), getattr(b, name)) for a, b in tables for name in a.__slots__]
    return left.tensors.names == right.tensors.names and all(np.array_equal(a, b) for a, b in columns)


@pytest.mark.parametrize("seed", range(30))
def test_one_plan_by_names_and_by_places(seed: int) -> None:
    pair = random_pair(seed)
    trainer, instances = pair.tables()
    by_names = plan_transfer(trainer, instances)
    trainer, instances = pair.tables()
    catalog, _ = join_reports(SideName(None), reports(trainer))
    for name, tables in instances.items():
        # With the catalog, as in the gateway, or as two joined tables that know nothing of each other.
        join_reports(SideName(name), reports(tables), catalog if seed % 2 else None)
    assert trainer[0].tensors.place is not None
    assert same_plans(by_names, plan_transfer(trainer, instances))


@pytest.mark.parametrize("seed", range(10))
def test_one_numbering_with_a_catalog_and_without(seed: int) -> None:
    """Also with one in which the tensors stand in another order, and that has more of them."""
    trainer, instances = random_pair(seed).tables()
    side, found = SideName("rollout-0"), reports(instances["rollout-0"])
    catalog, _ = join_reports(SideName(None), reports(trainer))
    more = {"other": TensorSpec((2,), "bfloat16")} | dict(reversed(catalog.specs().items()))
    plain, regions = join_reports(side, found)
    for table in (catalog, TensorTable.from_specs(more)):
        tensors, again = join_reports(side, found, table)
        assert tensors.names == plain.names
        assert np.array_equal(again.tensor, regions.tensor)
        assert tensors.place is not None
        assert [table.names[row] for row in tensors.place[1].tolist()] == list(tensors.names)
    lacking = TensorTable.from_specs({"other": TensorSpec((2,), "bfloat16")})
    tensors, again = join_reports(side, found, lacking)
    assert (tensors.names, tensors.place) == (plain.names, None)


def test_the_gateway_looks_names_up_once_for_all_ranks() -> None:
    """Every table's place leads to the trainer's catalog."""
    specs = {name: TensorSpec((4, 4), "bfloat16") for name in ("a", "b", "c")}
    halves = [[Region(name, (row, 0), (2, 4)) for name in names] for row, names in ((0, "abc"), (2, "cba"))]
    trainer = merge_trainer(reports(tables_of(specs, halves)))
    instance = merge_instance("rollout", reports(tables_of(specs, halves[::-1])), trainer.tensors)
    for table in instance.tables:
        assert table.tensors.place is not None
        whole, rows = table.tensors.place
        assert [whole.names[row] for row in rows.tolist()] == list(table.tensors.names)
        assert whole.place is not None
        assert whole.place[0] is trainer.tensors


def test_ranks_joined_with_others_are_planned_without_them() -> None:
    """The joined table has a tensor that none of the planned ranks has."""
    specs = {name: TensorSpec((4, 4), "bfloat16") for name in ("a", "b")}
    a, b = Region("a", (0, 0), (4, 4)), Region("b", (0, 0), (4, 4))
    engine = tables_of(specs, [[a, a], [b]])
    join_reports(SideName("rollout"), reports(engine))
    plan = plan_transfer(tables_of(specs, [[a]]), {"rollout": engine[:1]})
    assert plan.tensors.names == ("a",)
    with pytest.raises(WeightcastError, match="b: on no trainer rank"):
        plan_transfer(tables_of(specs, [[a]]), {"rollout": engine[1:]})


def test_a_table_may_be_its_own_catalog() -> None:
    specs = {name: TensorSpec((4, 4), "bfloat16") for name in ("a", "b")}
    boxes = [Region(name, (0, 0), (4, 4)) for name in specs]
    (table,) = tables_of(specs, [boxes])
    merge_instance("rollout", reports([table]), table.tensors)
    assert len(plan_transfer(tables_of(specs, [boxes]), {"rollout": [table]}).operations) == 2


def test_a_table_that_is_joined_again_meanwhile_does_not_lend_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """As another thread may do. What the pair remembers of a table must not be taken for another at the same place."""
    specs = {name: TensorSpec((4, 4), "bfloat16") for name in ("a", "b", "c", "d")}
    a, b, c, d = (Region(name, (0, 0), (4, 4)) for name in specs)
    # Ranks without a common tensor, so that the joined tables number them differently.
    engine = tables_of(specs, [[a, b], [c, d]])
    find = sides._Names.rows

    def joined_again(names: sides._Names, table: RegionTable) -> np.ndarray:
        rows = find(names, table)
        for other in (engine, engine[::-1]):
            for one in other:
                join_reports(SideName("rollout"), reports([one]))
        return rows

    for one in engine:
        join_reports(SideName("rollout"), reports([one]))
    trainer = tables_of(specs, [[a, b, c, d]])
    monkeypatch.setattr(sides._Names, "rows", joined_again)
    for _ in range(20):
        o = plan_transfer(trainer, {"rollout": engine}).operations
        assert sorted(zip(o.tensor.tolist(), o.dst_rank.tolist(), o.dst_region.tolist(), strict=True)) == [
            (0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 1, 1),
        ]  # fmt: skip
