"""Weights that ranks of one host read from each other's memory, where others send messages.

- `peers`: members of a communicator that can read each other's memory
- `sharing`: both ends of a run: who may read when, `Lender` and `Borrower`
- `exporter`: memory that a trainer rank lets others read: its weights or a staging buffer
- `offers`: an offer as bytes: memory to open, and places of boxes in it
- `importer`: copies out of another process's memory into a rank's own
- `segment`: `Segment`, a stretch of memory that another process can open
- `host_memory`: CPU memory shared by memfd
- `cuda_ipc`: GPU memory shared by CUDA IPC
"""
