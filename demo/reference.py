"""The Transformers model that the trainer's weights are copied into; its answers are the demo's expectation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from weightcast.demo.model import quiet

__all__ = ["ReferenceModel"]


class ReferenceModel:
    """A model of its own in one process, so that generation cannot disturb the sharded one."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        quiet()
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def loss(self, rows: torch.Tensor) -> float:
        """Mean loss over the next tokens of rows of token ids (rows, length)."""
        with torch.no_grad():
            return float(self.model(input_ids=rows, labels=rows).loss)

    def generate(self, prompts: list[list[int]], count: int) -> list[list[int]]:
        """The `count` greedy tokens after each prompt."""
        answers = []
        for prompt in prompts:
            ids = torch.tensor([prompt])
            out = self.model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count, do_sample=False
            )
            answers.append(out[0, len(prompt) :].tolist())
        return answers

    def logprobs(self, prompts: list[list[int]], answers: list[list[int]]) -> list[list[float]]:
        """Log-probability of each token of each answer, after its prompt."""
        rows = []
        with torch.no_grad():
            for prompt, answer in zip(prompts, answers, strict=True):
                logits = self.model(input_ids=torch.tensor([prompt + answer])).logits[0]
                scores = torch.log_softmax(logits[len(prompt) - 1 : -1].float(), dim=-1)
                rows.append(scores.gather(1, torch.tensor(answer)[:, None])[:, 0].tolist())
        return rows
