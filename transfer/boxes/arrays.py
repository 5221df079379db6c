"""Types of the arrays that boxes, plans and digests are kept in."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["BoolArray", "DigestArray", "FloatArray", "IntArray"]

IntArray: TypeAlias = npt.NDArray[np.int64]
BoolArray: TypeAlias = npt.NDArray[np.bool_]
FloatArray: TypeAlias = npt.NDArray[np.float64]
DigestArray: TypeAlias = npt.NDArray[np.uint64]
