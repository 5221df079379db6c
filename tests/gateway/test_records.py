"""Orders as they are sent: what a gateway gives is what a rank reads, and nothing else is obeyed."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from engine_support import first

from weightcast.gateway.records import Action, EngineSpec, Order, PairOptions, PairSpec, differences
from weightcast.gateway.settings import Settings
from weightcast.gateway.versions import Version
from weightcast.transfer.errors import InputError, WireError
from weightcast.transfer.planner.topology import Topology

FULL = Order(Action.RUN, 3, first(7), True, "why", (1, 4), 2, "rollout-0")


@pytest.mark.parametrize("action", Action)
def test_an_order_comes_as_it_was_given(action: Action) -> None:
    for order in (
        Order(action, 3),
        Order(action, 3, first(7), True, "why", (1, 4), 2, "rollout-0"),
        Order(action, 0, first(0)),
    ):
        assert Order.parse(json.loads(json.dumps(order.as_json()))) == order


def test_fields_of_later_versions_are_passed_over() -> None:
    assert Order.parse({**FULL.as_json(), "colour": "red"}) == FULL


@pytest.mark.parametrize(
    "wrong", [{"action": "jump"}, {"action": None}, {"layers": 3}, {"version": "7@1"}, {"version": -1}]
)
def test_what_is_not_known_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(WireError, match=r"an order that this version does not know .*same version"):
        Order.parse({**FULL.as_json(), **wrong})
    for name in ("action", "epoch"):
        with pytest.raises(WireError, match=name):
            Order.parse({key: value for key, value in FULL.as_json().items() if key != name})


def test_the_end_of_an_update() -> None:
    assert Order(Action.LEFT, 1).ends_update(first(5))
    assert Order(Action.END, 1, first(5)).ends_update(first(5))
    assert Order(Action.END, 1, first(5)).ends_update()
    assert not Order(Action.END, 1, first(4)).ends_update(first(5))
    assert not Order(Action.END, 1).ends_update(), "only what was begun of it is over"
    assert not Order(Action.RUN, 1, first(5)).ends_update(first(5))
    assert not Order(Action.END, 1, Version(2, 5)).ends_update(first(5)), "a number of another lineage"


@pytest.mark.parametrize(("given", "needed"), [(None, 3), (1, 1), (3, 3), (10_000, 3)])
def test_how_many_instances_an_update_needs(given: int | None, needed: int) -> None:
    engines = {"rollout-0": EngineSpec(kind="worker", world_size=1)}
    assert PairOptions(trainer_world=1, instances=engines, min_instances=given).needed(3) == needed


@pytest.mark.parametrize("wrong", [0, -1, 10_001, 1.5, True, "1"])
def test_numbers_of_instances_that_are_none(wrong: object) -> None:
    document = {"trainer_world": 1, "instances": {"a": {"kind": "worker", "world_size": 1}}, "min_instances": wrong}
    with pytest.raises(InputError, match=r"^pair: min_instances is .*, expected a whole number from 1 to 10000"):
        PairOptions.given(document, "pair")


def test_fields_of_a_pair_that_differ_are_named_without_secrets() -> None:
    engine = EngineSpec(world_size=2, url="http://user:secret@host:1/?key=secret")
    old = PairSpec("main", trainer_world=2, instances={"a": engine, "b": engine}, uid="x", lineage=3)
    assert differences(old, replace(old, uid="y", lineage=1)) == []
    new = replace(
        old,
        trainer_world=4,
        settings=Settings(join=7.0),
        topology=Topology(nic_gbps=400.0),
        instances={"a": replace(engine, pause="in_place", url="http://user:other@host:2"), "c": engine},
    )
    assert differences(old, new) == [
        "instances.a.pause is 'retract', now 'in_place'",
        "instances.a.url is 'http://host:1/', now 'http://host:2'",
        "instances.b is there, now absent",
        "instances.c is absent, now there",
        "settings.join is 120.0, now 7.0",
        "topology is None, now there",
        "trainer_world is 2, now 4",
    ]
