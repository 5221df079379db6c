"""Megatron-Core trainers as sources: `source` describes the regions of one rank.

`shards` reads what the model states about its memory, `names` has the checkpoint names of each family, and `rows` takes
fused rows apart.
"""
