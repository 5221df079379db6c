"""Plain endpoints: whole boxes over live memory, and over checkpoints on disk."""

from __future__ import annotations

import json
import resource
import struct
from pathlib import Path

import pytest
import torch
from plain_support import Piece, PlainSink
from safetensors.torch import save_file

from weightcast.adapters.unsharded import CheckpointSource, PlainSource
from weightcast.transfer.errors import DescribeError, LayoutError
from weightcast.transfer.layout.dtypes import SAFETENSORS, to_torch
from weightcast.transfer.layout.tables import Region


def test_every_tensor_is_one_whole_box_over_live_memory() -> None:
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor(1, dtype=torch.int64), "c": torch.zeros(4, 2).t()}
    layout = PlainSource(tensors).describe()
    assert [layout.table.region(row) for row in range(3)] == [
        Region("a", (0, 0), (2, 3)),
        Region("b", (), ()),
        Region("c", (0, 0), (2, 4)),
    ]
    assert layout.notes.parameter_bytes == 24 + 8 + 32
    tensors["a"].fill_(7)
    assert torch.equal(layout.view(0), torch.full((2, 3), 7.0))


def test_parameters_that_require_grad_are_described() -> None:
    module = torch.nn.Linear(3, 2)
    layout = PlainSource(dict(module.named_parameters())).describe()
    assert not layout.view(0).requires_grad
    assert layout.view(0).data_ptr() == module.weight.data_ptr()


def test_sparse_memory_is_named() -> None:
    with pytest.raises(DescribeError, match=r"tensor 's': its layout torch.sparse_coo is not strided"):
        PlainSource({"s": torch.eye(3).to_sparse()}).describe()


def test_a_sink_keeps_slots_and_order() -> None:
    memory = torch.zeros(4, 2)
    sink = PlainSink([Piece("w", (8, 2), (4, 0), memory[:2], 3), ("w", (8, 2), (0, 0), memory[2:])])
    layout = sink.describe()
    assert layout.table.region(0) == Region("w", (4, 0), (2, 2), 3)
    assert layout.view(1).data_ptr() == memory[2:].data_ptr()
    assert sink.placement() is None


def _contents(source: CheckpointSource) -> dict[str, torch.Tensor]:
    layout = source.describe()
    found = {}
    for row in range(len(layout.table)):
        name, offset, size, _ = layout.table.region(row)
        assert offset == (0,) * len(size)
        assert size == layout.table.tensors.specs()[name].shape
        found[name] = layout.view(row)
    return found


def _random(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(shape) * 100).to(dtype)


def test_a_checkpoint_of_every_dtype(tmp_path: Path) -> None:
    made = {name: _random((3, 5), to_torch(name)) for name in SAFETENSORS.values()}
    made |= {"scalar": torch.tensor(7.0), "nothing": torch.zeros(0, 4)}
    save_file(made, tmp_path / "model.safetensors")
    source = CheckpointSource(tmp_path)
    found = _contents(source)
    assert found.keys() == made.keys()
    for name, tensor in found.items():
        assert tensor.dtype == made[name].dtype
        assert torch.equal(tensor.reshape(-1).view(torch.uint8), made[name].reshape(-1).view(torch.uint8)), name
    assert source.describe() is source.describe()


def _save_in_files(folder: Path, files: int = 3) -> dict[str, torch.Tensor]:
    """A checkpoint in several files with an index, and a file that the index does not list."""
    made = {f"model.layers.{i}.weight": torch.randn(4, i + 1) for i in range(7)}
    names = {name: f"part-{i % files}.safetensors" for i, name in enumerate(made)}
    for file in set(names.values()):
        save_file({name: made[name] for name in made if names[name] == file}, folder / file)
    save_file({"model.layers.0.weight": torch.zeros(9)}, folder / "other.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return made


def test_several_files_with_an_index(tmp_path: Path) -> None:
    made = _save_in_files(tmp_path)
    found = _contents(CheckpointSource(str(tmp_path)))
    assert found.keys() == made.keys()
    assert all(torch.equal(found[name], made[name]) for name in made)


def test_processes_share_the_tensors_of_a_checkpoint(tmp_path: Path) -> None:
    made = _save_in_files(tmp_path)
    shares = [_contents(CheckpointSource(tmp_path, rank=rank, world_size=3)) for rank in range(3)]
    assert [len(share) for share in shares] == [3, 2, 2]
    assert set().union(*shares) == made.keys()
    assert all(torch.equal(share[name], made[name]) for share in shares for name in share)


def test_describing_a_checkpoint_reads_no_weight(tmp_path: Path) -> None:
    """A file of 64 GiB that has no blocks on disk: to read it would take its size in memory."""
    rows = 1 << 20
    size = rows * 32768 * 2
    header = json.dumps({"big": {"dtype": "BF16", "shape": [rows, 32768], "data_offsets": [0, size]}}).encode()
    header += b" " * (-len(header) % 8)
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + size)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    layout = CheckpointSource(tmp_path).describe()
    assert layout.notes.parameter_bytes == size
    assert float(layout.view(0)[rows - 1, 32767]) == 0.0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024


def _unaligned(path: Path) -> None:
    entries = {
        "a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        "b": {"dtype": "F32", "shape": [1], "data_offsets": [1, 5]},
    }
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(5))


def test_a_tensor_that_no_view_can_be_of_is_named(tmp_path: Path) -> None:
    _unaligned(tmp_path / "model.safetensors")
    with pytest.raises(
        DescribeError, match=r"tensor 'b' begins at byte \d+ of .*model.safetensors', which the 4 bytes of"
    ):
        CheckpointSource(tmp_path).describe()


def test_a_folder_that_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match=r"has no \*.safetensors file"):
        CheckpointSource(tmp_path).describe()
