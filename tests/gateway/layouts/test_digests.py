"""What ranks digest of a plan's parts, in the three modes, and what the gateway finds of it."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import numpy as np
import pytest
import torch
from plain_support import Piece, describe_pieces

from weightcast.gateway.layouts.digest_check import DigestCheck
from weightcast.gateway.ranks import digests as gateway_digests
from weightcast.gateway.ranks.digests import Digested, PartDigests, SharedDigests
from weightcast.gateway.versions import Version
from weightcast.transfer.digest.digester import Digester
from weightcast.transfer.errors import DigestMismatchError, WeightsChangedError
from weightcast.transfer.layout.memory import RankLayout
from weightcast.transfer.plan.operations import RankPart, TransferPlan
from weightcast.transfer.plan.parts import PlanParts
from weightcast.transfer.plan.verification import Verify
from weightcast.transfer.planner.planner import plan_transfer

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
    sent = {0: PartDigests().report(parts.trainer_part("a", 0), trainer, Version.parse(version)).report}

    def held() -> dict[int, object]:
        return {0: PartDigests().report(parts.instance_part("a", 0), instance, Version.parse(version)).report}

    assert DigestCheck(plan).compare(sent, "a", held()).rows == 3  # type: ignore[arg-type]
    instance.view(1)[14, 2] += 64.0  # Row 35, which is 3 modulo 16.
    if seen:
        with pytest.raises(DigestMismatchError):
            DigestCheck(plan).compare(sent, "a", held())  # type: ignore[arg-type]
    else:
        DigestCheck(plan).compare(sent, "a", held())  # type: ignore[arg-type]


def test_without_verification_nothing_is_digested() -> None:
    trainer, _, plan = pair()
    report = (
        PartDigests().report(PlanParts(plan, verify=Verify.OFF).trainer_part("a", 0), trainer, Version.parse(1)).report
    )
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
    first, second = (
        digests.report(parts[0], trainer, Version.parse(version)).report.digest.tolist() for version in (1, 2)
    )
    assert len(made) == 1
    assert first == second
    again = dataclasses.replace(trainer)
    assert digests.report(parts[0], again, Version.parse(3)).report.digest.tolist() == first
    fewer = dataclasses.replace(parts[0], digests=parts[0].digests.between(0, 1))
    assert digests.report(fewer, again, Version.parse(3)).report.digest.tolist() == first[:1]
    assert [layout is again for layout in made] == [False, True, True]
    digests.prepare(PlanParts(plan, verify=Verify.OFF).trainer_part("a", 0), trainer)
    assert len(made) == 3


def shared(*parts: RankPart, layout: RankLayout) -> SharedDigests:
    made = SharedDigests()
    made.begin(parts, layout, Version.parse(1))
    return made


def counting(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Each pass that is made, whether it counts values."""
    passes: list[bool] = []
    report = PartDigests.report

    def counted(self: PartDigests, *arguments: Any, values: bool = False, **scope: Any) -> Digested:
        passes.append(values)
        return report(self, *arguments, values=values, **scope)

    monkeypatch.setattr(PartDigests, "report", counted)
    return passes


def test_a_trainer_rank_makes_two_passes_for_all_instances(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, _, plan = pair()
    parts = [PlanParts(plan).trainer_part(name, 0) for name in ("a", "b")]
    alone = PartDigests().report(parts[0], trainer, Version.parse(1)).report.digest.tolist()
    passes, digests = counting(monkeypatch), shared(*parts, layout=trainer)
    assert [digests.first(part).report.digest.tolist() for part in parts] == [alone, alone]
    one, other = (digests.second(part) for part in parts)
    assert one is other
    assert one.result().report.digest.tolist() == alone
    assert passes == [True, False]
    trainer.view(0)[0, 0] = 5.0
    digests.begin(parts, trainer, Version.parse(1))
    assert digests.first(parts[0]).report.digest.tolist() != alone, "even of the same version"
    digests.close()


def test_an_instance_that_joined_meanwhile_has_a_second_pass_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other ranks may have made another first pass for it, so what was read before it was told to run is too early."""
    trainer, _, plan = pair()
    part = PlanParts(plan).trainer_part("a", 0)
    passes, digests = counting(monkeypatch), shared(part, layout=trainer)
    early = digests.second(part)
    late = digests.second(part, since=time.monotonic())
    assert late is not early
    assert digests.second(part) is late
    late.result()
    assert passes == [True, False, False]
    digests.close()


def test_all_first_passes_of_an_update_end_before_one_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that instances that were planned apart are of one state."""
    trainer, _, plan = pair()
    part = PlanParts(plan).trainer_part("a", 0)
    fewer = dataclasses.replace(part, digests=part.digests.between(0, 1))
    passes, digests = counting(monkeypatch), shared(part, fewer, layout=trainer)
    digests.first(part)
    assert passes == [True, True]
    digests.close()


@pytest.mark.parametrize("changed", [False, True])
def test_an_instance_planned_anew_meanwhile_finds_the_weights_as_they_were(changed: bool) -> None:
    trainer, _, plan = pair()
    part = PlanParts(plan).trainer_part("a", 0)
    fewer = dataclasses.replace(part, digests=part.digests.between(0, 1))
    digests = shared(part, layout=trainer)
    digests.second(part).result()
    if changed:
        trainer.view(0)[0, 0] += 1.0
        with pytest.raises(
            WeightsChangedError, match=r"weights changed during update\(\) while .* connected anew: w; let"
        ):
            digests.first(fewer)
    else:
        assert len(digests.first(fewer).report) == 1
    digests.close()


def test_instances_planned_apart_do_not_displace_each_other_s_digesters(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, _, plan = pair()
    part = PlanParts(plan).trainer_part("a", 0)
    fewer = dataclasses.replace(part, digests=part.digests.between(0, 1))
    made: list[int] = []

    def counted(layout: RankLayout, *columns: np.ndarray) -> Digester:
        made.append(len(columns[0]))
        return Digester(layout, *columns)

    monkeypatch.setattr(gateway_digests, "Digester", counted)
    digests = shared(part, fewer, layout=trainer)
    for one in (part, fewer):
        digests.second(one).result()
    assert made == [len(part.digests), 1]
    digests.close()
