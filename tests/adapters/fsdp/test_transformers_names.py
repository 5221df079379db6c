"""Names, shapes and cuts against what `save_pretrained` writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from weightcast.adapters.fsdp.source import FsdpSource
from weightcast.adapters.fsdp.transformers_names import NEW_DIM, Part, transformers_names, unchanged_names
from weightcast.transfer.errors import DescribeError

SMALL: dict[str, Any] = {
    "vocab_size": 130, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
LATENT: dict[str, Any] = {
    **EXPERTS, "n_routed_experts": 4, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
}  # fmt: skip
GROUPED: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 16}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen3 tied": ("Qwen3", {**GROUPED, "tie_word_embeddings": True}),
    "qwen3 untied": ("Qwen3", {**GROUPED, "tie_word_embeddings": False}),
    "qwen3 moe": ("Qwen3Moe", {**GROUPED, **EXPERTS, "num_experts": 4}),
    "qwen2 moe": ("Qwen2Moe", {**EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 32}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_key_value_heads": 2}),
    "deepseek v3": ("DeepseekV3", LATENT),
    "glm4 moe": ("Glm4Moe", {**GROUPED, **EXPERTS, "n_routed_experts": 4, "first_k_dense_replace": 1}),
    "gpt oss, fused in the checkpoint": ("GptOss", {**GROUPED, "num_local_experts": 4}),
    "granite moe, transposed": ("GraniteMoe", {"num_local_experts": 4, "num_key_value_heads": 2}),
    "phi moe": ("Phimoe", {"num_local_experts": 4, "num_key_value_heads": 2}),
}


def _build(kind: str, **config: Any) -> Any:
    import transformers

    made = getattr(transformers, f"{kind}Config")(**{**SMALL, **config})
    torch.manual_seed(1)
    return getattr(transformers, f"{kind}ForCausalLM")(made)


def _written(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("family", FAMILIES)
def test_described_is_what_save_pretrained_writes(family: str, tmp_path: Path) -> None:
    kind, config = FAMILIES[family]
    model = _build(kind, **config)
    _assert_same(model, tmp_path)


def _assert_same(model: Any, folder: Path) -> None:
    written = _written(model, folder)
    layout = FsdpSource(model).describe()
    specs = layout.table.tensors.specs()
    assert {name: spec.shape for name, spec in specs.items()} == {n: tuple(t.shape) for n, t in written.items()}
    for row in range(len(layout.table)):
        name, offset, size, _ = layout.table.region(row)
        box = tuple(slice(begin, begin + count) for begin, count in zip(offset, size, strict=True))
        assert torch.equal(layout.view(row), written[name][box]), layout.table.region(row)
    assert int(layout.table.nbytes.sum()) == sum(t.nbytes for t in written.values()) == layout.notes.parameter_bytes


def test_the_parts_of_fused_experts() -> None:
    model = _build("Qwen3Moe", **GROUPED, **EXPERTS, num_experts=4)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    parts = transformers_names(model)(shapes)
    prefix = "model.layers.1.mlp.experts"
    assert parts[f"{prefix}.gate_up_proj"][5] == Part(
        f"{prefix}.1.up_proj.weight", (32, 64), (0, 0), (1, 32, 0), (1, 32, 64), (1, 2)
    )
    assert parts[f"{prefix}.down_proj"][3] == Part(
        f"{prefix}.3.down_proj.weight", (64, 32), (0, 0), (3, 0, 0), (1, 64, 32), (1, 2)
    )
    assert parts["model.norm.weight"] == (Part.whole("model.norm.weight", (64,)),)


def _converted(*conversions: Any) -> Any:
    """A small Qwen3 as if loaded from a checkpoint with these conversions."""
    model = _build("Qwen3", num_key_value_heads=4, head_dim=16)
    model._weight_conversions = list(conversions)
    return model


def test_a_tensor_joined_from_several_parameters(tmp_path: Path) -> None:
    from transformers.core_model_loading import Chunk, WeightConverter

    names = [f"self_attn.{x}_proj.weight" for x in "qkv"]
    model = _converted(WeightConverter(["self_attn.qkv.weight"], names, [Chunk(dim=0)]))
    _assert_same(model, tmp_path)
    parts = transformers_names(model)({n: tuple(p.shape) for n, p in model.named_parameters()})
    assert parts["model.layers.0.self_attn.k_proj.weight"][0] == Part(
        "model.layers.0.self_attn.qkv.weight", (192, 64), (64, 0), (0, 0), (64, 64), (0, 1)
    )


def test_a_transposed_parameter(tmp_path: Path) -> None:
    from transformers.core_model_loading import Transpose, WeightConverter

    _assert_same(_converted(WeightConverter("mlp.down.weight", "mlp.down_proj.weight", [Transpose(0, 1)])), tmp_path)


def test_a_conversion_that_permutes_is_refused_by_name() -> None:
    from transformers.core_model_loading import Interleave, WeightConverter

    model = _converted(WeightConverter("mlp.down.weight", "mlp.down_proj.weight", [Interleave(dim=0)]))
    with pytest.raises(DescribeError, match=r"Qwen3ForCausalLM cannot be followed .* pass names="):
        FsdpSource(model).describe()


def test_a_conversion_that_computes_is_refused_by_name() -> None:
    from transformers.core_model_loading import ConversionOps, WeightConverter

    class Halve(ConversionOps):
        def convert(self, input_dict: Any, source_patterns: Any, target_patterns: Any, **kwargs: Any) -> Any:
            return {target_patterns[0]: next(iter(input_dict.values()))[0] / 2}

        @property
        def reverse_op(self) -> Any:
            return self

    model = _converted(WeightConverter("mlp.down.weight", "mlp.down_proj.weight", [Halve()]))
    with pytest.raises(DescribeError, match=r"'model.layers.0.mlp.down.weight' \(64, 96\) is not a box of a parameter"):
        FsdpSource(model).describe()


def test_two_parameters_under_one_name_are_refused() -> None:
    from transformers.core_model_loading import WeightRenaming

    model = _converted(WeightRenaming("post_attention_layernorm", "input_layernorm"))
    with pytest.raises(DescribeError, match=r"parameter 'model.layers.0.*layernorm.weight' \(64,\) is in no "):
        FsdpSource(model).describe()


def test_other_modules_keep_their_names() -> None:
    assert unchanged_names({"a.b": (2, 3)}) == {"a.b": (Part("a.b", (2, 3), (0, 0), (0, 0), (2, 3), (0, 1)),)}
    assert NEW_DIM == -1
