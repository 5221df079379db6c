"""Digests of boxes: the definition, and its loops for CPU and GPU."""
