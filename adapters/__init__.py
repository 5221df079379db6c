"""Adapters to frameworks: inference engines become sinks, trainers become sources.

`unsharded` has sources of whole tensors and of a checkpoint on disk, whose headers `checkpoint` reads. `live_memory`
makes sure that a parameter is ordinary memory.
"""
