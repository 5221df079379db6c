"""What the trainer ranks of test_source.py do: build a model, shard it, train a step, describe, and export the truth.

Each case returns (model, truth): the truth is what an unsharded copy writes with `save_pretrained`, or the tensors that
the same step gives without sharding. A rank saves its regions, rank 0 also the truth.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rebuild_support import rows_of
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from weightcast.adapters.fsdp.source import FsdpSource

Truth = dict[str, torch.Tensor] | None
OPTIONS: dict[str, dict[str, Any]] = {"lora_merged": {"lora": "merged"}, "lora_separate": {"lora": "separate"}}
"""What the source of a case is made with besides its model."""
Case = Callable[[int, int], tuple[nn.Module, Truth]]

SIZES: dict[str, Any] = {
    "vocab_size": 130,
    "hidden_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
}


def qwen3(*, tied: bool = False, intermediate_size: int = 98) -> Any:
    """A dense model; sizes that few world sizes divide."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(**SIZES, intermediate_size=intermediate_size, tie_word_embeddings=tied)
    return _built(Qwen3ForCausalLM, config)


def qwen3_moe(*, experts: int = 6) -> Any:
    """Every layer with fused experts of 24 rows a projection."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        **SIZES, num_experts=experts, num_experts_per_tok=2, moe_intermediate_size=24, tie_word_embeddings=False
    )
    return _built(Qwen3MoeForCausalLM, config)


def deepseek_v3() -> Any:
    """MLA, one dense layer, shared expert, and a persistent buffer that belongs into the checkpoint."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    sizes = {**SIZES, "num_key_value_heads": 4, "head_dim": 8}
    config = DeepseekV3Config(
        **sizes, intermediate_size=98, moe_intermediate_size=24, n_routed_experts=6, num_experts_per_tok=2, n_group=1,
        topk_group=1, n_shared_experts=1, first_k_dense_replace=1, q_lora_rank=20, kv_lora_rank=12, qk_nope_head_dim=16,
        qk_rope_head_dim=8, v_head_dim=16, tie_word_embeddings=False,
    )  # fmt: skip
    model = _built(DeepseekV3ForCausalLM, config)
    model.model.layers[1].mlp.gate.e_score_correction_bias.copy_(torch.arange(6.0))
    return model


def _built(kind: Any, config: Any) -> Any:
    torch.manual_seed(7)
    return kind(config)


def step(model: nn.Module) -> None:
    """One forward, backward and optimizer step on tokens that all ranks share."""
    tokens = torch.arange(24).view(2, 12) * 5 % 130
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def exported(model: nn.Module, copy: Any) -> Truth:
    """What `save_pretrained` of an unsharded copy writes when it has the sharded model's full tensors; on rank 0."""
    from safetensors.torch import load_file

    full = {
        name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()
        for name, tensor in model.state_dict().items()
    }
    if dist.get_rank():
        return None
    copy.load_state_dict({name.replace("_checkpoint_wrapped_module.", ""): full[name] for name in full})
    with tempfile.TemporaryDirectory() as folder:
        copy.save_pretrained(folder)
        return load_file(Path(folder) / "model.safetensors")


def shard_all(model: Any, mesh: DeviceMesh, **options: Any) -> None:
    """FSDP2 as trainers apply it: each layer a group, the rest in the root group."""
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)


def _mesh(*shape: int) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[: len(shape)])


def fsdp_moe(rank: int, world: int) -> tuple[nn.Module, Truth]:
    """Rows and experts in ceil chunks; with 4 ranks the last has no expert."""
    model = qwen3_moe()
    shard_all(model, _mesh(world))
    step(model)
    return model, exported(model, qwen3_moe())


def fsdp_moe_4_experts(rank: int, world: int) -> tuple[nn.Module, Truth]:
    """On 3 ranks: 2, 2 and 0 experts."""
    model = qwen3_moe(experts=4)
    shard_all(model, _mesh(world))
    step(model)
    return model, exported(model, qwen3_moe(experts=4))


def fsdp_fused_rows(rank: int, world: int) -> tuple[nn.Module, Truth]:
    """Fused gate/up split by rows, so that on 3 ranks one holds gate and up rows, and down by columns."""

    def placement(parameter: nn.Parameter) -> Shard:
        if parameter.dim() == 3:
            return Shard(1) if parameter.shape[1] == 48 else Shard(2)
        return Shard(0)

    model = qwen3_moe()
    shard_all(model, _mesh(world), shard_placement_fn=placement)
    step(model)
    return model, exported(model, qwen3_moe())


def hsdp_moe(rank: int, world: int) -> tuple[nn.Module, Truth]:
    """Replicated over the first mesh dimension, sharded over the second."""
    model = qwen3_moe()
    shard_all(model, _mesh(2, world // 2))
    step(model)
    return model, exported(model, qwen3_moe())


def tp_fsdp_dense(rank: int, world: int) -> tuple[nn.Module, Truth]:
    """Tensor parallel inside FSDP: `_StridedShard` rows where column-wise, a block where row-wise; 49 rows a rank."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = _mesh(world // 2, 2)
    model = qwen3()
    columns, rows = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("self_attn.o_proj", "mlp.down_proj")
    for layer in model.model.layers:
        # Each TP rank would see only its own heads' gradient of these and train them apart.
        layer.self_attn.q_norm.requires_grad_(False)
        layer.self_attn.k_norm.requires_grad_(False)
        plan: dict[str, Any] = {name: ColwiseParallel() for name in (*columns, "mlp.gate_proj", "mlp.up_proj")}
        parallelize_module(layer, mesh["tp"], plan | {name: RowwiseParallel() for name in rows})
    parallelize_module(model, mesh["tp"], {"lm_head": ColwiseParallel(output_layouts=Replicate())})
    shard_all(model, mesh["dp"])
    step(model)
    assert any(isinstance(p, _StridedShard) for p in model.lm_head.weight.placements)
    return model, exported(model, qwen3())


def ep_fsdp_moe(rank: int, world: int) -> tuple[nn.Module, Truth]:
    """Experts over an EP mesh and then FSDP, everything else FSDP over all ranks: two meshes in one model."""
    ep = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp_expert", "ep"))
    model = qwen3_moe()
    for layer in model.model.layers:
        experts = layer.mlp.experts
        for name, parameter in list(experts.named_parameters()):
            sharded = distribute_tensor(parameter.detach(), ep["ep"], [Shard(0)])
            setattr(experts, name, nn.Parameter(sharded))
        fully_shard(experts, mesh=ep["dp_expert"])
    shard_all(model, _mesh(world))
    _hand_step(model)
    return model, exported(model, qwen3_moe())


def _hand_step(model: nn.Module) -> None:
    """An optimizer step with gradients made by hand, for layouts that this model has no forward for."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone().mul_(0.5).add_(1.0)
    optimizer.step()
    optimizer.zero_grad()


def tied_dense(rank: int, world: int) -> tuple[nn.Module, Truth]:
    """Tied embeddings, activation checkpointing and torch.compile wrappers in the names."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = qwen3(tied=True)
    for i, layer in enumerate(model.model.layers):
        model.model.layers[i] = checkpoint_wrapper(layer)
    shard_all(model, _mesh(world))
    step(model)
    truth = exported(model, qwen3(tied=True))
    return torch.compile(model, backend="eager"), truth  # type: ignore[return-value]


def deepseek_after_forward(rank: int, world: int) -> tuple[nn.Module, Truth]:
    """Described right after a forward without grad, which leaves the root group unsharded; bfloat16 in the forward."""
    model = deepseek_v3()
    shard_all(model, _mesh(world), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    step(model)
    truth = exported(model, deepseek_v3())
    with torch.no_grad():
        model(input_ids=torch.arange(8).view(1, 8))
    assert not isinstance(model.lm_head.weight, DTensor), "the forward was to leave the root group unsharded"
    return model, truth


def offloaded(rank: int, world: int) -> tuple[nn.Module, Truth]:
    """CPU offload, reduced precision, and layers that are compiled one by one, which shows in their names."""
    from torch.distributed.fsdp import CPUOffloadPolicy

    model = qwen3_moe()
    policy = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16), "offload_policy": CPUOffloadPolicy(pin_memory=False)}
    shard_all(model, _mesh(world), **policy)
    step(model)
    truth = exported(model, qwen3_moe())
    for i, layer in enumerate(model.model.layers):
        model.model.layers[i] = torch.compile(layer, backend="eager")
    assert any("_orig_mod" in name for name, _ in model.named_parameters())
    return model, truth


def data_parallel(rank: int, world: int) -> tuple[nn.Module, Truth]:
    """DDP: every rank holds everything."""
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(qwen3_moe())
    step(model)
    return model, exported(model.module, qwen3_moe())


def _with_lora() -> Any:
    """Adapters on two kinds of layers, random where PEFT starts with zeros."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(qwen3_moe(), LoraConfig(r=4, target_modules=["q_proj", "o_proj"], init_lora_weights=False))
    torch.manual_seed(9)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.1)
    return model


def _lora_truth(model: Any) -> dict[str, Any]:
    """On rank 0: the weights below the adapters as `save_pretrained` writes them, the adapters as PEFT saves them."""
    from peft import get_peft_model_state_dict
    from safetensors.torch import load_file

    full = {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}
    if dist.get_rank():
        return {}
    copy = _with_lora()
    copy.load_state_dict(full)
    adapters = {name: tensor.clone() for name, tensor in get_peft_model_state_dict(copy).items()}
    with tempfile.TemporaryDirectory() as folder:
        copy.unload().save_pretrained(folder)
        return load_file(Path(folder) / "model.safetensors") | {f"adapter {name}": adapters[name] for name in adapters}


def lora_merged(rank: int, world: int) -> tuple[nn.Module, Truth]:
    """The weights after `merge_adapter()`, which works in place and on DTensors."""
    model = _with_lora()
    shard_all(model.get_base_model(), _mesh(world))
    step(model)
    before = _lora_truth(model)
    model.merge_adapter()
    after = {name: tensor for name, tensor in _lora_truth(model).items() if not name.startswith("adapter ")}
    moved = [name for name in after if not torch.equal(before[name], after[name])]
    assert len(moved) == (0 if rank else 4), moved
    return model, after


def lora_separate(rank: int, world: int) -> tuple[nn.Module, Truth]:
    """Weights without adapters, and those under PEFT's names; one layer inside a wrapper for checkpointing."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = _with_lora()
    inner = model.get_base_model()
    shard_all(inner, _mesh(world))
    step(model)
    truth = _lora_truth(model)
    inner.model.layers[1] = checkpoint_wrapper(inner.model.layers[1])
    return model, {name.removeprefix("adapter "): tensor for name, tensor in truth.items()}


def ignored_and_plain(rank: int, world: int) -> tuple[nn.Module, Truth]:
    """Parameters that FSDP ignores are whole on every rank; mixed dtypes stay what they are in memory."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3, dtype=torch.bfloat16), nn.BatchNorm1d(3))
    truth = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    fully_shard(model, mesh=_mesh(world), ignored_params={model[0].weight})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    return model, {
        name: t if name.startswith("2.run") or name.endswith("tracked") else t + 1 for name, t in truth.items()
    }


MESH_LAYOUTS: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[Placement, ...]]] = {
    "rows_0_1_4": ((12, 3), (2, 2), (_StridedShard(0, split_factor=3), Shard(0))),
    "strided": ((8, 3), (2, 2), (_StridedShard(0, split_factor=2), Shard(0))),
    "strided_uneven": ((7, 3), (2, 2), (_StridedShard(0, split_factor=2), Shard(0))),
    "strided_alone": ((9, 2), (4,), (_StridedShard(0, split_factor=2),)),
    "strided_columns": ((3, 10), (2, 2), (Replicate(), _StridedShard(1, split_factor=3))),
    "block": ((5, 7), (2, 2), (Shard(0), Shard(1))),
    "twice": ((7, 2), (2, 2), (Shard(0), Shard(0))),
    "twice_columns": ((2, 3, 6), (2, 2), (Shard(1), Shard(0))),
    "one_row": ((1, 4), (4,), (Shard(0),)),
    "replicated": ((3,), (2, 2), (Replicate(), Replicate())),
}
"""name -> global shape, mesh shape, placements. For 4 ranks."""


def mesh_layouts(rank: int, world: int) -> tuple[nn.Module, Truth]:
    """Placements one by one, after a step; the truth is the same step without sharding; full_tensor must agree."""
    model, truth = nn.Module(), {}
    for name, (shape, mesh, placements) in MESH_LAYOUTS.items():
        whole = torch.arange(1.0, 1.0 + torch.Size(shape).numel()).view(shape)
        sharded = distribute_tensor(whole, _mesh(*mesh), placements, src_data_rank=None)
        model.register_parameter(name, nn.Parameter(sharded))
        truth[name] = whole - 0.1 * (whole * 0.5 + 1.0)
    half = DeviceMesh("cpu", [1, 3])
    outside = distribute_tensor(torch.arange(5.0), half, [Shard(0)], src_data_rank=None)
    model.register_buffer("outside", outside)
    truth["outside"] = torch.arange(5.0)
    _hand_step(model)
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        if name == "rows_0_1_4":
            continue  # torch 2.13 cannot gather this layout again: full_tensor raises
        assert torch.equal(parameter.full_tensor(), truth[name]), name
    return model, truth


def tp_fsdp_uneven(rank: int, world: int) -> tuple[nn.Module, Truth]:
    """7 rows over dp 3 x tp 2: DTensor's own reading of these placements is wrong, rank 4 would hold row 6."""
    mesh = _mesh(3, 2)
    whole = torch.arange(21.0).view(7, 3)
    model = nn.Module()
    model.w = nn.Parameter(distribute_tensor(whole, mesh["tp"], [Shard(0)], src_data_rank=None))
    fully_shard(model, mesh=mesh["dp"])
    with torch.no_grad():
        model.w.add_(1)
    return model, {"w": whole + 1}


CASES: dict[int, tuple[Case, ...]] = {
    2: (tied_dense, deepseek_after_forward, ignored_and_plain, data_parallel, offloaded, lora_merged, lora_separate),
    3: (fsdp_moe_4_experts, fsdp_fused_rows),
    4: (fsdp_moe, hsdp_moe, tp_fsdp_dense, ep_fsdp_moe, mesh_layouts),
    6: (tp_fsdp_uneven,),
}


def run_cases(rank: int, world: int, port: int, folder: str) -> None:
    """Every case of this world size; what each rank describes goes to `folder`/CASE.RANK, the truth to CASE.truth."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    try:
        for case in CASES[world]:
            model, truth = case(rank, world)
            source = FsdpSource(model, **OPTIONS.get(case.__name__, {}))
            layout = source.describe()
            assert source.describe().table.fingerprint == layout.table.fingerprint
            torch.save(rows_of(layout), f"{folder}/{case.__name__}.{rank}")
            if rank == 0:
                torch.save(truth, f"{folder}/{case.__name__}.truth")
    finally:
        dist.destroy_process_group()
