"""The demo's settings and refusals, and the main job with a Megatron trainer. With FSDP2: test_plugin.py."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from life_support import soon

from weightcast.commands.demo import Steps
from weightcast.demo.config import DemoConfig, MegatronConfig, ServerConfig, VersionOutcome
from weightcast.transfer.errors import EngineError, InputError


def demo(*arguments: str, work: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "weightcast", "demo", "--work", str(work), *arguments]
    return subprocess.run(command, capture_output=True, timeout=540, text=True)


@pytest.mark.megatron
@pytest.mark.sglang
@pytest.mark.slow
def test_megatron_brings_every_version_to_an_engine(root: Path, tmp_path: Path) -> None:
    """Tensor, pipeline and expert parallel trainer ranks; an engine with two replicas of an expert on one rank.

    They share the host's memory by staging, and the trainer's weights are away while the engine generates.
    """
    server = json.dumps({"name": "rollout-0", "tp": 2, "ep": 2, "map": [0, 1, 2, 3, 3, 0]})
    prelude = str(root / "tests" / "support" / "megatron_cpu.py")
    done = demo(
        "--trainer", "megatron", "--trainer-prelude", prelude, "--versions", "2", "--instance", server, "--json",
        "--colocated", "staged", work=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    assert found["faults"] == []
    assert [outcome["weight_version"] for outcome in found["outcomes"]] == ["1", "2"]
    for outcome in found["outcomes"]:
        assert (outcome["equal"], outcome["changed"], outcome["prompts"]) == (8, 8, 8)
        assert outcome["verified"]["slot_regions"] == 36
        assert outcome["sent"] == 0 < outcome["shared"]
    assert done.stderr.count(" MB; the engines generate") == 2


@pytest.mark.parametrize(
    ("text", "layout", "ranks"),
    [
        ("{}", MegatronConfig(1, 1, 1, 1), 1),
        ('{"tp": 2, "pp": 2, "ep": 2}', MegatronConfig(2, 2, 2, 1), 4),
        ('{"tp": 2, "ep": 3}', MegatronConfig(2, 1, 3, 1), 6),
        ('{"tp": 4, "ep": 2, "etp": 2}', MegatronConfig(4, 1, 2, 2), 4),
    ],
)
def test_layouts_of_the_trainer(text: str, layout: MegatronConfig, ranks: int) -> None:
    assert MegatronConfig.given(text) == layout
    assert layout.ranks == ranks


@pytest.mark.parametrize("text", ["tp2", '{"cp": 2}', '{"tp": 0}', '{"pp": "2"}', "[1]"])
def test_bad_layouts_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="trainer layout"):
        MegatronConfig.given(text, f"trainer layout {text!r}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rollout-0", "Invalid JSON"),
        ('{"tp": 2}', "name is missing"),
        ('{"name": "a b"}', "name is 'a b', expected at most 40 letters"),
        ('{"name": "a", "tp": 0}', "tp is 0, expected a whole number from 1"),
        ('{"name": "a", "tp": 2, "ep": 3}', "ep 3 does not divide tp 2"),
        ('{"name": "a", "map": [0, 2]}', "too few for 3 logical experts"),
        ('{"name": "a", "dp": 2}', "dp is not known; known are name, tp, ep, pp, map"),
    ],
)
def test_bad_instances_are_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        ServerConfig.given(text, f"instance {text!r}")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--trainer-layout", "{}"], "--trainer-layout is for --trainer megatron"),
        (["--trainer", "megatron", "--trainer-layout", "tp2"], "trainer layout 'tp2': Invalid JSON"),
        (
            ["--host", "::1", "--ray"],
            "--host is for plain processes; with --ray they are at the addresses of Ray's nodes",
        ),
        (["--trainer-prelude", "/nowhere.py"], "--trainer-prelude /nowhere.py is not a file"),
    ],
)
def test_bad_settings_end_at_once(arguments: list[str], message: str, tmp_path: Path) -> None:
    done = demo(*arguments, work=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_step_that_takes_long_is_shown_again() -> None:
    """So that nobody thinks that it hangs: servers take a minute to start."""
    shown: list[str] = []
    with Steps(shown.append, seconds=0.05) as steps:
        steps.say("first; it takes long")
        soon(lambda: shown.count("still at: first") >= 2)
        steps.say("second")
        soon(lambda: shown[-1] == "still at: second")
    assert shown[shown.index("second") :].count("still at: first") == 0
    assert shown.count("first; it takes long") == shown.count("second") == 1
    with Steps(shown.append, seconds=60.0) as steps:
        steps.say("third")
    assert shown[-1] == "third", "it ends at once"


def _model(folder: Path, **changes: object) -> Path:
    """The config of the demo's model with some entries changed; its weights are not needed to refuse it."""
    config = {
        "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 256, "hidden_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 4,
        "moe_intermediate_size": 64, "tie_word_embeddings": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


@pytest.mark.megatron
@pytest.mark.parametrize(
    ("changes", "trainers", "message"),
    [
        ({}, 6, "tp2/pp2/ep2/etp1 takes a multiple of 4 trainer processes, not 6"),
        ({"model_type": "qwen3"}, 4, "builds Qwen3-MoE with experts in all layers, not qwen3"),
        ({"mlp_only_layers": [0]}, 4, "builds Qwen3-MoE with experts in all layers"),
        ({"tie_word_embeddings": True}, 4, "without tied embeddings"),
        ({"num_experts": 5}, 4, "num_experts 5 cannot be split over 2 ranks"),
        ({"vocab_size": 255}, 4, "vocab_size 255 cannot be split"),
    ],
)
def test_what_the_megatron_trainer_cannot_build(
    changes: dict[str, object], trainers: int, message: str, tmp_path: Path
) -> None:
    from weightcast.demo.megatron_training import check_megatron

    layout = MegatronConfig(tp=2, pp=2, ep=2)
    config = DemoConfig(work=tmp_path, trainers=trainers, megatron=layout, prelude=tmp_path)
    with pytest.raises(InputError, match=message):
        check_megatron(config, layout, _model(tmp_path, **changes))


@pytest.mark.megatron
def test_without_a_prelude_nothing_is_started(tmp_path: Path) -> None:
    from weightcast.demo.megatron_training import check_megatron

    config = DemoConfig(work=tmp_path, trainers=4, megatron=MegatronConfig(tp=2, pp=2, ep=2))
    with pytest.raises(InputError, match=r"on the CPU, where .* give --trainer-prelude"):
        check_megatron(config, MegatronConfig(tp=2, pp=2, ep=2), _model(tmp_path))


def test_expectations_that_are_not_the_trainers_are_a_fault() -> None:
    from weightcast.demo.run import reference_faults
    from weightcast.demo.trainer import Reference

    def said(trainer_loss: float, reference_loss: float) -> Reference:
        losses = {"loss": 0.5, "trainer_loss": trainer_loss, "reference_loss": reference_loss}
        return Reference(version=1, **losses, tokens=[], result={}, moved={}, steps=[])

    good = said(1.25, 1.2501)
    assert reference_faults(good) == []
    bad = said(1.25, 1.26)
    assert reference_faults(bad) == [
        "version 1: the trainer's own loss is 1.250000, that of its gathered weights 1.260000"
    ]
    assert len(reference_faults(said(float("nan"), 1.26))) == 1


def test_a_rank_that_ends_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from weightcast.demo import machines

    monkeypatch.setattr(machines, "train", print)  # it takes what a rank takes, and ends
    with machines.Machines(DemoConfig(work=tmp_path, trainers=1), tmp_path, "token") as here:
        ranks = here.start_trainers("http://127.0.0.1:1")
        with pytest.raises(EngineError, match="trainer rank 0 ended without a word, with status 0"):
            ranks.receive()
        with pytest.raises(EngineError, match="trainer rank 0 ended without a word"):
            ranks.send(None)


def test_weights_go_to_a_file_and_come_back_to_every_view(tmp_path: Path) -> None:
    import torch
    from plain_support import Piece, PlainSink

    from weightcast.demo.colocated import StoredWeights

    whole = torch.nn.Parameter(torch.arange(12.0).view(3, 4))
    other = torch.ones(5, dtype=torch.bfloat16)
    view = whole.detach()[:, 1]
    pieces = [Piece("a", (1, 4), (0, 0), whole.detach()[:1]), Piece("b", (2, 4), (0, 0), whole.detach()[1:]),
              Piece("c", (5,), (0,), other)]  # fmt: skip
    weights = StoredWeights(PlainSink(pieces), tmp_path / "weights.pt")
    for _ in range(2):
        weights.offload()
        assert weights.away_bytes >= 12 * 4 + 5 * 2
        assert [t.untyped_storage().nbytes() for t in (whole, view, other)] == [0, 0, 0]
        for _ in range(2):  # the second time there is nothing to do
            weights.resume()
        assert (view.tolist(), other.tolist()) == ([1.0, 5.0, 9.0], [1.0] * 5)
        assert torch.equal(whole.detach(), torch.arange(12.0).view(3, 4))
        assert (weights.away_bytes, list(tmp_path.iterdir())) == (0, [])


def test_an_outcome_names_its_faults(tmp_path: Path) -> None:
    config = DemoConfig(work=tmp_path)
    good = VersionOutcome(1, "a", 8, 8, 8, 1e-6, "1", 0.1, {"regions": 3})
    assert good.faults(config) == []
    bad = VersionOutcome(2, "a", 8, 7, 6, float("nan"), "1", 0.1, {})
    assert [fault.partition(": ")[2] for fault in bad.faults(config)] == [
        "1 of 8 prompts differ from the trainer's tokens",
        "only 6 of 8 prompts' tokens changed since the version before",
        "weight_version is '1', expected 2",
        "no region of its memory was verified",
        "log-probabilities differ by nan on average, limit 0.001",
    ]
