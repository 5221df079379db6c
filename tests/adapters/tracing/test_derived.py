"""Tensors that loaders compute beside the parameters: replayed, seen to be rewritten by the engine, or refused."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from weightcast.adapters.tracing.derived import Refresh, find_derived
from weightcast.adapters.tracing.replay import NotReplayableError, Recipe
from weightcast.adapters.tracing.snapshot import Binding, Snapshot
from weightcast.adapters.tracing.trace import Trace, trace_loader
from weightcast.transfer.errors import DescribeError, StalePlanError
from weightcast.transfer.layout.tables import TensorSpec

Given = Mapping[str, torch.Tensor]
Step = Callable[["Model", Given], Any]
End = Callable[["Model"], Any]

OLD = {"a": torch.arange(24.0).view(4, 6), "b": torch.arange(24.0).view(4, 6) + 100}
NEW = {name: t * -0.5 + 3 for name, t in OLD.items()}
CATALOG = {name: TensorSpec((4, 6), "float32") for name in OLD}


class Model(torch.nn.Module):
    """Two parameters, and tensors of each other kind; its loader copies both, and does what `step` says."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.zeros(4, 6), requires_grad=False)
        self.b = torch.nn.Parameter(torch.zeros(4, 6), requires_grad=False)
        self.register_buffer("cache", torch.zeros(4, 6), persistent=False)
        self.register_buffer("kept", torch.zeros(4, 6))
        self.register_buffer("table", torch.full((4, 6), 7.0), persistent=False)
        self.plain = torch.zeros(4, 6)
        self.other = torch.zeros(4, 6)
        self.absent: torch.Tensor | None = None
        self.hidden: dict[str, torch.Tensor] = {}
        self.tensors = [torch.zeros(4, 6)]
        self._step = step

    def load(self, pairs: Any) -> None:
        given = dict(pairs)
        self.a.data.copy_(given["a"])
        self.b.data.copy_(given["b"])
        self._step(self, given)


def describe(model: Model, end: End | None = None) -> tuple[Trace, Refresh]:
    parameters = {"a": model.a.data, "b": model.b.data}
    with Snapshot(model) as snapshot:
        loaded: list[Binding] = []

        def ending() -> None:
            loaded.extend(snapshot.rebound())
            if end is not None:
                end(model)

        trace = trace_loader(model.load, parameters, CATALOG, ending)
        return trace, find_derived(trace, parameters, loaded, snapshot.rebound(), snapshot)


def tensors_of(model: Model) -> dict[str, torch.Tensor]:
    named = {**dict(model.named_parameters()), **model._buffers, **vars(model)}
    found = {name: t for name, t in named.items() if isinstance(t, torch.Tensor)}
    return found | {f"tensors.{i}": t for i, t in enumerate(model.tensors)}


def updated(step: Step, end: End | None = None, fresh: bool = False) -> Refresh:
    """Checks that an update in place makes all tensors those of a fresh load, at the addresses they had."""
    model, expected = Model(step), Model(step)
    if not fresh:
        model.load(OLD.items())
    expected.load(NEW.items())
    if end is not None:
        end(model)
        end(expected)
    _, refresh = describe(model, end)
    before = {name: t.data_ptr() for name, t in tensors_of(model).items()}
    model.a.data.copy_(NEW["a"])
    model.b.data.copy_(NEW["b"])
    if end is not None:
        end(model)
    for _ in range(2):  # after a resend it is run again
        refresh.run()
        found = tensors_of(model)
        for name, t in tensors_of(expected).items():
            assert torch.equal(found[name], t), f"{name} is {found[name]}, a fresh load makes it {t}"
    if not fresh and end is None:
        assert {name: t.data_ptr() for name, t in tensors_of(model).items()} == before
    return refresh


def copied_and_changed(m: Model, g: Given) -> None:
    m.cache.copy_(m.a.data).add_(1.0)


def bound_anew(m: Model, g: Given) -> None:
    m.plain = (m.a * 2).exp().neg()


def through_views(m: Model, g: Given) -> None:
    left, right = m.a.unflatten(1, (2, 3)).transpose(0, 1).split([1, 1])
    m.plain = left.contiguous().squeeze(0).t().reshape(3, 4).t().repeat(1, 2)
    m.cache[:, :3].copy_(right[0])
    m.cache[:, 3:].copy_(left[0].flip(0))


def through_scratch(m: Model, g: Given) -> None:
    scratch = torch.empty(4, 6)
    scratch[:2] = m.a.data[2:]
    scratch[2:] = m.b.data[:2] * m.table[:2]
    scratch.mul_(torch.arange(6.0))
    m.cache.copy_(torch.cat([scratch[1:], scratch[:1]]))


def after_each_shard(m: Model, g: Given) -> None:
    for rows in (slice(0, 2), slice(2, 4)):
        m.a.data[rows].copy_(g["a"][rows])
        m.cache.copy_(m.a.data).add_(1.0)


def one_of_another(m: Model, g: Given) -> None:
    m.cache.copy_(m.a.data)
    m.plain.copy_(m.cache * 3)
    m.other = m.plain + m.b


def into_out(m: Model, g: Given) -> None:
    torch.add(m.a.data, 1, out=m.plain)


def many_at_once(m: Model, g: Given) -> None:
    torch._foreach_copy_([m.plain, m.cache], [m.a.data, m.b.data + 1])


def in_a_list(m: Model, g: Given) -> None:
    m.tensors[0].copy_(m.a.data.to(torch.bfloat16))


def of_constants(m: Model, g: Given) -> None:
    m.plain = torch.arange(24.0).view(4, 6)
    m.cache.fill_(5)


RECOMPUTED = [
    (copied_and_changed, {"cache"}),
    (bound_anew, {"plain"}),
    (through_views, {"plain", "cache"}),
    (through_scratch, {"cache"}),
    (after_each_shard, {"cache"}),
    (one_of_another, {"cache", "plain", "other"}),
    (into_out, {"plain"}),
    (many_at_once, {"plain", "cache"}),
    (in_a_list, {"of shape [4, 6], which no module names"}),
    (of_constants, {"plain", "cache"}),
]


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize(("step", "names"), RECOMPUTED)
def test_what_the_loader_computes_is_replayed(step: Step, names: set[str], inference: bool) -> None:
    with torch.inference_mode(inference):
        refresh = updated(step)
    assert (set(refresh.recomputed), refresh.rewritten) == (names, ())


def test_steps_that_a_later_one_overwrites_are_not_replayed() -> None:
    assert len(updated(after_each_shard).recipe.steps) == 2


def test_what_is_bound_to_the_memory_it_has_is_up_to_date() -> None:
    def alias(m: Model, g: Given) -> None:
        m.plain = m.b.data.view(24).view(4, 6)

    refresh = updated(alias)
    assert (refresh.recomputed, refresh.rewritten, len(refresh.recipe.steps)) == ((), (), 0)


def test_what_only_a_cycle_of_references_holds_is_not_kept() -> None:
    def cycle(m: Model, g: Given) -> None:
        ring: list[Any] = [m.a * 2, g["b"]]
        ring.append(ring)

    gc.disable()
    try:
        assert updated(cycle).recomputed == ()
    finally:
        gc.enable()


def test_what_was_never_loaded_is_bound() -> None:
    def bind(m: Model, g: Given) -> None:
        m.absent = m.a * 2

    assert updated(bind, fresh=True).recomputed == ("absent",)


class Alive(TorchDispatchMode):
    """Counts how many of the tensors that operators make live at one time."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: list[StorageWeakRef] = []
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not any(r.alias_info for r in func._schema.returns):
            self.made.append(StorageWeakRef(out.untyped_storage()))
        self.most = max(self.most, sum(not storage.expired() for storage in self.made))
        return out


def test_a_replay_frees_what_it_made() -> None:
    def long(m: Model, g: Given) -> None:
        value = m.a.data
        for _ in range(9):
            value = value + 1
        m.cache.copy_(value)

    with Alive() as alive:
        _, refresh = describe(Model(long))
        alive.made.clear()
        alive.most = 0
        refresh.run()
    assert len(refresh.recipe.steps) == 10
    assert alive.most <= 3


def binds(m: Model, g: Given) -> None:
    m.plain = m.a * 2


def copies_again(m: Model) -> None:
    m.cache.copy_(m.a.data).add_(1.0)


def binds_again(m: Model) -> None:
    m.plain = m.a * 2


@pytest.mark.parametrize(
    ("step", "end", "rewritten"),
    [
        (copied_and_changed, copies_again, "cache"),
        (binds, binds_again, "plain"),
        (lambda m, g: None, copies_again, "cache"),
        (lambda m, g: None, binds_again, "plain"),
    ],
)
def test_what_the_end_of_a_session_writes_is_its_business(step: Step, end: End, rewritten: str) -> None:
    refresh = updated(step, end)
    assert (refresh.rewritten, refresh.recomputed, len(refresh.recipe.steps)) == ((rewritten,), (), 0)


def test_what_was_bound_by_the_loader_and_is_written_in_place_at_the_end() -> None:
    def bind_once(m: Model) -> None:
        value = m.a * 2
        m.absent = value if m.absent is None else m.absent.copy_(value)

    _, refresh = describe(Model(lambda m, g: bind_once(m)), bind_once)
    assert (refresh.rewritten, refresh.recomputed) == (("absent",), ())


def from_the_checkpoint(m: Model, g: Given) -> None:
    m.cache.copy_(g["b"])


def computed_from_the_checkpoint(m: Model, g: Given) -> None:
    m.plain = g["b"] + torch.arange(6)


def bound_to_the_checkpoint(m: Model, g: Given) -> None:
    m.plain = g["b"]


def like_the_checkpoint(m: Model, g: Given) -> None:
    m.plain = torch.zeros_like(g["b"])


def on_the_device_of_the_checkpoint(m: Model, g: Given) -> None:
    m.plain = torch.ones(4, 6, device=g["b"].device)


def from_itself(m: Model, g: Given) -> None:
    m.cache.add_(m.a.data)


def bound_to_more_of_itself(m: Model, g: Given) -> None:
    m.plain = m.plain * 2 + m.a


def from_another_old_value(m: Model, g: Given) -> None:
    m.plain = m.cache * 2
    m.cache.copy_(m.a.data)


def at_random(m: Model, g: Given) -> None:
    m.plain = m.a + torch.rand(4, 6)


def at_random_in_place(m: Model, g: Given) -> None:
    m.cache.normal_()


def by_a_matrix_product(m: Model, g: Given) -> None:
    m.plain = (m.a @ m.b.t()).repeat(1, 2)[:, :6]


def too_early(m: Model, g: Given) -> None:
    m.plain = m.a * 2
    m.a.data[1:].copy_(g["a"][:3])


def of_another_shape(m: Model, g: Given) -> None:
    m.plain = torch.cat([m.a, m.b])


def bound_to_a_parameter(m: Model, g: Given) -> None:
    m.plain = m.b.data


def in_a_dict(m: Model, g: Given) -> None:
    m.hidden["a"] = m.a * 2


def in_a_closure(m: Model, g: Given) -> None:
    kept = m.a * 2
    m._step = lambda n, given: n.cache.copy_(kept)


def kept_back(m: Model, g: Given) -> None:
    m.hidden["b"] = g["b"]


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (
            from_the_checkpoint,
            r"tensor 'cache' is loaded or computed from checkpoint tensor 'b' \(aten.copy_.default\)",
        ),
        (computed_from_the_checkpoint, r"tensor 'plain' is loaded or computed from checkpoint tensor 'b' \(aten.add"),
        (bound_to_the_checkpoint, r"tensor 'plain' is loaded or computed from checkpoint tensor 'b', and is no copy"),
        (like_the_checkpoint, r"tensor 'plain' is loaded or computed from checkpoint tensor"),
        (on_the_device_of_the_checkpoint, r"tensor 'plain' is loaded or computed from checkpoint tensor unknown"),
        (from_itself, r"tensor 'cache' is computed from its own or another old value \(aten.add_.Tensor\)"),
        (bound_to_more_of_itself, r"tensor 'plain' is computed from its own or another old value \(aten.mul.Tensor\)"),
        (from_another_old_value, r"tensor 'plain' is computed from its own or another old value \(aten.mul.Tensor\)"),
        (at_random, r"tensor 'plain' is computed with aten.rand.default, which need not give the same values again"),
        (at_random_in_place, r"tensor 'cache' is computed .*aten.normal_.default"),
        (by_a_matrix_product, r"tensor 'plain' is computed with aten.mm.default"),
        (too_early, r"tensor 'plain' is computed from a parameter of which the loader writes more afterwards"),
        (
            of_another_shape,
            r"tensor 'plain' has torch.float32 \[4, 6\], but the loader makes it torch.float32 \[8, 6\]",
        ),
        (bound_to_a_parameter, r"tensor 'plain': the loader binds it to other memory than it has"),
        (in_a_dict, r"keeps a tensor of shape \[4, 6\], which .* computed from parameters, where no attribute of a"),
        (in_a_closure, r"keeps a tensor of shape \[4, 6\], which is or was computed from parameters"),
        (kept_back, r"keeps a tensor, which is or was computed from \['b'\], where no attribute"),
    ],
)
def test_what_nobody_can_refresh_is_refused_by_name(step: Step, message: str) -> None:
    model = Model(step)
    before = {name: (id(t), t.clone()) for name, t in tensors_of(model).items()}
    with pytest.raises(DescribeError, match=message):
        describe(model)
    for name, t in tensors_of(model).items():
        assert (id(t), t.tolist()) == (before[name][0], before[name][1].tolist())


@pytest.mark.parametrize(
    ("step", "end", "message"),
    [
        (copied_and_changed, lambda m: m.cache[:2].copy_(m.a.data[:2]), r"'cache': the end .* computes only a part"),
        (copied_and_changed, lambda m: m.cache.mul_(2), r"'cache' at the end .* computed from its own or another old"),
        (copied_and_changed, lambda m: m.plain.copy_(m.cache), r"'plain' at the end .* its own or another old value"),
        (
            lambda m, g: None,
            lambda m: setattr(m, "plain", m.plain * 2),
            r"'plain' at the end .* its own or another old",
        ),
        (
            copied_and_changed,
            lambda m: setattr(m, "plain", m.cache * 2),
            r"'plain' at the end .* its own or another old",
        ),
        (binds, lambda m: m.cache.copy_(m.plain), r"'cache' at the end .* its own or another old value"),
        (lambda m, g: None, lambda m: m.cache.mul_(2), r"'cache' at the end .* computed from its own or another old"),
        (binds, lambda m: setattr(m, "plain", m.plain * 2), r"'plain' at the end .* its own or another old value"),
    ],
)
def test_an_end_that_starts_from_old_values_is_refused(step: Step, end: End, message: str) -> None:
    with pytest.raises(DescribeError, match=message):
        describe(Model(step), end)


def test_parameters_that_the_end_of_a_session_writes_are_named() -> None:
    trace, _ = describe(Model(lambda m, g: None), lambda m: m.a.data.mul_(2))
    assert trace.at_end == {"a"}


def test_values_of_what_the_loader_computed_cannot_be_read_under_the_trace() -> None:
    def reads(m: Model, g: Given) -> None:
        m.cache.copy_(m.a.data)
        if m.cache.max() > 3:
            m.plain.fill_(1)

    with pytest.raises(DescribeError, match=r"reads values of parameter of its own making"):
        describe(Model(reads))


def test_memory_that_the_model_left_is_not_written() -> None:
    for leave in (lambda m: setattr(m, "cache", m.cache.clone()), lambda m: delattr(m, "cache")):
        model = Model(copied_and_changed)
        _, refresh = describe(model)
        old = model.cache
        leave(model)
        with pytest.raises(StalePlanError, match=r"'cache', .* is not where it was described; connect again"):
            refresh.run()
        assert not old.any()


def test_a_result_that_is_laid_out_otherwise_is_not_used() -> None:
    trace, _ = describe(Model(bound_anew))
    steps = trace.tape.steps[-1:]
    (result,) = steps[0].results
    assert result is not None
    recipe = Recipe([*trace.tape.steps[:-1], replace(steps[0], results=(replace(result, stride=(1, 4)),))])
    with pytest.raises(RuntimeError, match=r"made torch.float32 \(4, 6\) of strides \(6, 1\), .* \(1, 4\) when"):
        recipe.run()


def test_a_tape_refuses_what_it_cannot_replay() -> None:
    trace, _ = describe(Model(copied_and_changed))
    model = Model(at_random)
    storages = frozenset({w.storage for step in trace.tape.steps for w in step.written})
    with pytest.raises(NotReplayableError, match=r"old value"):
        trace.tape.recipe(storages, {}, storages | {o.storage for s in trace.tape.steps for o in s.reads()})
    assert model.plain is not None
