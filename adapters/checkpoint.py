"""Names, shapes, dtypes and places of a checkpoint's tensors from its safetensors headers, without reading a weight.

Format: safetensors 0.5, README, "Format": eight bytes of length, little-endian, then that many bytes of JSON, then the
data.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from weightcast.transfer.errors import LayoutError
from weightcast.transfer.layout.dtypes import ITEMSIZE, SAFETENSORS, dtype_code
from weightcast.transfer.layout.tables import TensorSpec

__all__ = ["INDEX", "MAX_HEADER_BYTES", "StoredTensor", "read_headers", "stored_tensors"]

INDEX = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000
"""The largest header that safetensors itself reads, and the largest index that is read here."""
_MAX_NDIM = 16


class StoredTensor(NamedTuple):
    """A tensor of a checkpoint: it begins at byte `start` of `file` in the folder, row by row."""

    spec: TensorSpec
    file: str
    start: int


def read_headers(model_path: str | os.PathLike[str]) -> dict[str, TensorSpec]:
    """Every tensor of the checkpoint in directory `model_path`: name -> (global shape, dtype), in order of file names.

    Raises LayoutError as `stored_tensors` does.
    """
    return {name: entry.spec for name, entry in stored_tensors(model_path).items()}


def stored_tensors(model_path: str | os.PathLike[str]) -> dict[str, StoredTensor]:
    """Every tensor of the checkpoint in directory `model_path` by name, in order of file names.

    With an index (`model.safetensors.index.json`) the files are those it lists, and every name it lists must be in its
    file. Without one all `*.safetensors` files are read. Raises LayoutError, one line, for a directory without such
    files and for broken ones.
    """
    folder = Path(model_path)
    if not folder.is_dir():
        raise LayoutError(f"checkpoint {str(folder)!r} is not a directory; give the folder of its safetensors files")
    index = folder / INDEX
    weight_map = _read_index(index) if index.is_file() else None
    files = (p.name for p in folder.glob("*.safetensors")) if weight_map is None else weight_map.values()
    names = sorted(set(files))
    if not names:
        raise LayoutError(f"checkpoint {str(folder)!r} has no *.safetensors file")
    tensors: dict[str, StoredTensor] = {}
    for name in names:
        for tensor, entry in _read_file(folder / name).items():
            duplicate = tensors.get(tensor)
            if duplicate is not None and (weight_map is None or weight_map.get(tensor) not in (name, duplicate.file)):
                raise LayoutError(f"tensor {tensor!r} is in both {duplicate.file!r} and {name!r} of {str(folder)!r}")
            if duplicate is None or (weight_map is not None and weight_map.get(tensor) == name):
                tensors[tensor] = entry
    for tensor, name in (weight_map or {}).items():
        if tensor not in tensors or tensors[tensor].file != name:
            raise LayoutError(
                f"{str(index)!r} says that tensor {tensor!r} is in {name!r}, but that file does not have it"
            )
    return tensors


def _read_index(path: Path) -> dict[str, str]:
    """The weight map of an index file: tensor name -> file name."""
    if path.stat().st_size > MAX_HEADER_BYTES:
        raise LayoutError(f"{str(path)!r} has {path.stat().st_size} bytes, more than {MAX_HEADER_BYTES}")
    index = _object(path.read_bytes(), str(path))
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise LayoutError(f"{str(path)!r} has no weight_map of tensor names to file names")
    for name in weight_map.values():
        if Path(name).name != name or name in ("", ".", ".."):
            raise LayoutError(f"{str(path)!r} lists file {name!r}, which is not a plain file name")
    return weight_map


def _read_file(path: Path) -> dict[str, StoredTensor]:
    """The tensors in the header of one file, checked against the size of the file."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or length > min(size - 8, MAX_HEADER_BYTES):
                raise LayoutError(
                    f"{str(path)!r} has {size} bytes and claims a header of {length}, at most {MAX_HEADER_BYTES} are "
                    "read; it is cut off or no safetensors file"
                )
            header = _object(file.read(length), str(path))
    except OSError as error:
        raise LayoutError(f"cannot read {str(path)!r}: {error.strerror or error}") from None
    data_start = 8 + length
    return {
        name: StoredTensor(
            _spec(name, entry, size - data_start, str(path)), path.name, data_start + entry["data_offsets"][0]
        )
        for name, entry in header.items()
        if name != "__metadata__"
    }


def _object(raw: bytes, where: str) -> dict[str, Any]:
    try:
        document = json.loads(raw, object_pairs_hook=_no_twice)
    except (ValueError, RecursionError) as error:
        raise LayoutError(f"{where!r}: header is not valid JSON ({' '.join(str(error).split())[:200]})") from None
    if not isinstance(document, dict):
        raise LayoutError(f"{where!r}: header is a JSON {type(document).__name__}, expected an object")
    return document


def _no_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("a name occurs twice")
    return members


def _spec(name: str, entry: Any, data: int, where: str) -> TensorSpec:
    """One entry of a header. `data` is the number of bytes after the header."""
    if not isinstance(entry, dict):
        raise LayoutError(f"{where!r}: entry of tensor {name!r} is not an object")
    dtype, shape, span = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in SAFETENSORS:
        raise LayoutError(f"{where!r}: tensor {name!r} has dtype {dtype!r}; known are {', '.join(SAFETENSORS)}")
    if not _counts(shape) or len(shape) > _MAX_NDIM:
        raise LayoutError(
            f"{where!r}: tensor {name!r} has shape {str(shape)[:80]}, expected at most {_MAX_NDIM} numbers >= 0"
        )
    if not _counts(span) or len(span) != 2 or not span[0] <= span[1] <= data:
        raise LayoutError(
            f"{where!r}: tensor {name!r} has data_offsets {str(span)[:80]}, not inside the {data} bytes of data"
        )
    nbytes = int(ITEMSIZE[dtype_code(SAFETENSORS[dtype])]) * math.prod(shape)
    if span[1] - span[0] != nbytes:
        raise LayoutError(
            f"{where!r}: tensor {name!r} of {dtype} {shape} takes {nbytes} bytes, data_offsets say {span[1] - span[0]}"
        )
    return TensorSpec(tuple(shape), SAFETENSORS[dtype])


def _counts(values: Any) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(type(n) is int and n >= 0 for n in values)
