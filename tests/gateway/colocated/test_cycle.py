"""The steps of an iteration on shared devices: their order, what is reported, and what a failure leaves."""

from __future__ import annotations

import asyncio
import mmap
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import httpx
import pytest

from weightcast.gateway.colocated.cycle import ORDER, ColocatedCycle, MemoryUse, check_order
from weightcast.gateway.colocated.engine_memory import SGLangMemory
from weightcast.gateway.control.engines import SGLangDriver
from weightcast.gateway.records import EngineSpec
from weightcast.transfer.errors import EngineError, InputError, PairStateError, UpdateError

NAMES = {"/pause_generation": "pause", "/continue_generation": "continue"}


@dataclass
class Engine:
    """SGLang's server as far as memory goes: it ends when it is asked for what it cannot do, as the real one does."""

    log: list[str]
    name: str = "rollout-0"
    refuses: str = ""
    breaks: str = ""
    released: set[str] = field(default_factory=set)
    paused: bool = False

    def __call__(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        tags = list(httpx.Response(200, content=request.content).json().get("tags", []))
        step = NAMES.get(path) or " ".join([path.split("_")[0].lstrip("/"), *tags])
        self.log.append(f"{self.name}: {step}")
        if step == self.refuses:
            return httpx.Response(400, json={"error": {"message": "not\nnow"}})
        if path == "/pause_generation":
            self.paused = True
        elif path == "/continue_generation":
            assert self.paused
            assert not self.released
            self.paused = False
        elif path == "/release_memory_occupation":
            assert self.paused
            self.released |= set(tags)
        else:
            assert set(tags) <= self.released, "SGLang ends: KeyError in resume_memory_occupation"
            self.released -= set(tags)
        if step == self.breaks:
            raise httpx.ReadTimeout("", request=request)
        return httpx.Response(200)

    def memory(self) -> SGLangMemory:
        return SGLangMemory(self.name, "http://127.0.0.1:1", transport=httpx.MockTransport(self))


@dataclass
class Trainer:
    log: list[str]
    fails: str = ""

    def _do(self, step: str) -> None:
        self.log.append(step)
        if step == self.fails:
            raise ValueError("out of\nmemory")

    def train(self, version: int) -> None:
        self._do(f"train {version}")

    def free(self) -> None:
        self._do("free")

    def transfer(self, version: int) -> None:
        self._do(f"transfer {version}")

    def offload(self) -> None:
        self._do("offload")


def cycle_of(trainer: Trainer, *engines: Engine, order: Sequence[str] = ORDER) -> ColocatedCycle:
    return ColocatedCycle([engine.memory() for engine in engines], trainer, order)


def test_all_steps_in_order_each_reported_with_the_memory_before_and_after() -> None:
    log: list[str] = []
    uses = iter(MemoryUse(n, 2 * n, 0) for n in range(100))
    told = []
    engine = Engine(log)
    cycle = ColocatedCycle([engine.memory()], Trainer(log), report=told.append, measure=lambda: next(uses))
    steps = cycle.run(3)
    mine = {"train": "train 3", "free": "free", "transfer": "transfer 3", "offload": "offload"}
    assert log == [mine.get(step, f"rollout-0: {step}") for step in ORDER]
    assert told == steps
    assert [(s.step, s.before.process, s.after.host) for s in steps] == [
        (step, 2 * i, 2 * (2 * i + 1)) for i, step in enumerate(ORDER)
    ]
    assert cycle.state == "at rest: the engines generate"
    assert not engine.paused
    cycle.run(4)


def test_memory_in_use_is_read_from_the_system() -> None:
    use = MemoryUse.now()
    assert 10 << 20 < use.process < use.host
    with mmap.mmap(-1, 64 << 20) as ballast:  # not what the process has kept
        ballast.write(bytes(len(ballast)))
        assert MemoryUse.now().process - use.process > 32 << 20


def test_an_engine_that_refuses_leaves_a_named_state_and_is_asked_again_alone() -> None:
    log: list[str] = []
    first, second = Engine(log), Engine(log, "rollout-1", refuses="resume weights")
    cycle = cycle_of(Trainer(log), first, second)
    with pytest.raises(
        UpdateError,
        match=r"'resume weights' failed: EngineError: instance rollout-1: /resume_memory_occupation answered 400: .*"
        r"; 5 of 10 steps of version 1 are done, next is 'resume weights'; rollout-0 without kv_cache, "
        r"rollout-1 without kv_cache and weights; run it again",
    ) as caught:
        cycle.run(1)
    assert "\n" not in str(caught.value)
    with pytest.raises(PairStateError, match="version 1 is under way, not 2"):
        cycle.run(2)
    log.clear()
    second.refuses = ""
    assert len(cycle.run(1)) == len(ORDER)
    assert log[:2] == ["rollout-1: resume weights", "transfer 1"]


def test_a_trainer_that_fails_goes_on_with_its_step() -> None:
    log: list[str] = []
    trainer = Trainer(log, fails="train 1")
    cycle = cycle_of(trainer, Engine(log))
    with pytest.raises(UpdateError, match="'train' failed: ValueError: out of memory; 3 of 10 steps"):
        cycle.run(1)
    trainer.fails = ""
    log.clear()
    cycle.run(1)
    assert log[0] == "train 1"


@pytest.mark.parametrize("done", [True, False])
def test_a_call_whose_answer_is_lost_has_to_be_settled(done: bool) -> None:
    log: list[str] = []
    engine = Engine(log, breaks="resume weights")
    cycle = cycle_of(Trainer(log), engine)
    with pytest.raises(UpdateError, match="was asked, but not answered: ReadTimeout"):
        cycle.run(1)
    for _ in range(2):
        with pytest.raises(PairStateError, match=r"not answered.*call settle\(done=...\) on every rank"):
            cycle.run(1)
    if not done:
        engine.released.add("weights")
    engine.breaks = ""
    cycle.settle(done)
    log.clear()
    cycle.run(1)
    assert log[0] == ("transfer 1" if done else "rollout-0: resume weights")
    with pytest.raises(PairStateError, match="every step is settled"):
        cycle.settle(True)


def test_a_call_whose_answer_is_lost_is_settled_on_all_ranks() -> None:
    """Also on those that do not lead, which would wait for the others in the next step."""
    log: list[str] = []
    engine = Engine(log, breaks="resume weights")
    failures = ["", ""]
    meeting = threading.Barrier(2, timeout=30.0)

    def agree(rank: int, failure: str) -> str:
        failures[rank] = failure
        meeting.wait()
        agreed = "; ".join(filter(None, failures))
        meeting.wait()
        return agreed

    cycles = [
        ColocatedCycle([engine.memory()], Trainer([]), leads=rank == 0, agree=partial(agree, rank)) for rank in range(2)
    ]

    def outcomes() -> list[object]:
        with ThreadPoolExecutor(2) as pool:
            return [future.exception() for future in [pool.submit(cycle.run, 1) for cycle in cycles]]

    assert [type(error) for error in outcomes()] == [UpdateError] * 2
    for _ in range(2):
        assert [type(error) for error in outcomes()] == [PairStateError] * 2
    engine.breaks = ""
    for cycle in cycles:
        cycle.settle(True)
    assert outcomes() == [None, None]


def test_a_server_that_is_not_there_was_not_asked() -> None:
    engine = SGLangMemory("rollout-0", "http://127.0.0.1:9")
    with pytest.raises(EngineError, match=r"/pause_generation was not asked: .*; is the server up"):
        engine.pause()
    engine.close()


def test_a_server_with_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    keys: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        keys.append(request.headers["authorization"])
        return httpx.Response(200)

    variable, transport = "WEIGHTCAST_ENGINE_KEY", httpx.MockTransport(answer)
    with pytest.raises(EngineError, match=f"variable {variable} is not set in the environment of this process"):
        SGLangMemory("rollout-0", "http://127.0.0.1:9", transport=transport, api_key_variable=variable)
    monkeypatch.setenv(variable, "the-key")
    engine = SGLangMemory("rollout-0", "http://127.0.0.1:9", transport=transport, api_key_variable=variable)
    engine.pause()
    engine.close()
    assert keys == ["Bearer the-key"]


@pytest.mark.parametrize(
    ("variable", "fault"),
    [
        ("", "the server wants a key: set api_key_variable"),
        ("WEIGHTCAST_ENGINE_KEY", "the server does not take the key of variable WEIGHTCAST_ENGINE_KEY"),
    ],
)
def test_a_server_that_does_not_take_the_key(monkeypatch: pytest.MonkeyPatch, variable: str, fault: str) -> None:
    monkeypatch.setenv("WEIGHTCAST_ENGINE_KEY", "the-key")
    transport = httpx.MockTransport(lambda request: httpx.Response(401, text="Unauthorized"))
    engine = SGLangMemory("rollout-0", "http://127.0.0.1:9", transport=transport, api_key_variable=variable)
    with pytest.raises(EngineError, match=f"/pause_generation answered 401: {fault}") as refused:
        engine.pause()
    assert "the-key" not in str(refused.value)
    engine.close()


def test_ranks_that_do_not_lead_leave_the_engines_alone_and_hear_of_failures() -> None:
    log: list[str] = []
    heard = iter(["", "", "", "", "rank 0 is out of memory", *[""] * 9])
    cycle = ColocatedCycle([Engine(log).memory()], Trainer(log), leads=False, agree=lambda mine: next(heard) or mine)
    with pytest.raises(UpdateError, match="'train' failed: rank 0 is out of memory; 3 of 10"):
        cycle.run(1)
    cycle.run(1)
    assert log == ["train 1", "train 1", "free", "transfer 1", "offload"]


@pytest.mark.parametrize(
    ("order", "message"),
    [
        (("release kv_cache", "continue"), "step 1, 'release kv_cache', comes before 'pause'"),
        (("pause", "release a", "release a", "continue"), "step 3, 'release a', comes twice"),
        (("pause", "resume weights", "continue"), "step 2, 'resume weights', comes before its release"),
        (("pause", "release weights", "transfer"), "step 3, 'transfer', comes while weights are released"),
        (("pause", "release a", "continue"), "step 3, 'continue', comes while a is released"),
        (("pause", "sing", "continue"), "step 2, 'sing', is none of pause"),
        (("pause", "release", "continue"), "step 2, 'release', is none of"),
        (("pause", "train a", "continue"), "step 2, 'train a', is none of"),
        (("pause", "train"), "the last step has to be 'continue'"),
        ((), "the last step has to be 'continue'"),
    ],
)
def test_orders_that_contradict_themselves_are_refused(order: tuple[str, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_order(order)


def test_order_and_tags_are_free_otherwise() -> None:
    log: list[str] = []
    order = ("pause", "release cuda_graph", "train", "transfer", "resume cuda_graph", "continue")
    cycle_of(Trainer(log), Engine(log), order=order).run(1)
    assert [entry.removeprefix("rollout-0: ") for entry in log] == [
        "pause", "release cuda_graph", "train 1", "transfer 1", "resume cuda_graph", "continue",
    ]  # fmt: skip


def test_an_engine_that_is_held_is_not_let_go_by_the_gateway() -> None:
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.path)
        return httpx.Response(200, json={"status": "ok"})

    for hold in (True, False):
        spec = EngineSpec(kind="sglang", world_size=1, url="http://127.0.0.1:1", hold=hold)
        asyncio.run(SGLangDriver("rollout-0", spec, 1.0, httpx.MockTransport(answer)).resume())
    assert asked == ["/continue_generation"]
