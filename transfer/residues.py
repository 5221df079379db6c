"""The field that digests are sums in; apart from `digest`, so that the gateway adds them up without torch."""

from __future__ import annotations

__all__ = ["PRIME"]

PRIME = 2**32 - 5
"""The largest prime below 2^32: both residues of a digest are modulo it."""
