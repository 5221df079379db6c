"""GPU memory that processes of one host share, by CUDA IPC. The counterpart of `host_memory` for GPUs.

Handles are those of torch (2.13, `torch/multiprocessing/reductions.py`), carried as plain numbers and bytes. Between
GPUs of a host the reader needs peer access. Never run so far: there was no GPU.
"""

from __future__ import annotations

from typing import Any

import msgpack
import torch

from weightcast.transfer.colocated.segment import Segment
from weightcast.transfer.errors import TransferError

__all__ = ["open_segment", "reachable", "segment_of", "uuid_of"]

_FIELDS = 7
"""Values of `_share_cuda_` after the device: handle, bytes, offset, counter and its offset, event and its flag."""


def uuid_of(device: torch.device) -> str:
    """The name of a GPU that is the same in every process, whatever CUDA_VISIBLE_DEVICES numbers it."""
    return str(torch.cuda.get_device_properties(device).uuid)


def reachable(device: torch.device) -> tuple[str, ...]:
    """UUIDs of the GPUs whose memory `device` can read: itself, and those with peer access."""
    index = torch.cuda.current_device() if device.index is None else device.index
    indices = range(torch.cuda.device_count())
    return tuple(
        uuid_of(torch.device("cuda", i)) for i in indices if i == index or torch.cuda.can_device_access_peer(index, i)
    )


def segment_of(storage: torch.UntypedStorage) -> tuple[Segment, int]:
    """The segment that is this storage, for one importer, and 0, the storage's first byte in it.

    torch keeps the memory of a storage that was freed until the importer has let go of it, which it counts for each
    call.
    """
    share: Any = storage
    _, *fields = share._share_cuda_()
    return Segment(uuid_of(storage.device), storage.nbytes(), msgpack.packb(fields)), 0


def open_segment(segment: Segment) -> torch.Tensor:
    """(nbytes,) uint8 over another process's storage, by this process's number of that GPU. Raises TransferError."""
    numbers = [i for i in range(torch.cuda.device_count()) if uuid_of(torch.device("cuda", i)) == segment.device]
    if not numbers:
        raise TransferError(
            f"GPU {segment.device} is not visible here; put it into CUDA_VISIBLE_DEVICES of both processes"
        )
    fields = msgpack.unpackb(segment.key)
    if not isinstance(fields, list) or len(fields) != _FIELDS or fields[1] != segment.nbytes:
        raise TransferError(f"the handle of {segment.nbytes} bytes on GPU {segment.device} is not one of this torch")
    storage_type: Any = torch.UntypedStorage
    try:
        storage = storage_type._new_shared_cuda(numbers[0], *fields)
    except RuntimeError as error:
        raise TransferError(
            f"cannot open {segment.nbytes} bytes on GPU {segment.device}: {' '.join(str(error).split())}; was it freed?"
        ) from error
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (segment.nbytes,), (1,))
