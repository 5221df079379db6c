"""What a trainer rank holds, under the names of the checkpoint: torchrun --nproc-per-node 2 examples/fsdp_source.py"""

import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from weightcast import FsdpSource

dist.init_process_group("gloo")
config = Qwen3MoeConfig(
    vocab_size=256, hidden_size=64, num_hidden_layers=1, num_attention_heads=4, num_experts=5, moe_intermediate_size=32
)
model = fully_shard(Qwen3MoeForCausalLM(config))
table = FsdpSource(model).describe().table
for row in range(len(table)):
    print(dist.get_rank(), *table.region(row)[:3])
dist.destroy_process_group()
