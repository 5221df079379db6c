"""The layout bundle: what it says is read, and whatever else is refused in one line."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightcast.offline.bundle import read_bundle
from weightcast.transfer.errors import LayoutError
from weightcast.transfer.layout.tables import Region, TensorSpec

CASES = Path(__file__).parent.parent / "cases"

GOOD = {
    "tensors": {"w": {"shape": [8, 4], "dtype": "bfloat16"}, "s": {"shape": [], "dtype": "float32"}},
    "trainer": {"ranks": {"0": [{"tensor": "w", "offset": [0, 0], "size": [8, 4]}], "1": []}, "hosts": {"0": "h0"}},
    "instances": {
        "a": {
            "ranks": {
                "0": [
                    {"tensor": "s", "offset": [], "size": []},
                    {"tensor": "w", "offset": [4, 0], "size": [4, 4], "slot": 3},
                ]
            }
        }
    },
}


def changed(path: str, value) -> dict:
    """GOOD with another value at a path like "trainer/ranks/0"; `...` deletes."""
    made = copy.deepcopy(GOOD)
    *steps, last = path.split("/")
    place = made
    for step in steps:
        place = place[int(step)] if isinstance(place, list) else place[step]
    if value is ...:
        del place[last]
    else:
        place[int(last) if isinstance(place, list) else last] = value
    return made


@pytest.mark.parametrize(
    "encode", [lambda b: json.dumps(b).encode(), lambda b: b"\n " + json.dumps(b).encode(), msgpack.packb]
)
def test_a_bundle_is_read(encode):
    bundle = read_bundle(encode(GOOD))
    assert bundle.tensors.specs() == {"w": TensorSpec((8, 4), "bfloat16"), "s": TensorSpec((), "float32")}
    assert [len(table) for table in bundle.trainer] == [1, 0]
    assert bundle.trainer_hosts == ("h0", "")
    (table,) = bundle.instances["a"]
    assert table.region(0) == Region("s", (), ())
    assert table.region(1) == Region("w", (4, 0), (4, 4), 3)
    assert bundle.instance_hosts == {"a": ("",)}


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("tensors", ..., "the bundle: tensors is missing"),
        ("trainer", ..., "the bundle: trainer is missing"),
        ("instances", ..., "the bundle: instances is missing"),
        ("extra", 1, "the bundle: extra is not known; known are tensors, trainer, instances"),
        ("tensors", [], r"the bundle: tensors is \[\], expected a table"),
        ("tensors/w", None, "the bundle: tensors.w is None, expected a table of shape, dtype"),
        ("tensors/w/shape", ..., "the bundle: tensors.w.shape is missing"),
        ("tensors/w/dtype", ..., "the bundle: tensors.w.dtype is missing"),
        ("tensors/w/dtype", "bf16", "the bundle: tensors.w: dtype 'bf16' is not known; known are float64"),
        ("tensors/w/dtype", ["bfloat16"], r"the bundle: tensors.w.dtype is \['bfloat16'\], expected text"),
        ("tensors/w/shape", 8, "the bundle: tensors.w.shape is 8, expected a list of at most 64 lengths"),
        ("tensors/w/shape", [8, 4.0], "the bundle: tensors.w.shape.1 is 4.0, expected a whole number from 0 on"),
        ("tensors/w/shape", [8, True], "the bundle: tensors.w.shape.1 is True, expected a whole number from 0 on"),
        ("tensors/w/shape", [8, "4"], "the bundle: tensors.w.shape.1 is '4', expected a whole number from 0 on"),
        ("tensors/w/shape", [8, -4], "the bundle: tensors.w.shape.1 is -4, expected a whole number from 0 on"),
        ("tensors/w/shape", [8, 10**30], "tensors.w.shape.1 is 1000+, expected a whole number from 0 on"),
        (
            "tensors/w/shape",
            [2**40, 2**40],
            r"the bundle: tensors.w: shape \[1099511627776, 1099511627776\] is too large to address",
        ),
        ("tensors/w/shape", [1] * 65, "expected a list of at most 64 lengths"),
        ("tensors/w/strides", [4, 1], "the bundle: tensors.w.strides is not known; known are shape, dtype"),
        ("tensors/", {"shape": [1], "dtype": "int8"}, r"tensors..\[key\] is '': expected printable text"),
        ("tensors/a\nb", {"shape": [1], "dtype": "int8"}, r"tensors.a b.\[key\] is 'a\\nb': expected printable text"),
        ("trainer", [], r"the bundle: trainer is \[\], expected a table of ranks, hosts"),
        ("trainer/ranks", ..., "the bundle: trainer.ranks is missing"),
        ("trainer/ranks", {}, "the bundle: trainer.ranks is {}, expected a table of at least one rank"),
        ("trainer/ranks", [[]], r"the bundle: trainer.ranks is \[\[\]\], expected a table of at least one rank"),
        ("trainer/rank", {}, "the bundle: trainer.rank is not known; known are ranks, hosts"),
        ("trainer/ranks/3", [], "trainer: rank '3' is not one of 0..2; ranks are counted without gaps"),
        ("trainer/ranks/-1", [], "trainer: rank '-1' is not one of 0..2"),
        ("trainer/ranks/01", [], "trainer: rank '01' is not one of 0..2"),
        ("trainer/ranks/x", [], "trainer: rank 'x' is not one of 0..2"),
        ("trainer/ranks/0", {}, "the bundle: trainer.ranks.0 is {}, expected a list"),
        ("trainer/ranks/0/0", 5, "trainer.ranks.0.0 is 5, expected a table of tensor, offset, size, slot"),
        ("trainer/hosts/7", "h", "trainer: hosts names rank '7', which the side does not have"),
        ("trainer/hosts/1", 5, "the bundle: trainer.hosts.1 is 5, expected printable text"),
        ("instances", {}, "the bundle: instances is {}, expected a table of at least one instance"),
        ("instances", [], r"the bundle: instances is \[\], expected a table of at least one instance"),
        ("instances/a/ranks", {}, "the bundle: instances.a.ranks is {}, expected a table of at least one rank"),
        ("instances/b", None, "the bundle: instances.b is None, expected a table of ranks, hosts"),
        (
            "instances/a/ranks/0/0/tensor",
            "v",
            "a rank 0: region 0 names tensor 'v', which is not in the bundle's tensors",
        ),
        ("instances/a/ranks/0/0/tensor", {}, "the bundle: instances.a.ranks.0.0.tensor is {}, expected text"),
        ("instances/a/ranks/0/1/offset", ..., "the bundle: instances.a.ranks.0.1.offset is missing"),
        ("instances/a/ranks/0/1/size", None, "the bundle: instances.a.ranks.0.1.size is None, expected a list"),
        ("instances/a/ranks/0/1/size", [4, False], "0.1.size.1 is False, expected a whole number"),
        (
            "instances/a/ranks/0/1/size",
            [4],
            r"a rank 0: region 1 of 'w' has offset \[4, 0\] and size \[4\], expected 2 numbers",
        ),
        ("instances/a/ranks/0/1/size", [5, 4], r"a rank 0: region 1 of 'w' has .* which is not inside shape \[8, 4\]"),
        ("instances/a/ranks/0/1/size", [-1, 4], r"a rank 0: region 1 of 'w' has .* which is not inside shape \[8, 4\]"),
        ("instances/a/ranks/0/1/offset", [2**60, 0], r"a rank 0: region 1 of 'w' has .* which is not inside shape"),
        (
            "instances/a/ranks/0/1/offset",
            [2**63, 0],
            "instances.a.ranks.0.1.offset.0 is 9223372036854775808, expected a whole number of at most 60 bits",
        ),
        ("instances/a/ranks/0/1/slot", -1, "instances.a.ranks.0.1.slot is -1, expected a whole number from 0 on"),
        ("instances/a/ranks/0/1/slot", True, "instances.a.ranks.0.1.slot is True, expected a whole number from 0 on"),
        ("instances/a/ranks/0/1/slot", None, "instances.a.ranks.0.1.slot is None, expected a whole number from 0 on"),
        (
            "instances/a/ranks/0/1/slots",
            1,
            "the bundle: instances.a.ranks.0.1.slots is not known; known are tensor, offset, size, slot",
        ),
    ],
)
def test_one_fault_is_one_line(path, value, message):
    for data in (json.dumps(changed(path, value)).encode(), pack(changed(path, value))):
        if data is not None:
            with pytest.raises(LayoutError, match=message) as caught:
                read_bundle(data)
            assert "\n" not in str(caught.value)


def pack(document) -> bytes | None:
    try:
        return msgpack.packb(document)
    except (OverflowError, ValueError):
        return None


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "neither JSON nor msgpack"),
        (b"{", "neither JSON nor msgpack"),
        (b"\x80", "the bundle: tensors is missing"),
        (b"[]", "neither JSON nor msgpack"),
        (b"\xc1", "neither JSON nor msgpack"),
        (b"\xff\xfe{", "neither JSON nor msgpack"),
        (b'{"tensors": "\xff"}', "neither JSON nor msgpack"),
        (b'{"a": 1, "a": 2}', "key 'a' occurs twice in one object"),
        (b'{"tensors": NaN}', "NaN is no number"),
        (b'{"tensors": -Infinity}', "-Infinity is no number"),
        (b'{"tensors": ' + b"9" * 5000 + b"}", "neither JSON nor msgpack"),
        (b'{"a": ' + b"[" * 100_000, "nested too deeply|neither JSON nor msgpack"),
        (b'{"tensors": ' + b'{"a": ' * 50_000 + b"1" + b"}" * 50_001, "nested too deeply"),
        (b"\x91" * 5000 + b"\xc0", "neither JSON nor msgpack|nested too deeply"),
        (msgpack.packb({1: 2}), "neither JSON nor msgpack"),
        (msgpack.packb({b"tensors": 2}), "tensors is missing|not known"),
        (b"\x82\xa1a\x01\xa1a\x02", "key 'a' occurs twice"),
        (b"\xdf\xff\xff\xff\xff", "neither JSON nor msgpack"),
    ],
)
def test_no_bundle_at_all(data, message):
    with pytest.raises(LayoutError, match=message) as caught:
        read_bundle(data)
    assert "\n" not in str(caught.value)


JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["w", "s", "0", "ranks", "tensor", "offset"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=6) | st.sampled_from(["w", "0", "ranks"]), inner, max_size=3)
    ),
    max_leaves=8,
)


def places(value, path=()):
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*path, key))


@settings(max_examples=500, deadline=None)
@given(st.data())
def test_junk_anywhere_is_refused_or_fine_but_never_a_traceback(data):
    document = copy.deepcopy(GOOD)
    for _ in range(data.draw(st.integers(1, 3))):
        *steps, last = data.draw(st.sampled_from([p for p in places(document) if p]))
        place = document
        for step in steps:
            place = place[step]
        place[last] = data.draw(JUNK)
    for encoded in (json.dumps(document).encode(), pack_or_none(document)):
        if encoded is None:
            continue
        message = refusal(encoded)
        assert "\n" not in message
        assert len(message) < 1000


def refusal(encoded: bytes) -> str:
    try:
        read_bundle(encoded)
    except LayoutError as error:
        return str(error)
    return ""


def pack_or_none(document) -> bytes | None:
    try:
        return msgpack.packb(document)
    except (OverflowError, ValueError, TypeError):
        return None


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=60))
def test_random_bytes_are_refused(data):
    with pytest.raises(LayoutError):
        read_bundle(data)
