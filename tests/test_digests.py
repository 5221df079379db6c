"""What ranks digest of a plan's parts, in the three modes, and what the gateway finds of it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from plain_support import Piece, describe_pieces

from weightcast.gateway import digests as gateway_digests
from weightcast.gateway.digests import PartDigests, SharedDigests
from weightcast.gateway.verify import compare_digests
from weightcast.transfer.digesting import Digester
from weightcast.transfer.errors import DigestMismatchError
from weightcast.transfer.layout import RankLayout
from weightcast.transfer.parts import PlanParts
from weightcast.transfer.plan import TransferPlan
from weightcast.transfer.planner import plan_transfer
from weightcast.transfer.verification import Verify

SHAPE = (64, 6)
FULL = torch.arange(384, dtype=torch.float32).view(SHAPE)


def pair() -> tuple[RankLayout, RankLayout, TransferPlan]:
    """A trainer rank, and an instance rank that holds the same in two pieces; a plan for two such instances."""
    trainer = describe_pieces([Piece("w", SHAPE, (0, 0), FULL.clone()), Piece("b", (), (), torch.ones(()))])
    views = [Piece("w", SHAPE, (0, 0), FULL[:21].bfloat16()), Piece("w", SHAPE, (21, 0), FULL[21:].bfloat16())]
    instance = describe_pieces([*views, Piece("b", (), (), torch.ones(()).bfloat16())])
    return trainer, instance, plan_transfer([trainer.table], {"a": [instance.table], "b": [instance.table]})


@pytest.mark.parametrize(
    ("verify", "version", "seen"), [("full", 3, True), ("sampled", 19, True), ("sampled", 4, False)]
)
def test_a_sample_sees_what_is_in_its_rows(verify: str, version: int, seen: bool) -> None:
    trainer, instance, plan = pair()
    parts = PlanParts(plan, verify=Verify(verify))
    sent = {0: PartDigests().report(parts.trainer_part("a", 0), trainer, version).report}

    def held() -> dict[int, object]:
        return {0: PartDigests().report(parts.instance_part("a", 0), instance, version).report}

    assert compare_digests(plan, sent, "a", held()).rows == 3  # type: ignore[arg-type]
    instance.view(1)[14, 2] += 64.0  # Row 35, which is 3 modulo 16.
    if seen:
        with pytest.raises(DigestMismatchError):
            compare_digests(plan, sent, "a", held())  # type: ignore[arg-type]
    else:
        compare_digests(plan, sent, "a", held())  # type: ignore[arg-type]


def test_without_verification_nothing_is_digested() -> None:
    trainer, _, plan = pair()
    report = PartDigests().report(PlanParts(plan, verify=Verify.OFF).trainer_part("a", 0), trainer, 1).report
    assert (len(report), len(report.digest)) == (0, 0)


def test_what_was_prepared_serves_until_rows_or_layout_are_others(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[RankLayout] = []

    def counted(layout: RankLayout, *columns: np.ndarray) -> Digester:
        made.append(layout)
        return Digester(layout, *columns)

    monkeypatch.setattr(gateway_digests, "Digester", counted)
    trainer, _, plan = pair()
    parts = [PlanParts(plan).trainer_part(name, 0) for name in ("a", "b")]
    digests = PartDigests()
    for part in parts:
        digests.prepare(part, trainer)
    first, second = (digests.report(parts[0], trainer, version).report.digest.tolist() for version in (1, 2))
    assert len(made) == 1
    assert first == second
    again = dataclasses.replace(trainer)
    assert digests.report(parts[0], again, 3).report.digest.tolist() == first
    fewer = dataclasses.replace(parts[0], digests=parts[0].digests.between(0, 1))
    assert digests.report(fewer, again, 3).report.digest.tolist() == first[:1]
    assert [layout is again for layout in made] == [False, True, True]
    digests.prepare(PlanParts(plan, verify=Verify.OFF).trainer_part("a", 0), trainer)
    assert len(made) == 3


def test_a_trainer_rank_digests_a_version_once_for_all_instances() -> None:
    trainer, _, plan = pair()
    parts = [PlanParts(plan).trainer_part(name, 0) for name in ("a", "b")]
    shared = SharedDigests()
    first, second = (shared.start(part, trainer, 1) for part in parts)
    assert first is second
    assert first.result().report.digest.tolist() == PartDigests().report(parts[0], trainer, 1).report.digest.tolist()
    fewer = dataclasses.replace(parts[0], digests=parts[0].digests.between(0, 1))
    assert len(shared.start(fewer, trainer, 1).result().report) == 1
    trainer.view(0)[0, 0] = 5.0
    shared.forget()
    again = shared.start(parts[0], trainer, 1)
    assert again.result().report.digest.tolist() != first.result().report.digest.tolist()
    shared.close()
