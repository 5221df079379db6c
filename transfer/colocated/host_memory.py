"""Memory that processes of one host share, without a name: a memfd, which ends with its last user whatever happens.

The owner moves storages of tensors into one such segment, in place: every view of them stays valid. A reader opens it
through the owner's `/proc/PID/fd` and checks that it is the file that was meant. It maps the file for reading only, so
that it cannot harm what it reads. Both have to be in one PID namespace, and the reader must be allowed to look into the
owner's process: the same user is.

    layout = share_memory(source.describe())    # the owner; again after each describe
    segment, first = segment_of(storage)        # the owner hands these out
    window = open_segment(segment)              # a reader: all bytes, as uint8
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from weightcast.transfer.colocated.segment import CPU, Segment
from weightcast.transfer.errors import TransferError
from weightcast.transfer.layout.memory import RankLayout

__all__ = ["allocate", "open_segment", "segment_of", "share_memory"]

_PAGE = mmap.PAGESIZE
_KEY = struct.Struct("<qqqq")
_shared: weakref.WeakValueDictionary[int, _Span] = weakref.WeakValueDictionary()
"""Spans that storages lie in now, by address."""
_moving = threading.Lock()


class _Span:
    """A part of a mapping for numpy, which keeps the mapping for as long as an array of it lives."""

    def __init__(self, mapping: mmap.mmap, address: int, nbytes: int, arena: Arena | None = None) -> None:
        self.__array_interface__ = {
            "data": (address, False), "shape": (nbytes,), "typestr": "|u1", "strides": None, "version": 3,
        }  # fmt: skip
        self._mapping = mapping
        self.address = address
        self.arena = arena
        if arena is not None:
            first = address - arena.address
            # Pages of a storage that is gone are given back although others still use the segment.
            _finally(self, _give_back, mapping, first, -(-nbytes // _PAGE) * _PAGE)

    def tensor(self) -> torch.Tensor:
        """The bytes of the span, (nbytes,) uint8."""
        array: npt.NDArray[np.uint8] = np.asarray(self)
        return torch.from_numpy(array)


def _finally(of: object, act: Callable[..., None], *arguments: object) -> None:
    """Calls `act` when `of` is gone. It is not called at the exit of the process, where something may still use the
    memory; what is left then ends with the process."""
    weakref.finalize(of, act, *arguments).atexit = False


def _give_back(mapping: mmap.mmap, first: int, nbytes: int) -> None:
    with suppress(OSError, ValueError):
        mapping.madvise(mmap.MADV_REMOVE, first, nbytes)


class Arena:
    """A segment of this process. It lives as long as something lies in it."""

    def __init__(self, nbytes: int) -> None:
        try:
            self._descriptor = os.memfd_create("weightcast", os.MFD_CLOEXEC)
            _finally(self, os.close, self._descriptor)
            os.ftruncate(self._descriptor, nbytes)
            self._mapping = mmap.mmap(self._descriptor, nbytes)
        except OSError as error:
            raise TransferError(f"this host gives no {nbytes} bytes of shared memory: {error}") from error
        with suppress(OSError):  # where the system has them for shared memory
            self._mapping.madvise(mmap.MADV_HUGEPAGE)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))
        status = os.fstat(self._descriptor)
        self.segment = Segment(CPU, nbytes, _KEY.pack(os.getpid(), self._descriptor, status.st_dev, status.st_ino))
        """The segment by which a reader opens it."""

    def span(self, first: int, nbytes: int) -> _Span:
        """A page-aligned part; its pages are given back when it is dropped."""
        return _Span(self._mapping, self.address + first, nbytes, self)


def share_memory(layout: RankLayout) -> RankLayout:
    """Moves the storages of a layout into shared memory unless they are there, and returns the layout as it lies now.

    Tensors and views keep their storages, whose memory is another one from here on; they cannot be resized any more.
    One storage is copied at a time. Storages of other devices stay where they are. Raises TransferError.
    """
    with _moving:
        storages = [base.untyped_storage() for base in layout.memory.bases]
        candidates: dict[int, torch.UntypedStorage] = {}
        for storage in storages:
            if storage.device.type != CPU or not storage.nbytes() or storage.data_ptr() in _shared:
                continue
            first = candidates.setdefault(storage.data_ptr(), storage)
            if first._cdata != storage._cdata:
                raise TransferError(
                    f"two storages lie at the same address ({storage.nbytes()} bytes): moved into shared memory they "
                    "would be two; use staging"
                )
        if candidates:
            _move(list(candidates.values()))
    address = np.array([b.untyped_storage().data_ptr() for b in layout.memory.bases], dtype=np.int64)
    return replace(layout, memory=replace(layout.memory, address=address))


def _move(storages: Iterable[torch.UntypedStorage]) -> None:
    extent = [(s, -(-s.nbytes() // _PAGE) * _PAGE) for s in storages]
    arena, first = Arena(sum(n for _, n in extent)), 0
    for storage, nbytes in extent:
        span = arena.span(first, storage.nbytes())
        target: Any = span.tensor()
        target.copy_(torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,)))
        target.untyped_storage()._swap_data_ptr_(storage)
        _shared[span.address] = span
        first += nbytes


def allocate(nbytes: int) -> torch.Tensor:
    """(nbytes,) uint8 of new shared memory, all zero. Raises TransferError."""
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8)
    span = Arena(nbytes).span(0, nbytes)
    _shared[span.address] = span
    return span.tensor()


def segment_of(storage: torch.UntypedStorage) -> tuple[Segment, int]:
    """The segment that a storage lies in, and its first byte there. Raises TransferError for one that is not shared."""
    span = _shared.get(storage.data_ptr())
    if span is None or span.arena is None:
        raise TransferError(
            f"a storage of {storage.nbytes()} bytes is not in shared memory; describe and share again, or use staging"
        )
    return span.arena.segment, span.address - span.arena.address


def open_segment(segment: Segment) -> torch.Tensor:
    """(nbytes,) uint8 over another process's segment, for reading only: a write to it ends this process.

    Raises TransferError when the owner is gone, may not be read, or has closed the segment since.
    """
    if len(segment.key) != _KEY.size:
        raise TransferError(
            f"{len(segment.key)} bytes are no key of shared memory; run the same weightcast on all sides"
        )
    owner, number, device, inode = _KEY.unpack(segment.key)
    try:
        descriptor = os.open(f"/proc/{owner}/fd/{number}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise TransferError(
            f"cannot open the memory of process {owner}: {error}; it has to be alive, of the same user and in the same "
            "PID namespace; else do not share memory"
        ) from error
    try:
        status = os.fstat(descriptor)
        if (status.st_dev, status.st_ino, status.st_size) != (device, inode, segment.nbytes):
            raise TransferError(
                f"the memory of process {owner} was freed: expected file {device}:{inode} of {segment.nbytes} bytes, "
                f"found {status.st_dev}:{status.st_ino} of {status.st_size}; connect again"
            )
        # Populated at once: page by page the first update would be ten times slower.
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        mapping = mmap.mmap(descriptor, segment.nbytes, flags, mmap.PROT_READ)
    finally:
        os.close(descriptor)
    address: int = np.frombuffer(mapping, dtype=np.uint8).ctypes.data
    return _Span(mapping, address, segment.nbytes).tensor()
