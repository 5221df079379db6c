"""The demo's model, text and prompts: small, made on the spot, and such that wrong experts show in the output."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from weightcast.transfer.errors import InputError

__all__ = ["PARTS", "PROMPTS", "make_model", "prompt_ids", "quiet", "text_batches"]

EXPERT_SCALE = 12.0
"""Factor of expert weights over the default initialisation.

Without it they hardly move the output of a tiny random model, and a wrong expert would go unseen.
"""

TEXT = """\
A river does not ask the stones which way to go. It leans on each of them in turn, and the ones that give are moved, and
the ones that stay are rounded, and after a thousand years nobody can say which of the two has shaped the other. The old
miller used to measure the spring by the sound of the wheel: slow in March, when the ice still held the upper meadows,
quick and even in April, and so loud in the last week of May that his children slept in the loft on the far side of the
house. He kept a book in which he wrote three things for every day: the height of the water at the post, the number of
sacks, and one word. The word was mostly the weather. Sometimes it was a name. On the day the bridge went down it was
only a line drawn across the page.
"""

PARTS = 4
"""Number of batches that the text is cut into."""

PROMPTS = (
    "A river does not",
    "The old miller used",
    "On the day the bridge",
    "He kept a book",
    "slow in March",
    "the number of sacks",
    "Sometimes it was",
    "after a thousand years",
)


def quiet() -> None:
    """Turns off the progress bars of Transformers: one a process and model, among which ours would be lost."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def make_model(folder: Path) -> None:
    """Writes a random Qwen3-MoE checkpoint (2 layers, 4 experts, byte vocabulary) to `folder`."""
    from transformers import AutoConfig, AutoModelForCausalLM

    quiet()
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        decoder_sparse_step=1,
        norm_topk_prob=True,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        architectures=["Qwen3MoeForCausalLM"],
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".experts." in name:
                parameter.mul_(EXPERT_SCALE)
    model.save_pretrained(folder)


def _encode(folder: Path, texts: list[str], vocabulary: int) -> list[list[int]]:
    """Token ids by the checkpoint's tokenizer, or bytes where it has none."""
    if not (folder / "tokenizer_config.json").exists():
        if vocabulary < 256:
            raise InputError(f"{folder} has no tokenizer and a vocabulary of {vocabulary}, too small for bytes")
        return [list(text.encode()) for text in texts]
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    return [list(tokenizer(text)["input_ids"]) for text in texts]


def prompt_ids(folder: Path, vocabulary: int) -> list[list[int]]:
    """Token ids of each prompt, in the order of PROMPTS."""
    return _encode(folder, list(PROMPTS), vocabulary)


def text_batches(folder: Path, vocabulary: int, length: int = 48) -> list[list[list[int]]]:
    """The text as PARTS batches of rows of token ids, `length` or fewer each, all alike.

    A version is trained on one of the batches, so that each differs.
    """
    ids = _encode(folder, [TEXT], vocabulary)[0]
    length = min(length, max(2, len(ids) // (2 * PARTS)))
    rows = [ids[i : i + length] for i in range(0, len(ids) - length + 1, length // 2)]
    size = len(rows) // PARTS
    return [rows[i * size : (i + 1) * size] for i in range(PARTS)]
