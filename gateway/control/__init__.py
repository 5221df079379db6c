"""The control plane: state of pairs and their instances, and the steps that bring a version to all of them.

- `gateway`: `Gateway`, all pairs of one process, and the tasks that connect and update them
- `pair`: `Pair`, the trainer's reports and offers, its instances, and how updates ended
- `instance`: `Instance`, its record, the reports of its ranks, and orders for them
- `instance_state`: state machine of an instance: phases, events, and the fence
- `connect`: steps of a connect: describe, register, merge, plan, join
- `update`: steps of an update: their order, their deadlines, and what a failure leads to
- `barrier`: instances of one update that wait for one another, to commit together
- `engines`: drivers that take an engine through an update by its own API
- `evictions`: dead instances, which are probed, leave their pair, and come back
- `waiting`: waits with a deadline, orders, and ranks that are no longer heard from
- `store`: state that outlives a restart, in one SQLite file
- `metrics`: counters and gauges in Prometheus' text format
"""
