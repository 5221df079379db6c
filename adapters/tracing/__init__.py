"""Tracer of an engine's weight loader: boxes of checkpoint tensors that it writes into parameters.

- `trace`: `trace_loader`, which runs a loader on meta tensors and returns its regions
- `snapshot`: state of a model before the trace, to see what its code rebinds and to put it back
- `dispatch_mode`: dispatch mode that holds back writes to real tensors and records them
- `provenance`: content of a tensor as boxes of logical tensors, copied together
- `recorder`: rows of a trace: regions, fills and opaque writes
- `strided`: strided copies turned into boxes of parameter and checkpoint tensor
- `coverage`: check that each element of a parameter is written once or is padding
- `derived`: tensors computed beside parameters, and their renewal after an update
- `replay`: tape of the loader's operators, replayed to compute a derived tensor anew
"""
