"""The body of a trainer rank that `weightcast up` starts: describes, connects, and updates when it is told to."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any, Protocol

from weightcast.adapters.unsharded import CheckpointSource
from weightcast.cluster.ray_actors import CONNECTED
from weightcast.cluster.spec import ClusterSpec, TrainerSpec
from weightcast.gateway.ranks.trainer import TrainerWorker
from weightcast.transfer.errors import InputError, WeightcastError
from weightcast.transfer.protocols import Source

__all__ = ["serve"]


class Mailbox(Protocol):
    """One end of a conversation."""

    def send(self, what: object, /) -> None:
        """Sends a message to the other end."""

    def recv(self) -> Any:
        """Waits for a message of the other end."""


def serve(spec: ClusterSpec, rank: int, address: str, rendezvous: str, mail: Mailbox) -> None:
    """Connects a rank, and updates at each version that it is told. None ends it.

    Sends (CONNECTED, None) first, and then for each version (version, records of its update by instance), or
    (version, error).

    RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are in the environment when the entry is called, as torchrun has them.
    """
    host, _, port = rendezvous.rpartition(":")
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(spec.trainer.ranks), "MASTER_ADDR": host, "MASTER_PORT": port}
    source = _source(spec.trainer, rank)
    worker = TrainerWorker(
        spec.gateway_url,
        spec.pair,
        source,
        rank=rank,
        world_size=spec.trainer.ranks,
        backend=spec.trainer.backend,
        address=address,
    )
    try:
        worker.connect()
        mail.send((CONNECTED, None))
        while (version := mail.recv()) is not None:
            mail.send((version, _update(worker, source, version)))
    finally:
        worker.close()


def _update(worker: TrainerWorker, source: Source, version: int) -> object:
    """Brings weights to the version, if the source can, and sends them; returns records by instance, or the error."""
    try:
        if (bring := getattr(source, "at", None)) is not None:
            bring(version)
        return worker.update(version).instances
    except WeightcastError as error:
        return error


def _source(trainer: TrainerSpec, rank: int) -> Source:
    if trainer.checkpoint is not None:
        return CheckpointSource(trainer.checkpoint, rank=rank, world_size=trainer.ranks)
    module, _, name = str(trainer.entry).partition(":")
    try:
        make = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise InputError(f"trainer entry {trainer.entry!r} cannot be imported as module:function: {error}") from None
    source: Source = make(rank, trainer.ranks)
    return source
