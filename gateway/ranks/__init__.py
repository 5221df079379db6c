"""The ranks' side of a pair: workers, which the gateway's orders lead through connects and updates.

`trainer` and `instance` are the workers of trainer and inference ranks, and `membership` is their place in a
communicator. `orders` gives a trainer rank its orders, `digests` has the digests of an update, and `heartbeat` says
that a rank lives.

- `trainer`: `TrainerWorker`, one trainer rank: connect and update, given a source
- `instance`: `InstanceWorker`, one inference rank: connect, receive and serve, given a sink
- `membership`: shared by both workers: waits, places in a communicator, layout reports
- `orders`: orders of all instances in one poll, as a trainer rank follows them
- `digests`: digests that a rank makes in an update, and the time they take
- `heartbeat`: thread that tells the gateway that a rank lives
- `outage`: gateway that an engine does not reach: when to ask it again, and a line a minute
- `host`: names of a rank's host and process
"""
