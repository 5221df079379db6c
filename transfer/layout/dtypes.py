"""Element types by name, code and size, without importing torch.

Codes travel on the wire, so the order below is fixed: append, never insert. Names are torch's, which are also those of
the JSON bundle. `SAFETENSORS` maps the spelling of safetensors headers (safetensors 0.5, README, "Format").
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from weightcast.transfer.errors import LayoutError

if TYPE_CHECKING:
    import torch

__all__ = ["ITEMSIZE", "NAMES", "SAFETENSORS", "cast_allowed", "dtype_code", "dtype_name", "from_torch", "to_torch"]

NAMES: tuple[str, ...] = (
    "float64", "float32", "bfloat16", "float16",
    "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu",
    "uint8", "int8", "int16", "int32", "int64", "bool",
)  # fmt: skip
ITEMSIZE: np.ndarray = np.array([8, 4, 2, 2, 1, 1, 1, 1, 1, 1, 1, 2, 4, 8, 1], dtype=np.int64)
"""Bytes per element, indexed by code."""

SAFETENSORS: dict[str, str] = {
    "F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "U8": "uint8", "I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64", "BOOL": "bool",
}  # fmt: skip

_CODES = {name: code for code, name in enumerate(NAMES)}

_FLOATS = (
    "float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz",
)  # fmt: skip
_CASTS: dict[str, tuple[str, ...]] = {
    # Rounding is what a lower precision means; values that become infinite or no number are counted in each update.
    **dict.fromkeys(_FLOATS, _FLOATS),
    # Powers of two without a sign, for scales: nothing else can be cast to them.
    "float8_e8m0fnu": ("float64", "float32", "bfloat16"),
    # Integers only where every value of the type is there.
    "uint8": ("int16", "int32", "int64"),
    "int8": ("int16", "int32", "int64"),
    "int16": ("int32", "int64"),
    "int32": ("int64",),
}
"""Other types to which values of a type may be cast. Any other cast could change values unseen."""
_ALLOWED = np.eye(len(NAMES), dtype=bool)
for _held, _wanted in _CASTS.items():
    _ALLOWED[_CODES[_held], [_CODES[name] for name in _wanted]] = True


def cast_allowed(held: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """(k,) dtype codes of the trainer and of an instance -> (k,) bool, true where such values may be moved."""
    return np.asarray(_ALLOWED[held, wanted])


def dtype_code(name: str) -> int:
    """Code of a dtype name. Raises LayoutError for a name that is not in NAMES."""
    try:
        return _CODES[name]
    except KeyError:
        raise LayoutError(f"dtype {name!r:.80} is not known; known are {', '.join(NAMES)}") from None


def dtype_name(code: int) -> str:
    """Name of a dtype code. Raises LayoutError for a code out of range."""
    if not 0 <= code < len(NAMES):
        raise LayoutError(f"dtype code {code} is not in 0..{len(NAMES) - 1}")
    return NAMES[code]


def from_torch(dtype: torch.dtype) -> str:
    """`torch.bfloat16` -> "bfloat16". Raises LayoutError for a dtype that weightcast does not move."""
    name = str(dtype).removeprefix("torch.")
    dtype_code(name)
    return name


def to_torch(name: str) -> torch.dtype:
    """ "bfloat16" -> `torch.bfloat16`. Raises LayoutError for an unknown name or one this torch lacks."""
    import torch

    dtype_code(name)
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise LayoutError(f"this torch ({torch.__version__}) has no dtype {name}")
    return dtype
