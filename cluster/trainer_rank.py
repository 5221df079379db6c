"""The body of a trainer rank that `weightcast up` starts: describes, connects, and updates when it is told to."""

from __future__ import annotations

import os
from dataclasses import replace

from weightcast.adapters.unsharded import CheckpointSource
from weightcast.cluster.ray_actors import CONNECTED, Mail, RankPlace, import_function
from weightcast.cluster.spec import ClusterSpec, TrainerSpec
from weightcast.gateway.ranks.trainer import TrainerWorker, UpdateResult
from weightcast.transfer.errors import WeightcastError
from weightcast.transfer.protocols import Source
from weightcast.transfer.transports.addresses import split_host_port

__all__ = ["serve"]


def serve(place: RankPlace, spec: ClusterSpec, mail: Mail) -> None:
    """Connects a rank, and updates at each version that it is told. None ends it.

    Sends (CONNECTED, None) first. Then it is told (call, version, restart), and sends (call, result) or (call, error).
    `call` stands for one call of `trainer_ranks.update`.

    RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are in the environment when the entry is called, as torchrun has them.
    """
    rank, world = place.rank, spec.trainer.ranks
    host, port = split_host_port(place.rendezvous)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": host, "MASTER_PORT": str(port)}
    source = _source(spec.trainer, rank)
    worker = TrainerWorker(
        spec.gateway_url,
        spec.pair,
        source,
        rank=rank,
        world_size=world,
        backend=spec.trainer.backend,
        address=place.address,
    )
    try:
        worker.connect()
        mail.send((CONNECTED, None))
        while (message := mail.recv()) is not None:
            call, version, restart = message
            mail.send((call, _update(worker, source, version, restart)))
    finally:
        worker.close()


def _update(worker: TrainerWorker, source: Source, version: int, restart: bool) -> UpdateResult | WeightcastError:
    """Brings weights to the version, if the source can, and sends them; returns the result, or the error."""
    try:
        if (bring := getattr(source, "at", None)) is not None:
            bring(version)
        return replace(worker.update(version, restart=restart), transfers={})
    except WeightcastError as error:
        return error


def _source(trainer: TrainerSpec, rank: int) -> Source:
    if trainer.checkpoint is not None:
        return CheckpointSource(trainer.checkpoint, rank=rank, world_size=trainer.ranks)
    source: Source = import_function(str(trainer.entry), "trainer entry ")(rank, trainer.ranks)
    return source
