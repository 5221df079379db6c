"""The Megatron source against Megatron-Bridge's export and Transformers' forward pass.

Every logical tensor is rebuilt from the regions of all ranks, byte for byte; ranks are real processes with Gloo.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_meta import EXPERTS, TINY, grouped_and_sequential, leave_mesh, meta_model
from megatron_workers import CASES, Case, checkpoint_of, model_logits, run_cases
from rebuild_support import Rows, count_calls, faults
from spawn_support import run_ranks
from torch import nn

from weightcast.adapters.megatron.source import MegatronSource
from weightcast.transfer.errors import DescribeError
from weightcast.transfer.layout.tables import Region

pytestmark = [pytest.mark.megatron, pytest.mark.slow]

WORLD = 4


@pytest.fixture(scope="session")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs all cases that were selected in one set of processes: most of the time is theirs to start."""
    from megatron_models import save_checkpoint

    calls = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    cases = [call["case"] for call in calls if isinstance(call.get("case"), Case)]
    folder = tmp_path_factory.mktemp("megatron")
    for path in {checkpoint_of(case, folder) for case in cases}:
        save_checkpoint(path.name, path)
    run_ranks(run_cases, WORLD, str(folder), [str(case) for case in cases], timeout=540)
    return folder


def _regions(case: Case, folder: Path) -> list[Rows]:
    return [torch.load(folder / f"{case}.{rank}", weights_only=False)[0] for rank in range(WORLD)]


def _checkpoint(case: Case, folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(checkpoint_of(case, folder) / "model.safetensors")


@pytest.mark.parametrize("case", [case for case in CASES if not case.forward], ids=str)
def test_regions_rebuild_what_the_bridge_exports(case: Case, results: Path) -> None:
    truth = torch.load(results / f"{case}.truth")
    before = _checkpoint(case, results)
    assert truth.keys() == before.keys()
    assert faults(_regions(case, results), truth) == []
    # GLM's own update rate of the expert bias is 0; everything else has moved.
    still = [name for name in truth if torch.equal(truth[name], before[name])]
    assert [
        name for name in still if not ("glm4" in case.checkpoint and name.endswith("e_score_correction_bias"))
    ] == []


@pytest.mark.parametrize("case", [case for case in CASES if case.forward], ids=str)
def test_a_model_filled_through_its_regions_computes_what_transformers_does(case: Case, results: Path) -> None:
    assert faults(_regions(case, results), _checkpoint(case, results)) == []
    expected = model_logits(case, results)
    torch.testing.assert_close(torch.load(results / f"{case}.logits"), expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("case", [case for case in CASES if case.mtp], ids=str)
def test_tensors_that_prediction_layers_share_are_declared(case: Case, results: Path) -> None:
    shared = {"model.layers.4.embed_tokens.weight", "model.layers.4.shared_head.head.weight"}
    for rank in range(WORLD):
        rows, notes = torch.load(results / f"{case}.{rank}", weights_only=False)
        has_layer = any(name.startswith("model.layers.4.") for name, *_ in rows)
        assert {name for name, _ in notes.left_out} == (shared if has_layer else set())


# Below: one rank of a world whose collectives do nothing, models without memory.


@pytest.fixture
def build() -> Iterator[Callable[..., Any]]:
    """Makes this process one rank of a mesh and builds its model on the meta device."""
    yield meta_model
    leave_mesh()


def _named(source: MegatronSource, part: str) -> list[Region]:
    table = source.describe().table
    return [region for row in range(len(table)) if part in (region := table.region(row)).tensor]


def test_a_rank_with_half_a_query_group(build: Any) -> None:
    """Two groups of four query heads, a key and a value head, 8 rows each, on four ranks: 24 rows of 96."""
    model = build(1, 4, tp=4, **TINY)
    assert _named(MegatronSource(model, family="llama", vocab_size=64), "layers.2.self_attn.")[1:] == [
        Region("model.layers.2.self_attn.q_proj.weight", (24, 0), (8, 32)),
        Region("model.layers.2.self_attn.k_proj.weight", (0, 0), (8, 32)),
        Region("model.layers.2.self_attn.v_proj.weight", (0, 0), (8, 32)),
    ]


def test_gate_and_up_of_a_rank(build: Any) -> None:
    model = build(1, 4, tp=4, **TINY)
    assert _named(MegatronSource(model, family="llama", vocab_size=64), "layers.0.mlp.")[:3] == [
        Region("model.layers.0.mlp.gate_proj.weight", (12, 0), (12, 32)),
        Region("model.layers.0.mlp.up_proj.weight", (12, 0), (12, 32)),
        Region("model.layers.0.mlp.down_proj.weight", (0, 12), (32, 12)),
    ]


@pytest.mark.parametrize(
    ("rank", "rows", "padding"), [(1, [((16, 0), (16, 32))], 0), (2, [((32, 0), (5, 32))], 11), (3, [], 16)]
)
def test_padding_of_the_vocabulary_is_never_described(build: Any, rank: int, rows: list[Any], padding: int) -> None:
    source = MegatronSource(build(rank, 4, tp=4, **TINY), family="llama", vocab_size=37)
    for name in ("embed_tokens", "lm_head"):
        assert [(region.offset, region.size) for region in _named(source, name)] == rows
    assert source.describe().notes.padding_bytes == 2 * padding * 32 * 2


def test_layers_and_experts_have_their_global_numbers(build: Any) -> None:
    """Rank 3 of 2 stages by 2 expert ranks: layers 2 and 3, experts 4 to 7."""
    source = MegatronSource(build(3, 4, pp=2, ep=2, **TINY, **EXPERTS), family="qwen3_moe", vocab_size=64)
    assert [region.tensor for region in _named(source, "down_proj")] == [
        f"model.layers.{layer}.mlp.experts.{expert}.down_proj.weight" for layer in (2, 3) for expert in (4, 5, 6, 7)
    ]


def test_layer_numbers_are_those_of_the_layers(build: Any) -> None:
    """A first stage with one layer of four: Megatron numbers the layers, nothing is worked out from the stage."""
    model = build(1, 2, pp=2, num_layers_in_first_pipeline_stage=1, **TINY)
    source = MegatronSource(model, family="llama", vocab_size=64)
    assert [region.tensor.split(".")[2] for region in _named(source, "o_proj")] == ["1", "2", "3"]


@pytest.mark.parametrize("single", [False, True], ids=["weight per expert", "one weight"])
def test_grouped_experts_of_transformer_engine_are_the_sequential_ones(single: bool) -> None:
    """What Megatron's own class for them states, with stand-ins for the kernels below it."""
    ((sequential, grouped),) = run_ranks(grouped_and_sequential, 1, single)
    assert len(grouped) == len(sequential)
    assert sorted(grouped) == sorted(sequential)


def test_describing_touches_no_weight_and_costs_as_much_as_there_are_regions(build: Any) -> None:
    """benchmarks/bench_describe.py prints the seconds for a model of 235B parameters."""
    costs, regions = [], []
    for layers in (4, 8, 12):
        model = build(1, 4, tp=2, ep=2, **{**TINY, **EXPERTS, "num_layers": layers})
        source = MegatronSource(model, family="qwen3_moe", vocab_size=64)
        source.describe()
        costs.append(count_calls(source.describe))
        layout = source.describe()
        # What is on the meta device cannot be read.
        assert {base.device.type for base in layout.memory.bases} == {"meta"}
        regions.append(len(layout.table))
        leave_mesh()
    small, middle, large = costs
    assert large - middle <= 1.05 * (middle - small)
    assert max(cost / count for cost, count in zip(costs, regions, strict=True)) < 400


class _Quantised(torch.Tensor):
    """Stands for a tensor subclass whose memory is not the weight's."""


def _add_parameter(model: Any) -> None:
    model.decoder.layers[1].register_parameter("scale", nn.Parameter(torch.zeros(3)))


def _add_buffer(model: Any) -> None:
    model.decoder.layers[1].mlp.register_buffer("history", torch.zeros(3))


def _add_parameter_that_megatron_forgets(model: Any) -> None:
    model.embedding.word_embeddings.register_parameter("scale", nn.Parameter(torch.zeros(3)))


def _describe_a_copy(model: Any) -> None:
    norm = model.decoder.final_layernorm
    norm.state_dict = lambda **_: {"weight": torch.zeros(norm.weight.shape)}


def _quantise(model: Any) -> None:
    norm = model.decoder.final_layernorm
    norm.weight = nn.Parameter(torch.zeros(32).as_subclass(_Quantised))


def _other_groups(model: Any) -> None:
    model.config.num_query_groups = 4


def _other_experts(model: Any) -> None:
    model.config.num_moe_experts = 16


def _no_gate(model: Any) -> None:
    for module in model.modules():
        if hasattr(module, "config"):
            module.config.gated_linear_unit = False


def _interleave(model: Any) -> None:
    model.config.moe_mlp_glu_interleave_size = 32


def _zero_centred(model: Any) -> None:
    model.config.layernorm_zero_centered_gamma = True


@pytest.mark.parametrize(
    ("change", "family", "message"),
    [
        (_add_parameter, "qwen3_moe", r"'decoder.layers.1.scale' on rank 1: family 'qwen3_moe' has no checkpoint name"),
        (_add_buffer, "qwen3_moe", r"'decoder.layers.1.mlp.history' on rank 1: .* has no checkpoint name"),
        (
            _add_parameter_that_megatron_forgets,
            "qwen3_moe",
            r"'embedding.word_embeddings.scale' on rank 1: sharded_state_dict\(\) accounts for 0 of its 12 bytes",
        ),
        (_describe_a_copy, "qwen3_moe", r"'decoder.final_layernorm.weight' on rank 1: .* gives a copy of it"),
        (_quantise, "qwen3_moe", r"'decoder.final_layernorm.weight' on rank 1: a _Quantised is not plain memory"),
        (_other_groups, "qwen3_moe", r"linear_qkv.weight' on rank 1: .* has 96 rows on all ranks, expected 128 rows"),
        (_other_experts, "qwen3_moe", r"leading axes \[8\], expected one of num_moe_experts=16"),
        (_no_gate, "qwen3_moe", r"linear_fc1.weight' on rank 1: .* is not gated in this model"),
        (_interleave, "qwen3_moe", r"moe_mlp_glu_interleave_size=32 mixes gate and up rows"),
        (_zero_centred, "qwen3_moe", r"layernorm_zero_centered_gamma=True keeps the weights of norms less 1"),
        (lambda model: None, "llama", r"mlp.router.weight' on rank 1: family 'llama' has no checkpoint name"),
    ],
)
def test_what_cannot_be_described_is_named(
    build: Any, change: Callable[[Any], None], family: str, message: str
) -> None:
    model = build(1, 2, ep=2, **TINY, **EXPERTS)
    MegatronSource(model, family="qwen3_moe", vocab_size=64).describe()
    change(model)
    with pytest.raises(DescribeError, match=message):
        MegatronSource(model, family=family, vocab_size=64).describe()


def test_a_vocabulary_larger_than_the_model_is_refused(build: Any) -> None:
    with pytest.raises(DescribeError, match="has 64 rows on all ranks, expected at least the 65 rows of vocab_size="):
        MegatronSource(build(0, 1, **TINY), family="llama", vocab_size=65).describe()


def test_layers_with_one_number_are_refused(build: Any) -> None:
    """Two layers that claim one number: the first would be lost without a word."""
    model = build(0, 1, **TINY)
    model.decoder.layers[1].layer_number = 3
    with pytest.raises(DescribeError, match=r"'decoder.layers.\d.*accounts for 0 of its"):
        MegatronSource(model, family="llama", vocab_size=64).describe()


def test_unknown_family() -> None:
    with pytest.raises(DescribeError, match="family 'gpt2' has no table; known are deepseek_v3, glm4_moe, llama"):
        MegatronSource(nn.Linear(2, 2), family="gpt2", vocab_size=8)


def test_a_module_that_is_not_megatrons() -> None:
    with pytest.raises(DescribeError, match="Linear is no Megatron-Core model"):
        MegatronSource(nn.Linear(2, 2), family="llama", vocab_size=8).describe()
