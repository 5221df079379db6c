"""The FSDP source against exporters: every logical tensor is rebuilt from the regions of all ranks, byte for byte."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from fsdp_workers import CASES, qwen3, qwen3_moe, run_cases
from rebuild_support import Rows, count_calls, faults
from spawn_support import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from weightcast.adapters.fsdp.source import FsdpSource
from weightcast.adapters.fsdp.transformers_names import Part
from weightcast.transfer.errors import DescribeError
from weightcast.transfer.layout.tables import Region


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """The folder of each world size that has run; its first test runs it."""
    return {}


def _run(world: int, results: dict[int, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    if world not in results:
        folder = tmp_path_factory.mktemp(f"world{world}")
        run_ranks(run_cases, world, str(folder), timeout=180)
        results[world] = folder
    return results[world]


@pytest.mark.parametrize(("world", "case"), [(world, case.__name__) for world in CASES for case in CASES[world]])
def test_regions_rebuild_the_checkpoint(
    world: int, case: str, results: dict[int, Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = _run(world, results, tmp_path_factory)
    ranks, truth = _load(folder, case, world)
    assert faults(ranks, truth) == []


def _load(folder: Path, case: str, world: int) -> tuple[list[Rows], dict[str, Any]]:
    return [torch.load(folder / f"{case}.{rank}") for rank in range(world)], torch.load(folder / f"{case}.truth")


def test_a_dropped_region_is_seen(results: dict[int, Path], tmp_path_factory: pytest.TempPathFactory) -> None:
    ranks, truth = _load(_run(3, results, tmp_path_factory), "fsdp_moe_4_experts", 3)
    name = ranks[1].pop()[0]
    assert faults(ranks, truth) == [f"{name}: part is on no rank"]


def test_taking_only_the_first_offset_is_seen(
    results: dict[int, Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    ranks, truth = _load(_run(4, results, tmp_path_factory), "mesh_layouts", 4)
    pieces = [row for row in ranks[0] if row[0] == "rows_0_1_4"]
    assert [(offset, tuple(view.shape)) for _, _, offset, view in pieces] == [((0, 0), (2, 3)), ((4, 0), (1, 3))]
    joined = ("rows_0_1_4", (12, 3), (0, 0), torch.cat([view for *_, view in pieces]))
    ranks[0] = [row for row in ranks[0] if row[0] != "rows_0_1_4"] + [joined]
    assert faults(ranks, truth) == ["rank 0: rows_0_1_4 at (0, 0) differs", "rows_0_1_4: part is on no rank"]


def test_ranks_without_a_share_hold_nothing(results: dict[int, Path], tmp_path_factory: pytest.TempPathFactory) -> None:
    ranks, _ = _load(_run(4, results, tmp_path_factory), "mesh_layouts", 4)
    assert [[row[0] for row in ranks[rank]].count("one_row") for rank in range(4)] == [1, 0, 0, 0]
    assert [[row[0] for row in ranks[rank]].count("outside") for rank in range(4)] == [0, 1, 0, 1]
    ranks, _ = _load(_run(6, results, tmp_path_factory), "tp_fsdp_uneven", 6)
    assert [[(offset[0], view[:, 0].tolist()) for _, _, offset, view in rank] for rank in ranks] == [
        [(0, [1, 4])], [(4, [13])], [(2, [7, 10])], [(5, [16])], [], [(6, [19])]
    ]  # fmt: skip
    ranks, _ = _load(_run(3, results, tmp_path_factory), "fsdp_moe_4_experts", 3)
    assert [sum(".experts." in row[0] for row in rank) for rank in ranks] == [12, 12, 0]


@pytest.fixture
def fake_world() -> Iterator[Callable[[int, int], None]]:
    """Makes this process one rank of a large world whose collectives do nothing; describing needs none.

    Torch remembers meshes by shape for as long as the process lives: each test must use a mesh shape of its own.
    """
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def start(rank: int, world: int) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)

    yield start
    if dist.is_initialized():
        dist.destroy_process_group()


def _one(tensor: torch.Tensor) -> nn.Module:
    module = nn.Module()
    module.register_parameter("w", nn.Parameter(tensor, requires_grad=tensor.is_floating_point()))
    return module


def test_every_rank_of_a_large_mesh_can_be_described_alone(fake_world: Callable[[int, int], None]) -> None:
    fake_world(200, 256)
    module = nn.Linear(4, 1000, device="meta")
    fully_shard(module, mesh=init_device_mesh("cpu", (2, 128), mesh_dim_names=("replicate", "shard")))
    table = FsdpSource(module).describe().table
    assert [table.region(row) for row in range(len(table))] == [
        Region("weight", (576, 0), (8, 4)),
        Region("bias", (576,), (8,)),
    ]


def test_describing_touches_no_weight_and_costs_as_much_as_there_are_regions(
    fake_world: Callable[[int, int], None],
) -> None:
    """benchmarks/bench_describe.py prints the seconds for a model of 235B parameters."""
    fake_world(9, 48)
    mesh = init_device_mesh("cpu", (48,))
    costs, regions = [], []
    for experts in (96, 96, 192, 288):  # the first time imports what it needs
        with torch.device("meta"):
            model = qwen3_moe(experts=experts)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        source = FsdpSource(model)
        costs.append([count_calls(source.describe), count_calls(source.describe)])
        layout = source.describe()
        assert {base.device.type for base in layout.memory.bases} == {"meta"}
        regions.append(len(layout.table))
    assert regions == [33, 33, 45, 57]
    for small, middle, large in zip(*costs[1:], strict=True):
        assert large - middle <= 1.05 * (middle - small)
    later = [cost / count for (_, cost), count in zip(costs, regions, strict=True)]
    assert max(later) < 400


def test_ambiguous_rows_are_refused(fake_world: Callable[[int, int], None]) -> None:
    """27 rows over 3 x 4: row 26 by DTensor's reading, row 20 by FSDP's, and the local size fits both."""
    fake_world(10, 12)
    mesh = init_device_mesh("cpu", (3, 4), mesh_dim_names=("dp", "tp"))
    module = _one(distribute_tensor(torch.zeros(27), mesh["tp"], [Shard(0)], src_data_rank=None))
    fully_shard(module, mesh=mesh["dp"])
    with pytest.raises(
        DescribeError, match=r"'w' \(27,\) on rank 10, .* may hold rows \[\(26, 27\)\] or \[\(20, 21\)\]"
    ):
        FsdpSource(module).describe()


class Odd(torch.Tensor):
    """A subclass whose memory could mean anything."""


def _dtensor(local: torch.Tensor, *placements: Placement, shape: tuple[int, ...]) -> torch.Tensor:
    mesh = init_device_mesh("cpu", (2,))
    stride = torch.empty(shape).stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: _dtensor(torch.zeros(4, 2), Partial(), shape=(4, 2)),
            r"parameter 'w' \(4, 2\) on rank 1, placements \(Partial\(sum\),\) on mesh \(2,\): .* redistribute it",
        ),
        (
            lambda: _dtensor(torch.zeros(()), Partial("avg"), shape=()),
            r"parameter 'w' \(\) on rank 1, placements \(Partial\(avg\),\) on mesh \(2,\): .* redistribute it",
        ),
        (
            lambda: _dtensor(torch.zeros(4, 2), Shard(0), shape=(6, 2)),
            r"'w' \(6, 2\) on rank 1, placements \(Shard\(dim=0\),\) .* has 4 local indices, expected 3",
        ),
        (lambda: torch.zeros(3).as_subclass(Odd), r"parameter 'w' \(3,\) on rank 1: a Odd is not plain memory"),
        (lambda: torch.eye(3).to_sparse(), r"'w' \(3, 3\) on rank 1: its layout torch.sparse_coo is not strided"),
        (
            lambda: torch.quantize_per_tensor(torch.zeros(3), 0.1, 0, torch.qint8),
            r"'w' \(3,\) on rank 1: its dtype torch.qint8 is quantised",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_refusals_name_parameter_rank_and_placements(
    make: Callable[[], torch.Tensor], message: str, fake_world: Callable[[int, int], None]
) -> None:
    fake_world(1, 2)
    with pytest.raises(DescribeError, match=message):
        FsdpSource(_one(make())).describe()


def test_weights_tied_by_the_model_but_sharded_apart_are_refused() -> None:
    model = qwen3(tied=True)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    with pytest.raises(
        DescribeError, match=r"'lm_head.weight' is tied to 'model.embed_tokens.weight' .* in one fully_"
    ):
        FsdpSource(model).describe()


def test_tied_parameters_of_another_module_go_by_their_first_name() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(5, 3), "head": nn.Linear(3, 5, bias=False)})
    model["head"].weight = model["embed"].weight
    assert FsdpSource(model).describe().table.tensors.names == ("embed.weight",)


def test_buffers_that_are_not_saved_are_left_out() -> None:
    module = _one(torch.zeros(2))
    module.register_buffer("kept", torch.zeros(3, dtype=torch.int64))
    module.register_buffer("scratch", torch.zeros(4), persistent=False)
    assert FsdpSource(module).describe().table.tensors.names == ("w", "kept")


def test_wrappers_around_the_whole_model_do_not_show() -> None:
    model = qwen3()
    wrapped = torch.compile(nn.DataParallel(model), backend="eager")
    assert FsdpSource(wrapped).describe().table.fingerprint == FsdpSource(model).describe().table.fingerprint


def test_names_can_be_given() -> None:
    def upper(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[Part, ...]]:
        return {name: (Part.whole(name.upper(), shape),) for name, shape in shapes.items()}

    assert FsdpSource(nn.Linear(2, 2), names=upper).describe().table.tensors.names == ("WEIGHT", "BIAS")


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({}, r"parameter 'weight' \(4, 2\) has no entry in names="),
        (
            {"weight": (Part("a", (2, 2), (0, 0), (0, 0), (2, 2), (0, 1)),), "bias": ()},
            r"parameter 'weight' \(4, 2\) has 8 elements, but its parts have 4 \(a\)",
        ),
    ],
)
def test_names_that_do_not_cover_a_parameter_are_refused(parts: dict[str, tuple[Part, ...]], message: str) -> None:
    with pytest.raises(DescribeError, match=message):
        FsdpSource(nn.Linear(2, 4), names=lambda shapes: parts).describe()


def test_a_parameter_can_be_left_out() -> None:
    parts = {"weight": (Part.whole("w", (4, 2)),), "bias": ()}
    layout = FsdpSource(nn.Linear(2, 4), names=lambda shapes: parts).describe()
    assert layout.table.tensors.names == ("w",)
    assert layout.notes.left_out == (("bias", "left out by names="),)


def test_tensors_without_elements_have_no_region() -> None:
    assert len(FsdpSource(_one(torch.zeros(0, 3))).describe().table) == 0


def test_memory_inside_a_larger_storage_is_found() -> None:
    flat = torch.arange(20.0)
    layout = FsdpSource(_one(flat[5:17].view(3, 4).t())).describe()
    assert torch.equal(layout.view(0), flat[5:17].view(3, 4).t())


def test_regions_are_live_memory() -> None:
    model = nn.Linear(2, 3)
    layout = FsdpSource(model).describe()
    with torch.no_grad():
        model.weight.add_(1)
    assert torch.equal(layout.view(0), model.weight)
