"""Digests of boxes: equal on all devices, however a tensor is cut.

- `definition`: the digest defined, and computed with torch on any device
- `constants`: pseudo-random constants of a digest, without torch
- `residues`: sums and differences of digests, without torch
- `digester`: `Digester`, the digests of many boxes, prepared once for a layout
- `boxes`: boxes of one form stacked, so that one call digests them
- `cpu_scan`: boxes in CPU memory, prepared for the compiled loops
- `cpu_loops`: loops that numba compiles for CPUs
- `gpu_kernel`: Triton kernel for GPUs
- `values`: counts of infinite values and NaN, in boxes or made by a cast
"""
