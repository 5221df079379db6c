"""The demo's Megatron-Core trainer: its model, its schedule, its optimizer, on one rank of a mesh."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from weightcast.demo.config import LEARNING_RATE, DemoConfig, MegatronConfig
from weightcast.demo.megatron_weights import gather_weights, load_weights
from weightcast.demo.reference import ReferenceModel
from weightcast.demo.training import Training
from weightcast.transfer.errors import InputError

__all__ = ["MegatronTraining", "check_megatron"]

_WITHOUT_KERNELS: dict[str, Any] = {
    "use_cpu_initialization": True,
    "moe_token_dispatcher_type": "allgather",
    "moe_permute_fusion": False,
    "gradient_accumulation_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "masked_softmax_fusion": False,
    "apply_rope_fusion": False,
    "persist_layer_norm": False,
}
"""Settings without the parts of Megatron that are there for speed alone and need its CUDA kernels."""


def check_megatron(config: DemoConfig, mesh: MegatronConfig, folder: Path) -> None:
    """Raises InputError when there is no prelude, or the model is not one that can be built here."""
    from transformers import AutoConfig

    if config.prelude is None:
        raise InputError(
            "the demo trains on the CPU, where Megatron-Core does not run by itself: give --trainer-prelude a file "
            "that replaces what is missing, for example tests/support/megatron_cpu.py of weightcast's source"
        )
    if config.trainers % mesh.ranks:
        raise InputError(f"{mesh} takes a multiple of {mesh.ranks} trainer processes, not {config.trainers}")
    sizes: Any = AutoConfig.from_pretrained(folder)
    if sizes.model_type != "qwen3_moe" or sizes.decoder_sparse_step != 1 or sizes.mlp_only_layers:
        raise InputError(
            f"the demo's Megatron trainer builds Qwen3-MoE with experts in all layers, not {sizes.model_type}"
        )
    if sizes.tie_word_embeddings or sizes.attention_bias:
        raise InputError("the demo's Megatron trainer builds Qwen3-MoE without tied embeddings and biases")
    parts = {
        "vocab_size": mesh.tp,  # padding counts in Megatron's loss, which then is not the reference's
        "num_key_value_heads": mesh.tp,
        "num_hidden_layers": mesh.pp,
        "num_experts": mesh.ep,
        "moe_intermediate_size": mesh.etp,
    }
    for name, ranks in parts.items():
        if (count := getattr(sizes, name)) % ranks:
            raise InputError(f"the model's {name} {count} cannot be split over {ranks} ranks of {mesh}")


class MegatronTraining(Training):
    """One rank of a Megatron-Core Qwen3-MoE that starts from the reference's weights."""

    def __init__(self, mesh: MegatronConfig, reference: ReferenceModel) -> None:
        from weightcast.adapters.megatron.source import MegatronSource

        sizes = reference.model.config
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        self._config, self._model = _model(mesh, sizes)
        load_weights(self._model, dict(reference.model.named_parameters()))
        self._trained, self._optimizer = _optimizer(self._config, self._model)
        self.source = MegatronSource(self._trained, family=sizes.model_type, vocab_size=sizes.vocab_size)

    def optimize(self, rows: torch.Tensor, steps: int) -> float:
        from megatron.core import parallel_state

        rank, ranks = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
        batch, loss = rows[rank % len(rows) :: ranks], 0.0
        for _ in range(steps):
            self._trained.zero_grad_buffer()
            self._optimizer.zero_grad()
            loss = self._pass(batch, forward_only=False)
            self._optimizer.step()
        return loss

    def loss(self, rows: torch.Tensor) -> float:
        return self._pass(rows, forward_only=True)

    def gather(self, reference: ReferenceModel) -> None:
        """Copies weights by whole tensors, with `megatron_weights`."""
        gather_weights(self._model, dict(reference.model.named_parameters()))

    def _pass(self, rows: torch.Tensor, *, forward_only: bool) -> float:
        """Runs Megatron's schedule over the pipeline; returns the mean loss over data-parallel ranks, on every rank."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        length = rows.shape[1]
        # Sequence parallelism takes a multiple of tp; the padding comes after all tokens that count.
        padding = -length % self._config.tensor_model_parallel_size
        tokens = torch.nn.functional.pad(rows, (0, padding))
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        mask = torch.ones(1, 1, tokens.shape[1], tokens.shape[1], dtype=torch.bool).triu(1)

        def mean(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
            loss = losses[:, : length - 1].mean()
            return loss, {"loss": float(loss.detach())}

        entries = get_forward_backward_func()(
            forward_step_func=lambda _, model: (model(tokens, positions, mask, labels=tokens.roll(-1, 1)), mean),
            data_iterator=None,
            model=self._trained,
            num_microbatches=1,
            seq_length=tokens.shape[1],
            micro_batch_size=len(tokens),
            forward_only=forward_only,
        )
        # Only the last stage has losses.
        total = torch.tensor([sum(entry["loss"] for entry in entries), float(len(entries))])
        dist.all_reduce(total)
        return float(total[0] / total[1])


def _model(mesh: MegatronConfig, sizes: Any) -> tuple[Any, Any]:
    """The config and model of this rank; `sizes` is the config of the Transformers model."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    parallel = {
        "tensor_model_parallel_size": mesh.tp,
        "pipeline_model_parallel_size": mesh.pp,
        "expert_model_parallel_size": mesh.ep,
        "expert_tensor_parallel_size": mesh.etp,
    }
    parallel_state.initialize_model_parallel(**parallel, create_gloo_process_groups=False)
    config = TransformerConfig(
        **parallel,
        **_WITHOUT_KERNELS,
        sequence_parallel=mesh.tp > 1,
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
        num_layers=sizes.num_hidden_layers,
        hidden_size=sizes.hidden_size,
        num_attention_heads=sizes.num_attention_heads,
        num_query_groups=sizes.num_key_value_heads,
        kv_channels=sizes.head_dim,
        ffn_hidden_size=sizes.intermediate_size,
        num_moe_experts=sizes.num_experts,
        moe_ffn_hidden_size=sizes.moe_intermediate_size,
        moe_router_topk=sizes.num_experts_per_tok,
        moe_router_pre_softmax=not sizes.norm_topk_prob,
        moe_router_load_balancing_type="none",
        normalization="RMSNorm",
        layernorm_epsilon=sizes.rms_norm_eps,
        qk_layernorm=True,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
    )
    model = GPTModel(
        config,
        get_gpt_decoder_block_spec(config, use_transformer_engine=False),
        vocab_size=sizes.vocab_size,
        max_sequence_length=sizes.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
        rotary_base=sizes.rope_parameters["rope_theta"],
    )
    return config, model


def _optimizer(config: Any, model: Any) -> tuple[Any, Any]:
    """The model in Megatron's data-parallel wrapper, and its distributed optimizer."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.enums import ModelType
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    model.model_type = ModelType.encoder_or_decoder
    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
    wrapper = DistributedDataParallel(config, settings, model)
    config.finalize_model_grads_func = finalize_model_grads
    adam = OptimizerConfig(
        optimizer="adam", lr=LEARNING_RATE, params_dtype=torch.float32, use_distributed_optimizer=True
    )
    return wrapper, get_megatron_optimizer(adam, [wrapper], use_gloo_process_groups=False)
