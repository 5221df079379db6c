"""FSDP2: a sharded model as a source."""
