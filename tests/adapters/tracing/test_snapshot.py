"""A model is put back as it was, whatever its own code did to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from model_support import Everything

from weightcast.adapters.tracing.snapshot import Snapshot
from weightcast.transfer.errors import DescribeError


class Method:
    """An object beside the modules, as SGLang's quantisation methods are."""

    def __init__(self) -> None:
        self.flag = False
        self.cache = {"a": 1}


class Part(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(12.0).view(3, 4), requires_grad=False)
        self.bias = torch.nn.Parameter(torch.arange(3.0))
        self.register_parameter("no_bias", None)
        self.register_buffer("scale", torch.ones(3))
        self.register_buffer("cache", torch.zeros(2, 2), persistent=False)
        self.derived = torch.ones(4)
        self.nothing: Any = None
        self.is_loaded = False
        self.names = ["a", "b"]
        self.table = {"x": torch.zeros(2), "y": [1, 2]}
        self.kinds = {"p", "q"}
        self.pair = (torch.zeros(2), [1])
        self.quant_method = Method()


def model() -> Any:
    return torch.nn.ModuleDict({"first": Part(), "second": Part(), "last": torch.nn.Linear(2, 2)})


def others(of: Any) -> list[tuple[str, object]]:
    return [(path, m.quant_method) for path, m in of.named_modules() if hasattr(m, "quant_method")]


CHANGES: list[Callable[[Any], Any]] = [
    lambda m: setattr(m["first"], "derived", torch.zeros(4)),
    lambda m: setattr(m["first"], "derived", None),
    lambda m: delattr(m["first"], "derived"),
    lambda m: setattr(m["first"], "nothing", torch.zeros(4)),
    lambda m: setattr(m["first"], "is_loaded", True),
    lambda m: setattr(m["first"], "new", 5),
    lambda m: setattr(m["first"], "scale", torch.zeros(3)),
    lambda m: m["first"].register_buffer("more", torch.zeros(3), persistent=False),
    lambda m: m["first"].register_buffer("cache", torch.zeros(2, 2)),
    lambda m: delattr(m["first"], "scale"),
    lambda m: setattr(m["first"].weight, "data", m["first"].weight.data.reshape(4, 3)),
    lambda m: setattr(m["first"].weight, "data", torch.zeros(3, 4)),
    lambda m: setattr(m["first"].weight, "data", m["first"].weight.data.to(torch.bfloat16)),
    lambda m: setattr(m["first"].weight, "data", m["first"].weight.data.t()),
    lambda m: setattr(m["first"].scale, "data", torch.zeros(1)),
    lambda m: setattr(m["first"].derived, "data", torch.zeros(1)),
    lambda m: setattr(m["first"].table["x"], "data", torch.zeros(1)),
    lambda m: m["first"].weight.requires_grad_(True),
    lambda m: setattr(m["first"].weight, "weight_loader", print),
    lambda m: setattr(m["first"], "weight", torch.nn.Parameter(torch.zeros(3, 4))),
    lambda m: delattr(m["first"], "weight"),
    lambda m: setattr(m["first"], "no_bias", torch.nn.Parameter(torch.zeros(3))),
    lambda m: delattr(m, "first"),
    lambda m: m.add_module("another", Part()),
    lambda m: m.__setitem__("second", Part()),
    lambda m: m["first"].names.append("c"),
    lambda m: m["first"].table.pop("x"),
    lambda m: m["first"].table["y"].clear(),
    lambda m: m["first"].kinds.add("r"),
    lambda m: m["first"].pair[1].append(2),
    lambda m: setattr(m["first"].quant_method, "flag", True),
    lambda m: m["first"].quant_method.cache.clear(),
    lambda m: m.eval(),
]


def apart(changes: list[Callable[[Any], Any]]) -> list[Any]:
    return [pytest.param([change], id=str(i)) for i, change in enumerate(changes)]


@pytest.mark.parametrize("changes", [*apart(CHANGES), pytest.param(CHANGES, id="all")])
@pytest.mark.parametrize("inference", [False, True])
def test_what_changed_is_put_back(changes: list[Callable[[Any], Any]], inference: bool) -> None:
    of = model()
    before = Everything(of)
    order = [name for name, _ in of.named_parameters()]
    with torch.inference_mode(inference), Snapshot(of, others(of)):
        for change in changes:
            try:
                change(of)
            except (AttributeError, KeyError):
                assert len(changes) > 1, "it was deleted by another change"
        assert len(changes) > 1 or before.changes() != [], "the comparison would see nothing"
    assert before.changes() == []
    assert [name for name, _ in of.named_parameters()] == order


def changing(of: Any, change: Callable[[Any], Any], error: Exception | None = None) -> None:
    with Snapshot(of):
        change(of)
        if error is not None:
            raise error


def test_a_snapshot_puts_back_when_the_code_fails() -> None:
    of = model()
    before = Everything(of)
    with pytest.raises(ZeroDivisionError):
        changing(of, lambda m: setattr(m["first"], "derived", torch.zeros(4)), ZeroDivisionError())
    assert before.changes() == []


def test_what_cannot_be_put_back_is_said_loudly() -> None:
    of = model()
    with pytest.raises(DescribeError, match=r"THE ENGINE IS DAMAGED, restart it: .* changed first.weight .* not be"):
        changing(of, lambda m: m["first"].weight.untyped_storage().resize_(0))
    error = ZeroDivisionError("before it was done")
    with pytest.raises(DescribeError, match=r"THE ENGINE IS DAMAGED") as caught:
        changing(of, lambda m: m["second"].scale.untyped_storage().resize_(0), error)
    assert caught.value.__cause__ is error


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: delattr(m, "last"), "deletes module 'last'"),
        (lambda m: m.add_module("another", Part()), "adds module 'another'"),
        (lambda m: m.__setitem__("second", Part()), "replaces module 'second'"),
        (lambda m: delattr(m["first"], "weight"), "deletes parameter 'first.weight'"),
        (lambda m: m["first"].register_buffer("more", torch.zeros(3)), "adds buffer 'first.more'"),
        (
            lambda m: setattr(m["first"].weight, "data", torch.zeros(3, 4)),
            "gives parameter 'first.weight' other memory",
        ),
        (lambda m: setattr(m["first"], "bias", torch.nn.Parameter(torch.zeros(3))), "replaces parameter 'first.bias'"),
        (lambda m: setattr(m["first"], "no_bias", torch.nn.Parameter(torch.zeros(3))), "replaces parameter 'first.no"),
        (lambda m: setattr(m["first"], "bias", torch.nn.Parameter(m["first"].bias.data)), None),
        (lambda m: setattr(m["first"], "derived", torch.zeros(4)), None),
    ],
)
def test_surgery_is_told(change: Callable[[Any], Any], words: str | None) -> None:
    of = model()
    with Snapshot(of) as snapshot:
        assert snapshot.surgery() is None
        change(of)
        told = snapshot.surgery()
    assert told is None if words is None else told is not None and words in told


def test_tensors_that_were_bound() -> None:
    of = model()
    first = of["first"]
    scale, derived, nothing = torch.zeros(3), torch.zeros(4), torch.zeros(5)
    before = (first.scale, first.derived)
    with Snapshot(of) as snapshot:
        assert snapshot.rebound() == []
        first.scale, first.derived, first.nothing, first.is_loaded = scale, derived, nothing, True
        bound = {b.key: (b.before, b.after) for b in snapshot.rebound()}
        assert snapshot.name_of(first, "scale") == "first.scale"
    assert [bound["scale"][0] is before[0], bound["derived"][0] is before[1], bound["nothing"][0]] == [True, True, None]
    assert [bound[k][1] is t for k, t in (("scale", scale), ("derived", derived), ("nothing", nothing))] == [True] * 3
