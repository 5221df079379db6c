from __future__ import annotations

from collections.abc import Callable
from dataclasses import FrozenInstanceError
from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightcast.transfer.errors import PlacementError, PlacementIndexError
from weightcast.transfer.layout.placement import ExpertPlacement, RankPlacement

# Two replicas of expert 3, on EP rank 1; then two of expert 0 on rank 0 and two of expert 3 on rank 1.
ONE_PAIR = [0, 1, 2, 3, 3, 0]
TWO_PAIRS = [0, 0, 1, 2, 3, 3]


def placement_of(*rows: list[int], num_logical: int = 4, ep_size: int = 2) -> ExpertPlacement:
    return ExpertPlacement(np.array(rows), num_logical, ep_size)


def slots_of(placement: ExpertPlacement, layer: int, expert: int) -> tuple[int, ...]:
    """Every physical slot of a logical expert, ascending."""
    return tuple(np.flatnonzero(placement.global_slots(layer) == expert).tolist())


def rank_slots(placement: ExpertPlacement, layer: int, expert: int) -> list[tuple[int, int]]:
    """(EP rank, local slot) of every slot of a logical expert."""
    return [divmod(physical, placement.slots_per_rank) for physical in slots_of(placement, layer, expert)]


@st.composite
def placements(draw: st.DrawFn) -> ExpertPlacement:
    """Random maps in which every expert has a slot, as EPLB makes them, in any order of slots."""
    num_logical = draw(st.integers(1, 9))
    ep_size = draw(st.integers(1, 4))
    per_rank = draw(st.integers(-(-num_logical // ep_size), -(-num_logical // ep_size) + 3))
    slots = per_rank * ep_size
    rows = []
    for _ in range(draw(st.integers(1, 4))):
        extra = draw(
            st.lists(st.integers(0, num_logical - 1), min_size=slots - num_logical, max_size=slots - num_logical)
        )
        rows.append(draw(st.permutations([*range(num_logical), *extra])))
    return ExpertPlacement(np.array(rows), num_logical, ep_size)


# ---- literal maps


def test_same_rank_pair_has_both_slots() -> None:
    placement = placement_of(ONE_PAIR)
    assert [slots_of(placement, 0, expert) for expert in range(4)] == [(0, 5), (1,), (2,), (3, 4)]
    assert rank_slots(placement, 0, 3) == [(1, 0), (1, 1)]
    assert rank_slots(placement, 0, 0) == [(0, 0), (1, 2)]
    assert placement.same_rank_pairs().tolist() == [[0, 3, 1, 2]]


def test_two_same_rank_pairs_on_different_ranks() -> None:
    placement = placement_of(TWO_PAIRS)
    assert [slots_of(placement, 0, expert) for expert in range(4)] == [(0, 1), (2,), (3,), (4, 5)]
    assert placement.same_rank_pairs().tolist() == [[0, 0, 0, 2], [0, 3, 1, 2]]
    assert placement.local_experts(0, 0).tolist() == [0, 0, 1]
    assert placement.local_experts(0, 1).tolist() == [2, 3, 3]


def test_pairs_are_counted_per_layer_and_rank() -> None:
    placement = placement_of([0, 0, 0, 1, 2, 3], ONE_PAIR, [0, 1, 2, 0, 1, 3])
    assert placement.same_rank_pairs().tolist() == [[0, 0, 0, 3], [1, 3, 1, 2]]


def test_layers_differ() -> None:
    placement = placement_of(ONE_PAIR, TWO_PAIRS)
    assert (placement.num_layers, placement.num_physical, placement.slots_per_rank) == (2, 6, 3)
    assert slots_of(placement, 0, 0) == (0, 5)
    assert slots_of(placement, 1, 0) == (0, 1)
    assert placement.logical(1, 5) == 3
    assert placement.global_slots(1).tolist() == TWO_PAIRS


def test_layer_past_the_map_is_identity() -> None:
    placement = ExpertPlacement(np.array([[3, 2, 1, 0]]), 4, 2)
    for layer in (1, 61):
        assert [placement.logical(layer, p) for p in range(4)] == [0, 1, 2, 3]
        assert [slots_of(placement, layer, e) for e in range(4)] == [(0,), (1,), (2,), (3,)]
        assert rank_slots(placement, layer, 2) == [(1, 0)]
        assert placement.local_experts(layer, 1).tolist() == [2, 3]
    assert slots_of(placement, 0, 0) == (3,)


def test_identity_goes_round_where_there_are_more_slots_than_experts() -> None:
    placement = placement_of(ONE_PAIR)
    assert placement.global_slots(7).tolist() == [0, 1, 2, 3, 0, 1]
    assert slots_of(placement, 7, 1) == (1, 5)


def test_identity() -> None:
    placement = ExpertPlacement.identity(3, 8, 4)
    assert placement.physical_to_logical.tolist() == [list(range(8))] * 3
    assert placement.same_rank_pairs().shape == (0, 4)


# ---- against a brute-force count


@given(placements())
def test_every_slot_is_on_one_rank_and_found_from_both_ends(placement: ExpertPlacement) -> None:
    for layer in range(placement.num_layers + 1):
        by_rank = [placement.local_experts(layer, rank).tolist() for rank in range(placement.ep_size)]
        assert [*chain(*by_rank)] == placement.global_slots(layer).tolist()
        seen = [pair for e in range(placement.num_logical) for pair in rank_slots(placement, layer, e)]
        assert sorted(seen) == [(r, s) for r in range(placement.ep_size) for s in range(placement.slots_per_rank)]
        for expert in range(placement.num_logical):
            assert all(by_rank[rank][slot] == expert for rank, slot in rank_slots(placement, layer, expert))


@given(placements())
def test_same_rank_pairs_is_the_brute_force_one(placement: ExpertPlacement) -> None:
    expected = [
        [layer, expert, rank, count]
        for layer in range(placement.num_layers)
        for expert in range(placement.num_logical)
        for rank in range(placement.ep_size)
        if (count := [r for r, _ in rank_slots(placement, layer, expert)].count(rank)) > 1
    ]
    assert placement.same_rank_pairs().tolist() == expected


# ---- fingerprints


@given(placements(), st.data())
def test_fingerprints_see_exactly_the_changed_layers(placement: ExpertPlacement, data: st.DataObject) -> None:
    rows = placement.physical_to_logical.copy()
    changed = set()
    for layer in range(placement.num_layers):
        order = data.draw(st.permutations(range(placement.num_physical)))
        moved = rows[layer, list(order)]
        if moved.tolist() != rows[layer].tolist():
            changed.add(layer)
        rows[layer] = moved
    other = ExpertPlacement(rows, placement.num_logical, placement.ep_size)
    assert placement.changed_layers(other).tolist() == sorted(changed)
    assert (placement.fingerprint == other.fingerprint) == (not changed) == (placement == other)


def test_fingerprint_of_one_swapped_pair_of_slots() -> None:
    before, after = placement_of(ONE_PAIR, TWO_PAIRS), placement_of(ONE_PAIR, [0, 0, 1, 3, 2, 3])
    assert before.changed_layers(after).tolist() == [1]
    assert before.fingerprint != after.fingerprint


def test_fingerprint_sees_the_spread_over_ranks() -> None:
    two, three = placement_of(ONE_PAIR, ep_size=2), placement_of(ONE_PAIR, ep_size=3)
    assert two.fingerprint != three.fingerprint
    assert two.changed_layers(three).tolist() == three.changed_layers(two).tolist() == [0]


def test_missing_layers_count_as_identity() -> None:
    short = ExpertPlacement.identity(1, 4, 2)
    assert short.changed_layers(ExpertPlacement.identity(3, 4, 2)).tolist() == []
    longer = ExpertPlacement(np.array([[0, 1, 2, 3], [0, 1, 2, 3], [1, 0, 2, 3]]), 4, 2)
    assert short.changed_layers(longer).tolist() == longer.changed_layers(short).tolist() == [2]


def test_a_rebalance_in_place_does_not_reach_an_older_placement() -> None:
    engine_map = np.array([ONE_PAIR])
    placement = ExpertPlacement(engine_map, 4, 2)
    before = placement.fingerprint
    engine_map[0] = TWO_PAIRS
    assert slots_of(placement, 0, 0) == (0, 5)
    assert ExpertPlacement(engine_map, 4, 2).changed_layers(placement).tolist() == [0]
    assert placement.fingerprint == before


def test_immutable() -> None:
    placement = placement_of(ONE_PAIR)
    with pytest.raises(ValueError, match="read-only"):
        placement.physical_to_logical[0, 0] = 1
    with pytest.raises(ValueError, match="read-only"):
        placement.global_slots(5)[0] = 1
    with pytest.raises(FrozenInstanceError):
        placement.ep_size = 3  # type: ignore[misc]


def test_equal_placements_hash_alike() -> None:
    assert len({placement_of(ONE_PAIR), placement_of(ONE_PAIR), placement_of(TWO_PAIRS)}) == 2
    assert placement_of(ONE_PAIR) != "placement"
    assert RankPlacement(placement_of(ONE_PAIR), 1, 3, 6) == RankPlacement(placement_of(ONE_PAIR), 1, 3, 6)


# ---- ids out of range


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda p: p.logical(0, 6), ["layer 0", "slot 6", "0..5"]),
        (lambda p: p.logical(1, -1), ["layer 1", "slot -1", "0..5"]),
        (lambda p: p.logical(-3, 0), ["layer -3", "0..1"]),
        (lambda p: p.global_slots(-1), ["layer -1", "0..1"]),
        (lambda p: p.local_experts(1, 2), ["layer 1", "EP rank 2", "0..1"]),
        (lambda p: p.local_experts(1, -1), ["layer 1", "EP rank -1", "0..1"]),
        (lambda p: p.local_experts(-1, 0), ["layer -1", "0..1"]),
    ],
)
def test_ids_out_of_range_name_layer_id_and_range(call: Callable[[ExpertPlacement], object], words: list[str]) -> None:
    placement = placement_of(ONE_PAIR, TWO_PAIRS)
    with pytest.raises(IndexError) as caught:
        call(placement)
    assert isinstance(caught.value, PlacementIndexError)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value)


# ---- maps that contradict themselves


@pytest.mark.parametrize(
    ("given_map", "num_logical", "ep_size", "words"),
    [
        ([[0, 1, 2, 3, 0]], 4, 2, ["5 physical slots", "EP size 2"]),
        ([[0, 1, 2, 3], [0, 1, 1, 3]], 4, 2, ["layer 1: experts 2"]),
        ([[0, 1, 2, 3], [0, 0, 0, 0], [0, 0, 0, 0]], 4, 2, ["layers 1-2: experts 1-3"]),
        ([[0, 0, 1, 1], [1, 1, 2, 2]], 4, 2, ["layer 0: experts 2-3", "layer 1: experts 0,3"]),
        ([[0, 1]], 4, 2, ["2 physical slots", "4 logical experts"]),
        ([0, 1, 2, 3], 4, 2, ["shape (4,)", "(layers, slots)"]),
        ([[0.0, 1.0]], 2, 1, ["float64", "integers"]),
        ([[True, False]], 2, 1, ["bool", "integers"]),
        (np.zeros((0, 4), dtype=np.int64), 4, 2, ["0 layers"]),
        ([[0, 1]], 0, 1, ["0 logical experts"]),
        ([[0, 1]], 2, 0, ["EP size 0"]),
    ],
)
def test_bad_maps_are_refused(given_map: object, num_logical: int, ep_size: int, words: list[str]) -> None:
    with pytest.raises(PlacementError) as caught:
        ExpertPlacement(np.asarray(given_map), num_logical, ep_size)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("given_map", "num_logical", "words"),
    [
        ([[0, 1, 2, 3, 3, 4]], 4, ["layer 0", "slot 5", "expert 4", "0..3"]),
        ([[0, 1, 2, 3], [0, 1, -1, 3]], 4, ["layer 1", "slot 2", "expert -1", "0..3"]),
        (np.array([[0, 2**63]], dtype=np.uint64), 2, ["layer 0", "slot 1", "expert 9223372036854775808", "0..1"]),
    ],
)
def test_ids_out_of_range_inside_a_map_are_index_errors(given_map: object, num_logical: int, words: list[str]) -> None:
    with pytest.raises(IndexError) as caught:
        ExpertPlacement(np.asarray(given_map), num_logical, 2)
    assert isinstance(caught.value, PlacementIndexError)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_experts_are_named_in_few_words() -> None:
    rows = np.tile(np.arange(128), (48, 1))
    rows[:, 32:] = rows[:, :1]
    with pytest.raises(PlacementError, match=r"layers 0-47: experts 32-127;"):
        ExpertPlacement(rows, 128, 4)


def test_many_different_faults_stay_one_short_line() -> None:
    rows = np.tile(np.arange(64), (60, 1))
    rows[np.arange(60), np.arange(60)] = 63
    with pytest.raises(PlacementError, match="and in 56 more layers") as caught:
        ExpertPlacement(rows, 64, 4)
    assert len(str(caught.value)) < 300


# ---- one rank


def test_routed_slots_follow_the_storage_rank() -> None:
    rank = RankPlacement(placement_of(ONE_PAIR), storage_rank=1, num_local_routed=3, num_global_routed=6, num_shared=1)
    assert rank.experts(0).tolist() == [3, 3, 0]
    assert rank.num_slots == 4


def test_after_a_scale_up_no_routed_slot_is_shared() -> None:
    """EP 2 with 4 experts grew to EP 4; a rank that joined has EP rank 1 of its own group and storage rank 3."""
    grown = placement_of([0, 1, 2, 3, 0, 1, 2, 3], [0, 1, 2, 3, 3, 2, 1, 0], ep_size=4)
    joined = RankPlacement(grown, storage_rank=3, num_local_routed=2, num_global_routed=4, num_shared=1)
    assert joined.experts(1).tolist() == [1, 0]
    old = RankPlacement(grown, storage_rank=0, num_local_routed=2, num_global_routed=4, num_shared=1)
    assert old.experts(1).tolist() == [0, 1]
    assert (joined.num_slots, old.num_slots) == (3, 3)


def test_shared_slots_are_counted_from_the_ranks_own_slots() -> None:
    """Three EP ranks at the start, so that the routed range and the rank's own slots have no number in common."""
    grown = ExpertPlacement(np.arange(24)[None] % 6, 6, ep_size=12)
    rank = RankPlacement(grown, storage_rank=11, num_local_routed=2, num_global_routed=6, num_shared=2)
    assert (rank.experts(0).tolist(), rank.num_slots) == ([4, 5], 4)


@given(placements(), st.integers(0, 2))
def test_slots_of_a_rank_round_trip(placement: ExpertPlacement, num_shared: int) -> None:
    per_rank = placement.slots_per_rank
    for storage_rank in range(placement.ep_size):
        rank = RankPlacement(placement, storage_rank, per_rank, placement.num_physical, num_shared)
        for slot in range(per_rank):
            physical = storage_rank * per_rank + slot
            assert rank.experts(0)[slot] == placement.logical(0, physical)


@pytest.mark.parametrize(
    ("storage_rank", "num_local", "num_global", "num_shared", "words"),
    [
        (0, 2, 6, 0, ["stores 2 routed slots", "has 3 a rank"]),
        (2, 3, 6, 0, ["storage rank 2", "0..1"]),
        (-1, 3, 6, 0, ["storage rank -1", "0..1"]),
        (0, 3, 7, 0, ["7 routed slots", "multiple of its own 3"]),
        (0, 3, 0, 0, ["0 routed slots"]),
        (0, 3, 6, -1, ["-1 shared slots"]),
    ],
)
def test_rank_that_contradicts_the_map_is_refused(
    storage_rank: int, num_local: int, num_global: int, num_shared: int, words: list[str]
) -> None:
    with pytest.raises(PlacementError) as caught:
        RankPlacement(placement_of(ONE_PAIR), storage_rank, num_local, num_global, num_shared)
    assert all(word in str(caught.value) for word in words), str(caught.value)


# ---- SGLang's own metadata


def sglang_metadata(placement: ExpertPlacement) -> object:
    """The engine's own metadata of a map, its inverse computed by its own code with `moe_a2a_backend none`."""
    torch = pytest.importorskip("torch")
    location = pytest.importorskip("sglang.srt.eplb.expert_location")
    physical_to_logical = torch.tensor(placement.physical_to_logical)
    # Without an EP rank the engine does not narrow, exactly as with `moe_a2a_backend none`; its own code says so.
    inverse = location._compute_logical_to_all_physical_map(
        physical_to_logical, placement.num_logical, placement.ep_size, moe_ep_rank=None
    )
    padded = torch.nn.functional.pad(inverse, (0, placement.num_physical - inverse.shape[-1]), value=-1)
    return location.ExpertLocationMetadata(
        physical_to_logical_map=physical_to_logical,
        physical_to_logical_map_cpu=physical_to_logical,
        logical_to_all_physical_map=padded,
        logical_to_all_physical_map_cpu=padded,
        logical_to_all_physical_map_num_valid=(padded != -1).sum(-1),
        ep_size=placement.ep_size,
        logical_to_rank_dispatch_physical_map=None,
    )


def random_placement(layers: int, num_logical: int, slots: int, ep_size: int) -> ExpertPlacement:
    rng = np.random.default_rng(7)
    extra = rng.integers(0, num_logical, size=(layers, slots - num_logical))
    rows = np.concatenate([np.tile(np.arange(num_logical), (layers, 1)), extra], axis=1)
    return ExpertPlacement(rng.permuted(rows, axis=1), num_logical, ep_size)


@pytest.mark.sglang
@pytest.mark.parametrize(("experts", "slots", "ep_size"), [(4, 6, 2), (8, 8, 4), (9, 16, 4), (64, 96, 8)])
def test_inverse_is_sglangs_own(experts: int, slots: int, ep_size: int) -> None:
    placement = random_placement(3, experts, slots, ep_size)
    engine = sglang_metadata(placement)
    for layer in range(3):
        for expert in range(experts):
            assert list(slots_of(placement, layer, expert)) == engine.logical_to_all_physical(layer, expert)  # type: ignore[attr-defined]


@pytest.mark.sglang
def test_sglang_agrees_on_identity_past_the_map() -> None:
    placement = random_placement(2, 8, 8, 4)
    engine = sglang_metadata(placement)
    for expert in range(8):
        assert list(slots_of(placement, 5, expert)) == engine.logical_to_all_physical(5, expert)  # type: ignore[attr-defined]
