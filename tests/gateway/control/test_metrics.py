"""Metrics of a gateway, read as a Prometheus server reads them."""

from __future__ import annotations

import asyncio
import time

import httpx
import pytest
from engine_support import A, B, Play, connected
from gateway_support import running_gateway
from prometheus_client.parser import text_string_to_metric_families

from weightcast.gateway.control.instance_state import Phase
from weightcast.gateway.control.metrics import Metrics

pytestmark = pytest.mark.usefixtures("quiet")

Samples = dict[tuple[str, ...], float]
"""Values by the name of a sample and its labels but for the pair's."""


def samples(text: str) -> Samples:
    families = text_string_to_metric_families(text)
    return {
        (sample.name, *(value for label, value in sample.labels.items() if label != "pair")): sample.value
        for family in families
        for sample in family.samples
    }


def counted(play: Play) -> Metrics:
    metrics = Metrics({play.pair.spec.name: play.pair})
    play.pair.updated = metrics.updated
    return metrics


def test_updates_are_counted_by_outcome_with_their_resends_and_values() -> None:
    async def run() -> Samples:
        play = await connected(A, B)
        metrics = counted(play)
        play.engine.moves = 2
        assert (await play.update(2)).resends == 2
        play.engine.corrupt = 1
        assert (await play.update(3)).fenced
        play.engine.corrupt = -1
        play.trainers[0].values = (1, 0, 0)
        assert not (await play.update(4)).committed
        return samples(metrics.text().decode())

    values = asyncio.run(run())
    outcomes = ("committed", "fenced", "refused")
    assert {o: values.get(("weightcast_updates_total", A, o), 0) for o in outcomes} == {
        "committed": 1,
        "fenced": 2,
        "refused": 0,
    }, "the refused values of version 4 lift no fence"
    assert {o: values.get(("weightcast_updates_total", B, o), 0) for o in outcomes} == {
        "committed": 2,
        "fenced": 0,
        "refused": 1,
    }
    assert values["weightcast_resends_total", A] == 2
    assert ("weightcast_resends_total", B) not in values
    assert values["weightcast_non_finite_tensors_total", B] == 1
    assert values["weightcast_update_seconds_count", A] == 1
    assert values["weightcast_update_seconds_count", B] == 2


def test_gauges_tell_the_state_of_each_instance() -> None:
    async def run() -> tuple[Samples, Samples]:
        play = await connected(A, B, version=None)
        metrics = counted(play)
        before = samples(metrics.text().decode())
        play.engine.corrupt = 1
        await play.update(1, restart=True)
        play.pair.hear(0, time.monotonic() - 1000.0)
        play.pair.listen(time.monotonic())
        play.pair.instance(B).hear(1, time.monotonic() - 1000.0)
        play.pair.instance(B).listen(time.monotonic())
        return before, samples(metrics.text().decode())

    before, after = asyncio.run(run())
    names = ("weightcast_version", "weightcast_serves", "weightcast_fenced", "weightcast_silent_ranks")
    assert [before.get((name, A)) for name in names] == [None, 0, 1, 0], "no version before the first commit"
    assert [after.get((name, A)) for name in names] == [None, 0, 1, 0]
    assert [after.get((name, B)) for name in names] == [1, 0, 0, 1], "an instance with a silent rank serves nobody"
    assert [after.get(("weightcast_lineage", name)) for name in (A, B)] == [None, 2]
    assert after["weightcast_trainer_silent_ranks",] == 1
    for name, phase in ((A, Phase.FAILED), (B, Phase.CONNECTED)):
        assert {p.value: after["weightcast_phase", name, p.value] for p in Phase} == {
            p.value: p is phase for p in Phase
        }


def test_the_route_needs_a_token_and_counts_those_that_were_refused() -> None:
    with running_gateway() as (url, token), httpx.Client(trust_env=False) as client:
        assert client.get(f"{url}/metrics").status_code == 401
        assert client.get(f"{url}/metrics", headers={"Authorization": "Bearer nobody"}).status_code == 401
        reply = client.get(f"{url}/metrics", headers={"Authorization": f"Bearer {token}"})
    assert reply.headers["content-type"].startswith("text/plain; version=")
    assert samples(reply.text)["weightcast_refused_requests_total", "401"] == 2
