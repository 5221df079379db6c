"""The main job on one machine: real optimizer steps, real SGLang servers, every version proven.

`run` starts gateway, servers and trainers, follows version after version, and compares what servers and trainer
generate. `machines` holds the processes, `trainer` is the body of a trainer process, and `training` and
`megatron_training` are its frameworks.
"""
