from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from weightcast.adapters import checkpoint
from weightcast.adapters.checkpoint import INDEX, read_headers
from weightcast.transfer.errors import LayoutError
from weightcast.transfer.layout.dtypes import SAFETENSORS, to_torch
from weightcast.transfer.layout.tables import TensorSpec


def test_every_dtype_that_safetensors_writes(tmp_path: Path) -> None:
    made = {name: torch.zeros(2, 3).to(to_torch(name)) for name in SAFETENSORS.values()}
    made |= {"scalar": torch.tensor(1.0), "nothing": torch.zeros(0, 4)}
    save_file(made, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert read_headers(tmp_path) == {
        name: TensorSpec(tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in made.items()
    }


def two_files(folder: Path) -> None:
    save_file({"a": torch.zeros(2), "b": torch.zeros(3)}, folder / "one.safetensors")
    save_file({"c": torch.zeros(4)}, folder / "two.safetensors")


def write_index(folder: Path, listed: Any) -> None:
    (folder / INDEX).write_text(json.dumps(listed))


def test_several_files_with_and_without_an_index(tmp_path: Path) -> None:
    two_files(tmp_path)
    assert list(read_headers(tmp_path)) == ["a", "b", "c"]
    write_index(tmp_path, {"weight_map": {"a": "one.safetensors", "b": "one.safetensors"}})
    assert list(read_headers(str(tmp_path))) == ["a", "b"]
    save_file({"a": torch.zeros(9)}, tmp_path / "zero.safetensors")
    assert read_headers(tmp_path)["a"].shape == (2,)
    write_index(tmp_path, {"weight_map": {"a": "one.safetensors", "c": "two.safetensors", "z": "zero.safetensors"}})
    with pytest.raises(
        LayoutError, match=r"says that tensor 'z' is in 'zero.safetensors', but that file does not have it"
    ):
        read_headers(tmp_path)


def test_a_tensor_in_two_files(tmp_path: Path) -> None:
    two_files(tmp_path)
    save_file({"b": torch.zeros(9)}, tmp_path / "zero.safetensors")
    with pytest.raises(LayoutError, match=r"tensor 'b' is in both 'one.safetensors' and 'zero.safetensors'"):
        read_headers(tmp_path)
    listed = {"a": "one.safetensors", "b": "zero.safetensors", "c": "two.safetensors"}
    write_index(tmp_path, {"weight_map": listed})
    assert read_headers(tmp_path)["b"].shape == (9,)


@pytest.mark.parametrize(
    ("listed", "message"),
    [
        ([], r"header is a JSON list"),
        ({}, r"has no weight_map"),
        ({"weight_map": {"a": 3}}, r"has no weight_map"),
        (
            {"weight_map": {"a": "../one.safetensors"}},
            r"lists file '../one.safetensors', which is not a plain file name",
        ),
        ({"weight_map": {"a": ".."}}, r"which is not a plain file name"),
        ({"weight_map": {"a": "three.safetensors"}}, r"cannot read '.*three.safetensors': No such file"),
        ({"weight_map": {}}, r"has no \*.safetensors file"),
    ],
)
def test_broken_indices(tmp_path: Path, listed: Any, message: str) -> None:
    two_files(tmp_path)
    write_index(tmp_path, listed)
    with pytest.raises(LayoutError, match=message):
        read_headers(tmp_path)


GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def raw(header: Any, data: int = 8) -> bytes:
    body = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(body)) + body + bytes(data)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"has 0 bytes and claims a header of 0"),
        (b"\x01\x00", r"it is cut off or no safetensors file"),
        (struct.pack("<Q", 1 << 62), r"claims a header of 4611686018427387904"),
        (raw({"a": GOOD})[:20], r"it is cut off or no safetensors file"),
        (raw(b"{"), r"header is not valid JSON"),
        (raw(b"\xff\xfe"), r"header is not valid JSON"),
        (raw(b"[" * 100000), r"header is not valid JSON"),
        (raw(b'{"a": 1, "a": 2}'), r"header is not valid JSON \(a name occurs twice\)"),
        (raw([1]), r"header is a JSON list, expected an object"),
        (raw({"a": 3}), r"entry of tensor 'a' is not an object"),
        (raw({"a": GOOD | {"dtype": "F7"}}), r"tensor 'a' has dtype 'F7'; known are F64, F32"),
        (raw({"a": GOOD | {"dtype": ["F32"]}}), r"tensor 'a' has dtype \['F32'\]"),
        (raw({"a": GOOD | {"shape": [-2]}}), r"tensor 'a' has shape \[-2\]"),
        (raw({"a": GOOD | {"shape": [True, 2]}}), r"tensor 'a' has shape \[True, 2\]"),
        (raw({"a": GOOD | {"shape": None}}), r"tensor 'a' has shape None"),
        (raw({"a": GOOD | {"shape": [1] * 17}}), r"expected at most 16 numbers"),
        (raw({"a": GOOD | {"data_offsets": [0, 9]}}), r"data_offsets \[0, 9\], not inside the 8 bytes of data"),
        (raw({"a": GOOD | {"data_offsets": [4, 2]}}), r"data_offsets \[4, 2\]"),
        (raw({"a": GOOD | {"data_offsets": [8]}}), r"data_offsets \[8\]"),
        (raw({"a": GOOD | {"shape": [3]}}), r"tensor 'a' of F32 \[3\] takes 12 bytes, data_offsets say 8"),
        (raw({"a": GOOD | {"shape": [1 << 40, 1 << 40]}}), r"takes 4835703278458516698824704 bytes"),
    ],
)
def test_broken_files(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(LayoutError, match=message) as caught:
        read_headers(tmp_path)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_limits_and_missing_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LayoutError, match=r"has no \*.safetensors file"):
        read_headers(tmp_path)
    with pytest.raises(LayoutError, match=r"'Qwen/Qwen3-30B-A3B' is not a directory"):
        read_headers("Qwen/Qwen3-30B-A3B")
    (tmp_path / "model.safetensors").write_bytes(raw({"a": GOOD}))
    write_index(tmp_path, {"weight_map": {"a": "model.safetensors"}})
    assert list(read_headers(tmp_path)) == ["a"]
    monkeypatch.setattr(checkpoint, "MAX_HEADER_BYTES", 10)
    with pytest.raises(LayoutError, match=r"bytes, more than 10"):
        read_headers(tmp_path)
    (tmp_path / INDEX).unlink()
    with pytest.raises(LayoutError, match=r"at most 10 are read"):
        read_headers(tmp_path)
