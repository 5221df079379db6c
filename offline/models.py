"""Layouts of published models for given parallel sizes, without a model: for simulations and benchmarks.

A trainer is `pp8xep32` (pipeline stages x expert-parallel ranks) or `fsdp64` (every tensor cut along its first
dimension). Dense weights of a stage are on all its ranks. `xdp2` after either means copies of all that. Instances are
`8x16`: eight of 16 expert-parallel ranks, with redundant slots and a random placement. Shapes are those of the models'
configurations on Hugging Face.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from weightcast.transfer.boxes.arrays import IntArray
from weightcast.transfer.errors import LayoutError
from weightcast.transfer.layout.dtypes import dtype_code
from weightcast.transfer.layout.tables import NO_SLOT, RegionTable, TensorTable

__all__ = ["DENSE_CUTS", "MODELS", "ModelShape", "Tensor", "instance_tables", "read_instances", "trainer_tables"]

DENSE_CUTS = ("replicated", "tensor", "sharded")
"""Ways in which an instance's ranks hold dense weights: each all of them (data-parallel attention); as tensor
parallelism cuts them; or each an even share. No engine does the last, the least that a model can occupy."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A mixture-of-experts transformer. `dense_layers` come before `moe_layers`; `q_rank` 0 means grouped-query
    attention, else multi-head latent attention with `kv_rank`."""

    hidden: int
    vocabulary: int
    dense_layers: int
    moe_layers: int
    experts: int
    expert_hidden: int
    heads: int
    kv_heads: int
    head_size: int
    shared_experts: int = 0
    dense_hidden: int = 0
    q_rank: int = 0
    kv_rank: int = 0
    rope_size: int = 0

    @property
    def layers(self) -> int:
        return self.dense_layers + self.moe_layers


MODELS = {
    "qwen3-30b-a3b": ModelShape(2048, 151936, 0, 48, 128, 768, 32, 4, 128),
    "qwen3-235b-a22b": ModelShape(4096, 151936, 0, 94, 128, 1536, 64, 4, 128),
    "deepseek-v3": ModelShape(7168, 129280, 3, 58, 256, 2048, 128, 128, 128, 1, 18432, 1536, 512, 64),
    "kimi-k2": ModelShape(7168, 163840, 1, 60, 384, 2048, 64, 64, 128, 1, 18432, 1536, 512, 64),
}


@dataclass(frozen=True, slots=True)
class Tensor:
    """A logical tensor, which tensor parallelism cuts along `cut` into at most `parts`; -1 if it is never cut."""

    name: str
    shape: tuple[int, ...]
    cut: int = -1
    parts: int = 1 << 30


def _attention(model: ModelShape, stem: str) -> Iterator[Tensor]:
    hidden, heads, size = model.hidden, model.heads, model.head_size
    if model.q_rank:
        yield Tensor(f"{stem}.q_a_proj.weight", (model.q_rank, hidden))
        yield Tensor(f"{stem}.q_a_layernorm.weight", (model.q_rank,))
        yield Tensor(f"{stem}.q_b_proj.weight", (heads * (size + model.rope_size), model.q_rank), 0)
        yield Tensor(f"{stem}.kv_a_proj_with_mqa.weight", (model.kv_rank + model.rope_size, hidden))
        yield Tensor(f"{stem}.kv_a_layernorm.weight", (model.kv_rank,))
        yield Tensor(f"{stem}.kv_b_proj.weight", (heads * size * 2, model.kv_rank), 0)
    else:
        yield Tensor(f"{stem}.q_proj.weight", (heads * size, hidden), 0)
        for name in ("k_proj", "v_proj"):
            yield Tensor(f"{stem}.{name}.weight", (model.kv_heads * size, hidden), 0, model.kv_heads)
        for name in ("q_norm", "k_norm"):
            yield Tensor(f"{stem}.{name}.weight", (size,))
    yield Tensor(f"{stem}.o_proj.weight", (hidden, heads * size), 1)


def _mlp(stem: str, hidden: int, inner: int) -> Iterator[Tensor]:
    yield Tensor(f"{stem}.gate_proj.weight", (inner, hidden), 0)
    yield Tensor(f"{stem}.up_proj.weight", (inner, hidden), 0)
    yield Tensor(f"{stem}.down_proj.weight", (hidden, inner), 1)


def dense_tensors(model: ModelShape, layers: range) -> Iterator[Tensor]:
    """All but the routed experts of some layers; the first has the embedding, the last the head."""
    if layers.start == 0:
        yield Tensor("model.embed_tokens.weight", (model.vocabulary, model.hidden), 0)
    for layer in layers:
        stem = f"model.layers.{layer}"
        yield from _attention(model, f"{stem}.self_attn")
        if layer < model.dense_layers:
            yield from _mlp(f"{stem}.mlp", model.hidden, model.dense_hidden)
        else:
            yield Tensor(f"{stem}.mlp.gate.weight", (model.experts, model.hidden))
            if model.shared_experts:
                yield from _mlp(f"{stem}.mlp.shared_experts", model.hidden, model.expert_hidden * model.shared_experts)
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield Tensor(f"{stem}.{name}.weight", (model.hidden,))
    if layers.stop == model.layers:
        yield Tensor("model.norm.weight", (model.hidden,))
        yield Tensor("lm_head.weight", (model.vocabulary, model.hidden), 0)


def expert_tensors(model: ModelShape, layer: int, expert: int) -> Iterator[Tensor]:
    yield from _mlp(f"model.layers.{layer}.mlp.experts.{expert}", model.hidden, model.expert_hidden)


def _expert_tensors(model: ModelShape, layers: range, experts: range) -> Iterator[Tensor]:
    """Some of the routed experts in some layers, as far as these have any."""
    for layer in range(max(layers.start, model.dense_layers), layers.stop):
        for expert in experts:
            yield from expert_tensors(model, layer, expert)


class _Piece(NamedTuple):
    """A tensor in the memory of a rank: piece `number` of `pieces` even ones along a dimension."""

    tensor: Tensor
    slot: int = NO_SLOT
    number: int = 0
    pieces: int = 1
    dim: int = 0


def _table(pieces: Iterable[_Piece], dtype: str) -> RegionTable:
    """The regions of a rank. Matrices have the `dtype`, vectors are bfloat16."""
    index: dict[str, int] = {}
    shapes: list[tuple[int, ...]] = []
    rows: list[tuple[int, int, int, int, int]] = []
    for tensor, slot, number, count, dim in pieces:
        row = index.setdefault(tensor.name, len(index))
        if row == len(shapes):
            shapes.append(tensor.shape)
        length = tensor.shape[dim]
        step = -(-length // count)
        start, end = min(number * step, length), min((number + 1) * step, length)
        if end > start:
            rows.append((row, dim, start, end - start, slot))
    ndim = np.array([len(shape) for shape in shapes], dtype=np.int64)
    shape = np.array([(*shape, 1)[:2] for shape in shapes], dtype=np.int64).reshape(-1, 2)
    codes = np.where(ndim > 1, dtype_code(dtype), dtype_code("bfloat16")).astype(np.int64)
    tensors, dims, starts, lengths, slots = np.array(rows, dtype=np.int64).reshape(-1, 5).T
    offset, size = np.zeros((len(rows), 2), dtype=np.int64), np.take(shape, tensors, axis=0)
    region = np.arange(len(rows))
    offset[region, dims], size[region, dims] = starts, lengths
    return RegionTable(TensorTable(tuple(index), shape, ndim, codes), tensors, offset, size, slots)


def trainer_tables(model: ModelShape, parallel: str, dtype: str = "bfloat16") -> list[RegionTable]:
    """Tables of `pp8xep32`, `fsdp64` or one of them with `xdp2` after it. Raises LayoutError where that does not fit
    the model."""
    match = re.fullmatch(r"(?:fsdp([1-9]\d{0,5})|pp([1-9]\d{0,3})xep([1-9]\d{0,3}))(?:xdp([1-9]\d{0,3}))?", parallel)
    if not match:
        raise LayoutError(f"trainer {parallel!r} is not of the form pp8xep32 or fsdp64, with xdp2 after it for copies")
    world, stages, ranks, copies = (int(number or 1) for number in match.groups())
    if match[1]:
        return _fully_sharded(model, world, dtype) * copies
    if stages > model.layers or model.experts % ranks:
        raise LayoutError(
            f"trainer {parallel!r}: {model.layers} layers make at most as many stages, and {model.experts} experts "
            f"must divide evenly among {ranks} ranks"
        )
    cuts = [model.layers * stage // stages for stage in range(stages + 1)]
    tables: list[RegionTable] = []
    for start, end in itertools.pairwise(cuts):
        tables += _stage(model, range(start, end), ranks, dtype) * copies
    return tables


def _stage(model: ModelShape, layers: range, ranks: int, dtype: str) -> list[RegionTable]:
    dense, share = list(dense_tensors(model, layers)), model.experts // ranks
    return [
        _table(map(_Piece, [*dense, *_expert_tensors(model, layers, range(start, start + share))]), dtype)
        for start in range(0, model.experts, share)
    ]


def _fully_sharded(model: ModelShape, world: int, dtype: str) -> list[RegionTable]:
    layers = range(model.layers)
    tensors = [*dense_tensors(model, layers), *_expert_tensors(model, layers, range(model.experts))]
    return [_table([_Piece(tensor, NO_SLOT, rank, world) for tensor in tensors], dtype) for rank in range(world)]


def read_instances(text: str) -> tuple[int, int]:
    """`8x16` -> 8 instances of 16 ranks. Raises LayoutError."""
    match = re.fullmatch(r"([1-9]\d{0,4})x([1-9]\d{0,4})", text)
    if not match:
        raise LayoutError(f"instances {text!r} are not of the form 8x16: how many, and how many ranks each has")
    return int(match[1]), int(match[2])


def random_placement(model: ModelShape, redundant: int, seed: int) -> IntArray:
    """(MoE layers, slots): the logical expert of each slot. Each expert has one slot and random ones have more. Their
    order is random, so that some rank has an expert twice."""
    rng = np.random.default_rng(seed)
    experts = np.arange(model.experts)
    return np.stack(
        [
            rng.permutation(np.concatenate([experts, rng.integers(0, model.experts, redundant)]))
            for _ in range(model.moe_layers)
        ]
    )


def instance_tables(
    model: ModelShape,
    world: int,
    placement: IntArray,
    dense: str = "replicated",
    dtype: str = "bfloat16",
    dense_ranks: int | None = None,
) -> list[RegionTable]:
    """Tables of one instance. `placement` (MoE layers, slots) is divided among `world` expert-parallel ranks, dense
    weights are as one of DENSE_CUTS over groups of `dense_ranks` (all ranks without it). Vectors and norms stay
    bfloat16 whatever the `dtype` is. Raises LayoutError."""
    if placement.shape[1] % world:
        raise LayoutError(f"{placement.shape[1]} slots a layer do not divide evenly among {world} ranks of an instance")
    if dense not in DENSE_CUTS:
        raise LayoutError(f"dense weights {dense!r} are none of {', '.join(DENSE_CUTS)}")
    tensors = list(dense_tensors(model, range(model.layers)))
    slots = placement.reshape(placement.shape[0], world, -1)
    group = dense_ranks or world
    tables = []
    for rank in range(world):
        pieces = [_dense_piece(tensor, dense, rank % group, group) for tensor in tensors]
        for layer, experts in enumerate(slots[:, rank].tolist(), model.dense_layers):
            for slot, expert in enumerate(experts):
                pieces += [_Piece(tensor, slot) for tensor in expert_tensors(model, layer, expert)]
        tables.append(_table(pieces, dtype))
    return tables


def _dense_piece(tensor: Tensor, dense: str, rank: int, ranks: int) -> _Piece:
    """The piece that a rank of a group has of a tensor that is no expert's; `dense` is one of DENSE_CUTS."""
    if dense == "sharded":
        return _Piece(tensor, NO_SLOT, rank, ranks)
    if dense == "tensor" and tensor.cut >= 0:
        pieces = min(ranks, tensor.parts)
        return _Piece(tensor, NO_SLOT, rank * pieces // ranks, pieces, tensor.cut)
    return _Piece(tensor)
