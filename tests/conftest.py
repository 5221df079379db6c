"""What every test shares: one thread per process, and tests that need what is not here are skipped with the reason."""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
from loopback_support import has_ipv6

# Many tests start several processes on few cores; set before torch is imported, and inherited by those processes.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# A time limit on examples, or on making them, measures how busy the machine is.
hypothesis.settings.register_profile(
    "weightcast", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("weightcast")

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    import torch

    torch.set_num_threads(1)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Only what is absent is skipped: an SGLang that is installed and cannot be imported fails its tests."""
    if item.get_closest_marker("sglang") and importlib.util.find_spec("sglang") is None:
        pytest.skip("SGLang is not installed; `make test` installs it")
    if item.get_closest_marker("megatron") and not _has_megatron():
        pytest.skip("Megatron-Core and Megatron-Bridge are not installed; `make test` installs them")
    if item.get_closest_marker("ipv6") and not has_ipv6():
        pytest.skip("this machine has no IPv6")
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")


def _has_megatron() -> bool:
    if importlib.util.find_spec("megatron") is None:
        return False
    return all(importlib.util.find_spec(f"megatron.{part}") is not None for part in ("core", "bridge"))


@pytest.fixture(scope="session")
def root() -> Path:
    """Root of the repository, which is the package `weightcast`."""
    return ROOT


@pytest.fixture(scope="session")
def sglang_cpu_environment() -> dict[str, str]:
    """Environment of a child process that runs SGLang without a GPU on up to two ranks, with all installed plugins."""
    return {
        **{name: value for name, value in os.environ.items() if name != "SGLANG_PLUGINS"},
        "SGLANG_USE_CPU_ENGINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "SGLANG_CPU_OMP_THREADS_BIND": "0|1" if (os.cpu_count() or 1) > 1 else "0|0",
        "OMP_NUM_THREADS": "1",
    }


@pytest.fixture
def quiet() -> Iterator[None]:
    """No logs: failures that are played are asserted, not read."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)
