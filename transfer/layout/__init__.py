"""Layouts of ranks: tensors, regions, placements, and the join of all ranks of one side."""
