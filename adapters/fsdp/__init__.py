"""FSDP2 and DTensor trainers as sources, with the checkpoint names of Transformers.

- `source`: `FsdpSource`, the regions of one rank as views of its local shards
- `mesh`: indices of one dimension that a rank of a device mesh holds
- `transformers_names`: checkpoint names and boxes of a Transformers model's parameters, fused experts too
- `lora`: models with PEFT adapters: base weights and adapter tensors told apart
"""
