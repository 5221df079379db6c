"""Reports of ranks become one layout per instance, or an error that names what does not fit."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_support import TINY, moe_instance, moe_report

from weightcast.gateway.layouts.merge import merge_instance, merge_trainer
from weightcast.transfer.errors import AgreementError, CoverageError, LayoutError, WeightcastError
from weightcast.transfer.layout.placement import ExpertPlacement, RankPlacement
from weightcast.transfer.layout.tables import NO_SLOT, LayoutNotes, RankReport, Region, RegionTable, TensorSpec

W = TensorSpec((4, 4), "bfloat16")
PAIR = ExpertPlacement(np.array([[0, 1, 2, 3, 3, 0], [3, 2, 1, 0, 0, 1]]), num_logical=4, ep_size=2)
"""Layer 0: rank 1 has expert 3 twice; layer 1: rank 1 has expert 0 twice."""


def report(rank: int, world: int, regions: list[Region], specs: dict[str, TensorSpec] | None = None) -> RankReport:
    table = RegionTable.from_regions(specs or {r.tensor: W for r in regions}, regions)
    return RankReport(rank, world, f"host-{rank}", table)


def whole(tensor: str, slot: int = NO_SLOT) -> Region:
    return Region(tensor, (0, 0), (4, 4), slot)


def rows(tensor: str, first: int, last: int, slot: int = NO_SLOT) -> Region:
    return Region(tensor, (first, 0), (last - first, 4), slot)


def moe(**options: bool) -> list[RankReport]:
    """Both ranks of an instance with PAIR."""
    return [moe_report(TINY, rank, PAIR, **options) for rank in (0, 1)]


def with_regions(found: RankReport, change: Callable[[list[Region]], list[Region]]) -> RankReport:
    """A report with other regions, its tensors those of the regions."""
    specs = found.table.tensors.specs()
    regions = change([found.table.region(row) for row in range(len(found.table))])
    # A new name has the shape of the first region that has it.
    used = {r.tensor: specs.get(r.tensor, TensorSpec(r.size, "bfloat16")) for r in reversed(regions)}
    return dataclasses.replace(found, table=RegionTable.from_regions(used, regions))


def with_notes(found: RankReport, **changes: Any) -> RankReport:
    return dataclasses.replace(found, notes=dataclasses.replace(found.notes, **changes))


# ---- ranks


def test_ranks_in_any_order() -> None:
    reports = moe_instance(TINY, 4, 4)
    shuffled = random.Random(1).sample(reports, 4)
    layout = merge_instance("rollout-0", shuffled)
    assert layout.tables == tuple(r.table for r in reports)
    assert layout.hosts == tuple(r.host for r in reports)
    assert layout.fingerprint == merge_instance("rollout-1", reports).fingerprint
    assert layout.world_size == 4


def test_layout_classes() -> None:
    one, other = moe_instance(TINY, 2, 2, seed=1), moe_instance(TINY, 2, 2, seed=2)
    assert merge_instance("a", one).fingerprint == merge_instance("b", one).fingerprint
    assert merge_instance("a", one).fingerprint != merge_instance("b", other).fingerprint


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ([], "no rank of {} reported"),
        ([(0, 3), (2, 3)], "of the 3 ranks of {} these did not report: 1"),
        ([(0, 2), (1, 2), (1, 2)], r"rank 1 of {} reported twice \(hosts host-1 and host-1\)"),
        ([(0, 2), (1, 4)], "rank 1 of {} says there are 4 ranks, rank 0 of {} says 2"),
        ([(0, 2), (5, 2)], r"rank 5 of {} is not in 0\.\.1"),
        ([(0, 2), (-1, 2)], r"rank -1 of {} is not in 0\.\.1"),
    ],
)
def test_ranks_that_do_not_fit(ranks: list[tuple[int, int]], said: str) -> None:
    reports = [report(rank, world, [whole("a")]) for rank, world in ranks]
    with pytest.raises(LayoutError, match=said.replace("{}", "rollout-0")):
        merge_instance("rollout-0", reports)
    with pytest.raises(LayoutError, match=said.replace("{}", "the trainer")):
        merge_trainer(reports)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (TensorSpec((4, 8), "bfloat16"), r"shape \[4, 4\] on rank 0 of rollout-0 and shape \[4, 8\] on rank 2"),
        (TensorSpec((4, 4, 1), "bfloat16"), r"shape \[4, 4\] on rank 0 of rollout-0 and shape \[4, 4, 1\] on rank 2"),
        (TensorSpec((4, 4), "float32"), r"tensor 'a' has dtype bfloat16 on rank 0 of .* and dtype float32 on rank 2"),
    ],
)
def test_ranks_that_disagree_about_a_tensor(spec: TensorSpec, said: str) -> None:
    odd = report(2, 3, [Region("a", (0,) * len(spec.shape), spec.shape)], {"a": spec})
    with pytest.raises(LayoutError, match=said):
        merge_instance("rollout-0", [odd, report(1, 3, [whole("b")]), report(0, 3, [whole("a")])])


# ---- coverage


def test_boxes_of_all_ranks_make_up_a_tensor() -> None:
    reports = [report(0, 2, [rows("a", 0, 3)]), report(1, 2, [rows("a", 2, 4), whole("b")])]
    layout = merge_instance("rollout-0", reports)
    assert layout.tensors.names == ("a", "b")
    assert merge_trainer(reports).tensors.names == ("a", "b")


def test_a_part_that_no_rank_holds() -> None:
    reports = [report(0, 2, [rows("a", 0, 2)]), report(1, 2, [rows("a", 3, 4)])]
    with pytest.raises(CoverageError, match=r"a\[2:3, 0:4\] of shape \[4, 4\]: on no rank of rollout-0"):
        merge_instance("rollout-0", reports)
    with pytest.raises(CoverageError, match=r"a\[2:3, 0:4\] of shape \[4, 4\]: on no trainer rank"):
        merge_trainer(reports)


def test_overlaps_do_not_stand_in_for_a_gap() -> None:
    reports = [report(0, 2, [rows("a", 0, 2)]), report(1, 2, [rows("a", 0, 2)])]
    with pytest.raises(CoverageError, match=r"a\[2:4, 0:4\]"):
        merge_instance("rollout-0", reports)


def test_one_instance_does_not_cover_for_another() -> None:
    with pytest.raises(CoverageError, match="on no rank of rollout-0"):
        merge_instance("rollout-0", [report(0, 1, [rows("a", 0, 2)])])
    merge_instance("rollout-1", [report(0, 1, [whole("a")])])


def catalog_of(experts: range) -> dict[str, TensorSpec]:
    parts = ("gate_proj", "up_proj", "down_proj")
    names = [f"model.layers.{la}.mlp.experts.{e}.{p}.weight" for la in range(48) for e in experts for p in parts]
    return {name: W for name in names}


def test_missing_names_are_said_in_ranges() -> None:
    held = report(0, 1, [whole(name) for name in catalog_of(range(32))])
    said = "^layers 0-47, experts 32-127, gate_proj/up_proj/down_proj: on no rank of rollout-0; LayoutNotes\\(left_out="
    with pytest.raises(CoverageError, match=said):
        merge_instance("rollout-0", [held], catalog_of(range(128)))


def test_names_the_trainer_lacks() -> None:
    held = report(0, 1, [whole("a"), whole("b")])
    with pytest.raises(CoverageError, match=r"^b: on rollout-0, but on no trainer rank, so it would never be updated$"):
        merge_instance("rollout-0", [held], {"a": W})


def test_names_left_out_on_purpose() -> None:
    held = with_notes(report(0, 2, [whole("a")]), left_out=(("mtp", "MTP layers are not loaded"),))
    layout = merge_instance("rollout-0", [held, report(1, 2, [whole("a")])], {"a": W, "mtp": W})
    assert layout.left_out == {"mtp": "MTP layers are not loaded"}


def test_left_out_on_one_rank_and_held_in_part_by_another() -> None:
    held = with_notes(report(0, 2, [whole("a")]), left_out=(("b", "elsewhere"),))
    with pytest.raises(CoverageError, match=r"b\[2:4, 0:4\]"):
        merge_instance("rollout-0", [held, report(1, 2, [rows("b", 0, 2)])], {"a": W, "b": W})


def test_shapes_that_the_trainer_has_otherwise() -> None:
    catalog = {"a": TensorSpec((8, 4), "float32")}
    with pytest.raises(LayoutError, match=r"'a' has shape \[8, 4\] on the trainer and \[4, 4\] on rollout-0"):
        merge_instance("rollout-0", [report(0, 1, [whole("a")])], catalog)


def test_another_dtype_than_the_trainer_is_no_fault() -> None:
    merge_instance("rollout-0", [report(0, 1, [whole("a")])], {"a": TensorSpec((4, 4), "float32")})


@pytest.mark.parametrize("held", ["int8", "uint8", "int32", "bool", "float8_e8m0fnu", "int64"])
def test_dtypes_between_which_values_would_change_unseen(held: str) -> None:
    """Only what cannot become bfloat16, or becomes another number there."""
    catalog = {"a": TensorSpec((4, 4), held), "b": TensorSpec((4, 4), held)}
    ranks = [report(0, 1, [whole("a"), whole("b")])]
    if held == "float8_e8m0fnu":  # powers of two, all of which bfloat16 has
        merge_instance("rollout-0", ranks, catalog)
        return
    with pytest.raises(LayoutError) as caught:
        merge_instance("rollout-0", ranks, catalog)
    assert str(caught.value) == (
        f"tensor 'a' has dtype {held} on the trainer and bfloat16 on rollout-0: a cast would change its values unseen; "
        "load the engine with the trainer's dtype, or convert the tensor on the trainer; 1 tensors more are like it"
    )


# ---- expert slots

EXPERT = "model.layers.{}.mlp.experts.{}.{}.weight"


def test_every_replica_is_kept() -> None:
    layout = merge_instance("rollout-0", moe())
    held = [layout.tables[1].region(row) for row in range(len(layout.tables[1]))]
    assert [r.slot for r in held if r.tensor == EXPERT.format(0, 3, "up_proj")] == [0, 1]
    assert layout.placement == PAIR


def drop(found: RankReport, tensor: str, slot: int) -> RankReport:
    return with_regions(found, lambda rs: [r for r in rs if not (r.tensor == tensor and r.slot == slot)])


def rename(found: RankReport, old: str, new: str) -> RankReport:
    return with_regions(found, lambda rs: [r._replace(tensor=r.tensor.replace(old, new)) for r in rs])


def swap(found: RankReport) -> RankReport:
    """Slots 0 and 1 of layer 0 exchanged."""

    def other(region: Region) -> Region:
        inside = ".layers.0." in region.tensor and region.slot in (0, 1)
        return region._replace(slot=1 - region.slot) if inside else region

    return with_regions(found, lambda regions: [other(r) for r in regions])


def cut(found: RankReport, tensor: str, slot: int) -> RankReport:
    """Half of one region of a slot gone."""

    def half(region: Region) -> Region:
        mine = region.tensor == tensor and region.slot == slot
        return region._replace(size=(region.size[0] // 2, *region.size[1:])) if mine else region

    return with_regions(found, lambda regions: [half(r) for r in regions])


def replace_map(found: RankReport, whole_map: ExpertPlacement, storage_rank: int | None = None) -> RankReport:
    assert found.placement is not None
    rank = found.placement.storage_rank if storage_rank is None else storage_rank
    made = RankPlacement(whole_map, rank, whole_map.slots_per_rank, whole_map.num_physical)
    return dataclasses.replace(found, placement=made)


OTHER_MAP = ExpertPlacement(np.array([[0, 1, 2, 3, 3, 0], [3, 2, 1, 0, 1, 0]]), num_logical=4, ep_size=2)


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        # The slot that SGLang's own loader forgets: the second replica on one rank.
        (lambda a, b: [a, with_regions(b, lambda rs: [r for r in rs if ".layers.0." not in r.tensor or r.slot != 1])],
         CoverageError, "layers 0, experts 3, gate_proj/up_proj/down_proj: not in slot 1 of rank 1 of rollout-0"),
        (lambda a, b: [a, drop(b, EXPERT.format(0, 3, "up_proj"), 1)],
         CoverageError, "layers 0, experts 3, up_proj: not in slot 1 of rank 1 of rollout-0"),
        (lambda a, b: [a, cut(b, EXPERT.format(0, 3, "up_proj"), 1)],
         CoverageError, r"layers.0.mlp.experts.3.up_proj.weight': slot 1 of rank 1 of rollout-0 holds only a part"),
        (lambda a, b: [swap(a), b],
         AgreementError, "rank 0 of rollout-0, layer 0, slot 1: the placement has expert 1.*, the region has expert 0"),
        (lambda a, b: [a, rename(b, "layers.1.mlp.experts.1.", "layers.1.mlp.experts.2.")],
         AgreementError, "rank 1 of rollout-0, layer 1, slot 2: the placement has expert 1.*, the region has expert 2"),
        (lambda a, b: [a, rename(b, "experts.1.", "other.")],
         AgreementError, r"rank 1 of rollout-0, layer 1, slot 2: .* the region has no expert number"),
        (lambda a, b: [a, replace_map(b, OTHER_MAP)],
         LayoutError, "placement of rank 1 of rollout-0 .* of rank 0: layer 1, physical slot 4 holds expert 1, and 0"),
        (lambda a, b: [a, replace_map(b, ExpertPlacement(PAIR.physical_to_logical[:1], 4, 2))],
         LayoutError, "differs from that of rank 0: 1 layers and 2"),
        (lambda a, b: [replace_map(a, OTHER_MAP), replace_map(b, OTHER_MAP)],
         AgreementError, "rank 1 of rollout-0, layer 1, slot 1: the placement has expert 1.*, the region has expert 0"),
        (lambda a, b: [a, dataclasses.replace(a, rank=1)],
         CoverageError, "the experts of storage rank 1 of 2 are on no rank of rollout-0"),
        (lambda a, b: [replace_map(a, PAIR, 1), replace_map(b, PAIR, 0)],
         AgreementError, "rank 0 of rollout-0, layer 0, slot 0: the placement has expert 3.*, the region has expert 0"),
        (lambda a, b: [a, with_regions(b, lambda rs: [r._replace(slot=7 if r.slot == 2 else r.slot) for r in rs])],
         LayoutError, "rank 1 of rollout-0 has 3 slots, but a region of .* in slot 7"),
        (lambda a, b: [a, dataclasses.replace(b, placement=None)],
         CoverageError, "storage rank 1 of 2 are on no rank"),
        # Dispatch: expert 0 sent to slot 1 of layer 0, which holds expert 1; a table that differs.
        (lambda a, b: [with_notes(a, dispatch=np.array([[0, 0, 1]])), b],
         AgreementError, "rank 0 of rollout-0: layer 0: the dispatcher may send logical expert 0 to physical slot 1"),
        (lambda a, b: [with_notes(a, dispatch=a.notes.dispatch[1:]), b],
         AgreementError, "rollout-0: layer 0, logical expert 0: the dispatcher of rank"),
        (lambda a, b: [with_notes(a, dispatch_shared=False), b],
         AgreementError, "rank 0 of rollout-0 says that dispatch tables may differ"),
    ],
)  # fmt: skip
def test_slots_that_do_not_fit(
    change: Callable[[RankReport, RankReport], list[RankReport]], error: type[WeightcastError], said: str
) -> None:
    with pytest.raises(error, match=said) as caught:
        merge_instance("rollout-0", change(*moe()))
    assert "\n" not in str(caught.value)


def test_dispatch_may_differ_between_ranks_with_an_all_to_all_backend() -> None:
    a, b = moe()
    near = with_notes(a, dispatch=a.notes.dispatch[1:], dispatch_shared=False)
    merge_instance("rollout-0", [near, with_notes(b, dispatch_shared=False)])


def test_a_shared_slot_is_in_no_map() -> None:
    a, b = moe()
    reports = []
    for found in (a, b):
        assert found.placement is not None
        placed = dataclasses.replace(found, placement=dataclasses.replace(found.placement, num_shared=1))
        extra = Region("model.layers.0.mlp.shared_experts.up_proj.weight", (0, 0), (4, 8), 3)
        reports.append(with_regions(placed, lambda regions, extra=extra: [*regions, extra]))
    merge_instance("rollout-0", reports)


def test_experts_cut_over_two_ranks_of_one_storage_rank() -> None:
    """tp 4, ep 2: ranks 0 and 1 store halves of the slots of storage rank 0."""

    def half(rank: int) -> RankReport:
        found = moe_report(TINY, rank // 2, PAIR)

        def part(region: Region) -> Region:
            if region.slot == NO_SLOT:
                return region
            size = region.size[0] // 2
            return region._replace(offset=(rank % 2 * size, 0), size=(size, region.size[1]))

        return with_regions(dataclasses.replace(found, rank=rank, world_size=4), lambda rs: [part(r) for r in rs])

    reports = [half(rank) for rank in range(4)]
    merge_instance("rollout-0", reports)
    # The other replica of expert 3 on the same rank is whole and must not stand in for the half that is gone.
    reports[3] = drop(reports[3], EXPERT.format(0, 3, "up_proj"), 1)
    with pytest.raises(CoverageError, match=r"3.up_proj.weight': slot 1 of rank 2 of rollout-0 holds only a part"):
        merge_instance("rollout-0", reports)


def test_experts_stacked_in_one_tensor() -> None:
    """Checkpoints that have all experts of a layer in one tensor: the expert is the index in dimension 0."""
    spec = {"model.layers.0.mlp.experts.down_proj": TensorSpec((4, 2, 3), "bfloat16")}
    placement = ExpertPlacement(PAIR.physical_to_logical[:1], 4, 2)

    def stacked(rank: int, experts: list[int]) -> RankReport:
        regions = [Region(next(iter(spec)), (e, 0, 0), (1, 2, 3), slot) for slot, e in enumerate(experts)]
        return dataclasses.replace(report(rank, 2, regions, spec), placement=RankPlacement(placement, rank, 3, 6))

    merge_instance("rollout-0", [stacked(0, [0, 1, 2]), stacked(1, [3, 3, 0])])
    with pytest.raises(AgreementError, match=r"rank 1 of rollout-0, layer 0, slot 1: the placement has expert 3"):
        merge_instance("rollout-0", [stacked(0, [0, 1, 2]), stacked(1, [3, 2, 0])])
    with pytest.raises(CoverageError, match=r"layers 0, mlp.experts.down_proj: not in slot 2 of rank 1"):
        merge_instance("rollout-0", [stacked(0, [0, 1, 2]), stacked(1, [3, 3])])


def test_layers_past_the_map_have_the_identity() -> None:
    short = ExpertPlacement(np.array([[0, 1, 2, 3]]), num_logical=4, ep_size=2)
    full = ExpertPlacement.identity(2, 4, 2)
    reports = [replace_map(moe_report(TINY, rank, full, dispatch=False), short) for rank in (0, 1)]
    merge_instance("rollout-0", reports)
    with pytest.raises(AgreementError, match="layer 1, slot 1"):
        merge_instance("rollout-0", [rename(reports[0], "1.mlp.experts.1.", "1.mlp.experts.0."), reports[1]])


def test_pipeline_stages_hold_different_layers() -> None:
    a, b = moe()

    def stage(found: RankReport, layer: int) -> RankReport:
        rank = found.rank + 2 * layer
        kept = with_regions(found, lambda rs: [r for r in rs if f".layers.{layer}." in r.tensor])
        return dataclasses.replace(kept, rank=rank, world_size=4, notes=LayoutNotes())

    reports = [stage(found, layer) for layer in (0, 1) for found in (a, b)]
    assert merge_instance("rollout-0", reports).world_size == 4
    reports[3] = with_regions(reports[3], lambda rs: [r for r in rs if r.slot != 2])
    with pytest.raises(CoverageError, match=r"layers 1, experts 1, .*: not in slot 2 of rank 1,3"):
        merge_instance("rollout-0", reports)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_lost_slot_or_swap_is_found(draw: st.DataObject) -> None:
    seed = draw.draw(st.integers(0, 1000))
    reports = moe_instance(TINY, 2, 2, seed=seed)
    merge_instance("rollout-0", reports)
    victim = draw.draw(st.integers(0, 1))
    table = reports[victim].table
    rows_in_slots = np.flatnonzero(table.slot != NO_SLOT).tolist()
    row = draw.draw(st.sampled_from(rows_in_slots))
    kept = with_regions(reports[victim], lambda rs: rs[:row] + rs[row + 1 :])
    with pytest.raises((CoverageError, AgreementError)):
        merge_instance("rollout-0", [kept, reports[1 - victim]])
