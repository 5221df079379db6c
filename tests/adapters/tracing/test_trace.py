"""Loaders as engines write them, traced and replayed: the replay must write what the loader itself writes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import pytest
import torch
import torch.nn.functional as F

from weightcast.adapters.sglang.sink import live_tensors
from weightcast.adapters.tracing.strided import Box
from weightcast.adapters.tracing.trace import Trace, trace_loader
from weightcast.transfer.errors import DescribeError
from weightcast.transfer.layout.dtypes import from_torch
from weightcast.transfer.layout.tables import TensorSpec

Parameters = dict[str, torch.Tensor]
Pairs = Iterable[tuple[str, torch.Tensor]]
Loader = Callable[[Parameters, torch.Tensor, torch.Tensor], object]

SHAPE = (4, 6)


def tensors(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    numbers = torch.arange(1.0, 49.0).reshape(2, *SHAPE)
    return {"a": numbers[0].to(dtype), "b": numbers[1].to(dtype)}


def specs(given: Mapping[str, torch.Tensor]) -> dict[str, TensorSpec]:
    return {name: TensorSpec(tuple(t.shape), from_torch(t.dtype)) for name, t in given.items()}


def run(load: Loader, parameters: Parameters, pairs: Pairs) -> None:
    given = dict(pairs)
    load(parameters, given["a"], given["b"])


def traced(load: Loader, parameters: Parameters, given: Mapping[str, torch.Tensor]) -> Trace:
    before = {name: p.clone() for name, p in parameters.items()}
    trace = trace_loader(lambda pairs: run(load, parameters, pairs), parameters, specs(given))
    for name, p in parameters.items():
        assert torch.equal(p, before[name]), f"the trace wrote {name}"
    return trace


def replayed(load: Loader, parameters: Parameters, given: Mapping[str, torch.Tensor]) -> Trace:
    """Traces, writes the regions, and compares with what the loader does to the same parameters."""
    trace = traced(load, parameters, given)
    assert trace.opaque == ()
    assert not written_elsewhere(trace)
    expected = {name: p.clone(memory_format=torch.preserve_format) for name, p in parameters.items()}
    run(load, expected, given.items())
    for fill in trace.fills:
        box_of(parameters[fill.parameter], fill.box).fill_(fill.value)
    for region in trace.regions:
        box = tuple(slice(o, o + n) for o, n in zip(region.offset, region.view.shape, strict=True))
        region.view.copy_(given[region.tensor][box])
        assert box_of(parameters[region.parameter], region.box).numel() == region.view.numel()
    for name, p in parameters.items():
        assert torch.equal(p, expected[name]), f"{name} is {p}, the loader makes {expected[name]}"
    return trace


def written_elsewhere(trace: Trace) -> list[int]:
    """Addresses of what is written and is no parameter, nor made under the trace."""
    return [w.live.data_ptr() for step in trace.tape.steps for w in step.written if w.live is not None]


def box_of(t: torch.Tensor, box: Box) -> torch.Tensor:
    return t[tuple(slice(o, o + n) for o, n in zip(box.start, box.size, strict=True))]


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Parameters:
    return {"p": torch.full(shape, -1.0).to(dtype)}


def shard_of_rows(p: Parameters, a: torch.Tensor, b: torch.Tensor) -> None:
    p["p"].copy_(a.narrow(0, 2, 2))


def fused_rows(p: Parameters, a: torch.Tensor, b: torch.Tensor) -> None:
    p["p"].data[:4].copy_(a)
    p["p"].data.narrow(0, 4, 4).copy_(b)


def transposed(p: Parameters, a: torch.Tensor, b: torch.Tensor) -> None:
    p["p"].data.copy_(a.t())


def halves_by_chunk(p: Parameters, a: torch.Tensor, b: torch.Tensor) -> None:
    left, right = a.chunk(2, dim=1)
    p["p"].data[:, 3:].copy_(left)
    p["p"].data[:, :3].copy_(right)


def slots(p: Parameters, a: torch.Tensor, b: torch.Tensor) -> None:
    p["p"].data[1] = a
    p["p"].data[0, :, 2:] = b[:, :4]
    p["p"].data[0, :, :2] = b[:, 4:]


def concatenated(p: Parameters, a: torch.Tensor, b: torch.Tensor) -> None:
    p["p"].data.copy_(torch.cat([b, a], dim=1)[1:3])


def concatenated_with_constants(p: Parameters, a: torch.Tensor, b: torch.Tensor) -> None:
    p["p"].data.copy_(torch.cat([a, torch.full((2, 6), 3, dtype=a.dtype)], dim=0))


def stacked(p: Parameters, a: torch.Tensor, b: torch.Tensor) -> None:
    p["p"].data.copy_(torch.stack([a, b], dim=1))


def cloned_and_cut(p: Parameters, a: torch.Tensor, b: torch.Tensor) -> None:
    p["p"].data.copy_(a.t().contiguous()[1:5].clone()[:, 1:])


def converted(p: Parameters, a: torch.Tensor, b: torch.Tensor) -> None:
    p["p"].data.copy_(a.to(torch.float64).to(p["p"].device)[2:])


def flattened(p: Parameters, a: torch.Tensor, b: torch.Tensor) -> None:
    p["p"].data.copy_(a.reshape(-1)[6:18].view(p["p"].shape))


def unflattened(p: Parameters, a: torch.Tensor, b: torch.Tensor) -> None:
    p["p"].data.copy_(a.unflatten(1, (2, 3)).permute(1, 0, 2))


def interleaved_halves(p: Parameters, a: torch.Tensor, b: torch.Tensor) -> None:
    p["p"].data.view(4, 2, 6)[:, 0].copy_(a)
    p["p"].data.view(4, 2, 6)[:, 1].copy_(b)


def piece_by_piece(p: Parameters, a: torch.Tensor, b: torch.Tensor) -> None:
    made = torch.empty(8, 6)
    made[:4] = a
    made[4:] = 0
    made[4:].copy_(b)
    made[2:4] = b[:2]
    p["p"].data.copy_(made)


def padded(p: Parameters, a: torch.Tensor, b: torch.Tensor) -> None:
    p["p"].data.copy_(F.pad(a, (1, 2, 0, 1), value=5.0))


def broadcast(p: Parameters, a: torch.Tensor, b: torch.Tensor) -> None:
    p["p"].data.copy_(a[:, 3:4].expand(4, 5))
    p["p"].data[0, 0] = b[1, 1]


def of_one_element(p: Parameters, a: torch.Tensor, b: torch.Tensor) -> None:
    p["p"].data.fill_(a[1, 2])


def filled_then_written(p: Parameters, a: torch.Tensor, b: torch.Tensor) -> None:
    p["p"].data.fill_(0)
    p["p"].data[:4, :6].copy_(a)


def tail_filled(p: Parameters, a: torch.Tensor, b: torch.Tensor) -> None:
    p["p"].data[: a.shape[0]].copy_(a)
    p["p"].data[a.shape[0] :].data.fill_(7)


def tail_of_ones(p: Parameters, a: torch.Tensor, b: torch.Tensor) -> None:
    p["p"].data.copy_(torch.ones_like(p["p"]))
    p["p"].data[: a.shape[0]].copy_(a)


def tail_of_a_number(p: Parameters, a: torch.Tensor, b: torch.Tensor) -> None:
    p["p"].data[: a.shape[0]].copy_(a)
    p["p"].data[a.shape[0]] = 9
    scratch = torch.zeros(6)
    scratch.fill_(4)
    p["p"].data[a.shape[0] + 1].copy_(scratch.clone())


def by_foreach(p: Parameters, a: torch.Tensor, b: torch.Tensor) -> None:
    torch._foreach_copy_([p["p"].data[:4], p["p"].data[4:]], [a, b])


def unbound(p: Parameters, a: torch.Tensor, b: torch.Tensor) -> None:
    for i, row in enumerate(a):
        p["p"].data[3 - i].copy_(row)


def scratch_is_free(p: Parameters, a: torch.Tensor, b: torch.Tensor) -> None:
    scratch = torch.arange(4)
    scratch.mul_(2)
    assert scratch.tolist() == [0, 2, 4, 6]
    p["p"].data.copy_(a)


@pytest.mark.parametrize(
    ("load", "shape", "count"),
    [
        (shard_of_rows, (2, 6), 1),
        (fused_rows, (8, 6), 2),
        (transposed, (6, 4), 1),
        (halves_by_chunk, (4, 6), 2),
        (slots, (2, 4, 6), 3),
        (concatenated, (2, 12), 2),
        (concatenated_with_constants, (6, 6), 1),
        (stacked, (4, 2, 6), 2),
        (cloned_and_cut, (4, 3), 1),
        (converted, (2, 6), 1),
        (flattened, (12,), 1),
        (flattened, (3, 4), 1),
        (unflattened, (2, 4, 3), 2),
        (interleaved_halves, (8, 6), 8),
        (piece_by_piece, (8, 6), 3),
        (padded, (5, 9), 1),
        (filled_then_written, (5, 8), 1),
        (tail_filled, (6, 6), 1),
        (tail_of_ones, (6, 6), 1),
        (tail_of_a_number, (6, 6), 1),
        (by_foreach, (8, 6), 2),
        (unbound, (4, 6), 4),
        (scratch_is_free, (4, 6), 1),
    ],
)
def test_replay_writes_what_the_loader_writes(load: Loader, shape: tuple[int, ...], count: int) -> None:
    for dtype, inference in ((torch.float32, False), (torch.bfloat16, False), (torch.float32, True)):
        parameters = empty(*shape, dtype=dtype)
        with torch.inference_mode(inference):  # Engines serve their requests in inference mode.
            trace = replayed(load, parameters, tensors(torch.float32))
        assert len(trace.regions) == count
        assert trace.used == {r.tensor for r in trace.regions}
        assert [r.order for r in trace.regions] == sorted(r.order for r in trace.regions)


def test_broadcasts_are_one_region_an_index() -> None:
    trace = traced(broadcast, empty(4, 5), tensors())
    assert [r.box for r in trace.regions] == [Box((0, i), (4, 1)) for i in range(5)] + [Box((0, 0), (1, 1))]
    assert {(r.tensor, r.offset) for r in trace.regions} == {("a", (0, 3)), ("b", (1, 1))}
    assert len(traced(of_one_element, empty(2, 2), tensors()).regions) == 4


def test_a_parameter_in_a_foreign_order_of_dimensions() -> None:
    parameters = {"p": torch.zeros(6, 4).t()}
    (region,) = replayed(lambda p, a, b: p["p"].copy_(a), parameters, tensors()).regions
    assert region.box == Box((0, 0), (4, 6))
    assert region.view.stride() == (1, 4)


def test_parameters_of_one_storage_are_told_apart() -> None:
    flat = torch.zeros(48)
    parameters = {"first": flat[:24].view(4, 6), "second": flat[24:].view(4, 6), "tied": flat[:24].view(4, 6)}

    def load(p: Parameters, a: torch.Tensor, b: torch.Tensor) -> None:
        p["second"].copy_(a)
        p["tied"].copy_(b)

    assert [(r.parameter, r.tensor) for r in traced(load, parameters, tensors()).regions] == [
        ("second", "a"),
        ("first", "b"),
    ]


def test_a_scalar() -> None:
    given = {"a": torch.tensor(3.0), "b": torch.tensor([2.0])}
    parameters = {"p": torch.zeros(2), "q": torch.tensor(0.0)}

    def load(p: Parameters, a: torch.Tensor, b: torch.Tensor) -> None:
        p["p"][1] = a
        p["p"][0:1].copy_(b)
        p["q"].copy_(a)

    replayed(load, parameters, given)


def multiplied(p: Parameters, a: torch.Tensor, b: torch.Tensor) -> None:
    p["p"].data.copy_(a * 2)


def added_to(p: Parameters, a: torch.Tensor, b: torch.Tensor) -> None:
    p["p"].data.add_(a)


def flipped(p: Parameters, a: torch.Tensor, b: torch.Tensor) -> None:
    p["p"].data.copy_(torch.cat([a[:2], b[2:].flip(0)]))


def rounded_on_the_way(p: Parameters, a: torch.Tensor, b: torch.Tensor) -> None:
    p["p"].data.copy_(a.to(torch.bfloat16))


def bits_reinterpreted(p: Parameters, a: torch.Tensor, b: torch.Tensor) -> None:
    p["p"].data.copy_(a.view(torch.int32))


def half_written(p: Parameters, a: torch.Tensor, b: torch.Tensor) -> None:
    made = torch.empty(4, 6)
    made[:3] = a[:3]
    p["p"].data.copy_(made)


def from_nowhere(p: Parameters, a: torch.Tensor, b: torch.Tensor) -> None:
    p["p"].data.copy_(torch.arange(24.0).view(4, 6))


def changed_after_it_was_kept(p: Parameters, a: torch.Tensor, b: torch.Tensor) -> None:
    made = a.clone()
    made.mul_(2)
    p["p"].data.copy_(made)


def random(p: Parameters, a: torch.Tensor, b: torch.Tensor) -> None:
    p["p"].data.normal_()


@pytest.mark.parametrize(
    ("load", "why"),
    [
        (multiplied, r"computed from the checkpoint \(checkpoint tensors: a\)"),
        (added_to, r"is no copy \(checkpoint tensors: a\)"),
        (flipped, r"computed from the checkpoint \(checkpoint tensors: a, b\)"),
        (rounded_on_the_way, r"rounded to torch.bfloat16 on the way to torch.float32"),
        (bits_reinterpreted, r"bits of torch.float32 read as torch.int32"),
        (half_written, r"memory that nothing was written to \(box \(3, 0\), \(1, 6\)\)"),
        (from_nowhere, r"values that are not in the checkpoint"),
        (changed_after_it_was_kept, r"computed from the checkpoint \(checkpoint tensors: a\)"),
        (random, r"is no copy \(checkpoint tensors: none\)"),
    ],
)
def test_what_is_no_strided_copy_is_opaque(load: Loader, why: str) -> None:
    trace = traced(load, empty(4, 6), tensors())
    (write,) = trace.opaque
    assert write.parameter == "p"
    assert write.box == Box((0, 0), (4, 6))
    with pytest.raises(AssertionError, match=why):
        raise AssertionError(write.why)


def test_long_steps_are_opaque() -> None:
    given = {"a": torch.zeros(200, 2), "b": torch.zeros(1)}
    trace = traced(lambda p, a, b: p["p"].copy_(a[::2]), empty(100, 2), given)
    (write,) = trace.opaque
    assert write.why.startswith("a step of 4 elements, 100 times")


def test_every_list_that_an_operator_writes_is_seen() -> None:
    """The schema gives lists no alias by which one of them could be told from another."""
    parameter, gradient, momentum = torch.ones(4), torch.ones(4), torch.ones(4)

    def load(_: object) -> None:
        options = {"weight_decay": 0.0, "momentum": 0.5, "lr": 1.0, "dampening": 0.0, "nesterov": False}
        lists = [parameter], [gradient], [momentum]
        torch.ops.aten._fused_sgd_(*lists, **options, maximize=False, is_first_step=False)

    trace = trace_loader(load, {"p": parameter}, {})
    assert [write.parameter for write in trace.opaque] == ["p"]
    assert all(torch.equal(t, torch.ones(4)) for t in (parameter, gradient, momentum))


def test_other_tensors_are_neither_written_nor_forgotten() -> None:
    attribute, buffer = torch.zeros(4, 6), torch.zeros(4, 6)

    def load(p: Parameters, a: torch.Tensor, b: torch.Tensor) -> None:
        p["p"].copy_(a)
        attribute.copy_(b)
        buffer.add_(1)
        buffer.copy_(p["p"])
        torch.add(p["p"], 1, out=attribute)

    trace = traced(load, empty(4, 6), tensors())
    assert not attribute.any()
    assert not buffer.any()
    assert written_elsewhere(trace) == [t.data_ptr() for t in (attribute, buffer, buffer, attribute)]
    assert trace.used == {"a", "b"}


def test_a_copy_onto_itself_is_nothing() -> None:
    trace = traced(lambda p, a, b: p["p"].copy_(p["p"].data.view(24).view(4, 6)), empty(4, 6), tensors())
    assert (trace.regions, trace.opaque, trace.fills) == ((), (), ())


@pytest.mark.parametrize(
    ("load", "message"),
    [
        (lambda p, a, b: a[0, 0].item(), r"reads values of checkpoint tensor 'a'"),
        (lambda p, a, b: bool((a + b).max() > 3), r"reads values of checkpoint tensor 'a, b'"),
        (lambda p, a, b: torch.equal(b, a), r"reads values of checkpoint tensor 'a, b'"),
        (lambda p, a, b: a.tolist(), r"failed while it was traced, at checkpoint tensor 'b'"),
        (lambda p, a, b: a.nonzero(), r"reads values of checkpoint tensor 'a'"),
        (lambda p, a, b: bool((p["p"].data[0] != 1).any()), r"reads values of parameter 'p'"),
        (lambda p, a, b: p["p"].copy_(a[:, :5]), r"failed while it was traced.*RuntimeError"),
        (lambda p, a, b: setattr(p["p"], "data", a.new_zeros(3, device="cpu")), r"gives parameter 'p' other memory"),
    ],
)
def test_values_that_the_loader_reads(load: Loader, message: str) -> None:
    parameters = empty(4, 6)
    with pytest.raises(DescribeError, match=message) as caught:
        trace_loader(lambda pairs: run(load, parameters, pairs), parameters, specs(tensors()))
    assert "\n" not in str(caught.value)


class Buffered(torch.nn.Module):
    """A model whose loader gives a buffer the memory of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(4), requires_grad=False)
        self.register_buffer("scale", torch.ones(4))

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in tensors:
            self.w.data.copy_(tensor)
        self.scale.data = self.w.data


def test_a_buffer_that_the_loader_gives_other_memory() -> None:
    """Nothing would renew it; an alias of it would not show that."""
    model = Buffered()
    with pytest.raises(DescribeError, match="gives parameter 'scale' other memory"):
        trace_loader(model.load_weights, dict(live_tensors(model)), {"w": TensorSpec((4,), "float32")})


def test_reading_what_is_no_weight_is_allowed() -> None:
    table = torch.tensor([3, 1])

    def load(p: Parameters, a: torch.Tensor, b: torch.Tensor) -> None:
        for to, start in enumerate(table.tolist()):
            p["p"][to].copy_(a[start])
            if table[to] == 1 and table.max().item() == 3:
                p["p"][2:].copy_(b[2:])

    assert len(replayed(load, {"p": torch.zeros(4, 6)}, tensors()).regions) == 3


def test_fp8_and_integers() -> None:
    given = {"a": torch.ones(4, 6).to(torch.float8_e4m3fn), "b": torch.arange(24, dtype=torch.int32).view(4, 6)}
    parameters = {"p": torch.zeros(4, 6).to(torch.float8_e4m3fn), "q": torch.zeros(2, 6, dtype=torch.int32)}

    def load(p: Parameters, a: torch.Tensor, b: torch.Tensor) -> None:
        p["p"].copy_(a.clone())
        p["q"].copy_(b[2:])

    trace = traced(load, parameters, given)
    assert [(r.parameter, r.tensor, r.offset) for r in trace.regions] == [("p", "a", (0, 0)), ("q", "b", (2, 0))]
