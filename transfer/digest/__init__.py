"""Digests of boxes: equal on all devices, however a tensor is cut.

`definition` says what a digest is and computes it with torch; `cpu_loops` and `gpu_kernel` compute the same faster.
`digester` digests the boxes of a rank, and `values` counts the values in them that are not finite.
"""
