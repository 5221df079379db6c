"""A real SGLang server with a prefix cache, a tokenizer and a probe inside; and a trainer whose weights are known."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors.torch import load_file, save_file
from sglang_probe.sglang_probe import COMPILE, REPORTS
from spawn_support import free_port

from weightcast.adapters.unsharded import PlainSource
from weightcast.cluster.processes import running, wait_up
from weightcast.demo.config import DemoConfig, ServerConfig
from weightcast.demo.model import make_model
from weightcast.demo.processes import server_launch

__all__ = ["Answer", "Engine", "Stream", "Weights", "start_engine"]

SLOTS = 8


class Weights:
    """The trainer's weights, one version after another, and what a model with them says, by Transformers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not (folder / "config.json").exists():
            make_model(folder)
        self.first = load_file(folder / "model.safetensors")
        self.tensors = {name: tensor.clone() for name, tensor in self.first.items()}
        self.source = PlainSource(self.tensors)
        self._model: Any = None

    def become(self, version: int) -> None:
        """Other weights in every element, in place; those of one version are always the same."""
        for name, tensor in self.tensors.items():
            tensor.copy_(torch.roll(self.first[name], version, 0) * (1 + 0.01 * (version % 7)))
        self._model = None

    def says(self, prompt: Sequence[int], count: int) -> list[int]:
        """Greedy tokens of the present weights."""
        from transformers import AutoModelForCausalLM

        if self._model is None:
            folder = self.folder.parent / "reference"
            folder.mkdir(exist_ok=True)
            (folder / "config.json").write_text((self.folder / "config.json").read_text())
            save_file(self.tensors, folder / "model.safetensors", {"format": "pt"})
            self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        tokens = self._model.generate(torch.tensor([list(prompt)]), max_new_tokens=count, do_sample=False)
        return [int(token) for token in tokens[0, len(prompt) :]]


class Answer:
    """Tokens of an answer, its stamp, and the spans of versions that SGLang says sampled it."""

    def __init__(self, said: dict[str, Any]) -> None:
        meta = said["meta_info"]
        self.tokens = [int(token) for token in said["output_ids"]]
        self.version = str(meta["weight_version"])
        self.spans = [(str(s["version"]), s["start"], s["end"]) for s in meta.get("weight_versions") or []]
        self.reason = (meta.get("finish_reason") or {}).get("type")


class Engine:
    """A server that runs."""

    def __init__(self, url: str, log: Path, reports: Path) -> None:
        self.url, self.log, self._reports = url, log, reports

    def ask(self, prompt: Sequence[int], count: int, **sampling: Any) -> Answer:
        """One answer, when it is complete."""
        said = self.generate(prompt, count, **sampling)
        assert said.status_code == 200, said.text
        return Answer(said.json())

    def generate(self, prompt: Sequence[int], count: int, **sampling: Any) -> httpx.Response:
        """The same, or what SGLang says in its place."""
        return self.post("/generate", **_body(prompt, count, sampling))

    def post(self, path: str, **body: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=300.0, trust_env=False)

    def health(self) -> int:
        return httpx.get(self.url + "/health", timeout=60.0, trust_env=False).status_code

    def threads(self) -> int:
        """Threads of the scheduler."""
        pid = next(self._reports.glob("*.json")).name.split(".")[1]
        return len(list(Path(f"/proc/{pid}/task").iterdir()))

    def make_busy(self, when: str, rank: int) -> None:
        """The rank refuses to flush its caches once, at the "begin" or the "end" of the next transfer."""
        (self._reports / f"busy.{when}.{rank}").touch()

    @contextmanager
    def guarded(self, sentence: str) -> Iterator[None]:
        """From the next session on SGLang refuses updates with `sentence`; then no more."""
        said = self._reports / "guard"
        said.write_text(sentence)
        try:
            yield
        finally:
            said.unlink()
            for path in ("/begin_weight_update", "/end_weight_update"):
                assert self.post(path).status_code == 200

    def kept(self, version: int) -> list[dict[str, Any]]:
        """What each scheduler kept when `version` was stamped."""
        return [json.loads(found.read_text()) for found in sorted(self._reports.glob(f"{version}.*.json"))]


class Stream:
    """A request that is answered token by token, in a thread."""

    def __init__(self, engine: Engine, prompt: Sequence[int], count: int, **sampling: Any) -> None:
        self._engine, self._body = engine, _body(prompt, count, sampling) | {"stream": True}
        self._begun = threading.Event()
        self._last: dict[str, Any] = {}
        self._tokens: list[int] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            url = self._engine.url + "/generate"
            with httpx.stream("POST", url, json=self._body, timeout=300.0, trust_env=False) as response:
                for line in response.iter_lines():
                    if not line.startswith("data: {"):
                        continue
                    self._last = json.loads(line.removeprefix("data: "))
                    self._tokens = list(self._last["output_ids"])
                    if len(self._tokens) >= 3:
                        self._begun.set()
        except BaseException as error:
            self._error = error
        finally:
            self._begun.set()

    def begun(self) -> None:
        """Waits until a few tokens have come."""
        assert self._begun.wait(120.0)
        assert self._error is None, self._error

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def answer(self) -> Answer:
        self._thread.join(300.0)
        assert self.done
        assert self._error is None, self._error
        return Answer(self._last)


def _body(prompt: Sequence[int], count: int, sampling: dict[str, Any]) -> dict[str, Any]:
    parameters = {"max_new_tokens": count, "temperature": 0, "ignore_eos": True, **sampling}
    return {"input_ids": list(prompt), "sampling_params": parameters}


@contextmanager
def start_engine(
    model: Path, work: Path, token: str, compile_seconds: float = 0.0, *options: str, tp: int = 1
) -> Iterator[Engine]:
    """A server of `tp` ranks."""
    _write_tokenizer(model)
    reports, entry = work / "reports", work / "probe" / "sglang_probe-0.dist-info"
    for folder in (reports, entry):
        folder.mkdir(parents=True)
    (entry / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang-probe\nVersion: 0\n")
    (entry / "entry_points.txt").write_text("[sglang.srt.plugins]\nprobe = sglang_probe.sglang_probe:register\n")
    spec, port, log = ServerConfig("rollout-0", tp, tp), free_port(), work / "server.log"
    launch = server_launch(spec, DemoConfig(work=work), model, token)
    command = launch.filled("127.0.0.1", port)
    command.remove("--skip-tokenizer-init")
    command[command.index("--max-running-requests") + 1] = str(SLOTS)
    command[command.index("--max-total-tokens") + 1] = "8192"
    environment = launch.environment | {
        "PYTHONPATH": os.pathsep.join([str(work / "probe"), str(Path(__file__).parent)]),
        COMPILE: str(compile_seconds),
        REPORTS: str(reports),
    }
    with running([*command, *options], log, environment) as process:
        url = f"http://127.0.0.1:{port}"
        wait_up(process, f"{url}/health", log, 400.0, {})
        yield Engine(url, log, reports)


def _write_tokenizer(folder: Path) -> None:
    """Bytes as tokens, for grammars."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=alphabet[0]).save_pretrained(folder)
