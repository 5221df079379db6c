"""The main job on one machine: real optimizer steps, real SGLang servers, every version proven.

- `config`: settings of the demo, and its outcome for each version
- `run`: course of the demo: processes started, versions followed, answers compared
- `machines`: where the demo's processes run: on this machine, or as actors of a Ray cluster
- `processes`: gateway and SGLang servers as processes with a log
- `model`: the small model, its training text and its prompts
- `trainer`: one trainer process: optimizer steps and an update for each version
- `training`: interface to a training framework, and FSDP2 behind it
- `megatron_training`: Megatron-Core behind the same interface
- `megatron_weights`: Transformers weights into Megatron-Core's ranks and back, independent of the adapter
- `reference`: Transformers model with the trainer's weights, whose answers are expected of the servers
- `colocated`: iteration on devices that trainer and engines share
"""
