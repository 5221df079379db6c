"""What the ranks of the SGLang tests run; every function gets rank, world size, port and its arguments."""

from __future__ import annotations

from typing import Any

import sglang_support as support


def oracle(rank: int, world: int, port: int, path: str, server: dict[str, Any]) -> list[str]:
    """Sync equals SGLang's own load; returns the names of the layout's tensors."""
    r = support.boot(rank, world, port, path, **server)
    layout = support.check_against_loader(r)
    return list(layout.table.tensors.names)
