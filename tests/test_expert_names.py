"""Layer and expert numbers in names."""

from __future__ import annotations

import numpy as np

from weightcast.transfer.expert_names import NONE, parse_names


def test_numbers_and_families() -> None:
    names = ["lm_head.weight", "a.layers.7.norm", "a.layers.3.mlp.experts.12.w", "xlayers.3.experts.x", "layers.5"]
    names += ["a.layers.3.mlp.experts.4.w", "a.layers.3.mlp.experts.4.v", "a.layers.4.mlp.experts.12.w"]
    parsed = parse_names(names)
    assert parsed.layer.tolist() == [NONE, 7, 3, NONE, 5, 3, 3, 4]
    assert parsed.expert.tolist() == [NONE, NONE, 12, NONE, NONE, 4, 4, 12]
    assert parsed.family.tolist() == [0, 1, 2, 3, 4, 2, 5, 6]


def test_numbers_that_fit_no_column_are_no_numbers() -> None:
    parsed = parse_names(["model.layers." + "9" * 5000 + ".w", "experts." + "9" * 10 + ".w"])
    assert parsed.layer.tolist() == [NONE, NONE]
    assert parsed.expert.tolist() == [NONE, NONE]


def test_columns_are_int64() -> None:
    assert all(column.dtype == np.int64 for column in parse_names(["a"]))
