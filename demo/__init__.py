"""The main job on one machine: real optimizer steps, real SGLang servers, every version proven.

`weightcast demo` trains a small model with FSDP2 on text in a few processes, starts SGLang servers with different
layouts, brings every version to all of them, and compares what they generate with what the trainer's own weights
generate.
"""
