"""usage: sglang_cpu_engine.py MODEL TP EP [MAP]

Prints the greedy tokens of a real SGLang Engine without a GPU, as JSON on the last line.
MAP is the JSON of one row of physical_to_logical_map, used for every layer. Run as a program, because the Engine starts
processes that import the main module again.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

PROMPTS = ([1, 2, 3, 4, 5], [7, 7, 9], [100, 3, 50, 2], [11, 12, 13, 14, 15, 16])
NEW_TOKENS = 8


def engine_arguments(model: str, tp: int, ep: int, row: list[int] | None) -> dict[str, Any]:
    """What SGLang 0.5.23 needs to run without a GPU. float32, so that tokens can be compared with transformers'."""
    config = json.loads((Path(model) / "config.json").read_text())
    placement: dict[str, Any] = {}
    if row is not None:
        rows = [row] * config["num_hidden_layers"]
        placement["init_expert_location"] = json.dumps({"physical_to_logical_map": rows})
        placement["ep_num_redundant_experts"] = len(row) - len(set(row))
    return {
        "model_path": model,
        "dtype": "float32",
        "device": "cpu",
        "tp_size": tp,
        "ep_size": ep,
        "skip_tokenizer_init": True,
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "disable_cuda_graph": True,
        "disable_radix_cache": True,
        "disable_overlap_schedule": True,
        "max_total_tokens": 2048,
        "max_running_requests": 4,
        "chunked_prefill_size": -1,
        "mem_fraction_static": 0.3,
        "log_level": "warning",
        **placement,
    }


def main(model: str, tp: str, ep: str, row: str = "null") -> None:
    import sglang

    engine = sglang.Engine(**engine_arguments(model, int(tp), int(ep), json.loads(row)))
    sampling = {"max_new_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}
    try:
        answers = [engine.generate(input_ids=prompt, sampling_params=sampling)["output_ids"] for prompt in PROMPTS]
    finally:
        engine.shutdown()
    print(json.dumps(answers), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
