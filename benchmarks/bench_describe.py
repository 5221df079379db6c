"""How long one rank of a 235B-shaped model takes to describe itself, on the meta device.

    python benchmarks/bench_describe.py [--trainer fsdp|megatron]

Seconds are of this process's CPU. The first `describe` works out the names, which later ones remember. Nothing on the
meta device can be read: no weight is touched.
"""

from __future__ import annotations

import argparse
import platform
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from weightcast.transfer.protocols import Source

LAYERS, EXPERTS, VOCABULARY = 94, 128, 151936
"""Of Qwen3-235B-A22B."""


def fsdp() -> tuple[str, Source]:
    """Rank 5 of 64: every layer a group, two experts of each."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from weightcast.adapters.fsdp.source import FsdpSource

    dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=64)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY, hidden_size=4096, num_hidden_layers=LAYERS, num_attention_heads=64,
        num_key_value_heads=4, head_dim=128, num_experts=EXPERTS, moe_intermediate_size=1536, dtype="bfloat16",
    )  # fmt: skip
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(config)
    mesh = init_device_mesh("cpu", (64,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return "FSDP2, 64 ranks", FsdpSource(model)


def megatron() -> tuple[str, Source]:
    """Rank 3 of 32: TP4 x EP8, sixteen experts of each layer."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    from weightcast.adapters.megatron.source import MegatronSource

    mesh = {"tensor_model_parallel_size": 4, "expert_model_parallel_size": 8, "expert_tensor_parallel_size": 1}
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=32)
    parallel_state.initialize_model_parallel(**mesh, create_gloo_process_groups=False)
    config = TransformerConfig(
        **mesh, num_layers=LAYERS, hidden_size=4096, num_attention_heads=64, num_query_groups=4, kv_channels=128,
        ffn_hidden_size=12288, num_moe_experts=EXPERTS, moe_ffn_hidden_size=1536, moe_router_topk=8, qk_layernorm=True,
        normalization="RMSNorm", gated_linear_unit=True, activation_func=torch.nn.functional.silu,
        bias_activation_fusion=False, add_bias_linear=False, gradient_accumulation_fusion=False,
        use_cpu_initialization=True, perform_initialization=False, params_dtype=torch.bfloat16, bf16=True,
    )  # fmt: skip
    with torch.device("meta"):
        model = GPTModel(
            config,
            get_gpt_decoder_block_spec(config, use_transformer_engine=False),
            vocab_size=VOCABULARY,
            max_sequence_length=64,
            share_embeddings_and_output_weights=False,
            position_embedding_type="rope",
        )
    return "Megatron-Core, TP4 x EP8", MegatronSource(model, family="qwen3_moe", vocab_size=VOCABULARY)


def describe(source: Source) -> tuple[float, Any]:
    began = time.process_time()
    layout = source.describe()
    return time.process_time() - began, layout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainer", choices=("fsdp", "megatron"), default="fsdp")
    label, source = {"fsdp": fsdp, "megatron": megatron}[parser.parse_args().trainer]()
    first, layout = describe(source)
    later = min(describe(source)[0] for _ in range(3))
    print(
        f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}"
    )
    print(f"{'trainer':<26} {'regions':>8} {'first s':>8} {'later s':>8}")
    print(f"{label:<26} {len(layout.table):>8} {first:>8.2f} {later:>8.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
