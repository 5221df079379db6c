"""Plain endpoints: whole boxes over live memory."""

from __future__ import annotations

import pytest
import torch
from plain_support import Piece, PlainSink

from weightcast.adapters.plain import PlainSource
from weightcast.transfer.errors import DescribeError
from weightcast.transfer.layout import Region


def test_every_tensor_is_one_whole_box_over_live_memory() -> None:
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor(1, dtype=torch.int64), "c": torch.zeros(4, 2).t()}
    layout = PlainSource(tensors).describe()
    assert [layout.table.region(row) for row in range(3)] == [
        Region("a", (0, 0), (2, 3)),
        Region("b", (), ()),
        Region("c", (0, 0), (2, 4)),
    ]
    assert layout.notes.parameter_bytes == 24 + 8 + 32
    tensors["a"].fill_(7)
    assert torch.equal(layout.view(0), torch.full((2, 3), 7.0))


def test_parameters_that_require_grad_are_described() -> None:
    module = torch.nn.Linear(3, 2)
    layout = PlainSource(dict(module.named_parameters())).describe()
    assert not layout.view(0).requires_grad
    assert layout.view(0).data_ptr() == module.weight.data_ptr()


def test_sparse_memory_is_named() -> None:
    with pytest.raises(DescribeError, match=r"tensor 's' \(Tensor\) is not plain strided memory"):
        PlainSource({"s": torch.eye(3).to_sparse()}).describe()


def test_a_sink_keeps_slots_and_order() -> None:
    memory = torch.zeros(4, 2)
    sink = PlainSink([Piece("w", (8, 2), (4, 0), memory[:2], 3), ("w", (8, 2), (0, 0), memory[2:])])
    layout = sink.describe()
    assert layout.table.region(0) == Region("w", (4, 0), (2, 2), 3)
    assert layout.view(1).data_ptr() == memory[2:].data_ptr()
    assert sink.placement() is None
