"""Two lives of one thing at the same time: of a worker, of a layout, of a join, of a pair."""

from __future__ import annotations

import threading
from contextlib import ExitStack

import pytest
import torch
from gateway_support import running_gateway
from life_support import ENGINE, SIZE, Engine, create, soon
from plain_support import Piece, PlainSink
from spawn_support import free_port

from weightcast.adapters.plain import PlainSource
from weightcast.gateway.client import GatewayClient
from weightcast.gateway.instance_worker import InstanceWorker, Memory
from weightcast.gateway.membership import Joining, Member, report_of
from weightcast.gateway.worker import TrainerWorker
from weightcast.transfer.errors import ControlError, PairStateError, TransferError, UpdateError, WeightcastError
from weightcast.transfer.layout import RankLayout


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


def test_a_worker_that_was_given_up_fails_no_pair_that_was_made_anew() -> None:
    """The same process, rank and epoch: but what stopped the worker before is of the pair before."""
    memory, weights, port = Memory(), torch.zeros(SIZE), free_port()

    def worker(url: str, token: str) -> InstanceWorker:
        piece = Piece("t", (SIZE,), (0,), weights)
        return InstanceWorker(url, "main", ENGINE, PlainSink([piece]), rank=0, world_size=1, token=token, memory=memory)

    def call(step: object, outcomes: list[BaseException | None]) -> None:
        try:
            step()  # type: ignore[operator]
            outcomes.append(None)
        except BaseException as error:
            outcomes.append(error)

    source = PlainSource({"t": torch.ones(SIZE)})
    of_first: list[BaseException | None] = []
    of_second: list[BaseException | None] = []
    of_trainer: list[BaseException | None] = []
    with running_gateway(port=port) as (url, token):
        create(url, token, register=20.0, join=90.0, outage=60.0)
        with GatewayClient(url, token) as silent:  # a trainer that registers and never joins
            silent.register_trainer("main", report_of(source.describe(), 0, 1))
            silent.start_connect("main")
            first = worker(url, token)
            joining = threading.Thread(target=call, args=(lambda: first.connect(1), of_first))
            joining.start()
            soon(lambda: first._joining is not None)
    with ExitStack() as undo:
        url, token = undo.enter_context(running_gateway(port=port, token=token))
        create(url, token, register=30.0, join=60.0)
        training = TrainerWorker(url, "main", source, rank=0, world_size=1, token=token)
        undo.callback(training.close)
        connecting = threading.Thread(target=call, args=(training.connect, of_trainer))
        connecting.start()
        with GatewayClient(url, token) as client:
            soon(lambda: client.pair_status("main")["trainer"]["registered"] == [0])
        first.give_up()
        joining.join(60.0)
        second = worker(url, token)
        undo.callback(second.close)
        call(lambda: second.connect(1), of_second)
        connecting.join(90.0)
        assert isinstance(of_first[0], WeightcastError)
        assert (of_second, of_trainer) == ([None], [None])
        first.close()


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
