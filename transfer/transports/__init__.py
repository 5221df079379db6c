"""Groups that carry the bytes: TCP between CPUs, torch.distributed (NCCL, Gloo), memory of one host."""
