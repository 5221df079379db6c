"""Of which families of Transformers the checkpoint names can be followed; each is built on the meta device.

    python benchmarks/transformers_families.py

Takes every causal and image-text model from its default config, with two layers and at most eight experts where the
config allows; two to four minutes. Families that cannot be built so are counted apart.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto import modeling_auto

from weightcast.adapters.fsdp.source import FsdpSource
from weightcast.transfer.errors import DescribeError

SMALLER = {
    "num_hidden_layers": 2, "num_layers": 2, "n_layer": 2, "n_layers": 2, "encoder_layers": 2, "decoder_layers": 2,
    "depth": 2, "num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8, "moe_num_experts": 8,
}  # fmt: skip


def shrink(config: Any) -> None:
    for name, most in SMALLER.items():
        if isinstance(getattr(config, name, None), int):
            setattr(config, name, min(getattr(config, name), most))
    for name in ("layer_types", "mlp_layer_types"):
        if isinstance(getattr(config, name, None), list):
            setattr(config, name, getattr(config, name)[:2])
    for name in ("text_config", "vision_config", "audio_config"):
        if getattr(config, name, None) is not None:
            shrink(getattr(config, name))


def build(family: str, auto: Any) -> Any:
    """The model on the meta device, small where that works; None where the default config makes none."""
    for small in (True, False):
        try:
            config = AutoConfig.for_model(family)
            if small:
                shrink(config)
            with torch.device("meta"):
                return auto.from_config(config)
        except Exception:  # whatever a config of that size lacks
            continue
    return None


def main() -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    families = dict.fromkeys(modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, AutoModelForImageTextToText)
    families |= dict.fromkeys(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, AutoModelForCausalLM)
    followed, refused, not_built = [], {}, []
    for family, auto in families.items():
        if (model := build(family, auto)) is None:
            not_built.append(family)
            continue
        try:
            FsdpSource(model).describe()
            followed.append(family)
        except DescribeError as error:
            refused[family] = str(error)
    print(f"transformers {transformers.__version__}: {len(followed)} followed, {len(refused)} refused")
    print(f"{len(not_built)} not built from their default config: {', '.join(not_built)}")
    for family, why in refused.items():
        print(f"{family}: {why[:200]}")


if __name__ == "__main__":
    main()
