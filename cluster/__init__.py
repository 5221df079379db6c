"""A pair on a Ray cluster: gateway, engines and trainer ranks as its processes.

`spec` reads the cluster file, and `launch` brings a cluster to it and takes it back. `ray_actors` has the actors of
engines and ranks, and `trainer_ranks` drives those of the trainer.
"""
