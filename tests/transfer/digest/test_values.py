"""Values that are infinite, no number, or become so by a cast: counted while they are digested, and reported."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from digest_support import DTYPES, random_bits
from gateway_support import running_gateway
from plain_support import Piece, PlainSink, describe_pieces

from weightcast.adapters.unsharded import PlainSource
from weightcast.gateway.client import GatewayClient
from weightcast.gateway.ranks.instance import InstanceWorker
from weightcast.gateway.ranks.trainer import TrainerWorker
from weightcast.transfer.digest import cpu_scan as digest_scan
from weightcast.transfer.digest import definition as digest_module
from weightcast.transfer.digest.digester import Digester
from weightcast.transfer.errors import InputError, LayoutError, UpdateError
from weightcast.transfer.layout.dtypes import NAMES, cast_allowed, dtype_code, from_torch, to_torch
from weightcast.transfer.plan.verification import Sample

FLOATS = [dtype for dtype in DTYPES if dtype.is_floating_point]
NARROW = [dtype for dtype in FLOATS if dtype.itemsize == 1]


@pytest.fixture(
    params=[pytest.param("scanned", marks=pytest.mark.skipif(find_spec("numba") is None, reason="no numba")), "stacked"]
)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways in which boxes on a CPU can be digested."""
    if request.param == "stacked":
        monkeypatch.setattr(digest_scan, "_loops", lambda: None)
    return str(request.param)


def counted(
    *views: torch.Tensor, dtype: torch.dtype | None = None, sample: Sample | None = None
) -> dict[int, tuple[int, int, int]]:
    """(nan, inf, overflow) of the views that have any, each a tensor of its own."""
    layout = describe_pieces([Piece(f"t{i}", tuple(v.shape), (0,) * v.ndim, v) for i, v in enumerate(views)])
    table = layout.table
    codes = table.tensors.dtype[table.tensor]
    if dtype is not None:
        codes = np.full_like(codes, dtype_code(from_torch(dtype)))
    digester = Digester(layout, np.arange(len(table)), table.offset, table.size, codes)
    reading = digester.read(sample)
    assert reading.digests.tolist() == digester.run(sample).tolist()
    return {row: tuple(rest) for row, *rest in np.stack(reading.values, axis=1).tolist()}  # type: ignore[misc]


def expected(view: torch.Tensor, dtype: torch.dtype | None = None) -> tuple[int, int, int]:
    """By torch, of all elements at once."""
    held, cast = view.double(), view.to(dtype or view.dtype).double()
    too_large = held.abs() >= 464.0 if dtype == torch.float8_e4m3fn else ~cast.isfinite()
    overflow = held.isfinite() & too_large
    return int(held.isnan().sum()), int(held.isinf().sum()), int(overflow.sum())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (7,), (5000,), (3, 33), (9, 2049), (4, 3, 40)])
def test_every_bit_pattern_is_counted_as_torch_has_it(way: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    view = random_bits(shape, dtype, seed=11)
    views = [view, view.mT.contiguous().mT if view.ndim > 1 else view, view[..., ::2] if view.ndim else view]
    wanted = expected(view) if dtype.is_floating_point else (0, 0, 0)
    found = counted(*views)
    assert found.get(0, (0, 0, 0)) == found.get(1, (0, 0, 0)) == wanted
    assert found.get(2, (0, 0, 0)) == (expected(views[2]) if dtype.is_floating_point else (0, 0, 0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("width", [5, 16, 17, 127, 1000, 4099])
def test_a_single_one_is_found_wherever_it_is(way: str, dtype: torch.dtype, width: int) -> None:
    """In rows of every stream and block, also in the last words, which are read together with words before."""
    chance = np.random.default_rng(width)
    for value, place in (("nan", 0), ("inf", 1), ("-inf", 1)):
        for _ in range(12):
            view = torch.randn(13, width).mul_(0.02).to(dtype)
            view[int(chance.integers(13)), int(chance.integers(width)) if chance.random() < 0.7 else -1] = float(value)
            counts = [0, 0, 0]
            counts[place] = 1
            assert counted(view) == {0: tuple(counts)}


@pytest.mark.parametrize("scale", [0.02, 1.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_finite_values_of_any_size_count_nothing(way: str, dtype: torch.dtype, scale: float) -> None:
    view = torch.randn(300, 513).mul_(scale).clamp_(-6e4, 6e4).to(dtype)
    view[7, 7] = torch.finfo(dtype).max
    view[9, 9] = torch.finfo(dtype).min
    assert counted(view, view.mT) == {}


@pytest.mark.parametrize("held", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, *NARROW[:2]], ids=str)
def test_what_a_cast_makes_infinite_is_told_from_what_was_so(way: str, held: torch.dtype, dtype: torch.dtype) -> None:
    """In float8_e4m3fn, which has no infinity, torch gives the largest number for what is too large, and infinite."""
    view = torch.randn(40, 130).mul_(0.1).to(held)
    view[3, 5], view[39, 129], view[8, 8] = float("nan"), float("inf"), float("-inf")
    view[20, :9] = torch.finfo(held).max
    view[21, 0] = 463.0  # the last that is rounded to 448, in types that have it
    wanted = expected(view, dtype)
    assert wanted[:2] == (1, 2)
    assert wanted[2] in ((0,) if held == dtype else (9, 10))
    assert counted(view, dtype=dtype) == {0: wanted}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, *NARROW[:2]], ids=str)
def test_a_single_one_that_is_too_large_is_found_by_itself(way: str, dtype: torch.dtype) -> None:
    view = torch.full((4, 40), 0.5)
    view[2, 39] = torch.finfo(torch.float32).max
    assert counted(view, torch.zeros(9), dtype=dtype) == {0: (0, 0, 1)}


def test_torch_looks_at_every_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest_scan, "_loops", lambda: None)
    monkeypatch.setattr(digest_module, "_STEP", 128)
    monkeypatch.setattr(digest_module, "_BLOCK", {"cpu": 1 << 10})
    for row in range(100):
        view = torch.zeros(100, 64)
        view[row, 63] = float("inf")
        assert counted(view) == {0: (0, 1, 0)}


def test_float32_overflows_in_bfloat16_from_halfway_on(way: str) -> None:
    """0x7F7F8000 lies halfway between the largest bfloat16 and the number after it, and is rounded to even."""
    words = torch.tensor([0x7F7F7FFF, 0x7F7F8000, -0x7F7F8000 + 0x7FFFFFFF + 1 - (1 << 31)], dtype=torch.int64)
    view = torch.zeros(3, 64)
    view[:, 0] = words.to(torch.int32).view(torch.float32)
    wanted = expected(view, torch.bfloat16)
    assert wanted[2] >= 1
    assert counted(view[:1], view[1:2], dtype=torch.bfloat16) == {1: (0, 0, 1)}
    assert counted(view, dtype=torch.bfloat16) == {0: wanted}


def test_a_sample_counts_its_rows_alone(way: str) -> None:
    view = torch.zeros(64, 40)
    view[5], view[6, 0] = float("nan"), float("inf")
    assert counted(view, sample=Sample(5)) == {0: (40, 0, 0)}
    assert counted(view, sample=Sample(16 + 6)) == {0: (0, 1, 0)}
    assert counted(view, sample=Sample(7)) == {}


def test_boxes_that_are_cut_into_pieces_count_once(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest_scan, "_PIECE_BYTES", 1000)
    views = [torch.zeros(50, 40), torch.zeros(70), torch.zeros(3, 3)]
    views[0][49, 39] = views[0][0, 0] = float("inf")
    views[2][1, 1] = float("nan")
    assert counted(*views) == {0: (0, 2, 0), 2: (1, 0, 0)}


# ---- casts


def test_the_table_of_casts() -> None:
    """Between integers only where torch holds every value of the type; between kinds none."""
    codes = np.arange(len(NAMES))
    allowed = {
        (held, wanted)
        for held in NAMES
        for wanted in NAMES
        if cast_allowed(codes[dtype_code(held)], codes[dtype_code(wanted)])
    }
    kinds = {name: to_torch(name) for name in NAMES}
    integers = [name for name, t in kinds.items() if not t.is_floating_point and t != torch.bool]
    floats = [name for name, t in kinds.items() if t.is_floating_point and "e8m0" not in name]
    wanted = {(name, name) for name in NAMES} | {(a, b) for a in floats for b in floats}
    for a in integers:
        low, high = torch.iinfo(kinds[a]).min, torch.iinfo(kinds[a]).max
        wanted |= {(a, b) for b in integers if torch.iinfo(kinds[b]).min <= low and torch.iinfo(kinds[b]).max >= high}
    wanted |= {("float8_e8m0fnu", name) for name in ("float64", "float32", "bfloat16")}
    assert allowed == wanted


# ---- whole updates


@pytest.fixture
def play() -> Iterator[Callable[..., TrainerWorker]]:
    """Makes a connected trainer rank of some weights, whose instance has memory of its own."""
    logging.disable(logging.CRITICAL)
    over, threads, workers = threading.Event(), [], []

    def serve(worker: InstanceWorker) -> None:
        while not over.is_set():
            worker.serve(wait=0.02)

    def make(weights: dict[str, torch.Tensor], held: dict[str, torch.Tensor], verify: str = "full", **spec: Any) -> Any:
        with GatewayClient(url, token) as client:
            client.create_pair("main", 1, {"e": {"kind": "worker", "world_size": 1, **spec}}, verify=verify)
        pieces = [Piece(name, tuple(t.shape), (0,) * t.ndim, t) for name, t in held.items()]
        where: dict[str, Any] = {"rank": 0, "world_size": 1, "token": token, "deadline": 60.0}
        workers.append(InstanceWorker(url, "main", "e", PlainSink(pieces), **where))
        threads.append(threading.Thread(target=serve, args=(workers[-1],)))
        threads[-1].start()
        trainer = TrainerWorker(url, "main", PlainSource(weights), **where)
        workers.append(trainer)  # type: ignore[arg-type]
        trainer.connect()

        def status() -> Any:
            with GatewayClient(url, token) as client:
                return client.pair_status("main")["instances"]["e"]

        trainer.status = status  # type: ignore[attr-defined]
        return trainer

    with running_gateway() as (url, token):
        try:
            yield make
        finally:
            over.set()
            for thread in threads:
                thread.join()
            for worker in workers:
                worker.close()
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize(
    ("held", "wanted"), [("float32", "int8"), ("int64", "uint8"), ("uint8", "float32"), ("bool", "float32")]
)
def test_lossy_casts_are_refused_at_connect(held: str, wanted: str, play: Callable[..., Any]) -> None:
    with pytest.raises(LayoutError) as caught:
        play({"w": torch.zeros(8, dtype=to_torch(held))}, {"w": torch.zeros(8, dtype=to_torch(wanted))})
    assert str(caught.value) == (
        f"tensor 'w' has dtype {held} on the trainer and {wanted} on e: a cast would change its values unseen; load "
        "the engine with the trainer's dtype, or convert the tensor on the trainer"
    )


def test_integers_may_become_wider(play: Callable[..., Any]) -> None:
    held = {"w": torch.zeros(8, dtype=torch.int32)}
    play({"w": torch.arange(-4, 4, dtype=torch.int8)}, held).update(1)
    assert held["w"].tolist() == list(range(-4, 4))


def test_what_is_not_finite_keeps_the_old_version_and_is_repaired_by_the_next(play: Callable[..., Any]) -> None:
    weights = {"w": torch.full((64,), 2.0), "b": torch.zeros(4, dtype=torch.bfloat16)}
    held = {"w": torch.zeros(64, dtype=torch.float16), "b": torch.zeros(4, dtype=torch.bfloat16)}
    trainer = play(weights, held)
    trainer.update(1)
    weights["w"][5], weights["b"][1], weights["b"][3] = 1e6, float("nan"), float("-inf")
    with pytest.raises(UpdateError) as caught:
        trainer.update(2)
    assert str(caught.value) == (
        "version 2 is not served everywhere: e is not updated: instance e: values are not finite: 'w' as float16 on "
        "trainer ranks 0: 1 too large; 'b' as bfloat16 on trainer ranks 0: 1 NaN, 1 infinite; version 2 was not sent, "
        "and the one before goes on; mend the weights, or allow these tensors by allow_non_finite"
    )
    status = trainer.status()
    assert (status["serves"], status["version"], status["fenced"], status["epoch"]) == (True, 1, False, 1)
    assert [one["tensor"] for one in status["updates"][-1]["non_finite"]] == ["w", "b"]
    assert held["w"].tolist() == [2.0] * 64
    weights["w"][5], weights["b"][1], weights["b"][3] = 4.0, 1.0, 1.0
    result = trainer.update(3).instances["e"]
    assert (result["attempts"], result["non_finite"]) == (1, [])
    assert trainer.status()["epoch"] == 1, "nobody had to connect anew"
    assert held["w"][5] == 4.0


def test_what_is_allowed_or_reported_is_committed(play: Callable[..., Any]) -> None:
    weights = {"mask": torch.full((4, 4), float("-inf")).triu(1), "w": torch.ones(8)}
    held = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    trainer = play(weights, held, allow_non_finite=["m?sk"])
    (found,) = trainer.update(1).instances["e"]["non_finite"]
    assert found == {"tensor": "mask", "dtype": "float32", "nan": 0, "inf": 6, "overflow": 0, "ranks": [0]}
    assert torch.equal(held["mask"], weights["mask"])
    weights["w"][0] = float("nan")
    with pytest.raises(
        UpdateError, match=r"values are not finite: 'w' as float32 on trainer ranks 0: 1 NaN; version 2"
    ):
        trainer.update(2)


@pytest.mark.parametrize(
    ("verify", "version", "found"), [("off", 2, 0), ("sampled", 16 + 4, 0), ("sampled", 16 + 3, 1)]
)
def test_nothing_is_counted_of_what_is_not_digested(
    verify: str, version: int, found: int, play: Callable[..., Any]
) -> None:
    weights, held = {"w": torch.ones(64, 8)}, {"w": torch.zeros(64, 8)}
    trainer = play(weights, held, verify, non_finite="report")
    weights["w"][3, 3] = float("nan")
    assert trainer.update(version).instances["e"]["non_finite_tensors"] == found


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"non_finite": "ignore"}, "expected 'refuse', 'report'"),
        ({"allow_non_finite": "w"}, "allow_non_finite is 'w', expected a list"),
        ({"allow_non_finite": [""]}, "at least 1 character"),
        ({"non_finite": "report", "allow_non_finite": ["w"]}, "non_finite is 'report', which allows all"),
        ({"allow_nonfinite": ["w"]}, "instances.e.allow_nonfinite is not known; known are kind, world_size, url"),
    ],
)
def test_records_that_are_none(spec: dict[str, Any], said: str, play: Callable[..., Any]) -> None:
    with pytest.raises(InputError, match=said):
        play({"w": torch.zeros(8)}, {"w": torch.zeros(8)}, **spec)


def test_threads_that_share_a_box_find_it_once(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest_scan, "_PIECE_BYTES", 1000)
    monkeypatch.setattr(digest_scan, "_WORTH_A_THREAD", 4000)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    view = torch.zeros(100, 100)
    view[::30, 7] = float("inf")
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda _: counted(view), range(2))) == [{0: (0, 4, 0)}] * 2
