"""A source for Megatron-Core models: tensor, pipeline (with virtual stages), expert and data parallelism, and any mix.

Megatron itself states where a rank's memory lies in the global tensors: `sharded_state_dict()`, made for distributed
checkpoints, has keys, global shapes and offsets, without communication. `megatron.names` has the checkpoint names, and
`megatron.rows` takes fused rows apart. Each region is a view of the live parameter.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from weightcast.adapters.megatron.names import FAMILIES, MTP_SHARED, Rule, Table
from weightcast.adapters.megatron.rows import FusedRows, Fusion, Sizes, fused_rows, overlap
from weightcast.adapters.megatron.shards import LiveMemory, Shard, refused, shards, unwrapped
from weightcast.transfer.errors import DescribeError
from weightcast.transfer.installed import check_installed
from weightcast.transfer.layout.memory import LayoutBuilder, RankLayout
from weightcast.transfer.layout.tables import LayoutNotes

if TYPE_CHECKING:
    from torch import nn

__all__ = ["MegatronSource"]

_LAYER = re.compile(r"^(decoder|mtp)\.layers\.(\d+)\.")


class MegatronSource:
    """One trainer rank of a Megatron-Core `GPTModel`.

    `model` is the model, or the list of model chunks that a rank with virtual pipeline stages has; wrappers for mixed
    precision and data parallelism may be around them. `family` is the `model_type` of the Transformers config (one of
    `megatron.names.FAMILIES`), or a table of one's own. `vocab_size` is the checkpoint's: rows above it are padding
    and are never sent.

    >>> source = MegatronSource(model, family="qwen3_moe", vocab_size=151936)
    >>> layout = source.describe()
    """

    def __init__(self, model: nn.Module | Sequence[nn.Module], *, family: str | Table, vocab_size: int) -> None:
        check_installed("Megatron-Core", "megatron", "megatron.core")
        if isinstance(family, str) and family not in FAMILIES:
            raise DescribeError(f"family {family!r} has no table; known are {', '.join(sorted(FAMILIES))}")
        self._family = family if isinstance(family, str) else "of your own"
        self._table = FAMILIES[family] if isinstance(family, str) else family
        self._vocab_size = vocab_size
        self._wrapped = tuple(model) if isinstance(model, Sequence) else (model,)

    def describe(self) -> RankLayout:
        """Every region that this rank holds of every parameter and persistent buffer, in all of its model chunks.

        Raises DescribeError naming parameter and rank. Refused are parameters without a name in the family's table,
        with a shape that contradicts the config, or not in plain memory. So is one that `sharded_state_dict()` does not
        account for.
        """
        import torch

        builder = LayoutBuilder()
        parameter_bytes = padding = 0
        left_out: dict[str, str] = {}
        for wrapped in self._wrapped:
            chunk = unwrapped(wrapped)
            memory = LiveMemory(chunk)
            with torch.no_grad():
                for shard in shards(chunk):
                    memory.claim(shard)
                    padding += self._add(builder, chunk.config, shard)
            parameter_bytes += memory.finish()
            left_out |= _shared_with_mtp(chunk)
        notes = LayoutNotes(parameter_bytes=parameter_bytes, padding_bytes=padding, left_out=tuple(left_out.items()))
        return builder.build(notes=notes)

    def _add(self, builder: LayoutBuilder, config: Any, shard: Shard) -> int:
        """The regions of one shard; returns its bytes of padding."""
        rule, layer = self._rule(shard, config)
        if rule.fusion is Fusion.WHOLE:
            builder.add(_rendered(rule, 0, layer, shard.expert), shard.shape, shard.offset, shard.data)
            return 0
        rows, first_row = shard.data.shape[0], shard.offset[0]
        row_count = 0
        for run in overlap(self._runs(rule, shard, config), first_row, rows):
            name = _rendered(rule, run.part, layer, shard.expert)
            view = shard.data.narrow(0, run.start - first_row, run.length)
            builder.add(name, (run.total, *shard.shape[1:]), (run.offset, *shard.offset[1:]), view)
            row_count += run.length
        return (rows - row_count) * shard.data[0:1].nbytes if row_count < rows else 0

    def _rule(self, shard: Shard, config: Any) -> tuple[Rule, int]:
        """The rule of a shard, and the checkpoint's number of its layer."""
        layer, key = 0, shard.key
        match = _LAYER.match(key)
        if match:
            # In a checkpoint the numbers of multi-token-prediction layers follow the decoder's.
            layer = int(match[2]) + (config.num_layers if match[1] == "mtp" else 0)
            key = f"{match[1]}.layers.{{layer}}.{key[match.end() :]}"
        rule = self._table.get(key)
        if rule is None:
            raise refused(
                shard.name, f"family {self._family!r} has no checkpoint name for {key!r}; add it to the table"
            )
        if (rule.fusion is Fusion.GATE_UP) is not shard.gated:
            kind, expected = ("gated", "not") if shard.gated else ("not gated", "gated")
            raise refused(shard.name, f"{key!r} is {kind} in this model and {expected} in family {self._family!r}")
        return rule, layer

    def _runs(self, rule: Rule, shard: Shard, config: Any) -> tuple[FusedRows, ...]:
        sizes = Sizes(config.num_attention_heads, config.num_query_groups, config.kv_channels, self._vocab_size)
        try:
            return _fused_rows(rule.fusion, shard.shape[0], sizes)
        except ValueError as error:
            raise refused(
                shard.name, f"{shard.key!r} has {shard.shape[0]} rows on all ranks, expected {error}"
            ) from None


_fused_rows = cache(fused_rows)


def _rendered(rule: Rule, part: int, layer: int, expert: int | None) -> str:
    return rule.name.format(layer=layer, expert=expert, part=rule.parts[part])


def _shared_with_mtp(chunk: Any) -> dict[str, str]:
    """Checkpoint tensors of this chunk's multi-token-prediction layers that Megatron shares with the main model."""
    layers = getattr(getattr(chunk, "mtp", None), "layers", ())
    return {
        f"model.layers.{chunk.config.num_layers + layer.layer_number - 1}.{name}": f"the same tensor as {main}"
        for layer in layers
        for name, main in MTP_SHARED.items()
    }
