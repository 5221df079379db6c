"""What the ranks of test_source.py do: build a Megatron model on a mesh, load, train a step, describe, export.

Megatron-Bridge loads the checkpoint that Transformers wrote and exports the weights after the step: the truth. Families
and expert layers that it cannot map are filled through the described regions instead, and must then compute what the
Transformers model computes.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from rebuild_support import rows_of

if TYPE_CHECKING:
    from weightcast.adapters.megatron.source import MegatronSource
    from weightcast.transfer.layout.memory import RankLayout

__all__ = ["CASES", "Case", "checkpoint_of", "model_logits", "run_cases"]

VOCABULARY = 250


@dataclass(frozen=True)
class Case:
    """A checkpoint of megatron_models on a mesh. Ranks beyond the product are data-parallel."""

    checkpoint: str
    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int | None = None
    vp: int | None = None
    mtp: bool = False
    overlap: bool = False
    """Gather the stepped weights in the next forward only (overlap_param_gather)."""
    forward: bool = False
    """Check by a forward pass instead of the bridge; such a model is not trained."""

    def __str__(self) -> str:
        sizes = {"tp": self.tp, "pp": self.pp, "vp": self.vp or 1, "ep": self.ep}
        mesh = "".join(f"{name}{size}" for name, size in sizes.items() if size > 1)
        mesh += "" if self.etp is None else f"etp{self.etp}"
        options = [name for name in ("mtp", "overlap", "forward") if getattr(self, name)]
        return "-".join([self.checkpoint, mesh, *options])

    def ranks(self) -> tuple[int, int, int, int, int]:
        """How many there are in each direction; no virtual stages are 0."""
        return self.tp, self.pp, self.vp or 0, self.ep, self.tp if self.etp is None else self.etp

    @property
    def family(self) -> str:
        return "llama" if self.checkpoint.startswith("llama") else self.checkpoint


CASES: tuple[Case, ...] = (
    Case("llama", tp=2),
    Case("llama", pp=2, vp=2),
    Case("llama_2_groups", tp=4),
    Case("llama_tied", tp=2, pp=2),
    Case("qwen2", tp=2, overlap=True),
    Case("qwen3", pp=4),
    Case("qwen3_moe", ep=2),
    Case("qwen3_moe", tp=2, ep=2, etp=2),
    Case("qwen3_moe", tp=2, ep=2, etp=1),
    Case("qwen3_moe", pp=2, ep=2),
    Case("qwen3_moe", pp=2, vp=2, ep=2),
    Case("qwen3_moe", ep=4),
    Case("glm4_moe", tp=2, ep=2),
    Case("glm4_moe", pp=2, ep=2, mtp=True),
    Case("deepseek_v3", tp=2, ep=2),
    Case("deepseek_v3", tp=2, pp=2, etp=1),
    Case("deepseek_v3", pp=2, ep=2, mtp=True),
    Case("llama", tp=2, forward=True),
    Case("mixtral", tp=2, ep=2, forward=True),
    Case("mixtral", tp=2, ep=4, etp=1, forward=True),
    Case("glm4_moe", tp=2, ep=2, forward=True),
    Case("deepseek_v3", tp=2, ep=2, forward=True),
)


def run_cases(rank: int, world: int, port: int, folder: str, names: list[str]) -> None:
    """One process of all cases; results are FOLDER/CASE.RANK, and on rank 0 FOLDER/CASE.truth."""
    import megatron_cpu

    megatron_cpu.install()
    megatron_cpu.install_bridge()
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=world)
    cases = sorted((case for case in CASES if str(case) in names), key=Case.ranks)
    for mesh, alike in itertools.groupby(cases, key=Case.ranks):
        # Some thirty process groups, which take longer than most cases.
        with _groups(*mesh):
            for case in alike:
                torch.manual_seed(5)
                (_forward if case.forward else _exported)(case, rank, Path(folder))
                dist.barrier()
    dist.destroy_process_group()


@contextmanager
def _groups(tp: int, pp: int, vp: int, ep: int, etp: int) -> Iterator[None]:
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vp or None,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
        create_gloo_process_groups=False,
    )
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()


def _provider(case: Case, checkpoint: Path) -> tuple[Any, Any]:
    """(Megatron-Bridge, the model's config): the bridge's own, made to run without a GPU."""
    from megatron.bridge import AutoBridge

    if case.checkpoint == "mixtral":
        bridge, provider = None, _mixtral()
    else:
        bridge = AutoBridge.from_hf_pretrained(str(checkpoint), dtype=torch.float32)
        provider = bridge.to_megatron_provider(load_weights=False)
    for name, value in {**_CPU, **_mesh(case)}.items():
        setattr(provider, name, value)
    provider.finalize()
    return bridge, provider


def _mesh(case: Case) -> dict[str, Any]:
    return {
        "tensor_model_parallel_size": case.tp,
        "pipeline_model_parallel_size": case.pp,
        "virtual_pipeline_model_parallel_size": case.vp,
        "expert_model_parallel_size": case.ep,
        "expert_tensor_parallel_size": case.etp,
        "sequence_parallel": case.tp > 1,
        "mtp_num_layers": 1 if case.mtp else None,
    }


_CPU: dict[str, Any] = {
    "use_cpu_initialization": True,
    "params_dtype": torch.float32,
    "pipeline_dtype": torch.float32,
    "bf16": False,
    "fp16": False,
    "moe_grouped_gemm": False,
    "moe_token_dispatcher_type": "allgather",
    "moe_router_load_balancing_type": "none",
    "moe_aux_loss_coeff": 0.0,
    "moe_shared_expert_overlap": False,
    "moe_permute_fusion": False,
    "moe_router_fusion": False,
    "gradient_accumulation_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "masked_softmax_fusion": False,
    "apply_rope_fusion": False,
    "persist_layer_norm": False,
    "cross_entropy_loss_fusion": False,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
}


def _mixtral() -> Any:
    """The config of Mixtral, which the bridge does not know."""
    from megatron.bridge.models.gpt_provider import GPTModelProvider
    from megatron_models import CONFIGS

    sizes = CONFIGS["mixtral"][1]
    return GPTModelProvider(
        num_layers=sizes["num_hidden_layers"],
        hidden_size=sizes["hidden_size"],
        ffn_hidden_size=sizes["intermediate_size"],
        moe_ffn_hidden_size=sizes["intermediate_size"],
        num_attention_heads=sizes["num_attention_heads"],
        num_query_groups=sizes["num_key_value_heads"],
        kv_channels=sizes["head_dim"],
        num_moe_experts=sizes["num_local_experts"],
        moe_router_topk=sizes["num_experts_per_tok"],
        normalization="RMSNorm",
        layernorm_epsilon=1e-5,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        position_embedding_type="rope",
        rotary_base=1000000.0,
        share_embeddings_and_output_weights=False,
    )


def _chunks(case: Case, config: Any) -> list[Any]:
    """The model chunks of this rank: one, or one for each virtual stage."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron_cpu import LatentAttention

    chunks = []
    for stage in range(case.vp or 1):
        vp_stage = stage if case.vp else None
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=vp_stage)
        for layer in spec.layer_specs:
            if config.multi_latent_attention:
                layer.submodules.self_attention.submodules.core_attention = LatentAttention
        mtp = None
        if case.mtp:
            mtp = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False, vp_stage=vp_stage)
        model = GPTModel(
            config,
            spec,
            # Megatron-Bridge pads under tensor parallelism alone.
            vocab_size=256 if case.tp > 1 or case.forward else VOCABULARY,
            max_sequence_length=64,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
            share_embeddings_and_output_weights=config.share_embeddings_and_output_weights,
            position_embedding_type="rope",
            rotary_base=config.rotary_base,
            rotary_percent=config.rotary_percent,
            mtp_block_spec=mtp,
            vp_stage=vp_stage,
        )
        model.model_type = 1
        chunks.append(model)
    return chunks


def _exported(case: Case, rank: int, folder: Path) -> None:
    from weightcast.adapters.megatron.source import MegatronSource

    bridge, config = _provider(case, checkpoint_of(case, folder))
    chunks = _chunks(case, config)
    bridge.load_hf_weights(chunks)
    trained = _step(case, config, chunks)
    source = MegatronSource(trained, family=case.family, vocab_size=VOCABULARY)
    if case.overlap:
        _check_old_weights_are_refused(source, trained)
    _save_regions(case, rank, folder, source.describe())
    # The bridge exports the padding of the vocabulary too; a checkpoint ends before it.
    truth = {
        name: (tensor[:VOCABULARY] if name in ("model.embed_tokens.weight", "lm_head.weight") else tensor).clone()
        for name, tensor in bridge.export_hf_weights(chunks, cpu=True, show_progress=False)
    }
    if rank == 0:
        torch.save(truth, folder / f"{case}.truth")


def checkpoint_of(case: Case, folder: Path) -> Path:
    """Where the checkpoint that a case starts from lies."""
    return folder / f"{case.checkpoint}{'_mtp' if case.mtp else ''}"


def model_logits(case: Case, folder: Path) -> torch.Tensor:
    """What the Transformers model computes from the checkpoint of a case."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        checkpoint_of(case, folder), dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        return model.eval()(_tokens()).logits  # type: ignore[no-any-return]


def _save_regions(case: Case, rank: int, folder: Path, layout: RankLayout) -> None:
    torch.save((rows_of(layout), layout.notes), folder / f"{case}.{rank}")


def _step(case: Case, config: Any, chunks: list[Any]) -> list[Any]:
    """One step of Megatron's own optimizer on its own data-parallel wrappers, which are returned."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func

    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=True,
        overlap_grad_reduce=case.overlap,
        overlap_param_gather=case.overlap,
    )
    wrapped = [DistributedDataParallel(config, ddp, chunk) for chunk in chunks]
    config.finalize_model_grads_func = finalize_model_grads
    settings = OptimizerConfig(optimizer="adam", lr=0.01, params_dtype=torch.float32, use_distributed_optimizer=True)
    optimizer = get_megatron_optimizer(settings, wrapped, use_gloo_process_groups=False)
    tokens = _tokens()

    def forward(_: Any, model: Any) -> Any:
        loss = model(tokens, *_positions(tokens), labels=tokens.roll(-1, 1))
        return loss, lambda output: (output.mean(), {})

    get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=[None] * len(wrapped) if case.vp else None,
        model=wrapped if case.vp else wrapped[0],
        num_microbatches=4,
        seq_length=tokens.shape[1],
        micro_batch_size=tokens.shape[0],
        forward_only=False,
    )
    assert optimizer.step()[0]
    return wrapped


def _check_old_weights_are_refused(source: MegatronSource, trained: list[Any]) -> None:
    from weightcast.transfer.errors import DescribeError

    with pytest.raises(DescribeError, match=r"start_param_sync\(force_sync=True\)"):
        source.describe()
    for chunk in trained:
        chunk.start_param_sync(force_sync=True)


def _tokens() -> torch.Tensor:
    return torch.arange(32).view(2, 16) * 7 % VOCABULARY


def _positions(tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    length = tokens.shape[1]
    mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    return torch.arange(length).expand_as(tokens), mask


def _forward(case: Case, rank: int, folder: Path) -> None:
    """Fill the described regions with the checkpoint and nothing else, and run the model."""
    from safetensors import safe_open

    from weightcast.adapters.megatron.source import MegatronSource

    config = _provider(case, checkpoint_of(case, folder))[1]
    (model,) = _chunks(case, config)
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data.fill_(float("nan") if tensor.is_floating_point() else 0)
    layout = MegatronSource(model, family=case.family, vocab_size=VOCABULARY).describe()
    with safe_open(checkpoint_of(case, folder) / "model.safetensors", "pt") as checkpoint:
        for row in range(len(layout.table)):
            region = layout.table.region(row)
            box = tuple(slice(begin, begin + n) for begin, n in zip(region.offset, region.size, strict=True))
            layout.view(row).copy_(checkpoint.get_tensor(region.tensor)[box])
    _save_regions(case, rank, folder, layout)
    model.eval()
    with torch.no_grad():
        logits = model(_tokens(), *_positions(_tokens()), runtime_gather_output=True)
    if rank == 0:
        torch.save(logits[..., :VOCABULARY], folder / f"{case}.logits")
