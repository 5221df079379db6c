"""A stretch of memory that another process can open."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CPU", "Segment"]


@dataclass(frozen=True, slots=True)
class Segment:
    """Memory of one process that others can open.

    `device` is "cpu" or the UUID of a GPU; `key` is what opens it, in the words of the transport for that device. Equal
    segments are the same memory: memory that was freed and taken again has another key.
    """

    device: str
    nbytes: int
    key: bytes


CPU = "cpu"
"""`Segment.device` of memory of the host."""
