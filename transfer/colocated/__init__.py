"""Weights that ranks of one host read from each other's memory, where others send messages.

`peers` finds out who can read whose memory, and `sharing` runs both ends. `exporter` offers memory of a trainer rank,
and `importer` copies out of it. `host_memory` and `cuda_ipc` open memory of CPUs and GPUs.
"""
