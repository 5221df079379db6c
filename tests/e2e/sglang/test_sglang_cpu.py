"""The test environment itself: SGLang without a GPU computes what transformers computes; other tests rely on it."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from sglang_cpu_engine import NEW_TOKENS, PROMPTS

from weightcast.demo.model import make_model

HIDDEN = 3


class TopK(NamedTuple):
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor


def native_forward(layer: torch.Tensor, x: torch.Tensor, topk: TopK, scale: float) -> torch.Tensor:
    """Like SGLang's: a negative id is an error, and an id that stands twice in a row is miscounted."""
    if (topk.topk_ids < 0).any():
        raise IndexError("index -1 is out of bounds")
    assert all(len(set(row)) == len(row) for row in topk.topk_ids.tolist())
    experts = layer[topk.topk_ids] * x[:, None, :] * scale
    return (experts * topk.topk_weights[:, :, None]).sum(1)


def run_python(environment: dict[str, str], *arguments: str | Path) -> str:
    """Output of a program that must succeed; what it started ends with it."""
    command = [sys.executable, *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=environment, text=True, start_new_session=True, **pipes) as process:
        try:
            output, errors = process.communicate(timeout=400)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, output + errors
    return output


@pytest.mark.sglang
@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([[0, 1], [1, 2]], [3.0, 8.0]),
        ([[0, -1], [-1, 2]], [1.0, 6.0]),
        ([[-1, -1], [2, 1]], [0.0, 7.0]),
        ([[-1, -1], [-1, -1]], [0.0, 0.0]),
    ],
)
def test_absent_experts_add_nothing(ids: list[list[int]], expected: list[float]) -> None:
    from sglang_cpu_shims.moe import skip_absent_experts

    # Experts multiply by 1, 2 and 3; the second token's second choice counts twice.
    experts = torch.arange(1.0, 4.0)[:, None].expand(3, HIDDEN).clone()
    weights = torch.tensor([[1.0, 1.0], [1.0, 2.0]])
    x = torch.ones(2, HIDDEN)
    out = skip_absent_experts(native_forward, experts, x, TopK(weights, torch.tensor(ids)), 1.0)
    assert out[:, 0].tolist() == expected


@pytest.mark.sglang
def test_an_expert_that_no_token_chose_cannot_show() -> None:
    from sglang_cpu_shims.moe import skip_absent_experts

    experts = torch.tensor([float("nan"), 2.0, 3.0])[:, None].expand(3, HIDDEN).clone()
    topk = TopK(torch.ones(2, 2), torch.tensor([[1, -1], [-1, -1]]))
    out = skip_absent_experts(native_forward, experts, torch.ones(2, HIDDEN), topk, 1.0)
    assert out[:, 0].tolist() == [2.0, 0.0]


@pytest.mark.sglang
def test_kernels_can_be_imported_and_not_called() -> None:
    from sgl_kernel import silu_and_mul

    with pytest.raises(RuntimeError, match=r"sgl_kernel\.silu_and_mul was called"):
        silu_and_mul()


@pytest.mark.sglang
def test_the_environment_has_the_plugins(sglang_cpu_environment: dict[str, str]) -> None:
    entry_points = importlib.metadata.entry_points(group="sglang.srt.plugins")
    assert {"cpu_shims", "weightcast"} <= entry_points.names
    run_python(sglang_cpu_environment, "-c", "import torchvision, torchvision.ops")


def test_deep_ep_stand_in_only_constructs_names(root: Path, sglang_cpu_environment: dict[str, str]) -> None:
    assert importlib.util.find_spec("deep_ep") is None, "the stand-in is for the processes of single tests"
    environment = {**sglang_cpu_environment, "PYTHONPATH": str(root / "tests" / "stand_ins")}
    program = "from deep_ep import Buffer, Config\ntry: Buffer(1)\nexcept RuntimeError as error: print(error)"
    assert run_python(environment, "-c", program).startswith("deep_ep.Buffer was constructed")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's model; its experts are scaled until the tokens depend on them."""
    folder = tmp_path_factory.mktemp("checkpoint")
    make_model(folder)
    return folder


@pytest.mark.sglang
@pytest.mark.slow
@pytest.mark.parametrize(
    ("tp", "ep", "row"), [(1, 1, None), (2, 2, [0, 1, 2, 3, 3, 0])], ids=["tp1", "tp2-ep2-same-rank-pair"]
)
def test_engine_generates_what_transformers_does(
    checkpoint: Path, sglang_cpu_environment: dict[str, str], root: Path, tp: int, ep: int, row: list[int] | None
) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    expected = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        tokens = model.generate(ids, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False)
        expected.append(tokens[0, len(prompt) :].tolist())
    script = root / "tests" / "support" / "sglang_cpu_engine.py"
    output = run_python(sglang_cpu_environment, script, checkpoint, str(tp), str(ep), json.dumps(row))
    assert json.loads(output.splitlines()[-1]) == expected
