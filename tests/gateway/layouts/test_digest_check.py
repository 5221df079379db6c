"""Digests of both sides are compared: every replica, every tensor, and nothing missing."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
from digest_support import add
from hypothesis import given, settings
from hypothesis import strategies as st

from weightcast.gateway.layouts.digest_check import DigestCheck
from weightcast.gateway.records import DigestCounts
from weightcast.transfer.digest.residues import PRIME, add_runs, subtract
from weightcast.transfer.errors import DigestMismatchError, PlanError
from weightcast.transfer.layout.dtypes import dtype_code
from weightcast.transfer.layout.tables import TensorSpec, TensorTable
from weightcast.transfer.plan.digest_report import DigestReport
from weightcast.transfer.plan.operations import DigestRows, Operations, Party, TransferPlan

BF16, F32 = dtype_code("bfloat16"), dtype_code("float32")
NAMES = ("model.layers.0.mlp.experts.0.w", "model.layers.0.mlp.experts.1.w", "model.layers.0.mlp.experts.2.w")

# party, rank, region, tensor, offset, size, dtype, cell
ROWS = [
    (0, 0, 0, 0, (0, 0), (2, 4), BF16, 0),
    (0, 1, 0, 0, (2, 0), (2, 4), BF16, 1),
    (0, 0, 1, 1, (0, 0), (4, 4), BF16, 2),
    (0, 1, 1, 2, (0, 0), (4, 4), BF16, 3),
    # Expert 0 once; expert 1 twice on rank 1; expert 2 on both ranks, cut in two cells on each.
    (1, 0, 0, 0, (0, 0), (4, 4), BF16, 0),
    (1, 0, 1, 2, (0, 0), (4, 2), BF16, 2),
    (1, 0, 2, 2, (0, 2), (4, 2), BF16, 3),
    (1, 1, 0, 1, (0, 0), (4, 4), BF16, 1),
    (1, 1, 1, 1, (0, 0), (4, 4), BF16, 1),
    (1, 1, 2, 2, (0, 0), (4, 2), BF16, 2),
    (1, 1, 3, 2, (0, 2), (4, 2), BF16, 3),
    # Another instance, of which nothing must be looked at.
    (2, 0, 0, 0, (0, 0), (4, 4), F32, 0),
]
SLOTS = {0: np.array([0, 1, 1]), 1: np.array([0, 1, 2, 2])}


def make_plan(rows: list[tuple]) -> TransferPlan:
    columns = [np.array(column, dtype=np.int64) for column in zip(*rows, strict=True)]
    none = np.empty(0, dtype=np.int64)
    boxes = np.empty((0, 2), dtype=np.int64)
    tensors = TensorTable.from_specs({name: TensorSpec((4, 4), "bfloat16") for name in NAMES})
    return TransferPlan(
        tensors=tensors,
        parties=tuple(
            Party(name, np.full(3, BF16), ("",) * world)
            for name, world in (("", 2), ("rollout-0", 2), ("rollout-1", 1))
        ),
        operations=Operations(none, none, none, none, none, none, none, none, boxes, boxes),
        digests=DigestRows(*columns),
    )


def values_of(names: tuple[int, ...] = (0, 1, 2)) -> dict[int, np.ndarray]:
    """Per tensor a (4, 4) grid of element digests, of which a box's digest is the sum; `names` can swap experts."""
    rng = random.Random(7)
    grids = [np.array([[rng.getrandbits(64) for _ in range(4)] for _ in range(4)], dtype=np.uint64) for _ in range(3)]
    return {tensor: grids[source] for tensor, source in enumerate(names)}


def digest_of(grid: np.ndarray, offset: tuple[int, int], size: tuple[int, int]) -> int:
    cut = [int(v) for v in grid[offset[0] : offset[0] + size[0], offset[1] : offset[1] + size[1]].reshape(-1)]
    low, high = sum(v & 0xFFFFFFFF for v in cut), sum(v >> 32 for v in cut)
    return (high % PRIME) << 32 | low % PRIME


def reports_of(index: int, values: dict[int, np.ndarray], rows: list[tuple] = ROWS) -> dict[int, DigestReport]:
    """What the ranks of one side report when their memory holds `values`."""
    reports = {}
    for rank in (0, 1):
        own = [row for row in rows if row[0] == index and row[1] == rank]
        digest = np.array([digest_of(values[r[3]], r[4], r[5]) for r in own], dtype=np.uint64)
        name = f"rollout-{index - 1}" if index else None
        reports[rank] = DigestReport(name, rank, np.array([r[7] for r in own], dtype=np.int64), digest)
    return reports


def broken(reports: dict[int, DigestReport], rank: int, row: int, digest: int | None = None) -> dict[int, DigestReport]:
    """One digest changed, or, with None, dropped."""
    report = reports[rank]
    if digest is None:
        changed = dataclasses.replace(report, cell=np.delete(report.cell, row), digest=np.delete(report.digest, row))
    else:
        values = report.digest.copy()
        values[row] = digest
        changed = dataclasses.replace(report, digest=values)
    return reports | {rank: changed}


TRAINED = reports_of(0, values_of())
HELD = reports_of(1, values_of())


def compare(
    trainer: dict[int, DigestReport] = TRAINED,
    held: dict[int, DigestReport] = HELD,
    rows: list[tuple] = ROWS,
    instance: str = "rollout-0",
) -> DigestCounts:
    return DigestCheck(make_plan(rows)).compare(trainer, instance, held, SLOTS)


def test_equal_sides_are_counted() -> None:
    assert compare() == DigestCounts(tensors=3, rows=7, regions=7, slot_regions=7, replicas=3)


def test_slots_are_not_needed() -> None:
    assert DigestCheck(make_plan(ROWS)).compare(TRAINED, "rollout-0", HELD).slot_regions == 0


def test_the_trainer_is_gathered_once_for_all_instances_and_anew_for_other_reports() -> None:
    check = DigestCheck(make_plan(ROWS))
    assert check.compare(TRAINED, "rollout-0", HELD, SLOTS) == compare()
    known = check._sent
    assert check.compare(dict(TRAINED), "rollout-0", HELD, SLOTS) == compare()
    assert check._sent is known
    other = broken(TRAINED, 0, 0, 5)
    for _ in range(2):
        with pytest.raises(DigestMismatchError):
            check.compare(other, "rollout-0", HELD, SLOTS)
    equal = {rank: dataclasses.replace(report) for rank, report in TRAINED.items()}
    assert check.compare(equal, "rollout-0", HELD, SLOTS) == compare()
    assert check._sent is not known
    with pytest.raises(DigestMismatchError, match="rank 1 of the trainer reported no digests"):
        check.compare({0: TRAINED[0]}, "rollout-0", HELD, SLOTS)


RESIDUES = st.integers(0, PRIME - 1)
DIGESTS = st.builds(lambda high, low: high << 32 | low, RESIDUES, RESIDUES)


@settings(deadline=None)
@given(st.lists(st.lists(DIGESTS, min_size=1, max_size=5), max_size=4))
def test_runs_add_up_as_digests_do(runs: list[list[int]]) -> None:
    start = np.cumsum([0, *map(len, runs)])[:-1]
    summed = add_runs(np.array([d for run in runs for d in run], dtype=np.uint64), start)
    assert summed.tolist() == [add(*run) for run in runs]
    for run, total in zip(runs, summed.tolist(), strict=True):
        assert subtract(total, add(*run[1:])) == run[0]


@pytest.mark.parametrize(
    ("trainer", "held", "said"),
    [
        # One wrong replica, on the row that stands first and on the one that stands second: the wrong one is named.
        (TRAINED, broken(HELD, 1, 1, 5), r"1.w' \(bfloat16\) .* rollout-0 rank 1 region 1 \(slot 1\): digest 0{15}5"),
        (TRAINED, broken(HELD, 1, 0, 5), r"1.w' \(bfloat16\) .* rollout-0 rank 1 region 0 \(slot 0\): digest 0{15}5"),
        (TRAINED, broken(HELD, 1, 3, 5), r"experts.2.w'.* box \[0:4, 2:4\] on rollout-0 rank 1 region 3 \(slot 2\)"),
        (TRAINED, broken(HELD, 0, 2, 5), r"experts.2.w'.* box \[0:4, 2:4\] on rollout-0 rank 0 region 2 \(slot 1\)"),
        # One wrong slot without a replica.
        (TRAINED, broken(HELD, 0, 0, 5), r"experts.0.w'.* on rollout-0 rank 0 region 0 \(slot 0\): digest 0{15}5, "),
        # A whole expert that is the other one: all its replicas agree, only the sums tell.
        (TRAINED, reports_of(1, values_of((1, 0, 2))), r"experts.0.w'.*2 of 3 tensors differ"),
        (TRAINED, reports_of(1, values_of((0, 2, 1))), r"1.w'.* rank 1 region 0 .*, rollout-0 rank 1 region 1 "),
        (broken(TRAINED, 0, 0, 5), HELD, r"experts.0.w'.* rank 0 region 0"),
        # Missing and superfluous rows and ranks.
        (TRAINED, broken(HELD, 1, 1), r"rank 1 of rollout-0 reported 3 digests, expected 4; .*experts.1.w' region 1 "),
        (TRAINED, broken(HELD, 1, 3), r"rank 1 of rollout-0 reported 3 digests, expected 4; .*experts.2.w' region 3 "),
        (broken(TRAINED, 1, 0), HELD, r"rank 1 of the trainer reported 1 digests, expected 2; .*0.w' region 0 "),
        (TRAINED, {0: HELD[0]}, "rank 1 of rollout-0 reported no digests, expected 4"),
        ({1: TRAINED[1]}, HELD, "rank 0 of the trainer reported no digests, expected 2"),
        (TRAINED, {}, "rank 0 of rollout-0 reported no digests"),
        (TRAINED, HELD | {2: HELD[1]}, "rank 2 of rollout-0 reported 4 digests, expected none"),
        (TRAINED, {0: HELD[1], 1: HELD[0]}, "rank 0 of rollout-0 handed in the digests of rank 1 of rollout-0"),
        (TRAINED, TRAINED, "rank 0 of rollout-0 handed in the digests of rank 0 of the trainer"),
    ],
)  # fmt: skip
def test_differences_are_named(trainer: dict[int, DigestReport], held: dict[int, DigestReport], said: str) -> None:
    with pytest.raises(DigestMismatchError, match=said) as caught:
        compare(trainer, held)
    assert "fence the instance" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_trailing_digest_nobody_asked_for() -> None:
    report = HELD[0]
    longer = dataclasses.replace(report, cell=np.append(report.cell, 9), digest=np.append(report.digest, np.uint64(1)))
    with pytest.raises(DigestMismatchError, match="reported 4 digests, expected 3; those at the end"):
        compare(held=HELD | {0: longer})


def test_another_dtype_on_the_two_sides() -> None:
    rows = [(*r[:6], F32, r[7]) if r[0] == 1 and r[3] == 1 else r for r in ROWS]
    with pytest.raises(DigestMismatchError, match=r"experts.1.w' \(float32\) .*the trainer digested it in bfloat16"):
        compare(rows=rows)


def test_a_tensor_the_trainer_never_digested() -> None:
    rows = [r for r in ROWS if not (r[0] == 0 and r[3] == 1)]
    trainer = reports_of(0, values_of(), rows)
    with pytest.raises(DigestMismatchError, match=r"experts.1.w'.*digested no cell of it"):
        compare(trainer, rows=rows)


def test_a_cell_that_the_plan_forgot() -> None:
    rows = [r for r in ROWS if not (r[0] == 1 and r[7] == 3)]
    with pytest.raises(DigestMismatchError, match=r"experts.2.w'.*somewhere on rollout-0 rank 0 region 1"):
        compare(held=reports_of(1, values_of(), rows), rows=rows)


def test_an_instance_the_plan_does_not_have() -> None:
    with pytest.raises(PlanError, match=r"no instance 'rollout-7'; it has rollout-0, rollout-1"):
        compare(instance="rollout-7")
