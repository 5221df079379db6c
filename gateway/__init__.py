"""Control plane of the transfer: a gateway tells ranks when to connect, and which version to send.

- `control`: the gateway itself: pairs, instances, connects and updates
- `layouts`: layouts of whole sides: merged, checked, inspected, and their digests compared
- `server`: the HTTP server around the gateway
- `client`: HTTP client of the gateway, for ranks, training loops and commands
- `ranks`: workers on the ranks of trainer and instances, which follow the gateway's orders
- `colocated`: cycle of a run in which trainer and engines share devices
- `records`: records of pairs, engines, orders and updates, which both ends share
- `reminder`: moments at which a rank that waits says so
- `settings`: every deadline, interval and limit of the control plane, with its default
- `versions`: numbers of a trainer in lineages, with their stamps
- `incarnations`: processes that register as trainer ranks, and those of them that are believed
- `addresses`: URLs, places of ranks, certificates to trust and keys of engines
- `ray_address`: `ray://NAME`, the address of a gateway that is an actor of Ray
"""
