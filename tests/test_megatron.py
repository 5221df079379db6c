"""The Megatron source against Megatron-Bridge's export and Transformers' forward pass, in real processes with Gloo."""
from __future__ import annotations
import torch
Rows = list

def faults(ranks: list[Rows], truth: dict[str, torch.Tensor]) -> list[str]:
    """What is wrong with these regions; empty when they rebuild the truth."""
    held = {name: torch.zeros(tensor.shape, dtype=torch.bool) for name, tensor in truth.items()}
    found = []
    for rank, regions in enumerate(ranks):
        for name, shape, offset, view in regions:
            if name not in truth or shape != tuple(truth[name].shape) or view.dtype != truth[name].dtype:
                found.append(f"rank {rank}: {name} {shape} {view.dtype} is not in the checkpoint")
                continue
            box = tuple(slice(begin, begin + size) for begin, size in zip(offset, view.shape, strict=True))
            held[name][box] = True
            if not torch.equal(truth[name][box], view):
                found.append(f"rank {rank}: {name} at {offset} differs")
    return found + [f"{name}: part is on no rank" for name, mask in held.items() if not mask.all()]
