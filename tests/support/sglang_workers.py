"""What the ranks of the SGLang tests run; every function gets rank, world size, port and its arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import sglang_support as support
import sglang_transfer as transfer
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from weightcast.adapters.checkpoint import read_headers
from weightcast.adapters.sglang import sink as sglang_module
from weightcast.adapters.sglang.sink import SglangSink
from weightcast.adapters.sglang.slots import ExpertParameter, Held
from weightcast.adapters.tracing.recorder import TracedRegion
from weightcast.transfer.errors import AgreementError, DescribeError, UpdateError
from weightcast.transfer.executor import TransferReport
from weightcast.transfer.layout.dispatch import audit_dispatch
from weightcast.transfer.layout.tables import RankReport, TensorSpec

Server = dict[str, Any]
Rows = Sequence[Sequence[int]]


def oracle(
    rank: int, world: int, port: int, path: str, server: Server, sink: dict[str, Any], store: int
) -> tuple[RankReport | None, TransferReport]:
    """Sync equals SGLang's own load: views written from the checkpoint, then a transfer from a trainer rank.

    The last process is the trainer; the store at port `store` is where it meets the ranks of the instance.
    """
    if rank == world - 1:
        return None, transfer.train(store, path, world - 1)
    r = support.boot(rank, world - 1, port, path, **server)
    synced = support.check_against_loader(r, **sink)
    layout = synced.layout
    if layout.placement is not None:
        audit_dispatch(layout.placement.placement, layout.notes.dispatch)
    report = RankReport(rank, world - 1, "", layout.table, layout.placement, layout.notes)
    support.poison(synced.model)
    moved = transfer.receive(store, layout, report)
    support.check_equal(r, synced)
    repeated = transfer.repeated_bytes(layout)
    assert moved.bytes_copied == repeated, "replicas on one rank are copied there, and nothing else is"
    assert moved.bytes_received == int(layout.table.nbytes.sum()) - repeated
    return report, moved


def derived_weights(rank: int, world: int, port: int, path: str, server: Server) -> None:
    """After new weights are written in place, SGLang's end of an update makes w_kc and w_vc those of a fresh load."""
    r = support.boot(rank, world, port, path, **server)
    support.set_map(r)
    model, fresh = support.build(r), support.build(r)
    support.load(r, model)
    # All weights of the next version differ from those that were loaded.
    new = r._replace(checkpoint={name: (t.float() * -0.5 + 1).to(t.dtype) for name, t in r.checkpoint.items()})
    support.load(new, fresh)
    layout = support.sink_of(r, model).describe()
    derived = layout.notes.derived
    layers = range(model.model.start_layer, model.model.end_layer)
    assert set(derived) == {f"model.layers.{i}.self_attn.{w}" for i in layers for w in ("w_kc", "w_vc")}

    def values(of: torch.nn.Module) -> dict[str, torch.Tensor]:
        return {name: support.derived_tensor(of, name) for name in derived}

    def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> list[bool]:
        return [torch.equal(support.as_bytes(a[name]), support.as_bytes(b[name])) for name in derived]

    old = {name: t.clone() for name, t in values(model).items()}
    addresses = {name: t.data_ptr() for name, t in values(model).items()}
    assert not any(equal(old, values(fresh))), "the new checkpoint would show nothing"
    updater = support.updater_of(r, model)
    updater.begin_weight_update()
    support.write(layout, new.checkpoint)
    assert all(equal(values(model), old)), "an update does not touch them itself"
    updater.end_weight_update(run_post_load=False)
    assert all(equal(values(model), old)), "stale: what happens when SGLang takes our write for a load of its own"
    updater.end_weight_update(run_post_load=True)
    assert all(equal(values(model), values(fresh)))
    assert {name: t.data_ptr() for name, t in values(model).items()} == addresses, "captured graphs keep the address"
    support.check_equal(new, support.Synced(layout, model, fresh))


def random_maps(rank: int, world: int, port: int, path: str, server: Server, layers: int, examples: int) -> int:
    """Sync equals SGLang's own load, and every slot is its expert, for maps that hypothesis makes up."""
    r = support.boot(rank, world, port, path, **server)
    physical = 4 + r.server_args.ep_num_redundant_experts
    extra = st.lists(st.integers(0, 3), min_size=physical - 4, max_size=physical - 4)
    row = extra.flatmap(lambda more: st.permutations([0, 1, 2, 3, *more]))
    tried = []

    # The same examples on every rank, because it is one instance.
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(st.lists(row, min_size=layers, max_size=layers))
    def holds(rows: list[list[int]]) -> None:
        layout = support.check_against_loader(r, rows).layout
        assert layout.placement is not None
        assert layout.placement.placement.physical_to_logical.tolist() == rows
        audit_dispatch(layout.placement.placement, layout.notes.dispatch)
        model = support.build(r)
        support.write(support.sink_of(r, model).describe(), r.checkpoint)
        assert support.wrong_slots(r, model, rows) == set()
        tried.append(rows)

    holds()
    return len(tried)


def forgotten_slots(
    rank: int, world: int, port: int, path: str, server: Server, maps: Sequence[Rows], sink: dict[str, Any]
) -> list[set[tuple[int, int]]]:
    """For each map the (layer, slot) that SGLang's own loader leaves unwritten here; asserts that ours writes all."""
    r = support.boot(rank, world, port, path, **server)
    found = []
    for rows in maps:
        support.set_map(r, rows)
        model = support.build(r)
        support.load(r, model)
        poisoned = {
            (m.layer_id, slot)
            for m in support.expert_layers(model)
            for name, p in m.named_parameters()
            for slot in range(m.num_local_experts)
            if support.is_poisoned(p[slot])
        }
        assert poisoned == support.wrong_slots(r, model, rows)
        found.append(poisoned)
        ours = support.build(r)
        layout = support.sink_of(r, ours, **sink).describe()
        support.write(layout, r.checkpoint)
        assert support.wrong_slots(r, ours, rows) == set()
        support.fill_padding(ours, layout)
        assert not [name for name, p in ours.named_parameters() if support.is_poisoned(p)]
        assert layout.placement is not None
        audit_dispatch(layout.placement.placement, layout.notes.dispatch)
        with only_traced_slots():
            if poisoned:
                with pytest.raises(DescribeError, match=r"is written by no checkpoint tensor"):
                    support.sink_of(r, ours, **sink).describe()
    return found


@contextmanager
def only_traced_slots() -> Iterator[None]:
    """The sink without the rows that the map adds to the trace: what every bridge keyed by the loader does."""

    def traced_only(parameter: ExpertParameter, regions: Iterable[TracedRegion]) -> list[Held]:
        return [Held.as_traced(r) for r in regions]

    original = sglang_module.describe_slots
    sglang_module.describe_slots = traced_only
    try:
        yield
    finally:
        sglang_module.describe_slots = original


def mover(rank: int, world: int, port: int, path: str, server: Server, old: list[int], new: list[int]) -> None:
    """SGLang's own mover rebalances layer 0 at run time; placement() and describe() follow."""
    from sglang.srt.eplb.expert_location import ExpertLocationMetadata
    from sglang.srt.eplb.expert_location_updater import ExpertLocationUpdater

    r = support.boot(rank, world, port, path, **server)
    support.set_map(r)
    model = support.build(r)
    support.load(r, model)
    sink = support.sink_of(r, model)
    before, stale = sink.placement(), sink.describe()
    assert before is not None
    assert before.placement.physical_to_logical.tolist() == [old, old]
    moved = ExpertLocationMetadata.init_by_mapping(r.model_config, [new, new], moe_ep_rank=rank)
    updater = ExpertLocationUpdater()
    updater._first_execution = False  # The first one calls torch.cpu.empty_cache, which does not exist.
    updater.update(model.routed_experts_weights_of_layer, moved, update_layer_ids=[0], nnodes=1, rank=rank)
    after = sink.placement()
    assert after is not None
    assert before.placement.physical_to_logical.tolist() == [old, old], "the earlier answer follows the live map"
    assert after.placement.physical_to_logical.tolist() == [new, old]
    assert after.placement.changed_layers(before.placement).tolist() == [0]
    layout = sink.describe()
    assert layout.placement == after
    assert layout.table.fingerprint != stale.table.fingerprint
    support.poison(model)
    support.write(layout, r.checkpoint)
    assert support.wrong_slots(r, model, [new, old]) == set()
    support.write(stale, r.checkpoint)
    assert support.wrong_slots(r, model, [new, old]) != set(), "a stale layout goes unnoticed"


def broken_inputs(rank: int, world: int, port: int, path: str, server: Server, row: list[int]) -> None:
    """Every check of the sink sees its fault. Rank 1 of EP 2 with a map of two layers."""
    r = support.boot(rank, world, port, path, **server)
    metadata = support.set_map(r)
    model = support.build(r)
    catalog = read_headers(path)
    sink = SglangSink(model, catalog, rank=rank)
    sink.describe()
    mine = row[3 * rank : 3 * rank + 3]

    # The map that slots come from and the one that the loader reads contradict each other.
    metadata.physical_to_logical_map_cpu[1] = torch.tensor(row[::-1])
    with pytest.raises(AgreementError, match=rf"rank {rank}: layer 1, slot \d of storage rank {rank}.*the map has"):
        sink.describe()
    metadata.physical_to_logical_map_cpu[1] = torch.tensor(row)

    # The loader swaps two experts.
    swapped = renamed(model, {"experts.0.": "experts.1.", "experts.1.": "experts.0."})
    with pytest.raises(AgreementError, match=r"the loader writes logical expert \d .*the map has logical expert \d"):
        SglangSink(swapped, catalog, rank=rank).describe()

    # The ep offset is ignored.
    original = sglang_module.find_layers
    sglang_module.find_layers = lambda m: [replace(layer, storage_rank=0) for layer in original(m)]
    if rank:
        with pytest.raises(AgreementError, match=r"layer 0, slot \d of storage rank 0"):
            sink.describe()
    sglang_module.find_layers = original

    # The checkpoint lacks a tensor of an expert, or of anything else.
    lacks = f"model.layers.1.mlp.experts.{mine[0]}.up_proj.weight"
    with pytest.raises(DescribeError, match=rf"{lacks}.*has no such tensor".replace(".", r"\.").replace(r"\.*", ".*")):
        SglangSink(model, {k: v for k, v in catalog.items() if k != lacks}, rank=rank).describe()
    with pytest.raises(
        DescribeError, match=r"'model.norm.weight' of shape \[64\]: box at \[0\] of size \[64\] is written by no"
    ):
        SglangSink(model, {k: v for k, v in catalog.items() if k != "model.norm.weight"}, rank=rank).describe()
    with pytest.raises(
        DescribeError, match=r"loader failed while it was traced, at checkpoint tensor 'model.norm.weight'"
    ):
        SglangSink(model, catalog | {"model.norm.weight": TensorSpec((65,), "bfloat16")}, rank=rank).describe()

    # Two tensors for one parameter.
    doubled = repeated(model, "model.layers.0.input_layernorm.weight", "model.norm.weight")
    with pytest.raises(DescribeError, match=r"'model.norm.weight'.*is written by two regions"):
        SglangSink(doubled, catalog, rank=rank).describe()

    # A loader that computes.
    scaled = transformed(model, "model.norm.weight", lambda t: t * 2)
    with pytest.raises(
        DescribeError, match=r"'model.norm.weight': the loader writes box \[0\] \+ \[64\] with aten.copy_"
    ):
        SglangSink(scaled, catalog, rank=rank).describe()
    asked = transformed(model, "model.norm.weight", lambda t: t if t.max() > 0 else -t)
    with pytest.raises(DescribeError, match=r"reads values of checkpoint tensor 'model.norm.weight'|model.norm.weight"):
        SglangSink(asked, catalog, rank=rank).describe()

    # Weights that are rearranged after loading.
    attention = model.model.layers[0].self_attn.o_proj
    attention.use_intel_amx_backend = True
    with pytest.raises(DescribeError, match=r"'model.layers.0.self_attn.o_proj': its weights are packed for AMX"):
        sink.describe()
    attention.use_intel_amx_backend = False

    # Another SGLang.
    experts = support.expert_layers(model)[0]
    kept = experts.__dict__.pop("_expert_storage_rank")
    with pytest.raises(DescribeError, match=r"SGLang 0\.\d+\.\d+ has no attribute '_expert_storage_rank'"):
        sink.placement()
    experts._expert_storage_rank = 1 - kept
    with pytest.raises(AgreementError, match=r"one rank has one"):
        sink.placement()
    experts._expert_storage_rank = kept

    # A map of another size, and a dispatcher that picks a slot of another expert.
    layout = sink.describe()
    assert layout.placement is not None
    table = layout.notes.dispatch.copy()
    table[0, 2] = int(np.flatnonzero(np.array(row) != table[0, 1])[0])
    with pytest.raises(AgreementError, match=r"layer 0: the dispatcher may send logical expert"):
        audit_dispatch(layout.placement.placement, table)
    support.set_map(r, [[0, 1, 2, 3], [0, 1, 2, 3]])
    with pytest.raises(AgreementError, match=r"do not fit together.*stores 3 routed slots, but the placement has 2"):
        sink.describe()
    support.set_map(r)
    assert sink.describe().table.fingerprint == layout.table.fingerprint
    assert all(support.is_poisoned(p) for p in model.parameters()), "a refused describe() wrote a parameter"


def renamed(model: torch.nn.Module, names: dict[str, str]) -> torch.nn.Module:
    """The same model, whose loader takes some tensors for others."""

    def rename(name: str) -> str:
        return next((name.replace(old, new) for old, new in names.items() if old in name), name)

    return _with_loader(model, lambda pairs: ((rename(n), t) for n, t in pairs))


def repeated(model: torch.nn.Module, which: str, again: str) -> torch.nn.Module:
    """The same model, whose loader writes one tensor a second time, to where `again` belongs."""
    return _with_loader(model, lambda pairs: (out for n, t in pairs for out in [(n, t)] + [(again, t)] * (n == which)))


def transformed(model: torch.nn.Module, which: str, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.nn.Module:
    """The same model, whose loader computes with one tensor."""
    return _with_loader(model, lambda pairs: ((n, change(t) if n == which else t) for n, t in pairs))


def _with_loader(model: torch.nn.Module, around: Callable[[Any], Any]) -> torch.nn.Module:
    changed = torch.nn.Module()
    changed.__dict__ = dict(model.__dict__)
    object.__setattr__(changed, "load_weights", lambda pairs: model.load_weights(around(pairs)))
    return changed


def scale_up(rank: int, world: int, port: int, path: str, server: Server) -> None:
    """Elastic EP scale-up, by its attributes: storage rank unlike EP rank, routed slots past those known at start."""
    from sglang.srt.eplb import expert_location

    r = support.boot(rank, world, port, path, **server)
    rows = [[0, 1, 2, 3, 3, 0, 1, 1, 2]] * 3
    physical_to_logical = torch.tensor(rows)
    everywhere = expert_location._compute_logical_to_all_physical_map(physical_to_logical, 4, 3, rank)
    metadata = expert_location.ExpertLocationMetadata._init_raw(3, physical_to_logical, everywhere, moe_ep_rank=rank)
    expert_location.set_global_expert_location_metadata(metadata, allow_overwrite=True)
    for storage_rank in (0, 1, 2):
        model = support.build(r)
        for m in support.expert_layers(model):
            assert (m._num_local_routed, m._num_global_routed, m.num_fused_shared_experts) == (3, 6, 1)
            m._expert_storage_rank = storage_rank
        layout = support.sink_of(r, model).describe()
        assert layout.placement is not None
        assert layout.placement.storage_rank == storage_rank
        assert layout.placement.experts(1).tolist() == rows[1][3 * storage_rank : 3 * storage_rank + 3]
        support.write(layout, r.checkpoint)
        assert support.wrong_slots(r, model, rows) == set()
        support.fill_padding(model, layout)
        assert not [name for name, p in model.named_parameters() if support.is_poisoned(p)]


def identity_layers(rank: int, world: int, port: int, path: str, server: Server, row: list[int]) -> None:
    """Layers past the map, and layers that do not follow it, have the identity placement."""
    r = support.boot(rank, world, port, path, **server)
    identity = [0, 1, 2, 3, 0, 1]
    metadata = support.set_map(r)
    model = support.build(r)
    draft = support.expert_layers(model)[1]
    draft.uses_expert_location = False
    support.write(support.sink_of(r, model).describe(), r.checkpoint)
    assert support.wrong_slots(r, model, [row, identity]) == set()
    draft.uses_expert_location = True
    for name in ("physical_to_logical_map", "logical_to_all_physical_map", "logical_to_all_physical_map_num_valid"):
        setattr(metadata, name, getattr(metadata, name)[:1])
    metadata.physical_to_logical_map_cpu = metadata.physical_to_logical_map_cpu[:1]
    metadata.logical_to_all_physical_map_cpu = metadata.logical_to_all_physical_map_cpu[:1]
    support.poison(model)
    layout = support.sink_of(r, model).describe()
    support.write(layout, r.checkpoint)
    assert support.wrong_slots(r, model, [row, identity]) == set()
    assert set(layout.notes.dispatch[:, 0]) == {0}


def global_scales(rank: int, world: int, port: int, path: str, server: Server, row: list[int]) -> None:
    """A parameter with all physical slots on every rank follows the map, though SGLang's loader does not."""
    r = support.boot(rank, world, port, path, **server)
    support.set_map(r)
    model = support.build(r)
    catalog = read_headers(path)
    checkpoint = dict(r.checkpoint)
    for m in support.expert_layers(model):
        scale = torch.nn.Parameter(torch.full((len(row),), torch.nan), requires_grad=False)
        scale._sglang_require_global_experts = True
        scale.weight_loader = m.weight_loader
        m.__dict__.pop("w2_input_scale", None)
        m.register_parameter("w2_input_scale", scale)
        for expert in range(4):
            name = f"model.layers.{m.layer_id}.mlp.experts.{expert}.down_proj.input_scale"
            catalog[name], checkpoint[name] = TensorSpec((), "float32"), torch.tensor(10.0 + expert)
    sink = SglangSink(model, catalog, rank=rank, as_loaded=True)
    layout = sink.describe()
    support.write(layout, checkpoint)
    for m in support.expert_layers(model):
        assert m.w2_input_scale.tolist() == [10.0 + expert for expert in row]
    with pytest.raises(DescribeError, match=r"quantisation method Fp8LinearMethod of SGLang"):
        SglangSink(model, catalog, rank=rank).describe()


class Small(torch.nn.Module):
    """A model with one of each kind of tensor; its loader does what `writes` says."""

    def __init__(self, writes: Callable[[Small, dict[str, torch.Tensor]], None]) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(4), requires_grad=False)
        self.tied = torch.nn.Parameter(self.weight.data, requires_grad=False)
        self.register_buffer("loaded", torch.zeros(2))
        self.register_buffer("counter", torch.zeros(1))
        self.register_buffer("cache", torch.zeros(3), persistent=False)
        self.derived: torch.Tensor | None = None
        self._writes = writes

    def load_weights(self, pairs: Any) -> None:
        given = dict(pairs)
        self.weight.data.copy_(given["weight"])
        self._writes(self, given)


def small_models(rank: int, world: int, port: int, path: str, server: Server) -> None:
    """Buffers, tied memory, derived attributes, without any of SGLang's own layers."""
    support.boot(rank, world, port, path, **server)
    catalog = {"weight": TensorSpec((4,), "float32"), "buffer": TensorSpec((2,), "float32")}

    def describe(writes: Callable[[Small, dict[str, torch.Tensor]], None]) -> tuple[Small, Any]:
        model = Small(writes)
        return model, SglangSink(model, catalog, rank=5).describe()

    def derive(model: Small, given: dict[str, torch.Tensor]) -> None:
        model.loaded.copy_(given["buffer"])
        model.derived = model.weight * 2 if model.derived is None else model.derived.copy_(model.weight * 2)

    for first in (None, torch.ones(4)):
        model = Small(derive)
        model.derived = first
        layout = SglangSink(model, catalog, rank=5).describe()
        assert model.derived is first, "describe() leaves what the loader bound in its trace"
        assert first is None or first.tolist() == [1.0] * 4
        assert layout.notes.derived == ("derived",)
        assert list(layout.table.tensors.names) == ["weight", "buffer"]
        assert layout.notes.parameter_bytes == 24
        assert layout.placement is None

    faults: list[tuple[Callable[[Small, dict[str, torch.Tensor]], Any], str]] = [
        (lambda m, g: m.loaded[:1].copy_(g["buffer"][1:]), r"rank 5: parameter 'loaded' of shape \[2\]: box at \[1\]"),
        (
            lambda m, g: m.cache[:2].copy_(g["buffer"]),
            r"tensor 'cache' is loaded or computed from checkpoint tensor 'buffer' \(aten.copy_.default\)",
        ),
        (lambda m, g: m.weight.data[2:].zero_(), r"the loader fills box \[2\] \+ \[2\] after it wrote 'weight' there"),
        (
            lambda m, g: m.tied.data[2:].copy_(g["buffer"]),
            r"parameter 'weight' .*\[2\] of size \[2\] is written by two",
        ),
        (lambda m, g: m.loaded.copy_(g["buffer"] + 1), r"tensor 'loaded' is loaded or computed from .* 'buffer'"),
    ]
    for writes, message in faults:
        with pytest.raises(DescribeError, match=message):
            describe(writes)
    for ends, message in (
        (lambda m: m.weight.data.mul_(2), r"parameter 'weight': the engine writes it at the end of an update session"),
        (lambda m: m.weight[:5].item(), r"the engine's end of an update session failed while it was traced: Run"),
        (lambda m: m.cache.mul_(2), r"tensor 'cache' at the end of an update session is computed from its own or"),
    ):
        model = Small(derive)
        model.post_load_weights = partial(ends, model)
        with pytest.raises(DescribeError, match=message):
            SglangSink(model, catalog, rank=5).describe()
        assert SglangSink(model, catalog, rank=5, as_loaded=True).describe().notes.derived == ("derived",)
    model = Small(lambda m, g: m.counter.copy_(m.weight[:1]).add_(1))
    sink = SglangSink(model, catalog | {"buffer": TensorSpec((2,), "float32")}, rank=5)
    with pytest.raises(UpdateError, match="rank 5 was not described"):
        sink.settle()
    layout = sink.describe()
    assert (layout.notes.derived, layout.notes.parameter_bytes) == (("counter",), 16), "a persistent buffer, computed"
    layout.view(0).fill_(3)
    sink.settle()
    assert model.counter.tolist() == [4.0]
    unloaded_models()
    both = torch.zeros(6)
    model = Small(derive)
    model.weight, model.tied = (torch.nn.Parameter(part, requires_grad=False) for part in (both[:4], both[2:]))
    with pytest.raises(DescribeError, match=r"parameter 'tied' shares a part of its memory"):
        SglangSink(model, catalog).describe()
    model.tied = torch.nn.Parameter(torch.empty(1, device="meta"))
    with pytest.raises(DescribeError, match=r"parameter 'tied' has no memory"):
        SglangSink(model, catalog).describe()


def unloaded_models() -> None:
    """Models that no loader has run for: what it would fill is filled, and what stays random is refused."""
    catalog = {"weight": TensorSpec((4,), "float32"), "buffer": TensorSpec((2,), "float32")}

    def fill(model: Small, given: dict[str, torch.Tensor]) -> None:
        model.loaded.fill_(7)
        model.loaded[1] = 8
        model.counter.copy_(torch.full((1,), 9.0))

    for is_dummy, loaded, counter in ((True, [7.0, 8.0], [9.0]), (False, [3.0, 3.0], [3.0])):
        model = Small(fill)
        model.loaded.fill_(3)
        model.counter.fill_(3)
        sink = SglangSink(model, catalog, rank=5, is_dummy=is_dummy)
        assert sink.describe().notes.padding_bytes == 12
        assert (model.loaded.tolist(), model.counter.tolist()) == ([3.0, 3.0], [3.0]), "described, and nothing else"
        sink.pad()
        assert (model.loaded.tolist(), model.counter.tolist()) == (loaded, counter)

    def mixed(model: Small, given: dict[str, torch.Tensor]) -> None:
        numbers = torch.zeros(2)
        numbers[:1].fill_(1)
        model.loaded.copy_(numbers)
        model.counter.zero_()

    for writes, message in (
        (lambda m, g: m.loaded.copy_(g["buffer"]), "buffer 'counter' has random numbers, and no checkpoint tensor"),
        (mixed, "parameter 'loaded': the loader pads it with several numbers"),
    ):
        SglangSink(Small(writes), catalog).describe()
        with pytest.raises(DescribeError, match=message):
            SglangSink(Small(writes), catalog, is_dummy=True).describe()
