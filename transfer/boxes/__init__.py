"""Boxes of tensors as columns of numbers, without torch.

`columns` sorts and groups rows, and `algebra` intersects boxes and decomposes them into cells. `slices` cuts boxes into
pieces, and `strided` joins copies of boxes into fewer.
"""
