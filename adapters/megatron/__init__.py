"""Megatron-Core: a parallel model as a source."""
