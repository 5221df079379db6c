"""Models with PEFT adapters, against what PEFT and `save_pretrained` write; sharded ones are in test_source.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fsdp_workers import qwen3_moe

from weightcast.adapters.fsdp.source import FsdpSource
from weightcast.transfer.errors import DescribeError


def adapted(model: Any = None, **options: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    options.setdefault("target_modules", ["q_proj"])
    return get_peft_model(model or qwen3_moe(), LoraConfig(r=4, init_lora_weights=False, **options))


def written(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    """What PEFT saves of the adapter, and `save_pretrained` of the model without it."""
    from peft import get_peft_model_state_dict
    from safetensors.torch import load_file

    adapter = {
        name: tensor.clone() for name, tensor in get_peft_model_state_dict(model, save_embedding_layers=False).items()
    }
    model.unload().save_pretrained(folder)
    return adapter | load_file(folder / "model.safetensors")


def described(source: FsdpSource) -> dict[str, torch.Tensor]:
    """The whole tensors that a source of one rank describes, joined from its boxes."""
    layout = source.describe()
    found = {}
    for name, spec in layout.table.tensors.specs().items():
        found[name] = torch.full(spec.shape, float("nan"))
    for row in range(len(layout.table)):
        name, offset, size, _ = layout.table.region(row)
        box = tuple(slice(begin, begin + count) for begin, count in zip(offset, size, strict=True))
        found[name][box] = layout.view(row)
    return found


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"target_modules": ["embed_tokens", "lm_head", "down_proj"]},
        {"target_modules": ["v_proj"], "use_dora": True},
        {"target_modules": ["o_proj"], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]},
    ],
    ids=lambda options: " ".join(options) or "plain",
)
def test_weights_and_adapters_are_named_as_they_are_saved(options: dict[str, Any], tmp_path: Path) -> None:
    model = adapted(**options)
    found = described(FsdpSource(model, lora="separate"))
    expected = written(model, tmp_path)
    assert sorted(found.keys() ^ expected.keys()) == []
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


def test_merged_weights(tmp_path: Path) -> None:
    model = adapted()
    model.merge_adapter()
    source = FsdpSource(model, lora="merged")
    found = described(source)
    left_out = source.describe().notes.left_out
    expected = written(model, tmp_path)
    assert found.keys() == {name for name in expected if "lora_" not in name}
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []
    assert set(left_out) == {(name, "merged into the weights") for name in expected if "lora_" in name}


def test_the_model_inside_of_peft_will_do() -> None:
    model = adapted()
    inside = FsdpSource(model.get_base_model(), lora="separate").describe().table
    assert inside.fingerprint == FsdpSource(model, lora="separate").describe().table.fingerprint


def test_a_model_without_adapters_is_the_same_in_every_mode() -> None:
    model = qwen3_moe()
    prints = {FsdpSource(model, lora=lora).describe().table.fingerprint for lora in (None, "merged", "separate")}
    assert len(prints) == 1


def _merge(model: Any) -> None:
    model.merge_adapter()


def _add_another(model: Any) -> None:
    from peft import LoraConfig

    model.add_adapter("other", LoraConfig(r=4, target_modules=["q_proj"]))


@pytest.mark.parametrize(
    ("change", "lora", "message"),
    [
        (None, None, r"'model.layers.0.self_attn.q_proj' has the adapters \['default'\]; say what an engine gets"),
        (None, "merged", r"q_proj' has the active adapters \['default'\] and merged ones \[\]; call merge_adapter\(\)"),
        (_merge, "separate", r"q_proj' .* of which \['default'\] are merged; lora='separate' needs one that is not"),
        (_add_another, "separate", r"q_proj' has the adapters \['default', 'other'\]"),
    ],
)
def test_what_contradicts_the_mode_is_refused(change: Any, lora: Any, message: str) -> None:
    model = adapted()
    if change is not None:
        change(model)
    with pytest.raises(DescribeError, match=message):
        FsdpSource(model, lora=lora).describe()


@pytest.mark.parametrize("options", [{"modules_to_save": ["lm_head"]}, {"trainable_token_indices": [1, 2]}])
def test_copies_beside_the_original_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(DescribeError, match=r"is trained as a copy beside the original .*; train it in place"):
        FsdpSource(adapted(**options), lora="separate").describe()
