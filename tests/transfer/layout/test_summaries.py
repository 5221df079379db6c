"""Compact ranges of tensor names."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightcast.transfer.layout.summaries import number_ranges, summarize

PARTS = ("gate_proj", "up_proj", "down_proj")


def experts(layers: range, numbers: range) -> list[str]:
    return [f"model.layers.{la}.mlp.experts.{e}.{p}.weight" for la in layers for e in numbers for p in PARTS]


@pytest.mark.parametrize(
    ("numbers", "text"),
    [([], ""), ([3], "3"), ([0, 1, 2], "0-2"), ([5, 0, 1, 2], "0-2,5"), ([2, 2, 3], "2-3"), ([0, 2, 4], "0,2,4")],
)
def test_ranges(numbers: list[int], text: str) -> None:
    assert number_ranges(numbers) == text


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ([], ""),
        (["lm_head.weight"], "lm_head.weight"),
        (["lm_head.weight", "model.norm.weight"], "lm_head.weight; model.norm.weight"),
        (experts(range(48), range(32, 128)), "layers 0-47, experts 32-127, gate_proj/up_proj/down_proj"),
        (["model.layers.3.self_attn.q_proj.weight"], "layers 3, self_attn.q_proj"),
        (["model.layers.3.self_attn.q_proj.weight", "model.layers.4.self_attn.q_proj.bias"],
         "layers 3, self_attn.q_proj; layers 4, self_attn.q_proj.bias"),
        (["model.layers.0.a.weight", "model.layers.0.a.bias"], "layers 0, a/a.bias"),
        (["model.layers.0.mlp.experts.1.w", "model.layers.1.mlp.experts.2.w"],
         "layers 0, experts 1, w; layers 1, experts 2, w"),
        (["vision.layers.0.a", "model.layers.0.a"], "vision.layers 0, a; layers 0, a"),
        (["model.layers.0.mlp.experts.gate_up_proj"], "layers 0, mlp.experts.gate_up_proj"),
        (["experts.3.w", "experts.4.w"], "experts 3-4, w"),
    ],
)  # fmt: skip
def test_summaries(names: list[str], text: str) -> None:
    assert summarize(names) == text


def test_repeated_names_count_once() -> None:
    names = experts(range(2), range(2))
    assert summarize(names + names) == summarize(names)


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


@settings(deadline=None)
@given(st.sets(st.tuples(st.integers(0, 3), st.integers(0, 4), st.sampled_from(PARTS)), min_size=1))
def test_summary_names_exactly_what_was_handed_in(chosen: set[tuple[int, int, str]]) -> None:
    names = (f"model.layers.{la}.mlp.experts.{e}.{p}.weight" for la, e, p in sorted(chosen))
    text = summarize(names, limit=10_000)
    assert _expand(text) == chosen


@settings(deadline=None)
@given(st.sets(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=40))
def test_what_does_not_fit_is_counted(chosen: set[tuple[int, int]]) -> None:
    text = summarize((f"model.layers.{la}.mlp.experts.{e}.w.weight" for la, e in sorted(chosen)), limit=60)
    shown, _, rest = text.rpartition("; and ")
    if shown:
        assert len(_expand(shown)) + int(rest.split()[0]) == len(chosen)
    else:
        assert len(_expand(text)) == len(chosen)
