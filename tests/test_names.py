"""Compact ranges of tensor names."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightcast.transfer.names import NONE, parse_names, ranges, summarize

PARTS = ("gate_proj", "up_proj", "down_proj")


def experts(layers: range, numbers: range) -> list[str]:
    return [f"model.layers.{la}.mlp.experts.{e}.{p}.weight" for la in layers for e in numbers for p in PARTS]


@pytest.mark.parametrize(
    ("numbers", "text"),
    [([], ""), ([3], "3"), ([0, 1, 2], "0-2"), ([5, 0, 1, 2], "0-2,5"), ([2, 2, 3], "2-3"), ([0, 2, 4], "0,2,4")],
)
def test_ranges(numbers: list[int], text: str) -> None:
    assert ranges(numbers) == text


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ([], ""),
        (["lm_head.weight"], "lm_head.weight"),
        (["lm_head.weight", "model.norm.weight"], "lm_head.weight, model.norm.weight"),
        (experts(range(48), range(32, 128)), "layers 0-47, experts 32-127, gate_proj/up_proj/down_proj"),
        (["model.layers.3.self_attn.q_proj.weight"], "layers 3, self_attn.q_proj"),
        (["model.layers.3.self_attn.q_proj.weight", "model.layers.4.self_attn.q_proj.bias"],
         "layers 3, self_attn.q_proj; layers 4, self_attn.q_proj.bias"),
        (["model.layers.0.a.weight", "model.layers.0.a.bias"], "layers 0, a.weight/a.bias"),
        (["model.layers.0.mlp.experts.1.w", "model.layers.1.mlp.experts.2.w"],
         "layers 0, experts 1, w; layers 1, experts 2, w"),
        (["vision.layers.0.a", "model.layers.0.a"], "vision.layers 0, a; model.layers 0, a"),
        (["model.layers.0.mlp.experts.gate_up_proj"], "layers 0, mlp.experts.gate_up_proj"),
        (["experts.3.w", "experts.4.w"], "experts 3-4, w"),
        ([f"model.layers.{n}.mlp.experts.{2 * n}.w" for n in range(9)],
         "layers 0, experts 0, w; layers 1, experts 2, w; layers 2, experts 4, w; layers 3, experts 6, w; "
         "layers 4, experts 8, w; layers 5, experts 10, w; and 3 more tensors"),
    ],
)  # fmt: skip
def test_summaries(names: list[str], text: str) -> None:
    assert summarize(names) == text


def test_repeated_names_count_once() -> None:
    names = experts(range(2), range(2))
    assert summarize(names + names) == summarize(names)


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


def _numbers(text: str) -> list[int]:
    ends = [run.split("-") for run in text.split(",")]
    return [n for run in ends for n in range(int(run[0]), int(run[-1]) + 1)]


def _expand(text: str) -> set[tuple[int, int, str]]:
    found = set()
    for group in text.split("; "):
        match = re.fullmatch(r"layers ([\d,-]+), experts ([\d,-]+), (.*)", group)
        assert match, group
        found |= {(la, e, p) for la in _numbers(match[1]) for e in _numbers(match[2]) for p in match[3].split("/")}
    return found


@given(st.sets(st.tuples(st.integers(0, 3), st.integers(0, 4), st.sampled_from(PARTS)), min_size=1))
def test_summary_names_exactly_what_was_handed_in(chosen: set[tuple[int, int, str]]) -> None:
    text = summarize(f"model.layers.{la}.mlp.experts.{e}.{p}.weight" for la, e, p in sorted(chosen))
    if "more tensor" in text:
        shown, _, rest = text.rpartition("; and ")
        assert len(_expand(shown)) + int(rest.split()[0]) == len(chosen)
        assert _expand(shown) <= chosen
    else:
        assert _expand(text) == chosen


def test_columns_are_int64() -> None:
    assert all(column.dtype == np.int64 for column in parse_names(["a"]))
