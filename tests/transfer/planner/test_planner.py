"""Plans judged element by element, and literal layouts with literal operations."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_support import PairLayout, judge, random_pair, tables_of

from weightcast.transfer.errors import CoverageError, LayoutError, PlanError
from weightcast.transfer.layout.dtypes import dtype_code
from weightcast.transfer.layout.tables import Region, TensorSpec
from weightcast.transfer.plan.operations import Kind, TransferPlan
from weightcast.transfer.plan.traffic import traffic_of
from weightcast.transfer.planner import planner
from weightcast.transfer.planner.planner import plan_transfer

W = {"w": TensorSpec((8, 4), "bfloat16")}
TOP, BOTTOM, ALL = Region("w", (0, 0), (4, 4)), Region("w", (4, 0), (4, 4)), Region("w", (0, 0), (8, 4))


def planned(trainer, instances, specs=W, **options) -> TransferPlan:
    return plan_transfer(
        tables_of(specs, trainer), {name: tables_of(specs, ranks) for name, ranks in instances.items()}, **options
    )


def operations(plan: TransferPlan) -> list[tuple]:
    """(kind, instance, source rank and region, destination rank and region, offset, size) of each operation."""
    o = plan.operations
    return [
        (
            Kind(int(o.kind[i])).name,
            plan.parties[int(o.dst_party[i])].name,
            (int(o.src_rank[i]), int(o.src_region[i])),
            (int(o.dst_rank[i]), int(o.dst_region[i])),
            tuple(o.offset[i].tolist()),
            tuple(o.size[i].tolist()),
        )
        for i in range(len(o))
    ]


def test_whole_to_shards():
    assert operations(planned([[ALL]], {"a": [[TOP], [BOTTOM]]})) == [
        ("SEND", "a", (0, 0), (0, 0), (0, 0), (4, 4)),
        ("SEND", "a", (0, 0), (1, 0), (4, 0), (4, 4)),
    ]


def test_shards_to_whole():
    assert operations(planned([[TOP], [BOTTOM]], {"a": [[ALL]]})) == [
        ("SEND", "a", (0, 0), (0, 0), (0, 0), (4, 4)),
        ("SEND", "a", (1, 0), (0, 0), (4, 0), (4, 4)),
    ]


def test_rows_to_columns():
    left, right = Region("w", (0, 0), (8, 2)), Region("w", (0, 2), (8, 2))
    assert operations(planned([[TOP], [BOTTOM]], {"a": [[left], [right]]})) == [
        ("SEND", "a", (0, 0), (0, 0), (0, 0), (4, 2)),
        ("SEND", "a", (1, 0), (0, 0), (4, 0), (4, 2)),
        ("SEND", "a", (0, 0), (1, 0), (0, 2), (4, 2)),
        ("SEND", "a", (1, 0), (1, 0), (4, 2), (4, 2)),
    ]


def test_three_to_two_uneven():
    thirds = [[Region("w", (0, 0), (3, 4))], [Region("w", (3, 0), (3, 4))], [Region("w", (6, 0), (2, 4))]]
    assert operations(planned(thirds, {"a": [[TOP], [BOTTOM]]})) == [
        ("SEND", "a", (0, 0), (0, 0), (0, 0), (3, 4)),
        ("SEND", "a", (1, 0), (0, 0), (3, 0), (1, 4)),
        ("SEND", "a", (1, 0), (1, 0), (4, 0), (2, 4)),
        ("SEND", "a", (2, 0), (1, 0), (6, 0), (2, 4)),
    ]


def test_instances_are_not_merged():
    plan = planned([[TOP], [BOTTOM]], {"a": [[TOP], [BOTTOM]], "b": [[TOP], [BOTTOM]]})
    assert operations(plan) == [
        ("SEND", "a", (0, 0), (0, 0), (0, 0), (4, 4)),
        ("SEND", "a", (1, 0), (1, 0), (4, 0), (4, 4)),
        ("SEND", "b", (0, 0), (0, 0), (0, 0), (4, 4)),
        ("SEND", "b", (1, 0), (1, 0), (4, 0), (4, 4)),
    ]


def test_each_instance_has_its_own_layout():
    plan = planned([[ALL]], {"a": [[TOP], [BOTTOM]], "b": [[BOTTOM], [TOP]]})
    assert [(op[1], op[3], op[4]) for op in operations(plan)] == [
        ("a", (0, 0), (0, 0)),
        ("a", (1, 0), (4, 0)),
        ("b", (0, 0), (4, 0)),
        ("b", (1, 0), (0, 0)),
    ]


def test_replicas_on_a_rank_are_received_once_and_copied():
    plan = planned([[ALL]], {"a": [[TOP, BOTTOM, TOP, TOP], [TOP]]})
    assert operations(plan) == [
        ("SEND", "a", (0, 0), (0, 0), (0, 0), (4, 4)),
        ("SEND", "a", (0, 0), (0, 1), (4, 0), (4, 4)),
        ("COPY", "a", (0, 0), (0, 2), (0, 0), (4, 4)),
        ("COPY", "a", (0, 0), (0, 3), (0, 0), (4, 4)),
        ("SEND", "a", (0, 0), (1, 0), (0, 0), (4, 4)),
    ]
    traffic = traffic_of(plan)
    assert (traffic.bytes_sent, traffic.bytes_copied) == (3 * 32, 2 * 32)
    assert (traffic.max_send_bytes, traffic.max_receive_bytes) == (96, 64)


def test_regions_that_overlap_partly_are_received_once():
    low, high = Region("w", (0, 0), (6, 4)), Region("w", (2, 0), (6, 4))
    assert operations(planned([[ALL]], {"a": [[low, high]]})) == [
        ("SEND", "a", (0, 0), (0, 0), (0, 0), (2, 4)),
        ("SEND", "a", (0, 0), (0, 0), (2, 0), (4, 4)),
        ("SEND", "a", (0, 0), (0, 1), (6, 0), (2, 4)),
        ("COPY", "a", (0, 0), (0, 1), (2, 0), (4, 4)),
    ]


def test_data_parallel_copies_share_the_load():
    specs = {f"w{i}": TensorSpec((4,), "float32") for i in range(12)}
    every = [Region(name, (0,), (4,)) for name in specs]
    plan = planned([every] * 4, {"a": [every]}, specs)
    assert traffic_of(plan).trainer_sent.tolist() == [48] * 4


def test_equal_instances_use_different_sources():
    plan = planned([[ALL]] * 4, {name: [[ALL]] for name in "abcd"})
    assert sorted(source for _, _, (source, _), *_ in operations(plan)) == [0, 1, 2, 3]


def test_a_rank_that_alone_holds_something_is_spared_the_rest():
    specs = W | {"v": TensorSpec((8, 4), "bfloat16")}
    v = Region("v", (0, 0), (8, 4))
    plan = planned([[ALL, v], [ALL]], {"a": [[v, ALL]]}, specs)
    assert traffic_of(plan).trainer_sent.tolist() == [64, 64]


def test_the_sender_casts_and_both_dtypes_are_digested():
    trainer = tables_of({"w": TensorSpec((8, 4), "float32")}, [[ALL]])
    instances = {"a": tables_of(W, [[ALL]]), "b": tables_of({"w": TensorSpec((8, 4), "float8_e4m3fn")}, [[ALL]])}
    plan = plan_transfer(trainer, instances)
    bf16, fp8 = dtype_code("bfloat16"), dtype_code("float8_e4m3fn")
    assert [party.dtype.tolist() for party in plan.instances] == [[bf16], [fp8]]
    assert plan.tensors.spec(0).dtype == "float32"
    d = plan.digests
    assert sorted(zip(d.party.tolist(), d.dtype.tolist(), strict=True)) == sorted(
        [(0, bf16), (0, fp8), (1, bf16), (2, fp8)]
    )
    assert sorted(d.cell[d.party == 0].tolist()) == [0, 1]
    assert traffic_of(plan).bytes_sent == 64 + 32


def test_every_copy_on_the_trainer_is_digested():
    """Data-parallel copies that have drifted apart are seen, whichever of them is sent."""
    specs = {f"w{i}": TensorSpec((4,), "float32") for i in range(8)}
    every = [Region(name, (0,), (4,)) for name in specs]
    d = planned([every] * 4, {"a": [every]}, specs).digests
    assert np.bincount(d.rank[d.party == 0]).tolist() == [8, 8, 8, 8]
    assert len(set(d.cell[d.party == 0].tolist())) == 8


@pytest.mark.parametrize("empty", [Region("w", (8, 0), (0, 4)), Region("w", (0, 0), (0, 0))])
def test_empty_regions_get_no_operation(empty):
    plan = planned([[empty, ALL], []], {"a": [[empty], [empty, ALL]]})
    assert operations(plan) == [("SEND", "a", (0, 1), (1, 1), (0, 0), (8, 4))]


def test_scalars_and_tensors_without_elements():
    specs = {"scale": TensorSpec((), "float32"), "none": TensorSpec((0, 4), "bfloat16"), "w": W["w"]}
    rows = [Region("scale", (), ()), Region("none", (0, 0), (0, 4)), ALL]
    plan = planned([rows], {"a": [[*rows, rows[0]]]}, specs, required=list(specs))
    assert [op[0] for op in operations(plan)] == ["SEND", "SEND", "COPY"]


def test_gaps_are_named_with_their_boxes():
    with pytest.raises(CoverageError, match=r"^w\[4:8, 0:4\] of shape \[8, 4\]: on no trainer rank$"):
        planned([[TOP]], {"a": [[ALL]]})
    with pytest.raises(CoverageError, match=r"^w\[0:4, 0:4\] of shape \[8, 4\]: on no rank of b$"):
        planned([[ALL]], {"a": [[ALL]], "b": [[BOTTOM]]})


def test_missing_tensors_are_named_in_ranges():
    specs = {
        f"model.layers.{i}.mlp.experts.{e}.{p}_proj.weight": TensorSpec((2,), "bfloat16")
        for i in range(3)
        for e in range(16)
        for p in ("gate", "up", "down")
    }
    every = [Region(name, (0,), (2,)) for name in specs]
    some = [region for region in every if ".experts.4" not in region.tensor and ".experts.5" not in region.tensor]
    with pytest.raises(CoverageError, match=r"^layers 0-2, experts 4-5, gate_proj/up_proj/down_proj: on no rank of a$"):
        planned([every], {"a": [some]}, specs, required=list(specs))
    with pytest.raises(
        CoverageError, match=r"^layers 0-2, experts 4-5, gate_proj/up_proj/down_proj: on no trainer rank$"
    ):
        planned([some], {"a": [every]}, specs)
    assert len(planned([every], {"a": [some]}, specs).operations) == len(some)


def test_left_out_tensors_may_be_missing_in_that_instance_alone():
    specs = W | {"v": TensorSpec((2,), "bfloat16")}
    trainer = [[ALL, Region("v", (0,), (2,))]]
    planned(trainer, {"a": [[ALL]]}, specs, required=["w", "v"], left_out={"a": ["v"]})
    with pytest.raises(CoverageError, match=r"^v: on no rank of b$"):
        planned(trainer, {"a": [[ALL]], "b": [[ALL]]}, specs, required=["w", "v"], left_out={"a": ["v"]})
    with pytest.raises(LayoutError, match="'c', which is no instance"):
        planned(trainer, {"a": [[ALL]]}, specs, left_out={"c": ["v"]})
    with pytest.raises(LayoutError, match="'x' is required but no rank declares it"):
        planned(trainer, {"a": [[ALL]]}, specs, required=["x"])


def test_shapes_and_dtypes_must_agree():
    def table(shape, dtype="bfloat16"):
        return tables_of({"w": TensorSpec(shape, dtype)}, [[Region("w", (0,) * len(shape), shape)]])[0]

    with pytest.raises(LayoutError, match=r"'w' has shape \[8, 4\] on rank 0 of a and shape \[8, 5\] on rank 1$"):
        plan_transfer([table((8, 4))], {"a": [table((8, 4)), table((8, 5))]})
    with pytest.raises(
        LayoutError, match=r"'w' has shape \[8, 1\] on rank 0 of the trainer and shape \[8\] on rank 1$"
    ):
        plan_transfer([table((8, 1)), table((8,))], {"a": [table((8, 1))]})
    with pytest.raises(LayoutError, match=r"'w' has dtype bfloat16 on rank 0 of a and dtype float32 on rank 1$"):
        plan_transfer([table((8, 4))], {"a": [table((8, 4)), table((8, 4), "float32")]})
    with pytest.raises(
        LayoutError, match=r"'w' has dtype bfloat16 on rank 0 of the trainer and dtype float32 on rank 1$"
    ):
        plan_transfer([table((8, 4)), table((8, 4), "float32")], {"a": [table((8, 4))]})


def test_sides_must_have_ranks():
    table = tables_of(W, [[ALL]])
    with pytest.raises(LayoutError, match="there is no instance"):
        plan_transfer(table, {})
    with pytest.raises(LayoutError, match="the trainer has no ranks"):
        plan_transfer([], {"a": table})
    with pytest.raises(LayoutError, match="a has no ranks"):
        plan_transfer(table, {"a": []})


def without(part, kind, count=None):
    """What an instance receives, without the first rows of a kind."""
    kept = np.setdiff1d(np.arange(part.kind.shape[0]), np.flatnonzero(part.kind == kind)[:count])
    columns = ("kind", "tensor", "row", "source", "offset", "size")
    columns = {name: getattr(part, name)[kept] for name in columns}
    sends = np.flatnonzero(columns["kind"] == Kind.SEND)
    return replace(part, **columns, sends=sends, cell=part.cell[np.isin(part.sends, kept)])


def without_first_receive(part):
    return without(part, Kind.SEND, 1)


def without_copies(part):
    return without(part, Kind.COPY)


def to_the_other_region(part):
    return replace(part, row=part.source)


def shifted(rows):
    return replace(rows, offset=rows.offset + 1)


STAGES = [
    ("bind", without_first_receive, "only 16 of 32 elements are written"),
    ("bind", without_copies, "only 0 of 32 elements are written"),
    ("bind", to_the_other_region, "overlaps the send of"),
    ("instance_rows", lambda o: o.take(np.arange(len(o) - 1)), "tables of 4 rows were made, expected 5"),
    ("instance_rows", lambda o: o.take(np.append(np.arange(len(o)), 0)), "tables of 6 rows and more were made"),
    ("instance_rows", lambda o: o.take(np.append(0, np.arange(len(o) - 1))), "overlaps the send of"),
    ("instance_rows", lambda o: replace(o, src_rank=1 - o.src_rank), "has its source on another rank"),
    ("instance_rows", lambda o: replace(o, src_rank=o.src_rank * 0), "takes what that region does not hold"),
    ("_trainer_digests", lambda rows: rows.take(np.arange(len(rows) - 1)), "digest"),
    ("_trainer_digests", shifted, "digest"),
    ("digest_rows", lambda rows: rows.take(np.arange(1, len(rows))), "rows were made, expected"),
    ("digest_rows", lambda rows: rows.take(np.append(0, np.arange(len(rows) - 1))), "digest"),
    ("digest_rows", shifted, "digest"),
]


@pytest.mark.parametrize(("stage", "breaks", "message"), STAGES)
def test_a_plan_of_a_broken_stage_is_not_given_out(monkeypatch, stage, breaks, message):
    """Every plan is proved before it leaves: whatever stage of the planner is wrong, nobody gets its plan."""
    right = getattr(planner, stage)
    trainer, instances = [[TOP], [BOTTOM]], {"a": [[ALL, ALL], [ALL]]}
    planned(trainer, instances)
    monkeypatch.setattr(planner, stage, lambda *arguments: breaks(right(*arguments)))
    with pytest.raises(PlanError, match=message):
        planned(trainer, instances)


def test_operations_are_sorted_as_documented():
    for seed in range(20):
        pair = random_pair(seed)
        o = plan_transfer(*pair.tables()).operations
        rows = list(
            zip(*(c.tolist() for c in (o.dst_party, o.dst_rank, o.kind, o.tensor, o.offset, o.dst_region)), strict=True)
        )
        assert rows == sorted(rows)


def test_equal_input_gives_an_equal_plan():
    pair = random_pair(7)
    first, second = plan_transfer(*pair.tables()), plan_transfer(*pair.tables())
    for name in first.operations.__slots__:
        assert np.array_equal(getattr(first.operations, name), getattr(second.operations, name))


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32))
def test_random_layouts(seed: int):
    pair = random_pair(seed)
    needed = 0
    for ranks in pair.instances.values():
        for rows in ranks:
            masks: dict[str, np.ndarray] = {}
            for region in rows:
                mask = masks.setdefault(region.tensor, np.zeros(pair.specs[region.tensor].shape, dtype=bool))
                mask[tuple(slice(o, o + s) for o, s in zip(region.offset, region.size, strict=True))] = True
            needed += sum(int(mask.sum()) for mask in masks.values())
    assert judge(pair, plan_transfer(*pair.tables()))["elements"] == needed


def split(shape: tuple[int, int], dim: int, parts: int, part: int) -> tuple[tuple[int, int], tuple[int, int]]:
    size = shape[dim] // parts
    return (size * part, 0) if dim == 0 else (0, size * part), (size, shape[1]) if dim == 0 else (shape[0], size)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]))
def test_expert_and_tensor_parallel_layouts_with_random_maps(seed: int, trainer_tp: int, ep: int, tp: int):
    """Experts over EP x TP with two redundant slots a rank, so that many maps have replicas on one rank."""
    rng = np.random.default_rng(seed)
    experts, layers = 4, 2
    specs = {
        f"model.layers.{i}.mlp.experts.{e}.up_proj.weight": TensorSpec((8, 4), "bfloat16")
        for i in range(layers)
        for e in range(experts)
    }
    names = list(specs)
    trainer = [[Region(name, *split((8, 4), 0, trainer_tp, r)) for name in names] for r in range(trainer_tp)] * 2
    instances = {}
    for instance in ("a", "b"):
        maps = [
            rng.permutation(np.concatenate([np.arange(experts), rng.integers(0, experts, 2 * ep)])).reshape(ep, -1)
            for _ in range(layers)
        ]
        instances[instance] = [
            [
                Region(names[layer * experts + e], *split((8, 4), 1, tp, part), slot)
                for layer in range(layers)
                for slot, e in enumerate(maps[layer][rank].tolist())
            ]
            for rank in range(ep)
            for part in range(tp)
        ]
    pair = PairLayout(specs, trainer, instances, {})
    plan = plan_transfer(*pair.tables(), required=names)
    counts = judge(pair, plan)
    slots = 2 * layers * (experts + 2 * ep) * tp
    distinct = sum(len({(r.tensor, r.offset, r.size) for r in rows}) for ranks in instances.values() for rows in ranks)
    assert counts["copies"] == slots - distinct
    sent = traffic_of(plan).trainer_sent
    assert sent.max() - sent.min() <= 64
