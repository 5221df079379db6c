"""Everything that an SGLang server keeps that its weights have computed: dropped, keyed by version, or refused.

`docs/engines.md` lists it, from reading SGLang 0.5.23. It is dropped on every rank before a version is stamped, keyed
by version, or copied anew. Or it is refused when the rank connects.

    refuse_settings(scheduler, pause, stages)     # at connect and before each transfer
    drop_caches(scheduler)                        # before a transfer, and once more when it is over
    prefixes.move_on(scheduler, "81")             # instead, where requests go on in place

Caches are dropped before anything is written, while the engine is paused. So an engine that cannot drop them now has
lost nothing, and is asked again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from weightcast.adapters.sglang.experts import attribute, sglang_version
from weightcast.transfer.errors import DescribeError, PairStateError

if TYPE_CHECKING:
    import torch

__all__ = [
    "BUSY",
    "SETTINGS",
    "Prefixes",
    "Setting",
    "drop_caches",
    "poll_copies",
    "refresh_memos",
    "refuse_memos",
    "refuse_settings",
    "require_pause",
]

BUSY = "busy: "
"""Begins the message of a refusal that holds only until requests under way have ended: ask again."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A server argument by which an update would not reach all that answers. Any value but `plain` is refused."""

    name: str
    plain: object
    why: str

    @property
    def option(self) -> str:
        """The name of the argument on the command line."""
        return "--" + self.name.replace("_", "-")


_BY_TOKENS = "it keeps KV by tokens alone, and would answer with that of older weights"
_COPIES = "what is offloaded has copies that an update does not write"
SETTINGS = (
    Setting("hicache_storage_backend", None, _BY_TOKENS),
    Setting("enable_lmcache", False, _BY_TOKENS),
    Setting("enable_flexkv", False, _BY_TOKENS),
    Setting("enable_unified_cache_external_linker", False, _BY_TOKENS),
    Setting("radix_cache_backend", None, "it is not known how a prefix cache of a plugin is emptied"),
    Setting(
        "disaggregation_mode",
        "null",
        "a prefill engine cannot be flushed while it is paused, and a decode engine goes on with KV of others",
    ),
    Setting("enable_hisparse", False, "it is not known how KV in host memory is emptied"),
    Setting("enable_mm_global_cache", False, "servers share embeddings that older weights computed"),
    Setting("encoder_only", False, "an encoder server has no update session"),
    Setting("language_only", False, "embeddings come from encoder servers, whose weights this update does not reach"),
    Setting("enable_pdmux", False, "its loop does not stop when the engine is paused"),
    Setting("cpu_offload_gb", 0, _COPIES),
    Setting("offload_group_size", -1, _COPIES),
    Setting("enable_paged_experts", False, _COPIES),
    Setting("ple_offload_embedding", None, _COPIES),
    Setting("kt_weight_path", None, "KTransformers computes with weights of its own"),
    Setting("enable_elastic_expert_backup", False, "the backup of experts would bring old weights back"),
)
"""Refused at connect, each by its name."""

IN_PLACE_SETTINGS = (
    Setting("enable_streaming_session", False, "a session goes on with KV that older weights computed"),
    Setting("enable_session_radix_cache", False, "a session goes on with KV that older weights computed"),
)
"""Refused with pause "in_place" too."""


def refuse_settings(scheduler: Any, pause: str, stages: int) -> None:
    """Raises DescribeError naming the first argument with which an update would not reach everything that answers.

    `pause` is what happens to requests in flight, `stages` the number of pipeline stages.
    """
    for setting in SETTINGS + (IN_PLACE_SETTINGS if pause == "in_place" else ()):
        value = attribute(attribute(scheduler, "server_args"), setting.name)
        if setting.name == "hicache_storage_backend" and attribute(scheduler, "enable_hicache_storage"):
            value = value or "attached since"  # SGLang attaches storage at run time, too
        if value != setting.plain and value:
            raise DescribeError(
                f"this server runs with {setting.option} {value!r}: {setting.why}; start it without {setting.option}"
            )
    if stages > 1 and pause != "abort":
        raise DescribeError(
            f"this server has {stages} pipeline stages, whose loop SGLang {sglang_version()} does not stop when it is "
            f'paused, so requests would go on during a transfer; its record has pause "{pause}", give "abort"'
        )


def require_pause(scheduler: Any) -> None:
    """Raises PairStateError unless the engine is paused: what it computed meanwhile would be of two versions."""
    if not attribute(scheduler, "_engine_paused"):
        raise PairStateError("the engine is not paused; pause it before a transfer, and let nobody else continue it")


def poll_copies(scheduler: Any) -> None:
    """Settles HiCache's finished copies. SGLang does it in the turns of its loop, of which a paused one has none.

    SGLang's ranks agree on the finished copies (0.5.23, `unified_radix_cache.py`). So each of them has to call this at
    the same requests, whatever else it answers. No copy begins while the engine is paused.
    """
    if attribute(scheduler, "enable_hierarchical_cache"):
        scheduler.tree_cache.check_hicache_events()


def drop_caches(scheduler: Any) -> None:
    """Empties every cache of this rank that can be emptied.

    Called at the same request on all ranks, in their loops. Raises PairStateError. Its message begins with `BUSY` where
    the rank may be asked again, and then some caches may be left.
    """
    require_pause(scheduler)
    grammars = attribute(scheduler, "grammar_manager")
    # Requests whose grammar is being compiled have computed nothing yet, and a paused loop never asks for it.
    queue, grammars.grammar_queue = attribute(grammars, "grammar_queue"), []
    try:
        flushed = scheduler.flush_cache(empty_cache=False)
    finally:
        grammars.grammar_queue = queue
    if not flushed:
        count = len(scheduler.running_batch.reqs)
        raise PairStateError(
            f"{BUSY}SGLang does not flush its caches while requests hold KV or copies are under way; {count} run, "
            f"{len(scheduler.waiting_queue)} wait"
        )
    _drop_embeddings()


def _drop_embeddings() -> None:
    from sglang.srt.managers import mm_schedule

    cache = attribute(mm_schedule, "embedding_cache")
    if cache is not None:
        cache.clear()


class Prefixes:
    """Keeps new requests from the KV of other weights where running requests keep theirs.

    SGLang finds prefixes by tokens and by `extra_key`, which a client may set. After the first update in place the key
    of every new request has the version in it, too. So has the key of a request that still waits: it has computed
    nothing that counts. A running request keeps its key, under which no later request looks for anything. A version's
    number may come again with other weights, as in a pair that is made anew. So the key counts the updates of this
    process, too.
    """

    MARK = "weightcast="

    def __init__(self) -> None:
        self.version = ""
        self._moves = 0

    def move_on(self, scheduler: Any, version: str) -> None:
        """Gives new requests the key of `version`, the weights that they are computed with from now on."""
        self._moves += 1
        self.version = f"{version}.{self._moves}"
        for request in [*scheduler.waiting_queue, *scheduler.grammar_manager.grammar_queue]:
            if not request.kv.holds_kv:
                self.apply(request)
        _drop_embeddings()
        # Nothing is computed during a pause, which SGLang's watchdog would take for a hang.
        scheduler.cur_batch_for_debug = None

    def apply(self, request: Any) -> None:
        """Gives a request the key of the present version, in front of a key of its own."""
        if not self.version:
            return
        key = request.extra_key or ""
        if key.startswith(self.MARK):
            key = key.partition("|")[2]
        request.extra_key = f"{self.MARK}{self.version}|{key}"


# Memos: values that modules compute from parameters at their first use.


def refresh_memos(model: torch.nn.Module) -> None:
    """Renews what modules keep of parameters, where captured CUDA graphs read it in place, and drops the rest."""
    for module in model.modules():
        topk = getattr(module, "topk_config", None)
        if (bias := getattr(topk, "_correction_bias_dtype_cache", None)) is not None:
            bias.copy_(attribute(topk, "correction_bias"))
        for name in ("_interpolated_pos_emb_cache", "cache_position_embedding", "cache_position_count"):
            memo = vars(module).get(name)
            if isinstance(memo, dict):
                memo.clear()


_UNREACHED = ("_qk_gamma_bf16", "_hpc_q_norm_w_fp32", "_hpc_k_norm_w_fp32", "_split2_hi", "_pre_norm_weight_cache")
"""Attributes of modules with copies of parameters that SGLang makes at the first use and never again."""


def refuse_memos(runner: Any) -> None:
    """Raises DescribeError for a copy of parameters that an update would leave as it is."""
    for name, module in attribute(runner, "model").named_modules():
        for key in _UNREACHED:
            if vars(module).get(key) is not None:
                raise DescribeError(
                    f"module {name!r} keeps a copy of its parameters, {key}, which SGLang {sglang_version()} does not "
                    "make anew; weightcast does not update such models"
                )
    backend = getattr(getattr(runner, "attn_backend", None), "linear_attn_backend", None)
    dispatcher = getattr(backend, "kernel_dispatcher", None)
    for kernel in () if dispatcher is None else vars(dispatcher).values():
        if type(kernel).__name__ == "FlashInferKDAKernel":
            raise DescribeError(
                "FlashInfer's KDA keeps a copy of A_log and dt_bias, which SGLang "
                f"{sglang_version()} does not make anew; start the server with --linear-attn-backend triton"
            )
