"""Groups that carry the bytes: torch.distributed (NCCL, Gloo)."""
