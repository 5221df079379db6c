"""Mistakes of code that holds a worker: each is refused in one line that says what was expected, before any wait.

Each case is named by its mistake. Those that need a gateway have a real one.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gateway_support import running_gateway
from life_support import ENGINE, Engine, soon
from plain_support import PlainSink
from spawn_support import free_port

from weightcast import FsdpSource, GatewayClient, InstanceWorker, LayoutBuilder, PlainSource, TrainerWorker
from weightcast.gateway.client import TOKEN_VARIABLE
from weightcast.transfer.errors import (
    AbsentError,
    ControlError,
    CoverageError,
    DeadlineError,
    DescribeError,
    InputError,
    LayoutError,
    TransferError,
    WeightcastError,
)

TOKEN = "a-token-of-enough-length"
NOWHERE = "http://127.0.0.1:9"
MODEL = torch.nn.Linear(2, 2)


class Mute:
    """An object that describes and cannot say its placement."""

    def describe(self) -> None: ...


def trainer(source: Any = None, **options: Any) -> TrainerWorker:
    """A worker at an address where nobody listens, which must not matter."""
    arguments = {"rank": 0, "world_size": 1, "token": TOKEN, **options}
    return TrainerWorker(NOWHERE, "main", PlainSource({}) if source is None else source, **arguments)


def engine(sink: Any = None, **options: Any) -> InstanceWorker:
    arguments = {"rank": 0, "world_size": 1, "token": TOKEN, **options}
    return InstanceWorker(NOWHERE, "main", ENGINE, PlainSink([]) if sink is None else sink, **arguments)


def client(token: str | None = TOKEN) -> GatewayClient:
    return GatewayClient(NOWHERE, token)


def closed(worker: Any) -> Any:
    worker.close()
    worker.close()  # which may be done twice
    return worker


MISTAKES: dict[str, tuple[Callable[[], object], type[WeightcastError], str]] = {
    "a model as source": (
        lambda: trainer(MODEL),
        InputError,
        "source is of type Linear, which has no describe(); it is a model: give FsdpSource(model), or MegatronSource(",
    ),
    "a model as sink": (
        lambda: engine(MODEL),
        InputError,
        "sink is of type Linear, which has no describe() and no placement(); it is a model: give FsdpSource(model)",
    ),
    "a state dict as source": (
        lambda: trainer(MODEL.state_dict()),
        InputError,
        "source is of type OrderedDict, which has no describe(); of named tensors a source is PlainSource(tensors)",
    ),
    "a class as sink": (
        lambda: engine(PlainSink),
        InputError,
        "sink is the class PlainSink, expected an object of it: PlainSink(...)",
    ),
    "a source as sink": (
        lambda: engine(Mute()),
        InputError,
        "sink is of type Mute, which has no placement(); see weightcast.Sink",
    ),
    "nothing as source": (lambda: trainer(3), InputError, "source is of type int, which has no describe(); see"),
    "share misspelt": (
        lambda: trainer(share="inplace"),
        InputError,
        "share is 'inplace', expected 'in_place', 'staged' or None",
    ),
    "share as a flag": (lambda: trainer(share=True), InputError, "share is True, expected 'in_place', 'staged' or"),
    "backend misspelt": (
        lambda: trainer(backend="ncll"),
        InputError,
        "backend is 'ncll', expected 'tcp', 'gloo', 'nccl'",
    ),
    "backend misspelt on an engine": (lambda: engine(backend="GLOO"), InputError, "backend is 'GLOO', expected 'tcp'"),
    "nccl without CUDA": (
        lambda: trainer(backend="nccl"),
        InputError,
        "backend is 'nccl', which needs a CUDA device, and torch sees none here; take 'tcp' or 'gloo'",
    ),
    "nccl without CUDA on an engine": (lambda: engine(backend="nccl"), InputError, "backend is 'nccl', which needs"),
    "a bool as version": (lambda: trainer().update(True), InputError, "version is True, expected a whole number"),
    "a float as version": (lambda: trainer().update(1.0), InputError, "version is 1.0, expected a whole number"),
    "a numpy float as version": (
        lambda: trainer().update(np.float64(1.0)),
        InputError,
        "version is np.float64(1.0), expected a whole number",
    ),
    "a text as version": (lambda: trainer().update("1"), InputError, "version is '1', expected a whole number"),
    "no version": (lambda: trainer().update(None), InputError, "version is None, expected a whole number"),
    "a text as rank": (lambda: trainer(rank="0"), InputError, "rank is '0', expected a whole number"),
    "a float as rank of an engine": (lambda: engine(rank=0.0), InputError, "rank is 0.0, expected a whole number"),
    "a fraction as world_size": (
        lambda: trainer(world_size=Fraction(2)),
        InputError,
        "world_size is Fraction(2, 1), expected a whole number",
    ),
    "a text as world_size of an engine": (lambda: engine(world_size="2"), InputError, "world_size is '2', expected a"),
    "connect after close": (
        lambda: closed(trainer()).connect(),
        ControlError,
        "trainer rank 0: this TrainerWorker was closed; make a new one and connect",
    ),
    "update after close": (lambda: closed(trainer()).update(1), ControlError, "this TrainerWorker was closed"),
    "serve after close": (
        lambda: closed(engine()).serve(),
        ControlError,
        f"{ENGINE} rank 0: this InstanceWorker was closed; make a new one",
    ),
    "an engine's connect after close": (lambda: closed(engine()).connect(1), ControlError, "was closed; make a new"),
    "a client after close": (
        lambda: closed(client()).status(),
        ControlError,
        f"gateway {NOWHERE}: GET /pairs: this client was closed; make a new one",
    ),
    "describe() without return": (
        lambda: trainer(Mute()).connect(),
        DescribeError,
        "describe() of Mute gave NoneType, expected a RankLayout: let it return LayoutBuilder's build()",
    ),
    "no url": (
        lambda: GatewayClient(os.environ.get("NO_SUCH_VARIABLE"), TOKEN),  # type: ignore[arg-type]
        InputError,
        "gateway url is None, expected http://host:port of the gateway, or ray://NAME",
    ),
    "a model in PlainSource": (
        lambda: PlainSource(MODEL),  # type: ignore[arg-type]
        InputError,
        "PlainSource takes a mapping of names to tensors, found Linear; of a model take FsdpSource(model)",
    ),
    "arrays in PlainSource": (
        lambda: PlainSource({"w": np.ones(3)}).describe(),  # type: ignore[dict-item]
        DescribeError,
        "tensor 'w': it is of type ndarray, expected a torch tensor",
    ),
    "a state dict in FsdpSource": (
        lambda: FsdpSource(MODEL.state_dict()),  # type: ignore[arg-type]
        InputError,
        "FsdpSource takes a model, found OrderedDict; of named tensors take PlainSource(tensors)",
    ),
    "an array in a layout": (
        lambda: LayoutBuilder().add("w", (3,), (0,), np.ones(3)),  # type: ignore[arg-type]
        LayoutError,
        "a region has a name and a torch tensor as its memory, found 'w' and ndarray",
    ),
    "a deadline as text": (
        lambda: trainer(deadline="60"),
        InputError,
        "deadline is '60', expected seconds above 0, or None for the pair's settings",
    ),
    "a deadline that is over": (lambda: engine(deadline=0), InputError, "deadline is 0, expected seconds above 0"),
    "a token that is not ASCII": (
        lambda: trainer(token="token-with-\u00e9-of-enough-length"),
        InputError,
        "the bearer token of the argument token has a character that is not printable ASCII, number 12 of 29",
    ),
    "a token with its line end": (
        lambda: engine(token=TOKEN + "\n"),
        InputError,
        "that is not printable ASCII, number 25 of 25; set it again, without spaces and line ends",
    ),
    "an empty token": (
        lambda: client(""),
        InputError,
        f"no bearer token for {NOWHERE}: the argument token is empty; set {TOKEN_VARIABLE} to the gateway's",
    ),
    "instances as a list": (
        lambda: create_with(instances=[ENGINE]),
        InputError,
        f"instances is ['{ENGINE}'], expected from 1 to 10000 instances by name",
    ),
    "an engine's record that is none": (
        lambda: create_with(instances={ENGINE: 1}),
        InputError,
        f"instances.{ENGINE} is 1, expected a table of kind, world_size",
    ),
    "worldsize": (
        lambda: create_with(instances={ENGINE: {"kind": "worker", "worldsize": 1}}),
        InputError,
        "; did you mean world_size?",
    ),
    "a setting that is no number": (
        lambda: create_with(settings={"join": float("nan")}),
        InputError,
        "cannot be sent as JSON: Out of range float values are not JSON compliant",
    ),
    "a tensor as world_size": (
        lambda: create_with(instances={ENGINE: {"kind": "worker", "world_size": torch.tensor(1)}}),
        InputError,
        "cannot be sent as JSON: tensor(1) is a Tensor",
    ),
}


@pytest.fixture(scope="module")
def gateway() -> Iterator[tuple[str, str]]:
    with running_gateway() as found:
        yield found


@pytest.fixture
def at(gateway: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> str:
    """URL of a gateway whose token is in the environment."""
    url, token = gateway
    monkeypatch.setenv(TOKEN_VARIABLE, token)
    monkeypatch.setenv("TEST_GATEWAY", url)
    return url


def create_with(**changes: Any) -> None:
    pair = {"trainer_world": 1, "instances": {ENGINE: {"kind": "worker", "world_size": 1}}, **changes}
    with GatewayClient(os.environ["TEST_GATEWAY"]) as asking:
        asking.create_pair("mistaken", **pair)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named_in_one_line(mistake: str, at: str) -> None:
    call, kind, text = MISTAKES[mistake]
    with pytest.raises(kind) as caught:
        call()
    message = str(caught.value)
    assert text in message
    assert "\n" not in message
    assert TOKEN not in message
    assert "During handling" not in _shown(caught.value)
    with GatewayClient(at) as asking:
        assert asking.status() == [], "nothing was asked of the gateway"


def _shown(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def test_a_token_of_the_environment_that_is_not_ascii(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "\u2026")
    with pytest.raises(InputError, match=rf"the bearer token of {TOKEN_VARIABLE} has a character .* number 1 of 1"):
        client(None)


@pytest.mark.parametrize("lost", ["client", "trainer", "engine"])
def test_a_gateway_that_is_not_there_is_one_traceback(lost: str) -> None:
    """What a user sees is our line, not four tracebacks of the HTTP client with ours at the end."""
    url = f"http://127.0.0.1:{free_port()}"
    calls: dict[str, Callable[[], object]] = {
        "client": lambda: GatewayClient(url, TOKEN).status(),
        "trainer": lambda: TrainerWorker(url, "main", PlainSource({}), rank=0, world_size=1, token=TOKEN).connect(),
        "engine": lambda: InstanceWorker(
            url, "main", ENGINE, PlainSink([]), rank=0, world_size=1, token=TOKEN, deadline=1.0
        ).connect(1),
    }
    with pytest.raises(TransferError, match=rf"gateway {url}: GET .*: ConnectError .*refused; is it up\?") as caught:
        calls[lost]()
    shown = _shown(caught.value)
    assert shown.count("Traceback") == 1
    assert "httpcore" not in shown


@pytest.mark.parametrize("side", ["trainer", "engine"])
def test_another_number_of_ranks_than_the_pair_has(side: str, at: str) -> None:
    """A world_size of 1 is what a script has that was not started by a launcher."""
    with GatewayClient(at) as asking:
        asking.create_pair("worlds", 2, {ENGINE: {"kind": "worker", "world_size": 2}})
    if side == "trainer":
        worker: Any = TrainerWorker(at, "worlds", PlainSource({}), rank=0, world_size=1)
        connect, text = (
            worker.connect,
            "trainer rank 0 has world_size=1, but pair worlds has trainer_world 2: make them",
        )
    else:
        worker = InstanceWorker(at, "worlds", ENGINE, PlainSink([]), rank=0, world_size=1)
        text = f"{ENGINE} rank 0 has world_size=1, but pair worlds has world_size in the instance's record 2: make them"
        connect = partial(worker.connect, 1)
    with pytest.raises(InputError) as caught:
        connect()
    assert str(caught.value).startswith(text)
    worker.close()
    with GatewayClient(at) as asking:
        asking.delete_pair("worlds")


def test_numbers_of_numpy_are_numbers(at: str) -> None:
    """Worlds, ranks and versions come out of arrays and configs."""
    one, zero = np.int64(1), np.int32(0)
    with GatewayClient(at) as asking:
        record = {"kind": "worker", "world_size": one}
        asking.create_pair("numpy", one, {ENGINE: record}, {"join": np.float32(60), "retries": one})
        token = os.environ[TOKEN_VARIABLE]
        serving = Engine(at, token, pair="numpy")
        training = TrainerWorker(at, "numpy", PlainSource({"t": torch.ones(8)}), rank=zero, world_size=one, token=token)
        try:
            training.connect()
            assert training.update(np.uint8(3)).version == 3
            soon(lambda: serving.state == (3, False))
        finally:
            training.close()
            serving.close()
        asking.delete_pair("numpy")


def test_a_model_is_a_sink_of_an_engine(at: str) -> None:
    """`FsdpSource` describes the parameters of any module under checkpoint names: an engine's own, too."""
    trained, served = torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)
    assert not torch.equal(trained.weight, served.weight)
    with GatewayClient(at) as asking:
        asking.create_pair("module", 1, {ENGINE: {"kind": "worker", "world_size": 1}})
        token = os.environ[TOKEN_VARIABLE]
        serving = Engine(at, token, pair="module", sink=FsdpSource(served))
        training = TrainerWorker(at, "module", FsdpSource(trained), rank=0, world_size=1)
        try:
            training.connect()
            training.update(1)
            soon(lambda: serving.state == (1, False))
            assert torch.equal(trained.weight, served.weight)
            assert torch.equal(trained.bias, served.bias)
        finally:
            training.close()
            serving.close()
        asking.delete_pair("module")


@pytest.mark.parametrize("fused", ["engine", "trainer"])
def test_fused_experts_are_no_names_of_a_checkpoint(fused: str, at: str) -> None:
    """A `state_dict()` of Transformers 5 has all experts of a layer in one tensor, which no checkpoint has."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 8, "moe_intermediate_size": 4, "head_dim": 4, "vocab_size": 16}
    config = Qwen3MoeConfig(
        num_hidden_layers=1, num_experts=2, num_attention_heads=2, num_key_value_heads=1, num_experts_per_tok=1, **sizes
    )
    model = Qwen3MoeForCausalLM(config)
    pieces = [(name, tuple(view.shape), (0,) * view.dim(), view) for name, view in model.state_dict().items()]
    sink = PlainSink(pieces) if fused == "engine" else FsdpSource(model)
    source = PlainSource(model.state_dict()) if fused == "trainer" else FsdpSource(model)
    name = f"fused-{fused}"
    with GatewayClient(at) as asking:
        asking.create_pair(name, 1, {ENGINE: {"kind": "worker", "world_size": 1}})
        serving = Engine(at, os.environ[TOKEN_VARIABLE], pair=name, sink=sink)
        training = TrainerWorker(at, name, source, rank=0, world_size=1)
        try:
            with pytest.raises(CoverageError) as caught:
                training.connect()
        finally:
            training.close()
            serving.close()
        asking.delete_pair(name)
    side = ENGINE if fused == "engine" else "the trainer"
    assert str(caught.value).endswith(
        f"; 'model.layers.0.mlp.experts.gate_up_proj' of {side} is all experts of a layer in one tensor: use "
        "checkpoint names, FsdpSource(model) gives them"
    )
    assert _shown(caught.value).count("Traceback") == 1


def test_an_engine_may_be_started_before_its_pair(at: str, caplog: pytest.LogCaptureFixture) -> None:
    """It waits, and says for which pair, and which there are: a name may be misspelt."""
    token = os.environ[TOKEN_VARIABLE]
    serving = Engine(at, token, pair="late", wait=0.1)
    try:
        soon(lambda: "there is no pair 'late'; there are none" in caplog.text)
        with GatewayClient(at) as asking:
            asking.create_pair("laten", 1, {ENGINE: {"kind": "worker", "world_size": 1}})
            soon(lambda: "there is no pair 'late'; there are laten; holds no version and waits for" in caplog.text)
            asking.create_pair("late", 1, {"another": {"kind": "worker", "world_size": 1}})
            soon(lambda: f"pair late has no instance '{ENGINE}'; it has another; holds no version" in caplog.text)
            assert caplog.text.count("to have it") == 3, (
                "once for each state of things, however often `serve` is called"
            )
            asking.join_instance("late", ENGINE, {"kind": "worker", "world_size": np.int64(1)})
            asking.leave_instance("late", "another")
            training = TrainerWorker(at, "late", PlainSource({"t": torch.ones(8)}), rank=0, world_size=1)
            training.connect()
            training.update(1)
            soon(lambda: serving.state == (1, False))
            training.close()
            asking.delete_pair("late")
            asking.delete_pair("laten")
    finally:
        serving.close()
    assert not serving.said


def test_a_pair_that_is_gone_is_created_again(at: str) -> None:
    """The error at the next update says how to go on."""
    client = GatewayClient(at)
    client.create_pair("gone", 1, {"rollout-0": {"kind": "worker", "world_size": 1}}, {"register": 0.5})
    training = TrainerWorker(at, "gone", PlainSource({"t": torch.zeros(4)}), rank=0, world_size=1)
    with pytest.raises(DeadlineError, match="did not register"):
        training.connect()
    client.delete_pair("gone", force=True)
    with pytest.raises(AbsentError, match=r"it was deleted, or .* create it and connect\(\) again on all ranks"):
        training.update(1)
    training.close()
    client.close()


def test_an_address_of_https_where_there_is_http(at: str) -> None:
    with GatewayClient(at.replace("http", "https")) as client, pytest.raises(TransferError, match="it speaks http: "):
        client.status()


def test_a_pair_that_is_not_there_is_an_error_for_a_trainer(at: str) -> None:
    """A trainer's first rank creates its pair, so nothing is to be waited for."""
    training = TrainerWorker(at, "nope", PlainSource({}), rank=0, world_size=1)
    with pytest.raises(AbsentError, match="there is no pair 'nope'; there are none"):
        training.connect()
    training.close()
