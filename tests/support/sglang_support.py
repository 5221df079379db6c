"""Builds real SGLang models in Gloo processes without a GPU, and checks what a sink says against SGLang's own loader.

A worker calls `boot` once and `build` as often as it likes: building a tiny model takes a fraction of a second,
importing SGLang half a minute.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from model_support import as_bytes
from sglang_models import read_tensors

from weightcast.adapters.checkpoint import read_headers
from weightcast.adapters.sglang.sink import SglangSink
from weightcast.transfer.layout.memory import RankLayout

SMALL_SERVER: dict[str, Any] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "dtype": "bfloat16",
    "skip_tokenizer_init": True,
    "disable_cuda_graph": True,
    "disable_radix_cache": True,
    "host": "127.0.0.1",
}


_CPU_KERNELS = (
    "fused_sigmoid_mul_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
)
_LIBRARIES: list[torch.library.Library] = []
"""A library whose object is gone takes its definitions with it."""


class Rank(NamedTuple):
    """One booted process of an SGLang instance, without a scheduler."""

    rank: int
    world: int
    path: str
    server_args: Any
    model_config: Any
    checkpoint: dict[str, torch.Tensor]


class Synced(NamedTuple):
    """What `check_against_loader` compared: our layout and model, and a model that SGLang itself loaded."""

    layout: RankLayout
    model: torch.nn.Module
    expected: torch.nn.Module


def environment() -> None:
    """Sets what SGLang reads when it is imported; before any import of it."""
    os.environ |= {
        "SGLANG_USE_CPU_ENGINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "SGLANG_PLUGINS": "none",
    }


def preload(models: bool = False) -> None:
    """Imports what building a model needs, all model classes with `models`, without starting anything."""
    if models:
        stand_in_for_kernels()
    import sglang.srt.eplb.expert_location_updater
    import sglang.srt.model_loader.loader
    import sglang.srt.models.deepseek_v2
    import sglang.srt.models.qwen3
    import sglang.srt.models.qwen3_moe
    import sglang.srt.server_args  # noqa: F401

    if models:
        from sglang.srt.models.registry import ModelRegistry

        ModelRegistry.get_supported_archs()


def stand_in_for_kernels() -> None:
    """Defines what modules of Qwen3-Next and its kin look up when they are imported, and what nothing here calls."""
    library = torch.library.Library("sgl_kernel", "FRAGMENT")
    for name in _CPU_KERNELS:
        library.define(f"{name}(Tensor a, Tensor b) -> Tensor")
    _LIBRARIES.append(library)
    torch.cuda.get_device_capability = lambda *_, **__: (9, 0)


def boot(rank: int, world: int, port: int, path: str, **server: Any) -> Rank:
    """Publishes the server arguments and makes the parallel groups, as a scheduler process does."""
    environment()
    os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(["0"] * world)  # One entry per rank.
    import logging

    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import bootstrap
    from sglang.srt.layers.moe import initialize_moe_config
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import ServerArgs

    server_args = ServerArgs(model_path=path, **(SMALL_SERVER | server))
    publish(server_args, role="scheduler", ranks=SpawnRanks(world_rank=rank, gpu_id=rank))
    logging.disable(logging.WARNING)
    model_config = ModelConfig.from_server_args(server_args)
    bootstrap.init_parallel_runtime(server_args=server_args, device="cpu", dist_port=port)
    bootstrap.init_layer_runtime(model_config=model_config)
    initialize_moe_config()
    return Rank(rank, world, path, server_args, model_config, read_tensors(path))


def map_arguments(row: Sequence[int], layers: int) -> dict[str, Any]:
    """Server arguments of a placement that has the same row in every layer."""
    return {
        "ep_num_redundant_experts": len(row) - len(set(row)),
        "init_expert_location": json.dumps({"physical_to_logical_map": [list(row)] * layers}),
    }


def set_map(r: Rank, rows: Sequence[Sequence[int]] | None = None) -> Any:
    """SGLang's expert metadata from `rows`, or from the server arguments; the global one from now on."""
    from sglang.srt.eplb import expert_location
    from sglang.srt.runtime_context import get_parallel

    rank = get_parallel().moe_ep_rank
    if rows is None:
        metadata = expert_location.compute_initial_expert_location_metadata(r.model_config, moe_ep_rank=rank)
    else:
        metadata = expert_location.ExpertLocationMetadata.init_by_mapping(
            r.model_config, [list(row) for row in rows], moe_ep_rank=rank
        )
    expert_location.set_global_expert_location_metadata(metadata, allow_overwrite=True)
    return metadata


def build(r: Rank) -> torch.nn.Module:
    """The real model with every floating-point parameter full of NaN."""
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.model_loader.loader import _get_quantization_config, _initialize_model
    from sglang.srt.model_loader.utils import set_default_torch_dtype

    load_config = LoadConfig(load_format="auto")
    quant_config = _get_quantization_config(r.model_config, load_config)
    with set_default_torch_dtype(r.model_config.dtype), torch.device("cpu"):
        model = _initialize_model(r.model_config, load_config, quant_config)
    poison(model)
    return model


def load(r: Rank, model: torch.nn.Module) -> None:
    """SGLang's own loader, from the checkpoint."""
    model.load_weights((name, t) for name, t in r.checkpoint.items())


def poison(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            raw = p.data.view(torch.uint8) if p.dim() else p.data.reshape(1).view(torch.uint8)
            raw.fill_(0xFF)  # NaN in every floating-point format, also in fp8.


def is_poisoned(t: torch.Tensor) -> bool:
    """Whether any element still has the bytes of `poison`."""
    return bool((as_bytes(t).view(-1, t.itemsize) == 0xFF).all(dim=1).any())


def write(layout: RankLayout, checkpoint: dict[str, torch.Tensor]) -> None:
    """What an update does, without a trainer: every region from the checkpoint."""
    for row in range(len(layout.table)):
        region = layout.table.region(row)
        box = tuple(slice(o, o + n) for o, n in zip(region.offset, region.size, strict=True))
        layout.view(row).copy_(checkpoint[region.tensor][box])


def fill_padding(model: torch.nn.Module, layout: RankLayout) -> int:
    """Zeroes what no region covers, and returns how many bytes that were; an engine's first load did it long ago."""
    zeroed = 0
    covered = {id(p): torch.zeros(p.shape, dtype=torch.bool) for p in model.parameters()}
    by_storage = {p.untyped_storage()._cdata: p for p in model.parameters()}
    for row in range(len(layout.table)):
        view = layout.view(row)
        p = by_storage[view.untyped_storage()._cdata]
        mask = covered[id(p)]
        start = view.storage_offset() - p.storage_offset()
        torch.as_strided(mask, view.shape, view.stride(), start).fill_(True)
    with torch.no_grad():
        for p in model.parameters():
            hole = ~covered[id(p)]
            if hole.any():
                p.data[hole] = 0
                zeroed += int(hole.sum()) * p.itemsize
    return zeroed


def sink_of(r: Rank, model: torch.nn.Module, **kwargs: Any) -> SglangSink:
    return SglangSink(model, read_headers(r.path), rank=r.rank, **kwargs)


def check_against_loader(r: Rank, rows: Sequence[Sequence[int]] | None = None, **sink: Any) -> Synced:
    """Poison, sync, compare every parameter byte for byte with SGLang's own load of the same checkpoint.

    Only for placements and backends with which SGLang's own load is complete.
    """
    set_map(r, rows)
    model = build(r)
    layout = sink_of(r, model, **sink).describe()
    assert all(is_poisoned(p) for p in model.parameters()), "describe() wrote a parameter"
    with torch.inference_mode():  # As a scheduler does.
        again = sink_of(r, model, **sink).describe()
    assert again.table.fingerprint == layout.table.fingerprint
    assert again.notes.derived == layout.notes.derived
    write(again, r.checkpoint)
    expected = build(r)
    load(r, expected)
    synced = Synced(layout, model, expected)
    check_equal(r, synced)
    assert int(layout.table.nbytes.sum()) + layout.notes.padding_bytes == layout.notes.parameter_bytes
    return synced


def check_equal(r: Rank, synced: Synced) -> None:
    """Every byte of every parameter is what SGLang's own load made it, padding aside."""
    layout, model, expected = synced
    assert fill_padding(model, layout) == layout.notes.padding_bytes
    for (name, ours), theirs in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert not is_poisoned(theirs), f"rank {r.rank}: SGLang's own load leaves {name} unwritten"
        assert torch.equal(as_bytes(ours), as_bytes(theirs)), f"rank {r.rank}: {name} differs from SGLang's own load"


def updater_of(r: Rank, model: torch.nn.Module) -> Any:
    """SGLang's own updater of a model, which begins and ends update sessions, without a model runner around it."""
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

    def no_runner(*_: Any, **__: Any) -> Any:
        raise AssertionError("a session asks for nothing but the model")

    return WeightUpdater(
        tp_rank=r.rank,
        device="cpu",
        gpu_id=0,
        model_config=r.model_config,
        custom_weight_loaders={},
        get_model=lambda: model,
        update_model_fields=no_runner,
        recapture_cuda_graph=no_runner,
        get_model_runner=no_runner,
    )


def derived_tensor(model: torch.nn.Module, name: str) -> torch.Tensor:
    """A tensor that a module keeps as a plain attribute."""
    path, _, key = name.rpartition(".")
    found = getattr(model.get_submodule(path), key)
    assert isinstance(found, torch.Tensor)
    return found.detach()


def expert_layers(model: torch.nn.Module) -> list[Any]:
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

    return [m for m in model.modules() if isinstance(m, FusedMoE)]


def slot_parts(r: Rank, m: Any, holder: str) -> dict[str, torch.Tensor]:
    """What one slot of each parameter of a FusedMoE must be when it holds `holder` ("experts.3", "shared_experts")."""
    parts = {}
    for kind, block in (("weight", 1), ("weight_scale_inv", 32)):
        if not hasattr(m, f"w13_{kind}"):
            continue
        count = m.intermediate_size_per_partition // block
        rows = slice(m.moe_tp_rank * count, (m.moe_tp_rank + 1) * count)
        prefix = f"model.layers.{m.layer_id}.mlp.{holder}"
        if holder.startswith("experts.") and f"model.layers.{m.layer_id}.mlp.experts.down_proj" in r.checkpoint:
            expert, start = int(holder.removeprefix("experts.")), f"model.layers.{m.layer_id}.mlp.experts"
            gate, up = r.checkpoint[f"{start}.gate_up_proj"][expert].chunk(2)
            parts["w13_weight"] = torch.cat([gate[rows], up[rows]])
            parts["w2_weight"] = r.checkpoint[f"{start}.down_proj"][expert][:, rows]
            continue
        gate, up = (r.checkpoint[f"{prefix}.{which}_proj.{kind}"][rows] for which in ("gate", "up"))
        both = [gate, up] if block > 1 else [gate.view(torch.uint8), up.view(torch.uint8)]
        parts[f"w13_{kind}"] = torch.cat(both).view(gate.dtype)
        parts[f"w2_{kind}"] = r.checkpoint[f"{prefix}.down_proj.{kind}"][:, rows]
    return parts


def wrong_slots(r: Rank, model: torch.nn.Module, rows: Sequence[Sequence[int]]) -> set[tuple[int, int]]:
    """(layer, local slot) of every slot that does not hold, byte for byte, what the map says; shared slots included."""
    wrong = set()
    for m in expert_layers(model):
        first = m._expert_storage_rank * m._num_local_routed
        for slot in range(m.num_local_experts):
            routed = slot < m._num_local_routed
            holder = f"experts.{rows[m.layer_id][first + slot]}" if routed else "shared_experts"
            for name, expected in slot_parts(r, m, holder).items():
                if not torch.equal(as_bytes(getattr(m, name)[slot]), as_bytes(expected)):
                    wrong.add((m.layer_id, slot))
    return wrong
