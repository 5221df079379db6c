"""FSDP2 and DTensor trainers as sources: `source` describes the regions of one rank.

`mesh` computes the indices that a rank holds, `transformers_names` the checkpoint names, and `lora` sorts out adapters.
"""
