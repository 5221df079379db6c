"""What a Megatron-Core rank holds, as a checkpoint names it: torchrun --nproc-per-node 2 examples/megatron_source.py

In a trainer the model chunks are those that Megatron's `get_model()` or Megatron-Bridge's provider returned.
"""

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

from weightcast import MegatronSource

dist.init_process_group("gloo")
parallel_state.initialize_model_parallel(tensor_model_parallel_size=2, create_gloo_process_groups=False)
config = TransformerConfig(
    num_layers=1, hidden_size=64, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=96, add_bias_linear=False,
    gated_linear_unit=True, activation_func=torch.nn.functional.silu, bias_activation_fusion=False,
    normalization="RMSNorm", tensor_model_parallel_size=2, use_cpu_initialization=True,
    gradient_accumulation_fusion=False,
)  # fmt: skip
spec = get_gpt_layer_local_spec(normalization="RMSNorm")
model = GPTModel(config, spec, vocab_size=256, max_sequence_length=64, position_embedding_type="rope")
table = MegatronSource([model], family="llama", vocab_size=250).describe().table
for row in range(len(table)):
    print(dist.get_rank(), *table.region(row)[:3])
dist.destroy_process_group()
