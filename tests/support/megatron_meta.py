"""One rank of a Megatron mesh whose collectives do nothing, with a model on the meta device: layouts without memory."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from weightcast.transfer.layout.tables import Region

__all__ = ["EXPERTS", "TINY", "grouped_and_sequential", "leave_mesh", "meta_model"]

TINY: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 8,
    "num_query_groups": 2,
    "kv_channels": 8,
    "ffn_hidden_size": 48,
}
EXPERTS: dict[str, Any] = {"num_moe_experts": 8, "moe_ffn_hidden_size": 16, "moe_router_topk": 2}

_COMMON: dict[str, Any] = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": nn.functional.silu,
    "bias_activation_fusion": False,
    "add_bias_linear": False,
    "gradient_accumulation_fusion": False,
    "use_cpu_initialization": True,
    "perform_initialization": False,
    "pipeline_dtype": torch.bfloat16,
    "params_dtype": torch.bfloat16,
    "bf16": True,
}


def meta_model(
    rank: int, world: int, tp: int = 1, pp: int = 1, ep: int = 1, etp: int = 1, vocabulary: int = 64, **sizes: Any
) -> Any:
    """Make this process rank `rank` of `world` and build its model; `leave_mesh()` undoes the first."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig
    from torch.testing._internal.distributed.fake_pg import FakeStore

    mesh = {
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "expert_model_parallel_size": ep,
        "expert_tensor_parallel_size": etp,
    }
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    parallel_state.initialize_model_parallel(**mesh, create_gloo_process_groups=False)
    config = TransformerConfig(**{**_COMMON, **mesh, **sizes})
    with torch.device("meta"):
        return GPTModel(
            config,
            get_gpt_decoder_block_spec(config, use_transformer_engine=False),
            vocab_size=vocabulary,
            max_sequence_length=64,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=False,
            position_embedding_type="rope",
        )


def leave_mesh() -> None:
    from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def grouped_and_sequential(rank: int, world: int, port: int, single: bool) -> tuple[list[Region], list[Region]]:
    """The regions of one rank of TP2 x EP2 with sequential experts, and with Transformer Engine's grouped ones.

    With `single`, all experts of a rank are one parameter. For a process of its own: it pretends that Transformer
    Engine is installed.
    """
    from megatron_cpu import pretend_transformer_engine

    from weightcast.adapters.megatron.source import MegatronSource

    pretend_transformer_engine()
    import megatron.core.transformer.transformer_block as block

    block.get_cpu_offload_context = None
    model = meta_model(3, 4, tp=2, ep=2, etp=2, **TINY, **EXPERTS)
    found = []
    for grouped in (False, True):
        if grouped:
            for layer in model.decoder.layers:
                layer.mlp.experts = _grouped(layer.mlp.experts, single)
        table = MegatronSource(model, family="qwen3_moe", vocab_size=64).describe().table
        found.append([table.region(row) for row in range(len(table))])
    return found[0], found[1]


def _grouped(experts: Any, single: bool) -> Any:
    """Megatron's class for grouped experts with the weights of sequential ones; its kernels are never called."""
    from megatron.core.extensions import transformer_engine as extensions
    from megatron.core.transformer.moe.experts import TEGroupedMLP

    extensions.TEGroupedLinear.get_extra_state = lambda self: torch.empty(0)
    made = _bare(
        TEGroupedMLP,
        config=experts.config,
        num_local_experts=experts.num_local_experts,
        ep_group=experts.ep_group,
        tp_group=experts.local_experts[0].tp_group,
    )
    for name, kind in (
        ("linear_fc1", extensions.TEColumnParallelGroupedLinear),
        ("linear_fc2", extensions.TERowParallelGroupedLinear),
    ):
        linear = _bare(
            kind,
            num_gemms=experts.num_local_experts,
            use_bias=False,
            fp8=False,
            fp8_calibration=False,
            fp8_meta={"fp8_checkpoint": False},
            _tp_group=made.tp_group,
            _pg_collection=_Groups(experts),
        )
        weights = [getattr(expert, name).weight for expert in experts.local_experts]
        if single:
            linear.weight = nn.Parameter(torch.stack(list(weights)))
        else:
            for index, weight in enumerate(weights):
                linear.register_parameter(f"weight{index}", weight)
        made.add_module(name, linear)
    return made


class _Groups:
    def __init__(self, experts: Any) -> None:
        self.ep = experts.ep_group
        self.expt_dp = self.expt_dp_gtp_remat = experts.dp_group


def _bare(kind: type, **attributes: Any) -> Any:
    """An instance of a module class without its own initialisation."""
    made = kind.__new__(kind)
    nn.Module.__init__(made)
    for name, value in attributes.items():
        object.__setattr__(made, name, value)
    return made
