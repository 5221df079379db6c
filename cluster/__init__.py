"""A pair on a Ray cluster: gateway, engines and trainer ranks as its actors.

- `spec`: the cluster file in TOML, read and checked
- `launch`: bring-up of all that a cluster file describes, and take-down
- `trainer_ranks`: the trainer's ranks from outside: placed, started, updated, begun anew after a restart
- `trainer_rank`: body of one trainer rank: describe, connect, update
- `ray_actors`: classes of the actors that hold an engine's server or a trainer rank
- `processes`: child processes on one host: started with a log, waited for, ended
- `die_with_parent`: wrapper that ends a command when its parent is gone
"""
