"""Copies inside one process, prepared once and made in every update.

- `batch`: `CopyBatch`, many copies between parameters and messages in few calls
- `runs`: many runs of CPU memory of one length, moved by one call
- `spacing`: runs at one distance, which need no second copy
- `nan`: one bit pattern for every NaN that a cast makes
"""
