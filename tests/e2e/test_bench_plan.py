"""The planning benchmark runs, on a small case, and says what it compares with or why not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["pp4xep2xdp2", "fsdp4xdp2"])
def test_a_small_case(root: Path, tmp_path: Path, trainer: str):
    command = [
        sys.executable,
        str(root / "benchmarks" / "bench_plan.py"),
        "--model",
        "qwen3-30b-a3b",
        "--trainer",
        trainer,
    ]
    command += ["--instances", "2", "--instance-ep", "4", "--instance-tp", "2", "--redundant", "8", "--repeat", "1"]
    command += ["--awex", str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr
    for row in ("merge of all instance reports", "plan, invariants proved", "parts of all ranks", "largest part"):
        assert row in ran.stdout
    assert f"Awex: not measured: no Awex in {tmp_path}" in ran.stdout
