"""Each invariant of a plan, broken on purpose."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_support import judge, random_pair, tables_of

from weightcast.transfer.errors import PlanError
from weightcast.transfer.layout.tables import Region, TensorSpec
from weightcast.transfer.plan.operations import Kind, TransferPlan
from weightcast.transfer.plan.proof.operations import check_plan
from weightcast.transfer.planner.planner import plan_transfer

SPECS = {"w": TensorSpec((8, 4), "bfloat16"), "v": TensorSpec((8, 4), "bfloat16")}
W_TOP, W_BOTTOM, W_ALL = Region("w", (0, 0), (4, 4)), Region("w", (4, 0), (4, 4)), Region("w", (0, 0), (8, 4))
V_ALL = Region("v", (0, 0), (8, 4))
TRAINER_RANKS = [[W_TOP, V_ALL], [W_BOTTOM, V_ALL]]
INSTANCES = {"a": [[W_ALL, V_ALL, W_ALL], [W_ALL, V_ALL, V_ALL]], "b": [[V_ALL, W_TOP, W_BOTTOM]]}


@pytest.fixture
def tables():
    return tables_of(SPECS, TRAINER_RANKS), {name: tables_of(SPECS, ranks) for name, ranks in INSTANCES.items()}


@pytest.fixture
def plan(tables) -> TransferPlan:
    return plan_transfer(*tables)


def find(plan: TransferPlan, kind: Kind, instance: str, rank: int, region: int) -> int:
    """First operation that writes a region."""
    o = plan.operations
    at = (o.kind == kind) & (o.dst_party == plan.number(instance)) & (o.dst_rank == rank) & (o.dst_region == region)
    return int(np.flatnonzero(at)[0])


def with_value(plan: TransferPlan, row: int, **values) -> TransferPlan:
    """The plan with other values in one operation."""
    columns = {}
    for name, value in values.items():
        columns[name] = getattr(plan.operations, name).copy()
        columns[name][row] = value
    return replace(plan, operations=replace(plan.operations, **columns))


def with_rows(plan: TransferPlan, rows) -> TransferPlan:
    return replace(plan, operations=plan.operations.take(np.asarray(rows)))


def test_the_plan_itself_is_right(plan, tables):
    check_plan(plan, *tables)
    assert len(plan.operations) == 12


def test_a_dropped_replica_is_seen(plan, tables):
    row = find(plan, Kind.COPY, "a", 0, 2)
    dropped = with_rows(plan, np.delete(np.arange(len(plan.operations)), row))
    with pytest.raises(
        PlanError, match=r"^tensor 'w', a rank 0 region 2, box \[0:8, 0:4\]: only 0 of 32 elements are written$"
    ):
        check_plan(dropped, *tables)


def test_every_dropped_operation_is_seen(plan, tables):
    everything = np.arange(len(plan.operations))
    for row in everything:
        with pytest.raises(PlanError, match="elements are written"):
            check_plan(with_rows(plan, np.delete(everything, row)), *tables)


def test_a_duplicate_write_is_seen(plan, tables):
    for row in range(len(plan.operations)):
        with pytest.raises(PlanError, match=r"overlaps the (send|copy) of"):
            check_plan(with_rows(plan, [*range(len(plan.operations)), row]), *tables)


def test_a_copy_turned_into_a_second_send_is_seen(plan, tables):
    row = find(plan, Kind.COPY, "a", 1, 2)
    twice = with_value(plan, row, kind=Kind.SEND, src_party=0, src_rank=1, src_region=1)
    with pytest.raises(
        PlanError, match=r"'v', a rank 1 region 2: the send of .* receives in region 1 already: copy it there"
    ):
        check_plan(twice, *tables)


def test_a_copy_from_a_copy_is_seen():
    specs = {"w": SPECS["w"]}
    tables = tables_of(specs, [[W_ALL]]), {"a": tables_of(specs, [[W_ALL, W_ALL, W_ALL]])}
    plan = plan_transfer(*tables)
    row = find(plan, Kind.COPY, "a", 0, 2)
    with pytest.raises(
        PlanError, match=r"region 2: the copy of .* reads what that region does not receive but copies itself"
    ):
        check_plan(with_value(plan, row, src_region=1), *tables)


@pytest.mark.parametrize(
    ("kind", "instance", "rank", "region", "values", "message"),
    [
        (Kind.SEND, "a", 0, 0, {"src_region": 1}, "from trainer rank 0 region 1 takes what that region does not hold"),
        (Kind.SEND, "a", 0, 0, {"src_rank": 1}, "from trainer rank 1 region 0 takes what that region does not hold"),
        (Kind.SEND, "a", 0, 0, {"src_rank": 2}, "from trainer rank 2 region 0 takes what that region does not hold"),
        (Kind.SEND, "a", 0, 0, {"src_rank": -1}, "from trainer rank -1 region 0 takes what that region does not hold"),
        (Kind.SEND, "a", 0, 0, {"src_region": 9}, "region 9 takes what that region does not hold"),
        (Kind.SEND, "a", 0, 0, {"offset": (1, 0)}, r"the send of \[1:5, 0:4\] .* takes what that region does not hold"),
        (
            Kind.SEND,
            "a",
            0,
            0,
            {"offset": (-1, 0)},
            r"the send of \[-1:3, 0:4\] .* does not lie in the region it writes",
        ),
        (Kind.SEND, "a", 0, 0, {"size": (3, 4)}, "only 28 of 32 elements are written"),
        (Kind.SEND, "b", 0, 1, {"dst_region": 2}, "b rank 0 region 2: .* does not lie in the region it writes"),
        (Kind.SEND, "b", 0, 1, {"dst_region": 0}, "b rank 0 region 0: .* does not lie in the region it writes"),
        (Kind.SEND, "b", 0, 1, {"dst_rank": 1}, "b rank 1 region 1: .* does not lie in the region it writes"),
        (Kind.SEND, "b", 0, 1, {"dst_party": 1}, "overlaps|does not lie in the region it writes"),
        (Kind.SEND, "b", 0, 1, {"tensor": 1}, "'v', b rank 0 region 1: .* does not lie in the region it writes"),
        (Kind.SEND, "b", 0, 1, {"tensor": 2}, "has tensor 2, which is out of range"),
        (Kind.SEND, "b", 0, 1, {"dst_party": 3}, "has dst_party 3, which is out of range"),
        (Kind.SEND, "b", 0, 1, {"kind": 3}, "has kind 3, which is out of range"),
        (Kind.SEND, "b", 0, 1, {"src_party": 1}, "has src_party 1, which is out of range"),
        (Kind.SEND, "b", 0, 1, {"size": (0, 4)}, r"has size \[0, 4\], which is out of range"),
        (
            Kind.COPY,
            "a",
            0,
            2,
            {"src_region": 1},
            "the copy of .* from a rank 0 region 1 takes what that region does not",
        ),
        (Kind.COPY, "a", 0, 2, {"src_region": 2}, "reads what that region does not receive but copies itself"),
        (Kind.COPY, "a", 0, 2, {"src_rank": 1}, "from a rank 1 region 0 has its source on another rank"),
        (Kind.COPY, "a", 0, 2, {"src_party": 2}, "from b rank 0 region 0 has its source on another rank"),
        (Kind.COPY, "a", 0, 2, {"dst_region": 0}, "a rank 0 region 0: the copy of .* overlaps the send of"),
        (
            Kind.COPY,
            "a",
            0,
            2,
            {"dst_region": 1},
            "a rank 0 region 1: the copy of .* does not lie in the region it writes",
        ),
    ],
)
def test_one_wrong_value_is_seen(plan, tables, kind, instance, rank, region, values, message):
    with pytest.raises(PlanError, match=message) as caught:
        check_plan(with_value(plan, find(plan, kind, instance, rank, region), **values), *tables)
    assert "\n" not in str(caught.value)


def test_swapped_experts_are_seen():
    """Two tensors of one shape exchanged: every byte is written, only in the wrong place."""
    specs = {"experts.0": TensorSpec((4,), "bfloat16"), "experts.1": TensorSpec((4,), "bfloat16")}
    ranks = [[Region("experts.0", (0,), (4,)), Region("experts.1", (0,), (4,))]]
    tables = tables_of(specs, ranks), {"a": tables_of(specs, ranks)}
    plan = plan_transfer(*tables)
    with pytest.raises(
        PlanError, match=r"tensor 'experts.0', a rank 0 region 1: the send .* does not lie in the region it writes"
    ):
        check_plan(replace(plan, operations=replace(plan.operations, dst_region=np.array([1, 0]))), *tables)
    with pytest.raises(
        PlanError, match=r"'experts.0', .* trainer rank 0 region 1 takes what that region does not hold"
    ):
        check_plan(replace(plan, operations=replace(plan.operations, src_region=np.array([1, 0]))), *tables)


def test_relays_are_followed(plan, tables):
    """b receives v from a: right from the region that a was sent, wrong from one that a copied itself."""
    row = find(plan, Kind.SEND, "b", 0, 0)
    relayed = {"kind": Kind.RELAY, "src_party": 1, "src_rank": 1}
    check_plan(with_value(plan, row, **relayed, src_region=1), *tables)
    with pytest.raises(
        PlanError, match="rank 1 region 2 passes on what that region does not receive but copies itself"
    ):
        check_plan(with_value(plan, row, **relayed, src_region=2), *tables)
    with pytest.raises(PlanError, match="from a rank 1 region 0 takes what that region does not hold"):
        check_plan(with_value(plan, row, **relayed, src_region=0), *tables)


def test_a_plan_for_other_tables_is_seen(plan, tables):
    trainer, instances = tables
    moved = tables_of(SPECS, [[V_ALL, W_ALL, W_ALL], [W_ALL, V_ALL, V_ALL]])
    with pytest.raises(PlanError, match="made for other tables of a "):
        check_plan(plan, trainer, instances | {"a": moved})
    with pytest.raises(PlanError, match="made for other tables of the trainer"):
        check_plan(plan, trainer[::-1], instances)
    with pytest.raises(PlanError, match="the plan is for instances"):
        check_plan(plan, trainer, {"a": instances["a"]})
    with pytest.raises(PlanError, match="the plan's tensors are not those of the tables"):
        check_plan(replace(plan, tensors=tables_of(SPECS, [[V_ALL]])[0].tensors), trainer, instances)


def test_columns_of_different_length_are_seen(plan, tables):
    short = replace(plan.operations, dst_region=plan.operations.dst_region[:-1])
    with pytest.raises(PlanError, match=r"column dst_region of the operations has shape \(11,\), not \(12,\)"):
        check_plan(replace(plan, operations=short), *tables)


def test_a_wrong_dtype_is_seen(plan, tables):
    *parties, b = plan.parties
    broken = replace(plan, parties=(*parties, replace(b, dtype=b.dtype + np.array([1, 0]))))
    with pytest.raises(PlanError, match="tensor 'w': the plan has another dtype in b"):
        check_plan(broken, *tables)


def digest_row(plan: TransferPlan, party: int, rank: int, region: int) -> int:
    d = plan.digests
    return int(np.flatnonzero((d.party == party) & (d.rank == rank) & (d.region == region))[0])


@pytest.mark.parametrize(
    ("where", "values", "message"),
    [
        ((1, 0, 0), {"region": 1}, "'w', a rank 0 region 1: the digest of .* does not lie in that region"),
        ((1, 0, 0), {"rank": 2}, "a rank 2 region 0: the digest of .* does not lie in that region"),
        ((1, 0, 0), {"size": (7, 4)}, "a rank 0 region 0: a part of it is in no digest"),
        ((1, 0, 0), {"region": 2}, r"a rank 0 region 2: the digest of \[0:8, 0:4\] overlaps that of \[0:8, 0:4\]"),
        ((1, 0, 0), {"dtype": 1}, "is in float32, which is not the dtype there"),
        ((1, 0, 0), {"dtype": 99}, "has dtype 99, which is out of range"),
        ((1, 0, 0), {"cell": 1}, "which is another box on rank"),
        ((1, 0, 0), {"cell": 9}, r"the digest of \[0:8, 0:4\] overlaps that of \[0:8, 0:4\]"),
        ((0, 0, 0), {"region": 1}, "'w', the trainer rank 0 region 1: the digest of .* does not lie in that region"),
        ((0, 0, 0), {"size": (3, 4)}, "tensor 'w': the digests of the trainer do not cover it"),
        ((0, 0, 0), {"dtype": 1}, "tensor 'w': the digests of the trainer do not cover it"),
        ((0, 0, 0), {"cell": 1}, "which is another box on rank"),
        ((0, 0, 0), {"tensor": 7}, "has tensor 7, which is out of range"),
    ],
)
def test_one_wrong_digest_row_is_seen(plan, tables, where, values, message):
    row = digest_row(plan, *where)
    columns = {}
    for name, value in values.items():
        columns[name] = getattr(plan.digests, name).copy()
        columns[name][row] = value
    with pytest.raises(PlanError, match=message):
        check_plan(replace(plan, digests=replace(plan.digests, **columns)), *tables)


def test_every_dropped_digest_is_seen(plan, tables):
    everything = np.arange(len(plan.digests))
    for row in everything:
        with pytest.raises(PlanError, match=r"in no digest|do not cover it"):
            check_plan(replace(plan, digests=plan.digests.take(np.delete(everything, row))), *tables)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 2**32), st.sampled_from(["drop", "double", "value"]))
def test_what_the_judge_refuses_the_check_refuses(seed: int, where: int, how: str):
    """Random damage to random plans: the vectorised proof and the judge, who plays the plan, agree."""
    pair = random_pair(seed)
    tables = pair.tables()
    plan = plan_transfer(*tables)
    if not len(plan.operations):
        return
    row = where % len(plan.operations)
    everything = np.arange(len(plan.operations))
    if how == "drop":
        broken = with_rows(plan, np.delete(everything, row))
    elif how == "double":
        broken = with_rows(plan, [*everything, row])
    else:
        o = plan.operations
        name = ["src_rank", "src_region", "dst_rank", "dst_region", "offset", "size"][where // 7 % 6]
        value = getattr(o, name)[row].copy()
        if value.ndim:
            value[where // 50 % len(value)] += 1 if name == "offset" or (value > 1).any() else 0
        else:
            value = value + (1 if where // 50 % 2 or value == 0 else -1)
        broken = with_value(plan, row, **{name: value})
    try:
        judge(pair, broken)
        fine = True
    except (AssertionError, IndexError, ValueError):
        fine = False
    if fine:
        check_plan(broken, *tables)
    else:
        with pytest.raises(PlanError):
            check_plan(broken, *tables)


@pytest.mark.parametrize("column", ["dst_region", "src_region", "src_rank", "offset", "kind"])
def test_a_wrong_row_in_the_last_of_equal_instances_is_seen(column):
    """Equal instances are proved once; each row of each of them counts all the same."""
    specs = {"w": SPECS["w"], "v": SPECS["v"]}
    trainer = tables_of(specs, [[W_ALL, V_ALL], [V_ALL, W_ALL]])
    instances = {name: tables_of(specs, [[W_ALL, V_ALL, W_ALL]]) for name in "abc"}
    plan = plan_transfer(trainer, instances)
    check_plan(plan, trainer, instances)
    values = {"dst_region": 1, "src_region": 1, "src_rank": 2, "offset": (1, 0), "kind": Kind.SEND}
    kind = Kind.COPY if column in ("kind", "src_region") else Kind.SEND
    rows = np.flatnonzero((plan.operations.dst_party == 3) & (plan.operations.kind == kind))
    name = plan.tensors.names.index("w")
    row = int(rows[plan.operations.tensor[rows] == name][0])
    with pytest.raises(PlanError, match=r"'w', c rank 0|elements are written|has src_party"):
        check_plan(with_value(plan, row, **{column: values[column]}), trainer, instances)


def test_a_wrong_digest_in_the_last_of_equal_instances_is_seen():
    specs = {"w": SPECS["w"], "v": SPECS["v"]}
    trainer = tables_of(specs, [[W_ALL, V_ALL]])
    instances = {name: tables_of(specs, [[W_ALL, V_ALL, W_ALL]]) for name in "abc"}
    plan = plan_transfer(trainer, instances)
    everything = np.arange(len(plan.digests))
    for row in np.flatnonzero(plan.digests.party == 3).tolist():
        with pytest.raises(PlanError, match=r"c rank 0 region \d: a part of it is in no digest"):
            check_plan(replace(plan, digests=plan.digests.take(np.delete(everything, row))), trainer, instances)
