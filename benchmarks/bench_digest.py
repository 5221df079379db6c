"""Digests on one core, in GB/s, beside a copy of the same bytes in the same run.

    python benchmarks/bench_digest.py [--mib 256] [--device cpu]

The values are those of weights, of which no number is 2 or more; "to 8" are larger, and their blocks are read twice to
find those that are infinite or no number.

`prepared` is what an update does: a Digester that was made before, scanning with numba's loops on a CPU. `torch` is by
torch's own operations, without numba. Times are CPU seconds of this process on a CPU, so that a busy machine disturbs
them less, and wall seconds elsewhere.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from weightcast.transfer.digest.definition import box_residues, join, scale
from weightcast.transfer.digest.digester import Digester
from weightcast.transfer.layout.dtypes import dtype_code, from_torch
from weightcast.transfer.layout.memory import LayoutBuilder
from weightcast.transfer.plan.verification import Sample

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
    weights = torch.randn(mib << 18).mul_(0.02).to(device)
    kinds = (weights.bfloat16().repeat(2), weights, weights.view(torch.uint8), weights.bfloat16().repeat(2).mul_(100.0))
    for number, flat in enumerate(kinds):
        dtype = f"{flat.dtype}".removeprefix("torch.") + (", to 8" if number == 3 else "")
        for width, label in SHAPES:
            view = flat[: flat.numel() // width * width].view(-1, width)
            row(f"{dtype}, {label}", view, None, device)
        view = flat[: flat.numel() // 7168 * 7168].view(-1, 7168).t()
        row(f"{dtype}, transposed", view, None, device)
    row("float32 as bfloat16", weights.view(-1, 2048), torch.bfloat16, device)


def row(label: str, view: torch.Tensor, dtype: torch.dtype | None, device: torch.device) -> None:
    copy = torch.empty_like(view)
    nbytes = view.numel() * view.element_size()
    copied = nbytes / seconds(lambda: copy.copy_(view), device) / 1e9
    prepared = nbytes / seconds(prepare([view], dtype).run, device) / 1e9
    digested = nbytes / seconds(lambda: digest(view, dtype), device, repeat=2) / 1e9
    print(f"{label:<32} {prepared:>9.2f} {digested:>9.2f} {copied:>9.2f} {prepared / copied:>9.1f}")


def digest(view: torch.Tensor, dtype: torch.dtype | None = None) -> int:
    """The digest of a matrix by torch's operations."""
    sums, _ = box_residues(view[None], (0, 0), (1, 1), dtype)
    return int(join(sums, scale(np.zeros((1, 2), dtype=np.int64), np.array([view.shape]), np.array([2])))[0])


def prepare(views: Sequence[torch.Tensor], dtype: torch.dtype | None = None) -> Digester:
    """Digests of views, each a whole tensor."""
    builder = LayoutBuilder()
    for number, view in enumerate(views):
        builder.add(f"t{number}", view.shape, (0,) * view.dim(), view)
    layout = builder.build()
    table = layout.table
    dtypes = table.tensors.dtype[table.tensor]
    if dtype is not None:
        dtypes = np.full_like(dtypes, dtype_code(from_torch(dtype)))
    return Digester(layout, np.arange(len(table)), table.offset, table.size, dtypes)


def measure_small(device: torch.device, count: int = 5000) -> None:
    """Boxes of 4 KiB: `count` experts of 16 x 128 in one parameter."""
    slots = torch.randn(count, 16, 128).mul_(0.02).bfloat16().to(device)
    digester, some = prepare(list(slots)), range(200)
    full = seconds(digester.run, device) / count * 1e6
    sampled = seconds(lambda: digester.run(Sample(3)), device) / count * 1e6
    single = seconds(lambda: [digest(slots[i]) for i in some], device) / len(some) * 1e6
    print(f"\n{count} boxes of 4 KiB: {full:.2f} us a box, {sampled:.2f} us sampled, {single:.1f} us each by itself")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=256, help="bytes digested per row of the table, in MiB")
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device(arguments.device)
    print(f"{platform.machine()}, torch {torch.__version__}, {device}, one thread, {arguments.mib} MiB")
    print(f"{'GB/s':<32} {'prepared':>9} {'torch':>9} {'copy':>9} {'of copy':>9}")
    measure_large(arguments.mib, device)
    measure_small(device)


if __name__ == "__main__":
    main()
