"""Transfer of weights between ranks: layout, plan, messages, copies, digests.

It knows no engine and no HTTP. The folders follow the way from layouts to proven memory.

- `protocols`: `Source` and `Sink`, the two sides of an update
- `layout`: tensors and regions that ranks hold, their memory and placements
- `boxes`: boxes of tensors as integer columns: sorted, intersected, cut, joined
- `planner`: plans made from the tables of both sides
- `plan`: columns of a plan, its parts for each rank, and its proof
- `wire`: reports, plan parts and digests as bytes
- `transports`: communicators over TCP, Gloo and NCCL
- `exchange`: messages and rounds of one rank
- `copy`: copies inside one process, prepared once
- `colocated`: weights read from the memory of another process on the same host
- `executor`: `Executor`, which runs one rank's part of a plan
- `digest`: digests of boxes, independent of how a tensor is cut
- `deadline`: `Deadline`, the moment after which a wait ends, and how moments are written
- `documents`: records that are read from JSON and TOML by their schema, and a check for duplicate keys
- `installed`: check for packages that only some commands and classes need
- `errors`: tree of all exceptions that weightcast raises
"""
