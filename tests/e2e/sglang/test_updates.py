"""What a real SGLang server answers around updates: in every pause mode, with a prefix cache, under load."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from gateway_support import running_gateway
from sglang_updates import SLOTS, Answer, Engine, Stream, Weights, start_engine
from stopping_trainer import STOPS

from weightcast.adapters.unsharded import PlainSource
from weightcast.cluster.processes import running
from weightcast.gateway.client import TOKEN_VARIABLE, GatewayClient
from weightcast.gateway.ranks.trainer import TrainerWorker
from weightcast.transfer.errors import CoverageError, UpdateError

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

PROMPTS = [[(7 + 11 * number + step * (3 + number)) % 250 for step in range(24)] for number in range(8)]
COUNT = 12
SCHEMA = '{"type": "object", "properties": {"n%d": {"type": "integer"}}, "required": ["n%d"]}'


@pytest.fixture(scope="module")
def gateway() -> Iterator[tuple[str, str]]:
    with running_gateway() as found:
        yield found


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    return Weights(tmp_path_factory.mktemp("weights") / "model")


@pytest.fixture(scope="module")
def engine(weights: Weights, gateway: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with start_engine(weights.folder, tmp_path_factory.mktemp("engine"), gateway[1], 2.0) as started:
        yield started


@contextmanager
def paired(
    gateway: tuple[str, str], engine: Engine, weights: Weights, pause: str, ranks: int = 1
) -> Iterator[TrainerWorker]:
    """A trainer of one rank that is connected to the engine; the pair is gone afterwards."""
    url, token = gateway
    record: dict[str, Any] = {"url": engine.url, "world_size": ranks, "pause": pause}
    with GatewayClient(url, token) as client:
        client.create_pair("main", 1, {"rollout-0": record}, {"silence": 60.0})
        trainer = TrainerWorker(url, "main", weights.source, rank=0, world_size=1, token=token)
        try:
            trainer.connect()
            yield trainer
        finally:
            trainer.close()
            client.delete_pair("main")


KNOWN = {
    "runner.kv_cache_configurator",  # sizes of pools
    "runner.kv_cache_dtype",
    "scheduler.tree_cache",  # KV and its radix tree
    "tree.storage_existence_cache",  # what storage has, which is refused
}
"""What a scheduler with its workers calls a cache; each was looked at for `INVENTORY` of `test_caches.py`."""

VERSIONS = iter(range(1, 1000))
ATTEMPTS = 5
"""Rounds of a test in which a busy machine may answer everything before the update begins."""


def update(trainer: TrainerWorker, weights: Weights) -> int:
    version = next(VERSIONS)
    weights.become(version)
    trainer.update(version)
    return version


def right(engine: Engine, weights: Weights, version: int | str, prompts: list[list[int]]) -> int:
    """Of how many prompts the answer is that of the trainer's weights, all stamped with `version`."""
    answers = [engine.ask(prompt, COUNT) for prompt in prompts]
    assert {answer.version for answer in answers} == {str(version)}
    return sum(a.tokens == weights.says(prompt, COUNT) for a, prompt in zip(answers, prompts, strict=True))


@pytest.mark.parametrize("pause", ["retract", "in_place"])
def test_answers_of_a_new_lineage_have_stamps_of_their_own(
    gateway: tuple[str, str], engine: Engine, weights: Weights, pause: str
) -> None:
    """Two versions of one number, with other weights: neither an answer nor a prefix cache takes one for the other."""
    with paired(gateway, engine, weights, pause) as trainer:
        first = update(trainer, weights)
        assert right(engine, weights, first, PROMPTS) == len(PROMPTS)
        weights.become(next(VERSIONS))
        assert trainer.update(first, restart=True).stamp == f"{first}@2"
        assert right(engine, weights, f"{first}@2", PROMPTS) == len(PROMPTS)


@pytest.mark.parametrize("pause", ["abort", "retract", "in_place"])
def test_answers_are_those_of_the_version_they_are_stamped_with(
    gateway: tuple[str, str], engine: Engine, weights: Weights, pause: str
) -> None:
    """Prompts that were asked before, several versions ago too, one that was under way, and two that waited."""
    with paired(gateway, engine, weights, pause) as trainer:
        first = update(trainer, weights)
        assert right(engine, weights, first, PROMPTS) == len(PROMPTS)
        long = [prompt[::-1] for prompt in PROMPTS]
        for _ in range(ATTEMPTS):
            before = [weights.says(prompt, 60) for prompt in long[:1]]
            streams = [Stream(engine, prompt, 460) for prompt in long]
            for stream in streams:
                stream.begun()
            waiting = [Stream(engine, prompt, COUNT) for prompt in PROMPTS[:2]]
            time.sleep(0.1)
            second = update(trainer, weights)
            answers = [stream.answer() for stream in streams]
            if all(answer.reason == "abort" or answer.version != str(first) for answer in answers):
                break
            first = second
        (kept,) = engine.kept(second)
        assert kept["embeddings"] == 0
        assert kept["transferred"] == (1 if pause == "in_place" else 0), "embeddings kept until the end of the session"
        unknown = set(kept["attributes"]) - KNOWN
        assert not unknown, f"SGLang keeps what the inventory may lack: {' '.join(sorted(unknown))}"
        for prompt, stream in zip(PROMPTS[:2], waiting, strict=True):
            if pause != "abort":
                answer = stream.answer()
                assert (answer.tokens, answer.version) == (weights.says(prompt, COUNT), str(second))
        if pause == "abort":
            assert [answer.reason for answer in answers] == ["abort"] * SLOTS
            assert kept["tree"] == 0
        else:
            for prompt, answer in zip(long, answers, strict=True):
                check_spans(answer, first, second)
                switch = answer.spans[0][2]
                if prompt is long[0]:
                    shown = min(switch, 60)
                    assert answer.tokens[:shown] == before[0][:shown]
                if pause == "retract":
                    rest = weights.says([*prompt, *answer.tokens[:switch]], COUNT)
                    assert answer.tokens[switch : switch + COUNT] == rest
        # What ran through the update has left KV of two versions.
        again = [*PROMPTS, *long, *([*p, *a.tokens[:40]] for p, a in zip(long, answers, strict=True))]
        assert right(engine, weights, second, again) == len(again)
        third = update(trainer, weights)
        assert right(engine, weights, third, again) == len(again)


def test_a_version_number_that_comes_again_is_another_version(
    gateway: tuple[str, str], engine: Engine, weights: Weights
) -> None:
    """A pair that is made anew counts from where it likes, with other weights; in place no cache is flushed."""
    version = next(VERSIONS)
    for weight in (version, version + 1):
        with paired(gateway, engine, weights, "in_place") as trainer:
            weights.become(weight)
            trainer.update(version)
            assert right(engine, weights, version, PROMPTS) == len(PROMPTS)


def test_an_engine_that_a_dead_trainer_left_paused_goes_on_in_the_pair_that_replaces_its_own(
    gateway: tuple[str, str], engine: Engine, weights: Weights, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, token = gateway
    monkeypatch.setenv(TOKEN_VARIABLE, token)
    arguments = ("main", 1, {"rollout-0": {"url": engine.url, "world_size": 1, "pause": "retract"}}, {"silence": 60.0})
    dying = [sys.executable, str(root / "tests" / "support" / "dying_trainer.py"), url, "main", str(weights.folder)]
    with GatewayClient(url, token) as client:
        client.create_pair(*arguments)  # type: ignore[arg-type]
        assert subprocess.run(dying, timeout=300.0).returncode == -signal.SIGKILL
        assert client.pair_status("main")["offers"] == {"0": 2}
        client.create_pair(*arguments, replace=True)  # type: ignore[arg-type]
    assert engine.ask(PROMPTS[0], COUNT).version == "1", "it goes on with what it has"
    with paired(gateway, engine, weights, "retract") as trainer:
        version = update(trainer, weights)
        assert right(engine, weights, version, PROMPTS) == len(PROMPTS)


def check_spans(answer: Answer, first: int, second: int) -> None:
    """An answer that spans versions is stamped with its last, and says which version sampled which tokens."""
    assert answer.version == str(second)
    (old, start, switch), (new, resumed, end) = answer.spans
    assert (old, start, new, resumed, end) == (str(first), 0, str(second), switch, len(answer.tokens))
    assert 3 <= switch < end


def test_what_is_refused_before_a_transfer_costs_nothing(
    gateway: tuple[str, str], engine: Engine, weights: Weights
) -> None:
    """SGLang's own refusal that holds since the connect, and an engine that is not paused: the old version goes on."""
    sentence = "Online updates are not supported: a derived copy of the tests"
    with GatewayClient(*gateway) as client, paired(gateway, engine, weights, "retract") as trainer:

        def goes_on(version: int) -> None:
            (status,) = client.pair_status("main")["instances"].values()
            assert (status["version"], status["fenced"]) == (version, False)
            weights.become(version)
            assert right(engine, weights, version, PROMPTS[:2]) == 2

        version = update(trainer, weights)
        with engine.guarded(sentence), pytest.raises(UpdateError, match=f"refuses updates of this model: {sentence}"):
            update(trainer, weights)
        goes_on(version)

        version = update(trainer, weights)
        (status,) = client.pair_status("main")["instances"].values()
        group = f"weightcast/main/rollout-0/{status['epoch']}"
        body = {"names": [], "dtypes": [], "shapes": [], "group_name": group, "load_format": "weightcast"}
        assert engine.post("/begin_weight_update").status_code == 200
        said = engine.post("/update_weights_from_distributed", **body)
        assert said.status_code == 400
        assert "the engine is not paused" in said.text
        assert engine.post("/end_weight_update").status_code == 200
        goes_on(version)
        version = update(trainer, weights)
        goes_on(version)


@pytest.fixture
def two_ranks(weights: Weights, gateway: tuple[str, str], tmp_path: Path) -> Iterator[Engine]:
    with start_engine(weights.folder, tmp_path, gateway[1], tp=2) as started:
        yield started


def test_a_rank_that_is_busy_is_asked_again_or_named(
    gateway: tuple[str, str], two_ranks: Engine, weights: Weights
) -> None:
    """Before the first byte either rank alone may be busy: all are asked again. At the end nobody asks again: the
    version is not stamped, the instance is fenced and the rank named; the next update mends it.
    """
    with GatewayClient(*gateway) as client, paired(gateway, two_ranks, weights, "retract", 2) as trainer:
        for rank in (0, 1):
            two_ranks.make_busy("begin", rank)
            version = update(trainer, weights)
            assert right(two_ranks, weights, version, PROMPTS[:2]) == 2
            assert [kept["embeddings"] for kept in two_ranks.kept(version)] == [0, 0]
        for rank in (0, 1):
            two_ranks.make_busy("end", rank)
            begun = time.monotonic()
            with pytest.raises(UpdateError, match=rf"rank {rank}\b.* busy: SGLang does not flush its caches"):
                update(trainer, weights)
            assert time.monotonic() - begun < 120.0, "it has to be told, not to be waited for"
            (status,) = client.pair_status("main")["instances"].values()
            assert (status["version"], status["fenced"]) == (version, True)
            assert not two_ranks.kept(version + 1), "it was stamped"
            version = update(trainer, weights)
            assert right(two_ranks, weights, version, PROMPTS[:2]) == 2


def load(engine: Engine, stop: threading.Event, number: int, ended: list[str]) -> None:
    """One client: a request after the other, every fourth with a grammar that was never compiled before."""
    turn = 0
    while not stop.is_set():
        turn += 1
        grammar = {"json_schema": SCHEMA % (number * 1000 + turn, number)} if (number + turn) % 4 == 0 else {}
        said = engine.generate([1 + number, 2 + turn % 200, *range(10, 20)], 24, **grammar)
        # Who waited is told by status, who had tokens already in the answer.
        ended.append("abort" if "Aborted by AbortReq" in said.text else str(said.json()["meta_info"]["finish_reason"]))


@pytest.mark.parametrize("pause", ["retract", "in_place", "abort"])
def test_updates_under_load_commit(gateway: tuple[str, str], engine: Engine, weights: Weights, pause: str) -> None:
    """64 clients for 8 slots; grammars compile for 2 s, longer than an update takes."""
    stop, ended = threading.Event(), list[str]()
    with paired(gateway, engine, weights, pause) as trainer:
        first = update(trainer, weights)
        clients = [
            threading.Thread(target=load, args=(engine, stop, number, ended), daemon=True) for number in range(64)
        ]
        for client in clients:
            client.start()
        try:
            compiling = 0
            for _ in range(UPDATES):
                time.sleep(0.5)
                version = update(trainer, weights)  # raises unless it committed
                compiling += sum(kept["grammars"] for kept in engine.kept(version))
        finally:
            stop.set()
            for client in clients:
                client.join(120.0)
        assert not any(client.is_alive() for client in clients)
        assert len(ended) > 64
        assert ended.count("abort") == 0 or pause == "abort"
        assert compiling > 0 or pause == "abort", "no grammar was compiled during an update"
        assert version > first
        assert right(engine, weights, version, PROMPTS) == len(PROMPTS)


UPDATES = 7
"""Of each mode: 21 in all."""


def test_a_connect_that_waits_holds_nothing_up(
    gateway: tuple[str, str], engine: Engine, weights: Weights, tmp_path: Path
) -> None:
    """A trainer rank stands still after it has registered; meanwhile health checks and a request are answered, and
    connects that were given up leave no threads. When it goes on, an update commits.
    """
    url, token = gateway
    record: dict[str, Any] = {"url": engine.url, "world_size": 1, "pause": "retract"}
    settings = {"join": 12.0, "silence": 300.0, "heartbeat": 1.0, "offer": 60.0}
    with GatewayClient(url, token) as client:
        client.create_pair("main", 1, {"rollout-0": record}, settings)
        program = Path(__file__).parents[2] / "support" / "stopping_trainer.py"
        command = [sys.executable, str(program), url, str(weights.folder)]
        with running(command, tmp_path / "trainer.log", {TOKEN_VARIABLE: token}) as trainer:
            try:
                threads = []
                for _ in range(STOPS):
                    wait_for(lambda: Path(f"/proc/{trainer.pid}/stat").read_text().split()[2] == "T")
                    wait_for(lambda: phase(client) == "planned")
                    stream = Stream(engine, PROMPTS[0], 100)
                    healthy = [engine.health() for _ in range(3)]
                    assert len(stream.answer().tokens) == 100
                    assert healthy == [200, 200, 200]
                    assert phase(client) == "planned", "all this has to happen while the connect waits"
                    threads.append(engine.threads())
                    wait_for(lambda: phase(client) == "failed")
                    trainer.send_signal(signal.SIGCONT)
                assert threads[-1] <= threads[0], "connects that were given up leave something behind"
                assert trainer.wait(120.0) == 0, (tmp_path / "trainer.log").read_text()
            finally:
                trainer.send_signal(signal.SIGCONT)
        (status,) = client.pair_status("main")["instances"].values()
        assert (status["version"], status["fenced"]) == (1, False)
        client.delete_pair("main")
    assert "trainer rank 0 did not join within 12 s" in engine.log.read_text(), "the server's log says what failed"


def test_the_log_of_a_server_says_why_its_connect_failed(
    gateway: tuple[str, str], engine: Engine, weights: Weights
) -> None:
    """The fault is the trainer's: nothing is wrong with the server's own rank."""
    url, token = gateway
    with GatewayClient(url, token) as client:
        client.create_pair("main", 1, {"rollout-0": {"url": engine.url, "world_size": 1}}, {"silence": 60.0})
        source = PlainSource({**weights.tensors, "model.layers.9.of_the_trainer_alone": torch.ones(3)})
        trainer = TrainerWorker(url, "main", source, rank=0, world_size=1, token=token)
        try:
            with pytest.raises(CoverageError, match="of_the_trainer_alone"):
                trainer.connect()
            wait_for(lambda: "of_the_trainer_alone" in engine.log.read_text())
        finally:
            trainer.close()
            client.delete_pair("main")


def phase(client: GatewayClient) -> str:
    return str(client.pair_status("main")["instances"]["rollout-0"]["phase"])


def wait_for(true: Callable[[], bool], seconds: float = 120.0) -> None:
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until
        time.sleep(0.05)
