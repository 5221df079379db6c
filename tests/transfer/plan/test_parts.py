"""The parts of a plan together are the plan, and each is what its rank needs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_support import random_pair, tables_of

from weightcast.transfer.errors import PlanError
from weightcast.transfer.layout.dtypes import dtype_code
from weightcast.transfer.layout.tables import Region, TensorSpec
from weightcast.transfer.plan.operations import Kind, Operations, RankPart, TransferPlan
from weightcast.transfer.plan.parts import PlanParts
from weightcast.transfer.planner.planner import plan_transfer

SPECS = {"v": TensorSpec((2,), "float32"), "w": TensorSpec((8, 4), "float32")}
TOP, BOTTOM, ALL, V = (
    Region("w", (0, 0), (4, 4)),
    Region("w", (4, 0), (4, 4)),
    Region("w", (0, 0), (8, 4)),
    Region("v", (0,), (2,)),
)


@pytest.fixture
def plan() -> TransferPlan:
    wanted = {"v": SPECS["v"], "w": TensorSpec((8, 4), "bfloat16")}
    trainer = tables_of(SPECS, [[V], [TOP], [BOTTOM]])
    return plan_transfer(
        trainer, {"a": tables_of(wanted, [[ALL, ALL], [V]]), "b": tables_of(wanted, [[BOTTOM], [TOP]])}
    )


def rows(part: RankPart) -> list[tuple]:
    o = part.operations
    return [
        (Kind(int(k)).name, part.tensors.names[t], (int(s), int(sr)), (int(d), int(dr)))
        for k, t, s, sr, d, dr in zip(o.kind, o.tensor, o.src_rank, o.src_region, o.dst_rank, o.dst_region, strict=True)
    ]


def test_a_trainer_rank_sees_its_sends_to_one_instance(plan):
    part = PlanParts(plan).trainer_part("a", 1)
    assert rows(part) == [("SEND", "w", (1, 0), (0, 0))]
    assert (part.instance, part.instance_party, part.party, part.rank) == ("a", 1, 0, 1)
    assert (part.trainer_ranks, part.instance_ranks, part.group_size, part.group_rank) == ((0, 1, 2), 2, 5, 1)
    assert part.wire_dtype.tolist() == [dtype_code("bfloat16")]
    assert part.tensors.specs() == {"w": TensorSpec((8, 4), "float32")}
    assert part.table_fingerprint == plan.trainer.fingerprints[1]


def test_only_senders_join_the_communicator(plan):
    part = PlanParts(plan).trainer_part("b", 2)
    assert (part.trainer_ranks, part.group_size, part.group_rank) == ((1, 2), 4, 1)
    idle = PlanParts(plan).trainer_part("b", 0)
    assert rows(idle) == []
    assert 0 not in idle.trainer_ranks


def test_an_instance_rank_sees_what_it_receives_and_copies(plan):
    part = PlanParts(plan, bucket_bytes=77).instance_part("a", 0)
    assert rows(part) == [("SEND", "w", (1, 0), (0, 0)), ("SEND", "w", (2, 0), (0, 0)), ("COPY", "w", (0, 0), (0, 1))]
    assert (part.is_trainer, part.group_rank, part.bucket_bytes) == (False, 3, 77)
    assert part.wire_dtype.tolist() == [dtype_code("bfloat16")] * 3
    assert part.table_fingerprint == plan.instances[0].fingerprints[0]
    assert [
        plan.tensors.names[t] for t in plan.digests.tensor[(plan.digests.party == 1) & (plan.digests.rank == 0)]
    ] == ["w", "w"]
    assert part.digests.tensor.tolist() == [0, 0]


def test_digests_of_a_trainer_rank_are_the_same_in_all_its_parts(plan):
    parts = PlanParts(plan)
    for rank in range(3):
        a, b = parts.trainer_part("a", rank).digests, parts.trainer_part("b", rank).digests
        assert len(a) == len(b) == 1
        assert a.cell.tolist() == b.cell.tolist()


def test_unknown_ranks_and_instances_are_named(plan):
    parts = PlanParts(plan)
    with pytest.raises(PlanError, match="no instance 'c'; it has a, b"):
        parts.instance_part("c", 0)
    with pytest.raises(PlanError, match="no rank 2 of a, which has 2 ranks"):
        parts.instance_part("a", 2)
    with pytest.raises(PlanError, match="no rank -1 of the trainer, which has 3 ranks"):
        parts.trainer_part("a", -1)


def relayed(plan: TransferPlan, row: int, src_party: int, src_rank: int) -> TransferPlan:
    columns = {name: getattr(plan.operations, name).copy() for name in Operations.__slots__}
    columns["kind"][row], columns["src_party"][row], columns["src_rank"][row] = Kind.RELAY, src_party, src_rank
    return TransferPlan(**{**plan.__dict__, "operations": Operations(**columns)})


def test_relays_are_in_the_parts_of_both_ranks(plan):
    row = int(np.flatnonzero((plan.operations.dst_party == 1) & (plan.operations.dst_rank == 1))[0])
    parts = PlanParts(relayed(plan, row, 1, 0))
    assert ("RELAY", "v", (0, 0), (1, 0)) in rows(parts.instance_part("a", 0))
    assert ("RELAY", "v", (0, 0), (1, 0)) in rows(parts.instance_part("a", 1))
    assert parts.trainer_ranks("a") == (1, 2)
    with pytest.raises(PlanError, match="relays 'v' from b to a, which share no communicator"):
        PlanParts(relayed(plan, row, 2, 0))


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32))
def test_parts_add_up_to_the_plan(seed: int):
    plan = plan_transfer(*random_pair(seed).tables())
    parts = PlanParts(plan)
    o, d = plan.operations, plan.digests
    for index, party in enumerate(plan.instances, start=1):
        sides = [parts.trainer_part(party.name, r) for r in range(plan.trainer.world)]
        sides += [parts.instance_part(party.name, r) for r in range(party.world)]
        for part in sides:
            mine = o.dst_party == index
            mine &= (o.kind == Kind.SEND) & (o.src_rank == part.rank) if part.is_trainer else o.dst_rank == part.rank
            assert_same(part, part.operations, o.take(np.flatnonzero(mine)), plan)
            assert part.wire_dtype.tolist() == party.dtype[o.tensor[mine]].tolist()
            own = (d.party == (0 if part.is_trainer else index)) & (d.rank == part.rank)
            assert_same(part, part.digests, d.take(np.flatnonzero(own)), plan)
            if part.is_trainer:
                assert (part.rank in part.trainer_ranks) == bool(len(part.operations))


def assert_same(part: RankPart, got, expected, plan: TransferPlan) -> None:
    """Equal but for the numbering of tensors."""
    for name in expected.__slots__:
        if name != "tensor":
            assert np.array_equal(getattr(got, name), getattr(expected, name)), name
    assert [part.tensors.names[t] for t in got.tensor] == [plan.tensors.names[t] for t in expected.tensor]
    assert all(
        part.tensors.spec(int(t)) == plan.tensors.spec(int(e)) for t, e in zip(got.tensor, expected.tensor, strict=True)
    )
