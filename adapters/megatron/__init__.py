"""Megatron-Core trainers as sources, with the checkpoint names of Transformers.

- `source`: `MegatronSource`, the regions of one rank as views of its live parameters
- `shards`: shards of a model chunk from `sharded_state_dict()`, checked against live memory
- `names`: tables of checkpoint names, one for each model family
- `rows`: rows of fused tensors (QKV, gate and up) as rows of checkpoint tensors
"""
