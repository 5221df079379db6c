"""Storages that are moved into shared memory: views, bytes, and what is left when they go."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch
from plain_support import Piece, describe_pieces

from weightcast.transfer.colocated import host_memory as shared_memory
from weightcast.transfer.colocated.host_memory import open_segment, segment_of, share_memory
from weightcast.transfer.colocated.segment import Segment
from weightcast.transfer.errors import TransferError
from weightcast.transfer.layout.memory import RankLayout


def layout_of(*tensors: torch.Tensor) -> RankLayout:
    return describe_pieces([Piece(f"t{i}", tuple(t.shape), (0,) * t.dim(), t) for i, t in enumerate(tensors)])


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:weightcast")


def test_every_view_stays_and_sees_what_the_others_write() -> None:
    whole = torch.arange(24.0).view(4, 6)
    column, tail = whole[:, 2], whole.flatten()[20:]
    other = torch.ones(3, dtype=torch.bfloat16)
    layout = share_memory(layout_of(whole[1:], column, other))
    assert layout.memory.moved() == []
    segment, first = segment_of(whole.untyped_storage())
    assert segment_of(other.untyped_storage())[0] == segment, "one segment for all that is moved together"
    window = open_segment(segment)[first : first + 96].view(torch.float32)
    assert torch.equal(window, torch.arange(24.0))
    column.fill_(-1.0)
    tail[3] = 7.0
    assert window[2::6].tolist() == [-1.0] * 4
    assert window[23] == layout.view(0)[2, 5] == 7.0
    with pytest.raises(RuntimeError, match="not resizable"):
        whole.untyped_storage().resize_(0)


def test_sharing_again_moves_only_what_is_new() -> None:
    old, new = torch.ones(5), torch.zeros(5)
    share_memory(layout_of(old))
    place = segment_of(old.untyped_storage())
    share_memory(layout_of(old, new))
    assert segment_of(old.untyped_storage()) == place
    assert segment_of(new.untyped_storage())[0] != place[0]


def test_a_storage_that_is_not_shared_is_named() -> None:
    with pytest.raises(TransferError, match="a storage of 20 bytes is not in shared memory"):
        segment_of(torch.ones(5).untyped_storage())


def test_storages_at_one_address_are_refused() -> None:
    tensor = torch.ones(5)
    twin = torch.from_numpy(tensor.numpy())
    with pytest.raises(TransferError, match="two storages lie at the same address"):
        share_memory(layout_of(tensor, twin))


def test_memory_goes_with_its_last_user_and_pages_of_what_is_gone_are_given_back() -> None:
    gc.collect()
    before = mappings()
    gone, stays = torch.ones(1 << 20), torch.ones(1 << 10)
    share_memory(layout_of(gone, stays))
    segment, _ = segment_of(stays.untyped_storage())
    pid, number = shared_memory._KEY.unpack(segment.key)[:2]
    blocks = os.stat(f"/proc/{pid}/fd/{number}").st_blocks
    del gone
    gc.collect()
    assert os.stat(f"/proc/{pid}/fd/{number}").st_blocks <= blocks - (4 << 20) // 512
    assert stays.sum() == 1 << 10
    window = open_segment(segment)
    assert mappings() == before + 2
    del stays
    gc.collect()
    assert mappings() == before + 1, "a reader keeps what it has open"
    with pytest.raises(TransferError, match=r"cannot open the memory of process|was freed"):
        open_segment(segment)
    del window
    gc.collect()
    assert mappings() == before


def test_another_file_under_the_same_number_is_no_memory_of_ours() -> None:
    tensor = torch.ones(5)
    share_memory(layout_of(tensor))
    segment, _ = segment_of(tensor.untyped_storage())
    pid, number, device, inode = shared_memory._KEY.unpack(segment.key)
    with pytest.raises(TransferError, match=f"was freed: expected file {device}:{inode + 1}"):
        open_segment(Segment(segment.device, segment.nbytes, shared_memory._KEY.pack(pid, number, device, inode + 1)))
    with pytest.raises(TransferError, match="cannot open the memory of process 4194305"):
        open_segment(Segment(segment.device, segment.nbytes, shared_memory._KEY.pack(4194305, number, device, inode)))


@pytest.mark.parametrize("key", [b"", b"x" * 31, b"x" * 64])
def test_keys_that_are_none_are_refused(key: bytes) -> None:
    with pytest.raises(TransferError, match="no key of shared memory"):
        open_segment(Segment("cpu", 64, key))
