"""What the ranks of the family harness run: a whole update through SGLang's own session, compared with a fresh load."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

import pytest
import sglang_families as families
import sglang_support as support
import torch
from model_support import Everything, Tensors, all_tensors, as_bytes, differences

from weightcast.adapters.sglang.sink import SglangSink
from weightcast.transfer.errors import DescribeError, StalePlanError
from weightcast.transfer.layout.dtypes import from_torch
from weightcast.transfer.layout.memory import RankLayout
from weightcast.transfer.layout.tables import TensorSpec


class Loaded(NamedTuple):
    """A rank of a family with two checkpoints: a model that serves the older, and one that loaded the newer."""

    rank: support.Rank
    family: families.Family
    model: torch.nn.Module
    fresh: torch.nn.Module
    newer: dict[str, torch.Tensor]

    def sink(self) -> SglangSink:
        """The sink of the model that serves."""
        tensors = self.newer | dict.fromkeys(self.family.extra, torch.zeros(2))
        catalog = {name: TensorSpec(tuple(t.shape), from_torch(t.dtype)) for name, t in tensors.items()}
        return SglangSink(self.model, catalog, rank=self.rank.rank)


def start(rank: int, world: int, port: int, name: str, folder: str) -> Loaded:
    """Boots a rank of a family and loads its models, as a server does."""
    family = families.FAMILIES[name]
    r = support.boot(rank, world, port, folder, tp_size=world, **family.server)
    support.set_map(r)
    model, fresh = support.build(r), support.build(r)
    generator = torch.Generator().manual_seed(2)
    for parameter, t in model.named_parameters():
        if parameter.startswith(family.completed) and parameter not in r.checkpoint:
            r.checkpoint[parameter] = torch.randn(t.shape, generator=generator).to(t.dtype)
    loaded = Loaded(r, family, model, fresh, {n: next_version(t) for n, t in r.checkpoint.items()})
    if family.alter is not None:
        family.alter(model)
    if family.loaded:
        load(model, r.checkpoint)
        load(fresh, loaded.newer)
    return loaded


def load(model: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    """SGLang's own load of a checkpoint."""
    from sglang.srt.model_loader.loader import DefaultModelLoader

    model.load_weights(iter(tensors.items()))
    DefaultModelLoader.postprocess_weights(model, torch.device("cpu"))


def next_version(t: torch.Tensor) -> torch.Tensor:
    """The next version of a tensor, which differs in nearly every element."""
    return (t.float() * -0.5 + 1).to(t.dtype) if t.is_floating_point() else t.clone()


def update(on: Loaded, sink: SglangSink, layout: RankLayout, settle: bool = True) -> None:
    """A whole update: SGLang's own session, with the parameters written by weightcast's regions."""
    session(on, lambda: support.write(layout, on.newer))
    if settle:
        sink.settle()


def session(on: Loaded, write: Callable[[], object]) -> None:
    """SGLang's own session around what writes the parameters."""
    updater = support.updater_of(on.rank, on.model)
    with torch.inference_mode():  # As a scheduler does.
        updater.begin_weight_update()
        write()
        updater.end_weight_update(run_post_load=True)


def empty_session(on: Loaded) -> None:
    """A session in which nothing is written leaves every tensor with its bytes, at its address."""
    before = facts(on.model)
    session(on, lambda: None)
    after = facts(on.model)
    assert sorted(n for n in before.keys() | after.keys() if before.get(n) != after.get(n)) == []


def facts(model: torch.nn.Module) -> dict[str, object]:
    """Address, layout and bytes of every tensor that modules hold."""
    return {
        f"{kind} {name}": (t.data_ptr(), tuple(t.shape), t.stride(), t.dtype, as_bytes(t).numpy().tobytes())
        for kind, tensors in zip(Tensors._fields, all_tensors(model), strict=True)
        for name, t in tensors.items()
    }


def describe(on: Loaded) -> tuple[SglangSink, RankLayout]:
    """Describes the model that serves, which leaves it as it was."""
    sink, before = on.sink(), Everything(on.model)
    with torch.inference_mode():
        layout = sink.describe()
    assert before.changes() == []
    return sink, layout


def whole_update(rank: int, world: int, port: int, name: str, folder: str) -> None:
    """A whole update leaves every tensor of the model as a fresh load of the same weights does, at its address."""
    on = start(rank, world, port, name, folder)
    older = all_tensors(on.model)
    stale = {n for n, t in older.parameters.items() if equal_elements(t, all_tensors(on.fresh).parameters[n]) > 0.1}
    assert not stale, "the newer checkpoint would show nothing"
    sink, layout = describe(on)
    refresh = sink._refresh
    assert refresh is not None
    empty_session(on)
    assert keys(layout.notes.derived) == on.family.recomputed | on.family.rewritten
    assert (keys(refresh.recomputed), keys(refresh.rewritten)) == (on.family.recomputed, on.family.rewritten)
    update(on, sink, layout, settle=False)
    assert keys(differences(on.model, on.fresh)) == on.family.recomputed, "what nobody else brings up to date"
    sink.settle()
    assert differences(on.model, on.fresh) == []
    sink.settle()
    assert differences(on.model, on.fresh) == [], "after a resend it settles once more"
    moved = [
        n
        for was, now in zip(older, all_tensors(on.model), strict=True)
        for n in was
        if now[n].data_ptr() != was[n].data_ptr()
    ]
    assert moved == [], "captured graphs keep the address"


def keys(names: Iterable[str]) -> set[str]:
    """The last parts of names of tensors."""
    return {name.rpartition(".")[2] for name in names}


def equal_elements(a: torch.Tensor, b: torch.Tensor) -> float:
    """The part of elements in which two tensors are equal and not zero, as padding is."""
    return float(((a == b) & (a != 0)).float().mean()) if a.numel() else 0.0


def refused(rank: int, world: int, port: int, name: str, folder: str) -> None:
    """What is refused is refused by name, and left as it was."""
    on = start(rank, world, port, name, folder)
    before = Everything(on.model)
    for inference in (False, True):
        with torch.inference_mode(inference), pytest.raises(DescribeError) as caught:
            on.sink().describe()
        assert on.family.refused is not None
        assert re.search(on.family.refused, str(caught.value)), str(caught.value)
        assert before.changes() == []


def planted(rank: int, world: int, port: int, name: str, folder: str) -> None:
    """The harness sees tensors that nobody brings up to date, of each kind."""
    on = start(rank, world, port, name, folder)
    for model in (on.model, on.fresh):
        norm = model.model.norm
        norm.register_buffer("planted_buffer", norm.weight.data * 3, persistent=False)
        norm.planted_attribute = norm.weight.data + 3
    sink, layout = describe(on)
    update(on, sink, layout)
    assert differences(on.model, on.fresh) == [
        "attributes model.norm.planted_attribute",
        "buffers model.norm.planted_buffer",
    ]


def changed_under_it(rank: int, world: int, port: int, name: str, folder: str) -> None:
    """What is recomputed into memory that the model has left is refused when the update settles."""
    on = start(rank, world, port, name, folder)
    sink, layout = describe(on)
    norm = on.model.model.norm
    norm.gemma_weight = norm.gemma_weight.clone()
    with pytest.raises(StalePlanError, match=rf"rank {rank}: 'model.norm.gemma_weight', .* is not where it was"):
        update(on, sink, layout)
