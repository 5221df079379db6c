"""Layer and expert numbers in names."""

from __future__ import annotations

import re

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from weightcast.transfer.layout.tensor_names import NONE, parse_layers, parse_names

WORDS = ["layers", "experts", "xlayers", "0", "7", "12", "00", "123456789", "1234567890", "w", "é", "Ω", "\n", ""]
PIECES = st.sampled_from(WORDS)
NAMES = st.lists(st.lists(PIECES, max_size=7).map(".".join), max_size=6)


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
    for names in ([], ["a"]):
        assert all(column.dtype == np.int64 for column in parse_names(names))


def reference(name: str, word: str) -> int:
    found = re.search(rf"(?:^|(?<=\.)){word}\.([0-9]{{1,9}})(?=\.|$)", name.replace("\n", " "))
    return int(found[1]) if found else NONE


@settings(deadline=None)
@given(NAMES)
def test_as_a_pattern_would_find_them(names: list[str]) -> None:
    parsed = parse_names(names)
    assert parsed.layer.tolist() == [reference(name, "layers") for name in names]
    assert parsed.expert.tolist() == [reference(name, "experts") for name in names]
    number = re.compile(r"((?:^|(?<=\.))experts\.)[0-9]{1,9}(?=\.|$)")
    taken_out = [number.sub(r"\1", name.replace("\n", " "), count=1) for name in names]
    for i, one in enumerate(taken_out):
        for j, other in enumerate(taken_out):
            assert (parsed.family[i] == parsed.family[j]) == (one == other)


@settings(max_examples=200, deadline=None)
@given(NAMES)
def test_layers_alone_are_those_of_all_numbers(names: list[str]) -> None:
    assert parse_layers(names).tolist() == parse_names(names).layer.tolist()
