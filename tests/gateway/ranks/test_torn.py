"""Weights that change while update() runs: what is committed is what the trainer had at one moment, or nothing is."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import numpy as np
import pytest
import torch
from gateway_support import running_gateway
from plain_support import Piece, PlainSink

from weightcast.adapters.unsharded import PlainSource
from weightcast.gateway.client import GatewayClient
from weightcast.gateway.ranks.instance import InstanceWorker
from weightcast.gateway.ranks.trainer import TrainerWorker
from weightcast.transfer.colocated.offers import Share
from weightcast.transfer.errors import DigestMismatchError, UpdateError, WeightsChangedError

FILLERS, FILLER = 12, (1 << 20,)
"""Tensors between the two that are written, and their shape: they keep the reads of those two apart."""
FIRST, LAST = "a.first", "z.last"
TRIALS = 8


def tensors() -> dict[str, torch.Tensor]:
    shapes = {FIRST: (64,), **{f"m.{i:02}": FILLER for i in range(FILLERS)}, LAST: (64,)}
    return {name: torch.zeros(shape) for name, shape in shapes.items()}


class Rig:
    """Trainer ranks, each with the tensors of `names`, and an instance rank, on a gateway of their own."""

    def __init__(
        self,
        url: str,
        token: str,
        *,
        names: Sequence[Sequence[str]] = (),
        verify: str = "full",
        backend: str = "tcp",
        share: Share = None,
    ) -> None:
        self.held, self.weights = tensors(), tensors()
        names = names or [list(self.weights)]
        engine = {"kind": "worker", "world_size": 1, "backend": backend}
        with GatewayClient(url, token) as client:
            client.create_pair("main", len(names), {"e": engine}, bucket_bytes=1 << 20, verify=verify)
        pieces = [
            Piece(name, tuple(t.shape), (0,), t) for name, t in self.held.items() if any(name in mine for mine in names)
        ]
        where: dict[str, Any] = {"token": token, "backend": backend, "deadline": 60.0}
        self.worker = InstanceWorker(url, "main", "e", PlainSink(pieces), rank=0, world_size=1, **where)
        self._over = threading.Event()
        self._serving = threading.Thread(target=self._serve)
        self._serving.start()
        sources = [PlainSource({name: self.weights[name] for name in mine}) for mine in names]
        self.trainers = [
            TrainerWorker(url, "main", source, rank=rank, world_size=len(names), share=share, **where)
            for rank, source in enumerate(sources)
        ]
        self.pool = ThreadPoolExecutor(len(names))
        list(self.pool.map(TrainerWorker.connect, self.trainers))

    def _serve(self) -> None:
        while not self._over.is_set():
            self.worker.serve(wait=0.02)

    def update(self, version: int) -> None:
        """On all trainer ranks. Raises what rank 0 does."""
        running = [self.pool.submit(trainer.update, version) for trainer in self.trainers]
        wait(running)
        running[0].result()

    def seconds(self, version: int) -> float:
        """How long an update takes while nobody writes."""
        begun = time.monotonic()
        self.update(version)
        return time.monotonic() - begun

    def pair_of(self, which: dict[str, torch.Tensor]) -> tuple[float, float]:
        """What the two tensors hold; each has one value."""
        values = [set(which[name].tolist()) for name in (FIRST, LAST)]
        assert all(len(one) == 1 for one in values), values
        return values[0].pop(), values[1].pop()

    def serves(self, version: int) -> bool:
        """Whether the instance's rank serves a version, once it has heard so."""
        limit = time.monotonic() + 20.0
        while self.worker.version != version and time.monotonic() < limit:
            time.sleep(0.01)
        return self.worker.version == version and not self.worker.fenced

    def close(self) -> None:
        for trainer in self.trainers:
            trainer.close()
        self.pool.shutdown()
        self._over.set()
        self._serving.join()
        self.worker.close()


@pytest.fixture
def rig() -> Iterator[Callable[..., Rig]]:
    logging.disable(logging.CRITICAL)
    rigs: list[Rig] = []

    def make(**how: Any) -> Rig:
        rigs.append(Rig(url, token, **how))
        return rigs[-1]

    with running_gateway() as (url, token):
        yield make
        for one in rigs:
            one.close()
    logging.disable(logging.NOTSET)


Write = Callable[[torch.Tensor, float], object]


def with_numpy(tensor: torch.Tensor, value: float) -> None:
    np.asarray(tensor.numpy())[:] = value


WRITERS: dict[str, Write] = {
    "torch": lambda tensor, value: tensor.fill_(value),
    "numpy": with_numpy,
    "data": lambda tensor, value: tensor.data.copy_(torch.full_like(tensor, value)),
}
TRANSPORTS = {
    "tcp": {"backend": "tcp"},
    "gloo": {"backend": "gloo"},
    "in place": {"share": "in_place"},
    "staged": {"share": "staged"},
}


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_no_mixture_is_committed(transport: str, rig: Callable[..., Rig]) -> None:
    """One tensor is written, then the other, at some moment of each update. New beside old, in this order, never was.

    In every other update that moment is after the first pass, and the second one waits for it: those are all refused.
    The next update, in which nobody writes, brings what the trainer has.
    """
    pair, chance = rig(**TRANSPORTS[transport]), random.Random(5)
    window = max(pair.seconds(1), pair.seconds(2))
    training, sending, written = pair.trainers[0], threading.Event(), threading.Event()
    run, second = training._run, training._digests.second

    def run_announced(*arguments: Any, **which: Any) -> None:
        sending.set()
        run(*arguments, **which)

    def second_behind_the_write(*arguments: Any, **which: Any) -> Any:
        assert written.wait(60.0)
        return second(*arguments, **which)

    training._run = run_announced  # type: ignore[method-assign]
    version, mixtures, refusals = 2, [], []
    for trial in range(TRIALS):
        is_inside = trial % 2 == 0
        old, new, write = 2.0 * trial, 2.0 * trial + 1, WRITERS[chance.choice(list(WRITERS))]
        for tensor in pair.weights.values():
            tensor.fill_(old)

        def writer(is_inside: bool, moment: float, value: float, write: Write) -> None:
            assert not is_inside or sending.wait(60.0)
            time.sleep(moment)
            write(pair.weights[FIRST], value)
            write(pair.weights[LAST], value)
            written.set()

        sending.clear()
        written.clear()
        training._digests.second = second_behind_the_write if is_inside else second  # type: ignore[method-assign]
        moment = chance.uniform(0.0, (0.5 if is_inside else 1.1) * window)
        writing = threading.Thread(target=writer, args=(is_inside, moment, new, write))
        version += 1
        writing.start()
        try:
            pair.update(version)
        except UpdateError as error:
            refusals.append(str(error))
        else:
            assert not is_inside, "it was written after the first pass and before the second"
            first, last = pair.pair_of(pair.held)
            if first < last:
                mixtures.append((first, last))
        writing.join()
        version += 1
        pair.update(version)
        assert pair.pair_of(pair.held) == (new, new), "the next update repairs what the refused one has left"
        assert pair.serves(version)
    assert mixtures == []
    assert len(refusals) >= TRIALS // 2
    assert all("the trainer's weights changed during update()" in reason for reason in refusals), refusals


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_ranks_that_send_one_after_the_other_send_one_state(transport: str, rig: Callable[..., Rig]) -> None:
    """Rank 1 is late. All weights take a step meanwhile, and had its digests and bytes come from behind it, and those
    of rank 0 from before, both sides would agree.
    """
    pair = rig(names=[[FIRST], [LAST]], **TRANSPORTS[transport])
    pair.update(1)
    for tensor in pair.weights.values():
        tensor.fill_(2.0)
    client = pair.trainers[1]._client
    begun = client.begun

    def late(*arguments: Any) -> Any:
        limit = time.monotonic() + 1.0
        while pair.held[FIRST][0] != 2.0 and time.monotonic() < limit:
            time.sleep(0.01)
        time.sleep(0.2)  # for the rest of what rank 0 does
        pair.weights[FIRST].fill_(3.0)
        pair.weights[LAST].fill_(3.0)
        return begun(*arguments)

    client.begun = late  # type: ignore[method-assign]
    with pytest.raises(
        UpdateError, match=r"weights changed during update\(\): 'a.first' on trainer ranks 0, 'z.last' on"
    ):
        pair.update(2)
    client.begun = begun  # type: ignore[method-assign]
    pair.update(3)
    assert pair.serves(3)
    assert pair.pair_of(pair.held) == (3.0, 3.0)


@pytest.mark.parametrize("writer", WRITERS)
def test_what_changes_behind_the_transfer_is_named(writer: str, rig: Callable[..., Rig]) -> None:
    """The rank writes between its two passes, here by way of the second one's beginning."""
    pair = rig()
    second = pair.trainers[0]._digests.second

    def writing(*arguments: Any, **which: Any) -> Any:
        WRITERS[writer](pair.weights[LAST], 1.0)
        WRITERS[writer](pair.weights[FIRST], 1.0)
        return second(*arguments, **which)

    pair.trainers[0]._digests.second = writing  # type: ignore[method-assign]
    with pytest.raises(UpdateError) as caught:
        pair.update(1)
    assert str(caught.value) == (
        "version 1 is not served everywhere: e is fenced: the trainer's weights changed during update(): "
        f"'{FIRST}' on trainer ranks 0, '{LAST}' on trainer ranks 0 had other digests before they were sent than "
        "afterwards; let weights stand still until update() has returned; the version is not committed; fence the "
        "instance and update it in full"
    )
    assert pair.worker.fenced
    pair.trainers[0]._digests.second = second  # type: ignore[method-assign]
    pair.update(2)
    assert pair.serves(2)


def test_nothing_is_sent_before_the_first_pass_is_over(rig: Callable[..., Rig]) -> None:
    """A pass that takes long: no byte may have come when it ends."""
    pair = rig()
    pair.update(1)
    report, seen = pair.trainers[0]._digests._digests.report, []

    def slow(*arguments: Any, **which: Any) -> Any:
        if which.get("values"):
            time.sleep(0.5)
            seen.append([float(pair.held[name][0]) for name in (FIRST, LAST)])
        return report(*arguments, **which)

    pair.trainers[0]._digests._digests.report = slow  # type: ignore[method-assign]
    for tensor in pair.weights.values():
        tensor.fill_(7.0)
    pair.update(2)
    assert seen == [[0.0, 0.0]]
    assert pair.pair_of(pair.held) == (7.0, 7.0)


def test_a_sample_sees_what_changes_in_its_rows_alone(rig: Callable[..., Rig]) -> None:
    """Both passes and the instance take the rows that are the version modulo 16."""
    pair = rig(verify="sampled")
    second = pair.trainers[0]._digests.second
    changed = [3]

    def writing(*arguments: Any, **which: Any) -> Any:
        pair.weights["m.00"][changed[0]] += 1.0
        return second(*arguments, **which)

    pair.trainers[0]._digests.second = writing  # type: ignore[method-assign]
    pair.update(16 + 2)
    with pytest.raises(UpdateError, match=r"weights changed during update\(\): 'm.00' on trainer ranks 0 had"):
        pair.update(16 + 3)


def test_the_errors_are_told_apart() -> None:
    assert not issubclass(WeightsChangedError, DigestMismatchError)
