"""Digests on one core, in GB/s, beside a copy of the same bytes in the same run.

    python benchmarks/bench_digest.py [--mib 64] [--device cpu]

Times are CPU seconds of this process on a CPU, so that a busy machine disturbs them less, and wall seconds elsewhere.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable

import numpy as np
import torch

from weightcast.transfer.digest import digest
from weightcast.transfer.digesting import digest_rows
from weightcast.transfer.layout import LayoutBuilder

SHAPES = ((7168, "rows of 7168"), (2048, "rows of 2048"), (128, "rows of 128"))


def seconds(call: Callable[[], object], device: torch.device, repeat: int = 5) -> float:
    """The best of `repeat` calls after one to warm up."""
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    call()
    taken = []
    for _ in range(repeat):
        start = clock()
        call()
        if device.type != "cpu":
            torch.accelerator.synchronize()
        taken.append(clock() - start)
    return min(taken)


def measure_large(mib: int, device: torch.device) -> None:
    raw = torch.randint(-(2**31), 2**31, (mib << 18,), dtype=torch.int64).to(torch.int32).to(device)
    for dtype in (torch.bfloat16, torch.float32, torch.uint8):
        flat = raw.view(dtype)
        for width, label in SHAPES:
            view = flat[: flat.numel() // width * width].view(-1, width)
            row(f"{dtype}, {label}", view, None, device)
        view = flat[: flat.numel() // 7168 * 7168].view(-1, 7168).t()
        row(f"{dtype}, transposed", view, None, device)
    row("float32 as bfloat16", raw.view(torch.float32).view(-1, 2048), torch.bfloat16, device)


def row(label: str, view: torch.Tensor, dtype: torch.dtype | None, device: torch.device) -> None:
    copy = torch.empty_like(view)
    nbytes = view.numel() * view.element_size()
    copied = nbytes / seconds(lambda: copy.copy_(view), device) / 1e9
    digested = nbytes / seconds(lambda: digest(view, (0, 0), dtype), device) / 1e9
    print(f"{label:<32} {digested:>9.2f} {copied:>9.2f}")


def measure_small(device: torch.device, count: int = 5000) -> None:
    """Boxes of 4 KiB: `count` experts of 16 x 128 in one parameter."""
    slots = torch.randn(count, 16, 128).bfloat16().to(device)
    builder = LayoutBuilder()
    for expert in range(count):
        builder.add(f"experts.{expert}.weight", (32, 128), (16, 0), slots[expert], expert)
    layout = builder.build()
    table = layout.table
    rows, dtypes = np.arange(count), table.tensors.dtype[table.tensor]
    together = seconds(lambda: digest_rows(layout, rows, table.offset, table.size, dtypes), device)
    some = range(200)
    alone = seconds(lambda: [digest(layout.view(i), (16, 0)) for i in some], device)
    each, single = together / count * 1e6, alone / len(some) * 1e6
    print(f"\n{count} boxes of 4 KiB: {each:.1f} us a box together, {single:.1f} us alone")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=64, help="bytes digested per row of the table, in MiB")
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device(arguments.device)
    print(f"{platform.machine()}, torch {torch.__version__}, {device}, one thread, {arguments.mib} MiB")
    print(f"{'GB/s':<32} {'digest':>9} {'copy':>9}")
    measure_large(arguments.mib, device)
    measure_small(device)


if __name__ == "__main__":
    main()
