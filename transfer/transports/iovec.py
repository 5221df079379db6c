"""Messages that lie in many places, and sockets that send and fill them as they lie.

The kernel copies between a socket and a list of addresses in one call, so that small regions travel like large ones:
nothing is packed first and nothing unpacked later. The list stays a table of numbers; a Python object for each region
would cost more than copying it.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from weightcast.transfer.boxes.arrays import IntArray

__all__ = ["Cursor", "Iovec"]

_MOST_ROWS = 1024
"""Places that Linux takes in one call (UIO_MAXIOV)."""
_CALL_BYTES = 4 << 20
"""About the bytes of the places that one call names: more than a socket takes or gives at once."""


@dataclass(frozen=True, slots=True)
class Iovec:
    """n runs of this process's CPU memory which together are one message, in this order.

    `rows` (n, 2) uint64 are addresses and bytes, as the kernel reads them (struct iovec). `ends` (n,) are the bytes up
    to and with each run. The maker keeps the memory alive.
    """

    rows: npt.NDArray[np.uint64]
    ends: IntArray

    @classmethod
    def of(cls, address: IntArray, nbytes: IntArray) -> Iovec:
        """Iovec of (n,) addresses and bytes. Runs that continue the one before are joined to it, empty ones dropped."""
        mask = nbytes > 0
        address, nbytes = address[mask], nbytes[mask]
        heads = np.ones(len(address), dtype=bool)
        heads[1:] = address[1:] != (address + nbytes)[:-1]
        ends = np.cumsum(nbytes)[np.append(heads[1:], True)] if len(address) else nbytes
        rows = np.stack([address[heads], np.diff(ends, prepend=0)], axis=1)
        return cls(np.ascontiguousarray(rows.astype(np.uint64)), ends)

    @classmethod
    def of_tensor(cls, tensor: torch.Tensor) -> Iovec:
        """Iovec of a contiguous tensor, one run."""
        return cls.of(np.array([tensor.data_ptr()]), np.array([tensor.nbytes]))

    @property
    def nbytes(self) -> int:
        """Number of bytes of the message."""
        return int(self.ends[-1]) if len(self.ends) else 0


class _Vectors(ctypes.Structure):
    """struct msghdr of Linux."""

    _fields_ = (
        ("name", ctypes.c_void_p),
        ("name_bytes", ctypes.c_uint32),
        ("rows", ctypes.c_void_p),
        ("count", ctypes.c_size_t),
        ("control", ctypes.c_void_p),
        ("control_bytes", ctypes.c_size_t),
        ("flags", ctypes.c_int),
    )


_libc = ctypes.CDLL(None, use_errno=True)
for _call in (_libc.sendmsg, _libc.recvmsg):
    _call.argtypes = (ctypes.c_int, ctypes.POINTER(_Vectors), ctypes.c_int)
    _call.restype = ctypes.c_ssize_t

_DONTWAIT, _NOSIGNAL = 0x40, 0x4000
"""Linux's MSG_DONTWAIT and MSG_NOSIGNAL; `socket` has them on Linux alone."""


class Cursor:
    """The progress of one message through a socket: a header, then its spans. The caller has to keep `header`."""

    def __init__(self, header: npt.NDArray[np.uint64], spans: Iovec) -> None:
        first = np.array([[header.ctypes.data, header.nbytes]], dtype=np.uint64)
        self._rows = np.concatenate([first, spans.rows])
        self._ends = np.concatenate([[header.nbytes], spans.ends + header.nbytes])
        self._total = int(self._ends[-1])
        self._body = spans.nbytes
        self.done = 0

    @property
    def due(self) -> int:
        """Bytes of header and message that are yet to go through."""
        return self._total - self.done

    @property
    def left(self) -> int:
        """Bytes of the message that are yet to go through."""
        return min(self.due, self._body)

    def send(self, connection: int) -> None:
        """Gives to a socket what it takes now. Raises OSError, which is BlockingIOError when it takes nothing."""
        self._advance(_libc.sendmsg, connection, _NOSIGNAL)

    def receive(self, connection: int) -> bool:
        """Fills memory with what a socket has now, like `send`; False when the peer has closed it."""
        return self._advance(_libc.recvmsg, connection, 0) > 0

    def _advance(self, call: ctypes._NamedFuncPointer, connection: int, flags: int) -> int:
        first = int(np.searchsorted(self._ends, self.done, side="right"))
        last = int(np.searchsorted(self._ends, self.done + _CALL_BYTES)) + 1
        rows = self._rows[first : min(last, first + _MOST_ROWS)].copy()
        skip = self.done - (int(self._ends[first - 1]) if first else 0)
        rows[0, 0] += np.uint64(skip)
        rows[0, 1] -= np.uint64(skip)
        vectors = _Vectors(rows=rows.ctypes.data, count=len(rows))
        nbytes = int(call(connection, ctypes.byref(vectors), flags | _DONTWAIT))
        if nbytes < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        self.done += nbytes
        return nbytes
