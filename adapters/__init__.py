"""Adapters to frameworks: trainers become sources of weights, inference engines become sinks.

- `fsdp`: FSDP2 and DTensor trainers as sources
- `megatron`: Megatron-Core trainers as sources
- `unsharded`: sources of tensors that one process holds whole, and of a checkpoint on disk
- `checkpoint`: names, shapes, dtypes and file offsets from safetensors headers
- `live_memory`: checks that a parameter is ordinary memory, which can be read in place
- `sglang`: SGLang engines as sinks, and the plugin inside their schedulers
- `tracing`: tracer of an engine's weight loader: checkpoint boxes that it writes into parameters
"""
