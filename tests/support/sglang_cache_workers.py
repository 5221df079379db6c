"""What the ranks of `test_caches.py` run: SGLang's refusals, its sessions and its memos, on real models."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import sglang_support as support
import torch
from model_support import Everything

from weightcast.adapters.sglang.caches import IN_PLACE_SETTINGS, SETTINGS, refresh_memos, refuse_memos, refuse_settings
from weightcast.transfer.errors import DescribeError

Server = dict[str, Any]


def refusal(r: support.Rank, model: torch.nn.Module) -> str:
    """Why `model` is not described; empty when it is. It is left as it was in either case."""
    before, reason = Everything(model), ""
    try:
        support.sink_of(r, model).describe()
    except DescribeError as error:
        reason = str(error)
    assert before.changes() == []
    return reason


def guards(rank: int, world: int, port: int, path: str, server: Server) -> None:
    """SGLang's own refusals, and unquantised weights that it rearranges."""
    from sglang.srt.environ import envs
    from sglang.srt.model_executor.model_runner_components import weight_updater
    from sglang.srt.runtime_context import get_context

    r = support.boot(rank, world, port, path, **server)
    support.set_map(r)
    model = support.build(r)
    support.load(r, model)
    assert refusal(r, model) == ""
    layer = model.get_submodule("model.layers.0")
    layer._derived_weight_cache_error = "Online updates are not supported:\n a derived copy"
    own = "Online updates are not supported: a derived copy"
    assert weight_updater._unsupported_derived_weight_cache_error(model) == layer._derived_weight_cache_error
    assert refusal(r, model).endswith(f"refuses updates of this model: {own}")
    del layer._derived_weight_cache_error
    layer._hc_attn_tf32_parts = torch.zeros(1)
    assert "SGLANG_OPT_DEEPGEMM_HC_PRENORM=0" in refusal(r, model)
    del layer._hc_attn_tf32_parts
    get_context().override("test", weight_cache_mode="attach")
    assert "[weight_cache] update_weights_from_distributed is not supported" in refusal(r, model)
    get_context().override("test", weight_cache_mode="off")
    assert refusal(r, model) == ""

    (first, *_) = support.expert_layers(model)
    method = first.quant_method
    for flag, what in (
        ("use_flashinfer_trtllm_moe", "start the server with --moe-runner-backend triton"),
        ("w13_swiglu_interleaved", "unset SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED"),
        ("_aiter_runner", "unset SGLANG_USE_AITER"),
    ):
        before = getattr(method, flag)
        setattr(method, flag, True)
        said = refusal(r, model)
        assert "module 'model.layers.0.mlp.experts': " in said, said
        assert what in said
        setattr(method, flag, before)
    os.environ["SGLANG_USE_AITER"] = "1"
    assert "AITER" in refusal(r, model)
    del os.environ["SGLANG_USE_AITER"]
    with envs.SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED.override(True):
        assert "unset SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED" in refusal(r, model)
    first.w13_kernel = object()
    assert "Ascend" in refusal(r, model)
    del first.w13_kernel
    # A method of another module is another method, whatever it is called.
    kind = type(method)
    method.__class__ = type(kind.__name__, (kind,), {"__module__": "somewhere.else"})
    assert "quantisation method UnquantizedFusedMoEMethod" in refusal(r, model)
    method.__class__ = kind
    assert refusal(r, model) == ""


def _state(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor that modules hold: parameters, buffers, plain attributes."""
    for path, module in model.named_modules():
        for where in (module._parameters, module._buffers, vars(module)):
            for key, value in where.items():
                if isinstance(value, torch.Tensor):
                    yield f"{path}.{key}", value


def empty_session(rank: int, world: int, port: int, path: str, server: Server) -> int:
    """A session in which nothing is written leaves every tensor where it is and as it is; returns how many."""
    r = support.boot(rank, world, port, path, **server)
    support.set_map(r)
    model = support.build(r)
    support.load(r, model)
    assert refusal(r, model) == "", "only models that are accepted are of interest"
    before = {name: (t.shape, t.stride(), support.as_bytes(t).clone()) for name, t in _state(model)}
    places = {name: t.data_ptr() for name, t in model.named_parameters()}
    updater = support.updater_of(r, model)
    updater.begin_weight_update()
    updater.end_weight_update(run_post_load=True)
    after = {name: (t.shape, t.stride(), support.as_bytes(t)) for name, t in _state(model)}
    assert before.keys() == after.keys()
    for name, (shape, stride, content) in before.items():
        assert after[name][:2] == (shape, stride), name
        assert torch.equal(after[name][2], content), name
    assert places == {name: t.data_ptr() for name, t in model.named_parameters()}
    return len(before)


def memos(rank: int, world: int, port: int, path: str, server: Server) -> None:
    """Copies of parameters that SGLang makes at the first use: renewed where they lie, or dropped, or refused."""
    from sglang.srt.models.kimi_vl_moonvit import Learnable2DInterpPosEmb

    r = support.boot(rank, world, port, path, **server)
    support.set_map(r)
    model = support.build(r)
    support.load(r, model)
    layout = support.sink_of(r, model).describe()
    configs = [m.topk_config for m in model.modules() if hasattr(m, "topk_config")]
    biased = [c for c in configs if c.correction_bias is not None]
    assert biased
    dtype = torch.float16 if biased[0].correction_bias.dtype != torch.float16 else torch.float32
    copies = [c.correction_bias_for_dtype(dtype) for c in biased]
    old = [copy.clone() for copy in copies]
    support.write(layout, {name: t + 1 for name, t in r.checkpoint.items()})
    assert all(c.correction_bias_for_dtype(dtype) is copy for c, copy in zip(biased, copies, strict=True))
    assert all(torch.equal(copy, o) for copy, o in zip(copies, old, strict=True)), "SGLang notices raw writes: no memo"
    refresh_memos(model)
    for config, copy in zip(biased, copies, strict=True):
        assert config.correction_bias_for_dtype(dtype) is copy, "a CUDA graph reads it at this address"
        assert torch.equal(copy, config.correction_bias.to(dtype))

    eyes = torch.nn.ModuleDict({"pos_emb": Learnable2DInterpPosEmb(4, 4, 8)}).eval()
    grid = torch.tensor([[2, 6]])
    x = torch.zeros(12, 8)
    first = eyes["pos_emb"](x, grid)
    eyes["pos_emb"].weight.data.mul_(2)
    assert torch.equal(eyes["pos_emb"](x, grid), first), "the memo is gone by itself"
    refresh_memos(eyes)
    assert torch.allclose(eyes["pos_emb"](x, grid), 2 * first)

    runner = SimpleNamespace(model=model, attn_backend=None)
    refuse_memos(runner)
    model.get_submodule("model.layers.0")._qk_gamma_bf16 = (torch.ones(1),)
    with pytest.raises(DescribeError, match=r"'model\.layers\.0' keeps .*, _qk_gamma_bf16"):
        refuse_memos(runner)
    del model.get_submodule("model.layers.0")._qk_gamma_bf16
    kernel = type("FlashInferKDAKernel", (), {})()
    runner.attn_backend = SimpleNamespace(
        linear_attn_backend=SimpleNamespace(kernel_dispatcher=SimpleNamespace(decode_kernel=kernel))
    )
    with pytest.raises(DescribeError, match="A_log"):
        refuse_memos(runner)


def settings(rank: int, world: int, port: int, path: str, server: Server) -> int:
    """What is refused is off by default, and is refused when it is on; returns how many settings that are."""
    r = support.boot(rank, world, port, path, **server)
    scheduler = SimpleNamespace(server_args=r.server_args, enable_hicache_storage=False)
    for pause in ("abort", "retract", "in_place"):
        refuse_settings(scheduler, pause, 1)
    refuse_settings(scheduler, "abort", 2)
    for pause in ("retract", "in_place"):
        with pytest.raises(DescribeError, match=f'2 pipeline stages.* pause "{pause}", give "abort"'):
            refuse_settings(scheduler, pause, 2)
    every = SETTINGS + IN_PLACE_SETTINGS
    for setting in every:
        values = {other.name: getattr(r.server_args, other.name) for other in every}
        assert values[setting.name] == setting.plain, setting.name
        changed = SimpleNamespace(**values | {setting.name: "on" if setting.plain in (None, "null") else 7})
        odd = SimpleNamespace(server_args=changed, enable_hicache_storage=False)
        with pytest.raises(DescribeError, match=f"runs with {setting.option} .*start it without {setting.option}$"):
            refuse_settings(odd, "in_place", 1)
        if setting in IN_PLACE_SETTINGS:
            refuse_settings(odd, "retract", 1)
    attached = SimpleNamespace(server_args=r.server_args, enable_hicache_storage=True)
    with pytest.raises(DescribeError, match="--hicache-storage-backend 'attached since'"):
        refuse_settings(attached, "retract", 1)
    return len(every)
