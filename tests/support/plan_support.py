"""Random pairs of layouts, and a judge that plays a plan element by element. Slow and simple on purpose."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from weightcast.transfer.layout.tables import Region, RegionTable, TensorSpec
from weightcast.transfer.plan.operations import Kind, TransferPlan

Ranks = list[list[Region]]


@dataclass
class PairLayout:
    """A trainer and instances as literal rows; `casts` has the dtypes in which an instance differs from the trainer."""

    specs: dict[str, TensorSpec]
    trainer: Ranks
    instances: dict[str, Ranks]
    casts: dict[str, dict[str, TensorSpec]]

    def tables(self) -> tuple[list[RegionTable], dict[str, list[RegionTable]]]:
        return tables_of(self.specs, self.trainer), {
            name: tables_of(self.specs | self.casts.get(name, {}), ranks) for name, ranks in self.instances.items()
        }

    def dtype_of(self, plan: TransferPlan, party: int, tensor: str) -> str:
        """In which dtype an instance has a tensor."""
        name = plan.parties[party].name
        return self.casts.get(name, {}).get(tensor, self.specs[tensor]).dtype


def tables_of(specs: dict[str, TensorSpec], ranks: Ranks) -> list[RegionTable]:
    """One table a rank, with only the tensors that it holds."""
    return [RegionTable.from_regions({r.tensor: specs[r.tensor] for r in rows}, rows) for rows in ranks]


def _slices(offset, size):
    # The ellipsis makes even a box of no dimensions a view that can be written.
    return (*(slice(int(o), int(o) + int(s)) for o, s in zip(offset, size, strict=True)), ...)


def _cut(rng: random.Random, shape: tuple[int, ...], depth: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """A box cut at random, again and again, into disjoint boxes that fill it; some may be empty."""
    boxes = [((0,) * len(shape), shape)]
    for _ in range(depth if shape else 0):
        offset, size = boxes.pop(rng.randrange(len(boxes)))
        dim = rng.randrange(len(shape))
        at = rng.randint(0, size[dim])
        low, high = list(size), list(size)
        low[dim], high[dim] = at, size[dim] - at
        moved = list(offset)
        moved[dim] += at
        boxes += [(offset, tuple(low)), (tuple(moved), tuple(high))]
    return boxes


def _even(shape: tuple[int, ...], dim: int, parts: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Chunks of ceil(n / parts) along one dimension, as FSDP cuts: the last ones may be short or empty."""
    step = -(-shape[dim] // parts)
    boxes = []
    for i in range(parts):
        low, high = min(i * step, shape[dim]), min((i + 1) * step, shape[dim])
        boxes.append(
            (
                tuple(low if d == dim else 0 for d in range(len(shape))),
                tuple(high - low if d == dim else n for d, n in enumerate(shape)),
            )
        )
    return boxes


def _random_box(rng: random.Random, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    offset = tuple(rng.randint(0, n) for n in shape)
    return offset, tuple(rng.randint(0, n - o) for n, o in zip(shape, offset, strict=True))


def random_side(rng: random.Random, specs: dict[str, TensorSpec], world: int) -> Ranks:
    """Every tensor covered by whole copies, even shards or random pieces, with copies on other and on the same rank and
    boxes that overlap partly."""
    ranks: Ranks = [[] for _ in range(world)]
    for name, spec in specs.items():
        kind = rng.choice(["whole", "even", "cut", "messy"])
        if kind == "whole" or not spec.shape:
            boxes = [((0,) * len(spec.shape), spec.shape)]
        elif kind == "even":
            boxes = _even(spec.shape, rng.randrange(len(spec.shape)), world)
        else:
            boxes = _cut(rng, spec.shape, rng.randint(1, 5))
        if kind == "messy":
            boxes += [_random_box(rng, spec.shape) for _ in range(rng.randint(1, 3))]
        for i, (offset, size) in enumerate(boxes):
            owners = {i % world if kind == "even" else rng.randrange(world)} | {
                r for r in range(world) if rng.random() < 0.2
            }
            for rank in sorted(owners):
                for _ in range(rng.choice([1, 1, 1, 2, 3])):
                    ranks[rank].append(Region(name, offset, size))
    for rows in ranks:
        rng.shuffle(rows)
    return ranks


def random_pair(seed: int) -> PairLayout:
    rng = random.Random(seed)
    dtypes = ["bfloat16", "float32", "uint8"]
    specs = {}
    for i in range(rng.randint(1, 5)):
        shape = tuple(
            rng.choice([0, 1, 2, 3, 4, 5, 6, 7, 8]) if rng.random() < 0.3 else rng.randint(1, 6)
            for _ in range(rng.randint(0, 4))
        )
        specs[f"model.layers.{i}.weight"] = TensorSpec(shape, rng.choice(dtypes))
    instances, casts = {}, {}
    for i in range(rng.randint(1, 3)):
        name = f"rollout-{i}"
        if instances and rng.random() < 0.3:
            instances[name] = instances["rollout-0"]
            casts[name] = casts["rollout-0"]
        else:
            instances[name] = random_side(rng, specs, rng.randint(1, 4))
            casts[name] = {n: TensorSpec(s.shape, rng.choice(dtypes)) for n, s in specs.items() if rng.random() < 0.3}
    return PairLayout(specs, random_side(rng, specs, rng.randint(1, 5)), instances, casts)


def judge(pair: PairLayout, plan: TransferPlan) -> dict[str, int]:
    """Plays the plan on arrays of element numbers; every region must end up right, each element written once."""
    number = {name: np.arange(int(np.prod(s.shape, dtype=np.int64))).reshape(s.shape) for name, s in pair.specs.items()}
    memory = {
        (i, rank, k): np.full(region.size, -1, dtype=np.int64)
        for i, party in enumerate(plan.instances, start=1)
        for rank, rows in enumerate(pair.instances[party.name])
        for k, region in enumerate(rows)
    }

    def region_at(party: int, rank: int, k: int) -> Region:
        return (pair.instances[plan.parties[party].name] if party else pair.trainer)[rank][k]

    received = defaultdict(int)
    seen: dict[tuple[int, int, str], np.ndarray] = {}
    o = plan.operations

    def play(row: int) -> bool:
        """Carries out an operation, unless what it passes on has not arrived yet."""
        name = plan.tensors.names[int(o.tensor[row])]
        ndim = len(pair.specs[name].shape)
        offset, size = o.offset[row, :ndim], o.size[row, :ndim]
        assert (o.offset[row, ndim:] == 0).all()
        assert (o.size[row, ndim:] == 1).all()
        held = (int(o.src_party[row]), int(o.src_rank[row]), int(o.src_region[row]))
        source = region_at(*held)
        key = (int(o.dst_party[row]), int(o.dst_rank[row]), int(o.dst_region[row]))
        target = region_at(*key)
        for region in (source, target):
            assert region.tensor == name
            assert all(
                a <= b and b + n <= a + m for a, m, b, n in zip(region.offset, region.size, offset, size, strict=True)
            )
        if o.kind[row] == Kind.SEND:
            assert held[0] == 0
            values = number[name][_slices(offset, size)]
        else:
            assert (held[:2] == key[:2]) == (o.kind[row] == Kind.COPY)
            values = memory[held][_slices(offset - source.offset, size)].copy()
            if (values == -1).any():
                return False
            assert pair.dtype_of(plan, held[0], name) == pair.dtype_of(plan, key[0], name)
        place = memory[key][_slices(offset - target.offset, size)]
        assert (place == -1).all(), f"operation {row} writes twice"
        place[...] = values
        if o.kind[row] != Kind.COPY:
            mask = seen.setdefault((*key[:2], name), np.zeros(pair.specs[name].shape, dtype=bool))
            assert not mask[_slices(offset, size)].any(), f"operation {row} sends what the rank has"
            mask[_slices(offset, size)] = True
            received[key[:2]] += place.size
        return True

    # What comes over the network first, relays as soon as they can, then all copies at once: none may wait for another.
    waiting = sorted(np.flatnonzero(o.kind != Kind.COPY).tolist(), key=lambda row: int(o.kind[row]))
    while waiting:
        left = [row for row in waiting if not play(row)]
        assert len(left) < len(waiting), f"operations {left} pass on what never arrives"
        waiting = left
    copies = np.flatnonzero(o.kind == Kind.COPY).tolist()
    ready = {key: array.copy() for key, array in memory.items()}
    for row in copies:
        source = region_at(int(o.src_party[row]), int(o.src_rank[row]), int(o.src_region[row]))
        ndim = len(source.offset)
        held = ready[int(o.src_party[row]), int(o.src_rank[row]), int(o.src_region[row])]
        part = held[_slices(o.offset[row, :ndim] - source.offset, o.size[row, :ndim])]
        assert (part != -1).all(), f"operation {row} copies what was not received"
        assert play(row)
    for key, array in memory.items():
        region = region_at(*key)
        assert (array == number[region.tensor][_slices(region.offset, region.size)]).all(), f"region {key} is wrong"
    _judge_digests(pair, plan, region_at)
    return {
        "sends": int((o.kind == Kind.SEND).sum()),
        "copies": int((o.kind == Kind.COPY).sum()),
        "relays": int((o.kind == Kind.RELAY).sum()),
        "elements": sum(received.values()),
    }


def _judge_digests(pair: PairLayout, plan: TransferPlan, region_at) -> None:
    d = plan.digests
    boxes: dict[tuple[int, int], tuple] = {}
    regions: dict[tuple[int, int, int], np.ndarray] = {}
    logical: dict[tuple[int, str, int], np.ndarray] = {}
    for row in range(len(d)):
        name = plan.tensors.names[int(d.tensor[row])]
        shape = pair.specs[name].shape
        offset, size = d.offset[row, : len(shape)], d.size[row, : len(shape)]
        key = (int(d.party[row]), int(d.rank[row]), int(d.region[row]))
        region = region_at(*key)
        assert region.tensor == name
        count = regions.setdefault(key, np.zeros(region.size, dtype=int))
        low = offset - np.array(region.offset, dtype=np.int64)
        assert (low >= 0).all()
        assert (low + size <= np.array(region.size, dtype=np.int64)).all()
        count[_slices(low, size)] += 1
        cell = (key[0], int(d.cell[row]))
        box = (name, int(d.dtype[row]), tuple(offset), tuple(size))
        if cell in boxes:
            assert boxes[cell] == box
            continue
        boxes[cell] = box
        whole = logical.setdefault((key[0], name, int(d.dtype[row])), np.zeros(shape, dtype=int))
        whole[_slices(offset, size)] += 1
    assert all((whole == 1).all() for whole in logical.values())
    for index, party in enumerate(plan.instances, start=1):
        for rank, rows in enumerate(pair.instances[party.name]):
            for k, region in enumerate(rows):
                if np.prod(region.size, dtype=np.int64):
                    assert (regions[index, rank, k] == 1).all()
        for row, name in enumerate(plan.tensors.names):
            if np.prod(pair.specs[name].shape, dtype=np.int64):
                dtype = int(party.dtype[row])
                assert (index, name, dtype) in logical
                assert (0, name, dtype) in logical
