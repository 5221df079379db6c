"""Boxes of tensors as columns of integers, without torch.

- `arrays`: types of the numpy arrays
- `columns`: sorting, grouping and numbering of integer columns
- `algebra`: intersection, disjointness, cells and coverage of boxes
- `slices`: boxes cut into pieces, each one run in row-major order
- `strided`: many strided copies joined into few
"""
