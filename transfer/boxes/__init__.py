"""Boxes of tensors as columns of numbers: sorting, set algebra, slices and strides. No torch."""
