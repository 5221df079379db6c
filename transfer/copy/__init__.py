"""Copies on a rank's device: runs of memory, and batches of them."""
