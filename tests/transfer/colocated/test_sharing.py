"""One trainer rank and one instance rank of a host, as threads of this process."""

from __future__ import annotations

import dataclasses
import gc
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from group_support import join_all, together
from part_support import make_parts
from plain_support import Piece, describe_pieces

from weightcast.transfer.colocated import exporter as lending
from weightcast.transfer.colocated import sharing as colocated
from weightcast.transfer.colocated.host_memory import share_memory
from weightcast.transfer.colocated.offers import Offer, Share
from weightcast.transfer.colocated.peers import NOWHERE, PeerPlace, find_neighbours, here, meet_neighbours
from weightcast.transfer.copy.batch import CopyBatch
from weightcast.transfer.deadline import Deadline
from weightcast.transfer.errors import PlanError, StalePlanError, TransferError
from weightcast.transfer.executor import Executor, TransferReport, member_labels
from weightcast.transfer.layout.memory import RankLayout
from weightcast.transfer.transports.communicator import Communicator, Exchange, Message

Boxes = Sequence[tuple[str, tuple[int, ...], tuple[int, ...], torch.Tensor]]
SOON = 10.0


class Counted:
    """A communicator that counts the bytes it is given to send."""

    def __init__(self, group: Communicator) -> None:
        self._group, self.sent = group, 0
        self.rank, self.size, self.device = group.rank, group.size, group.device
        self.scatters, self.buffers = group.scatters, group.buffers

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Exchange:
        self.sent += sum(message.nbytes for _, message in sends)
        return self._group.post(sends, receives)

    def abort(self) -> None:
        self._group.abort()

    def close(self) -> None:
        self._group.close()


class Pair:
    def __init__(self, source: Boxes, target: Boxes, share: Share, bucket_bytes: int = 1 << 20) -> None:
        self.share = share
        held = [describe_pieces([Piece(*box) for box in boxes]) for boxes in (source, target)]
        (sender,), (self.part,) = make_parts([held[0].table], [held[1].table], bucket_bytes)
        assert sender is not None
        self.parts = [sender, self.part]
        self.groups = [Counted(group) for group in join_all(member_labels(self.part))]
        self.neighbours = together(
            *(
                lambda side=side: find_neighbours(
                    self.groups[side], self.parts[side], held[side], share if side == 0 else None, Deadline.after(SOON)
                )
                for side in (0, 1)
            )
        )
        self.executors: list[Executor] = []
        for side in (0, 1):
            self.executors.append(self.executor(side, held[side]))

    def executor(self, side: int, layout: RankLayout) -> Executor:
        if side == 0 and self.share == "in_place":
            layout = share_memory(layout)
        return Executor(self.parts[side], layout, self.groups[side], self.neighbours[side])

    def results(self) -> list[Any]:
        for group in self.groups:
            group.sent = 0
        return together(*(lambda e=e: e.run(Deadline.after(SOON)) for e in self.executors))

    def run(self) -> list[TransferReport]:
        results = self.results()
        for result in results:
            if isinstance(result, Exception):
                raise result
        return results


def vectors(source: torch.Tensor, target: torch.Tensor) -> tuple[Boxes, Boxes]:
    shape = tuple(source.shape)
    return [("v", shape, (0,) * len(shape), source)], [("v", shape, (0,) * len(shape), target)]


def mappings() -> int:
    gc.collect()
    return Path("/proc/self/maps").read_text().count("memfd:weightcast")


@pytest.mark.parametrize("share", ["in_place", "staged"])
def test_no_byte_goes_through_the_group_and_the_offer_only_once(share: Share) -> None:
    source, target = torch.randn(1 << 16), torch.zeros(1 << 16)
    pair = Pair(*vectors(source, target), share)
    sent, received = pair.run()
    assert (sent.bytes_sent, received.bytes_received, sent.rounds, received.rounds) == (0, 0, 0, 0)
    assert sent.bytes_shared == received.bytes_shared == source.nbytes
    first = pair.groups[0].sent
    source.add_(1.0)
    pair.run()
    assert torch.equal(source, target)
    words = 16 + 8 + 8 * (share == "staged")
    assert (pair.groups[0].sent, pair.groups[1].sent) == (words, 8 + 8 * (share == "staged"))
    assert first > words + 100, "the offer came with the first"


def test_nothing_is_shared_unless_the_trainer_lends() -> None:
    source, target = torch.randn(64), torch.zeros(64)
    sent, received = Pair(*vectors(source, target), None).run()
    assert (sent.bytes_sent, received.bytes_received, received.bytes_shared) == (256, 256, 0)
    assert torch.equal(source, target)


@pytest.mark.parametrize("share", ["in_place", "staged", None])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_casts_give_the_bits_that_messages_give(share: Share, dtype: torch.dtype) -> None:
    """All kinds of NaN, infinities, numbers that overflow, subnormal ones; read transposed and written strided."""
    bits = torch.randint(-(2**31), 2**31 - 1, (64, 96), dtype=torch.int32, generator=torch.Generator().manual_seed(3))
    bits[:, ::3] |= 0x7F800000
    source = bits.view(torch.float32).t()
    target = torch.zeros(96, 128, dtype=dtype)[:, ::2]
    Pair(*vectors(source, target), share).run()
    expected = source.to(dtype)
    expected[expected.isnan()] = float("nan")
    assert torch.equal(target.contiguous().view(torch.int16), expected.contiguous().view(torch.int16))


@pytest.mark.parametrize("bucket_bytes", [1 << 12, 1 << 18])
def test_extra_memory_stays_within_the_setting(bucket_bytes: int) -> None:
    def of(share: Share, dtype: torch.dtype) -> list[int]:
        source, target = torch.randn(1 << 9, 1 << 9), torch.zeros(1 << 9, 1 << 9, dtype=dtype)
        pair = Pair(*vectors(source, target), share, bucket_bytes)
        pair.run()
        assert torch.equal(source.to(dtype), target)
        return [executor.staging_bytes for executor in pair.executors]

    assert of("in_place", torch.float32) == [0, 0]
    assert of("in_place", torch.bfloat16) == [0, bucket_bytes]
    lent, read = of("staged", torch.bfloat16)
    assert 0 < lent <= bucket_bytes
    assert read == 0


def test_weights_that_moved_between_updates_are_opened_anew_and_the_old_ones_closed() -> None:
    before = mappings()
    source, target = torch.randn(1 << 10), torch.zeros(1 << 10)
    pair = Pair(*vectors(source, target), "in_place")
    pair.run()
    assert mappings() == before + 2
    moved = source.clone()
    pair.executors[0] = pair.executor(0, describe_pieces([Piece(*vectors(moved, target)[0][0])]))
    source.fill_(float("nan"))
    del source
    pair.run()
    assert torch.equal(moved, target)
    assert mappings() == before + 2, "the old segment is closed on both sides"
    for neighbours in pair.neighbours:
        neighbours.close()
    pair.executors.clear()
    del moved
    assert mappings() == before


def test_weights_that_move_while_they_are_read_are_an_error_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = torch.randn(1 << 10), torch.zeros(1 << 10)
    pair = Pair(*vectors(source, target), "in_place")
    run, other = CopyBatch.run, torch.zeros(1 << 10)

    def moving(batch: CopyBatch) -> None:
        run(batch)
        monkeypatch.setattr(CopyBatch, "run", run)
        source.untyped_storage()._swap_data_ptr_(other.untyped_storage())  # type: ignore[attr-defined]

    monkeypatch.setattr(CopyBatch, "run", moving)
    lender, reader = pair.results()
    assert isinstance(lender, StalePlanError)
    assert "1 storages of this rank were moved or freed while others read them" in str(lender)
    assert isinstance(reader, StalePlanError)
    assert "rollout-0: trainer rank 0: its memory was moved or freed while it was read" in str(reader)
    lender, reader = pair.results()
    assert isinstance(lender, StalePlanError)
    assert "were reallocated since they were described" in str(lender)
    assert isinstance(reader, TransferError)


def test_a_reader_that_has_not_opened_what_the_lender_speaks_of_refuses() -> None:
    pair = Pair(*vectors(torch.randn(64), torch.zeros(64)), "in_place")
    pair.run()
    pair.neighbours[1].offers.clear()
    lender, reader = pair.results()
    assert "speaks of memory that this rank has not opened; connect again" in str(reader)
    assert isinstance(lender, TransferError)


def test_a_lender_whose_weights_are_not_shared_says_what_to_do() -> None:
    pair = Pair(*vectors(torch.randn(64), torch.zeros(64)), "in_place")
    with pytest.raises(TransferError, match="is not in shared memory; describe and share again, or use staging"):
        Executor(
            pair.parts[0],
            describe_pieces([Piece(*vectors(torch.randn(64), torch.zeros(64))[0][0])]),
            pair.groups[0],
            pair.neighbours[0],
        )


def test_an_offer_that_reaches_outside_its_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    make = lending.in_place_offer

    def beyond(*arguments: Any) -> Offer:
        offer = make(*arguments)
        return dataclasses.replace(offer, start=offer.start + 1)

    monkeypatch.setattr(colocated, "in_place_offer", beyond)
    target = torch.zeros(64)
    pair = Pair(*vectors(torch.randn(64), target), "in_place")
    lender, reader = pair.results()
    assert isinstance(reader, PlanError)
    assert "trainer rank 0 offers box 0 up to element 64 of 64" in str(reader)
    assert isinstance(lender, TransferError)
    assert not target.any()


@pytest.mark.parametrize(
    ("lender", "reader", "can"),
    [
        (PeerPlace("a"), PeerPlace("a"), True),
        (PeerPlace("a"), PeerPlace("b"), False),
        (NOWHERE, NOWHERE, False),
        (PeerPlace("a", "GPU-1"), PeerPlace("a", "GPU-2", ("cpu", "GPU-2", "GPU-1")), True),
        (PeerPlace("a", "GPU-1"), PeerPlace("a", "GPU-2", ("cpu", "GPU-2")), False),
        (PeerPlace("a", "cpu"), PeerPlace("a", "GPU-2", ("cpu", "GPU-2")), True),
    ],
)
def test_who_can_read_whose_memory(lender: PeerPlace, reader: PeerPlace, can: bool) -> None:
    """By the rule, and by what two members find out."""
    assert reader.can_read(lender) is can
    held = [describe_pieces([Piece(*box) for box in boxes]) for boxes in vectors(torch.ones(4), torch.zeros(4))]
    (sender,), (part,) = make_parts([held[0].table], [held[1].table], 1 << 20)
    assert sender is not None
    groups = join_all(member_labels(part))
    found = together(
        *(
            lambda group=group, own=own, place=place: meet_neighbours(group, own, place, Deadline.after(SOON))
            for group, own, place in zip(groups, (sender, part), (lender, reader), strict=True)
        )
    )
    assert [sorted(each.peers) for each in found] == ([[1], [0]] if can else [[], []])


def test_processes_of_one_machine_find_that_they_share_it() -> None:
    place = here(torch.device("cpu"))
    assert place.can_read(place)
    assert str(os.stat("/proc/self/ns/pid").st_ino) in place.host
