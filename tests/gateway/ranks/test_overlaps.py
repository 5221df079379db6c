"""Two lives of one thing at the same time: of a worker, of a layout, of a join, of a pair."""

from __future__ import annotations

import threading
from contextlib import ExitStack

import pytest
import torch
from gateway_support import running_gateway
from life_support import ENGINE, SIZE, Engine, create, soon
from plain_support import Piece, PlainSink

from weightcast.adapters.unsharded import PlainSource
from weightcast.gateway.client import GatewayClient, Seat
from weightcast.gateway.ranks.instance import InstanceWorker
from weightcast.gateway.ranks.membership import Joining, Member
from weightcast.gateway.ranks.trainer import TrainerWorker
from weightcast.transfer.errors import ControlError, PairStateError, TransferError, UpdateError, WeightcastError
from weightcast.transfer.layout.memory import RankLayout


def sink(*names: str) -> PlainSink:
    return PlainSink([Piece(name, (SIZE,), (0,), torch.zeros(SIZE)) for name in names])


class Changing:
    """A source whose layout can be exchanged."""

    def __init__(self, **tensors: float) -> None:
        self.hold(**tensors)

    def hold(self, **tensors: float) -> None:
        self._inner = PlainSource({name: torch.full((SIZE,), value) for name, value in tensors.items()})

    def describe(self) -> RankLayout:
        return self._inner.describe()


def test_an_instance_that_is_down_holds_nobody_up_after_the_layout_changed() -> None:
    """Its part is of the layout before, and is digested for nobody."""
    with ExitStack() as undo:
        url, token = undo.enter_context(running_gateway())
        client = undo.enter_context(GatewayClient(url, token))
        alone = {"kind": "worker", "world_size": 1}
        client.create_pair("main", 1, {"a": alone, "b": alone}, {"register": 6.0, "join": 20.0, "outage": 5.0})
        up, down = (Engine(url, token, name=name) for name in ("a", "b"))
        undo.callback(up.close)
        for engine in (up, down):
            engine.worker._sink = sink("v", "t")
        source = Changing(v=1.0, t=1.0)
        training = TrainerWorker(url, "main", source, rank=0, world_size=1, token=token)
        undo.callback(training.close)
        training.connect()
        training.update(1)
        down.close()
        up.worker._sink = sink("t")
        source.hold(t=2.0)
        with pytest.raises(WeightcastError, match="b"):
            training.connect()
        for version in (2, 3):
            with pytest.raises(UpdateError, match="b is ") as caught:
                training.update(version)
            assert "a is " not in str(caught.value)
            soon(lambda version=version: up.state == (version, False))  # type: ignore[misc]


def test_a_failure_of_the_pair_before_is_none_of_the_pair_that_was_made_anew() -> None:
    """Both begin with epoch 1, and the rank that tells it may be the same process."""
    with ExitStack() as undo:
        url, token = undo.enter_context(running_gateway())
        create(url, token)
        client = undo.enter_context(GatewayClient(url, token, identity="h~1~x"))
        uid = client.pair_status("main")["uid"]
        client.delete_pair("main")
        create(url, token)
        seat = Seat("main", ENGINE, 1, "instance", 0)
        with pytest.raises(PairStateError, match="the pair was created again since"):
            client.fail(seat, TransferError("given up"), uid=uid)
        client.fail(seat, TransferError("x"), uid=client.pair_status("main")["uid"])


def test_a_worker_whose_place_was_taken_tells_nobody() -> None:
    """It fails, and says so in its log alone: another worker speaks for the rank by now."""
    with ExitStack() as undo:
        url, token = undo.enter_context(running_gateway())
        create(url, token)
        worker = InstanceWorker(url, "main", ENGINE, sink("t"), rank=0, world_size=1, token=token)
        undo.callback(worker.close)
        told: list[object] = []
        worker._client.fail = lambda *arguments, **_: told.append(arguments)  # type: ignore[method-assign]
        worker.failed(TransferError("before"))
        worker.give_up(quietly=True)
        with pytest.raises(PairStateError, match="another connect has taken the place of this one"):
            worker.connect(1)
        assert len(told) == 1


def test_a_join_ends_whatever_comes_of_telling_its_failure() -> None:
    def work(_: Joining) -> Member:
        raise TransferError("a peer is gone")

    def failed(_: BaseException) -> None:
        raise ControlError("asked too often")

    outcomes: list[BaseException] = []

    def wait() -> None:
        try:
            joining.result()
        except TransferError as error:
            outcomes.append(error)

    hook, threading.excepthook = threading.excepthook, lambda _: None
    try:
        joining = Joining(30.0, work, failed)
        waiting = threading.Thread(target=wait, daemon=True)
        waiting.start()
        waiting.join(20.0)
    finally:
        threading.excepthook = hook
    assert [str(error) for error in outcomes] == ["a peer is gone"]


def test_a_join_that_is_abandoned_ends_at_once_and_tells_nobody() -> None:
    told: list[BaseException] = []

    def work(joining: Joining) -> Member:
        while not joining.deadline.expired:
            ended.wait(0.01)
        raise TransferError("too late")

    ended = threading.Event()
    joining = Joining(60.0, work, told.append)
    joining.abandon()
    with pytest.raises(PairStateError, match="joining was given up"):
        joining.result()
    assert told == []
