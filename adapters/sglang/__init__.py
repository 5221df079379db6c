"""SGLang engines as sinks: layout of each rank, and weight updates inside its scheduler.

- `plugin`: SGLang plugin, which serves weight updates inside each scheduler process
- `session`: this rank in a group, and the thread that waits for others beside the scheduler's loop
- `ray_actors`: the same plugin in schedulers that are actors of Ray
- `sink`: `SglangSink`, the layout of one rank from SGLang's own loader
- `experts`: expert layers of a model, their placement and dispatch table
- `slots`: regions of one expert parameter, slot by slot
- `caches`: caches that depend on weights: dropped, keyed by version, or refused
"""
