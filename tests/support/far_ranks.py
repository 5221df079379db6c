"""Ranks of a pair that say they are on another host: `pair_workers.play` with another name of the network."""

from __future__ import annotations

from typing import Any

import pair_workers

from weightcast.gateway.ranks import membership


def play(
    rank: int, world: int, port: int, url: str, pair: str, roles: list[tuple[str, dict[str, Any]]], far_rank: int
) -> Any:
    """Process `far_rank` is on another host than the others."""
    if rank == far_rank:
        membership.network_name = lambda: "another-boot:1"
    return pair_workers.play(rank, world, port, url, pair, roles)
