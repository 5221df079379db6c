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
        ("tensors", ..., "the bundle: 'tensors' is missing"),
        ("trainer", ..., "the bundle: 'trainer' is missing"),
        ("instances", ..., "the bundle: 'instances' is missing"),
        ("extra", 1, "the bundle: key 'extra' is not known; known are tensors, trainer, instances"),
        ("tensors", [], r"tensors: expected an object, found \[\]"),
        ("tensors/w", None, "tensor 'w': expected an object, found None"),
        ("tensors/w/shape", ..., "tensor 'w': 'shape' is missing"),
        ("tensors/w/dtype", ..., "tensor 'w': 'dtype' is missing"),
        ("tensors/w/dtype", "bf16", "tensor 'w': dtype 'bf16' is not known; known are float64"),
        ("tensors/w/dtype", ["bfloat16"], r"tensor 'w': expected the name of a dtype, found \['bfloat16'\]"),
        ("tensors/w/shape", 8, "tensor 'w': shape: expected a list of integers, found 8"),
        ("tensors/w/shape", [8, 4.0], "tensor 'w': shape: 4.0 is not an integer"),
        ("tensors/w/shape", [8, True], "tensor 'w': shape: True is not an integer"),
        ("tensors/w/shape", [8, "4"], "tensor 'w': shape: '4' is not an integer"),
        ("tensors/w/shape", [8, -4], r"tensor 'w': shape \[8, -4\] has a negative number"),
        ("tensors/w/shape", [8, 10**30], "tensor 'w': shape: 1000+ is not an integer of at most 60 bits"),
        (
            "tensors/w/shape",
            [2**40, 2**40],
            r"tensor 'w': shape \[1099511627776, 1099511627776\] is too large to address",
        ),
        ("tensors/w/shape", [1] * 65, "more than 64 dimensions"),
        ("tensors/w/strides", [4, 1], "tensor 'w': key 'strides' is not known; known are shape, dtype"),
        ("tensors/", {"shape": [1], "dtype": "int8"}, "a tensor name is '', expected printable text"),
        ("tensors/a\nb", {"shape": [1], "dtype": "int8"}, r"a tensor name is 'a\\nb', expected printable text"),
        ("trainer", [], r"trainer: expected an object, found \[\]"),
        ("trainer/ranks", ..., "trainer: 'ranks' is missing"),
        ("trainer/ranks", {}, "trainer: there are no ranks"),
        ("trainer/ranks", [[]], r"trainer: ranks: expected an object, found \[\[\]\]"),
        ("trainer/rank", {}, "trainer: key 'rank' is not known; known are ranks, hosts"),
        ("trainer/ranks/3", [], "trainer: rank '3' is not one of 0..2; ranks are counted without gaps"),
        ("trainer/ranks/-1", [], "trainer: rank '-1' is not one of 0..2"),
        ("trainer/ranks/01", [], "trainer: rank '01' is not one of 0..2"),
        ("trainer/ranks/x", [], "trainer: rank 'x' is not one of 0..2"),
        ("trainer/ranks/0", {}, "trainer rank 0: expected a list of regions, found {}"),
        ("trainer/ranks/0/0", 5, "trainer rank 0: region 0: expected an object, found 5"),
        ("trainer/hosts/7", "h", "trainer: hosts names rank '7', which the side does not have"),
        ("trainer/hosts/1", 5, "trainer rank 1: host is 5, expected printable text"),
        ("instances", {}, "instances: there is none"),
        ("instances", [], r"instances: expected an object, found \[\]"),
        ("instances/a/ranks", {}, "a: there are no ranks"),
        ("instances/b", None, "b: expected an object, found None"),
        (
            "instances/a/ranks/0/0/tensor",
            "v",
            "a rank 0: region 0 names tensor 'v', which is not in the bundle's tensors",
        ),
        ("instances/a/ranks/0/0/tensor", {}, "a rank 0: region 0 names tensor {}, which is not in"),
        ("instances/a/ranks/0/1/offset", ..., "a rank 0: region 1: 'offset' is missing"),
        (
            "instances/a/ranks/0/1/size",
            None,
            "a rank 0: region 1 of 'w': size: expected a list of integers, found None",
        ),
        ("instances/a/ranks/0/1/size", [4, False], "a rank 0: region 1 of 'w': size: False is not an integer"),
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
            "a rank 0: region 1 of 'w': offset: 9223372036854775808 is not an integer",
        ),
        ("instances/a/ranks/0/1/slot", -1, "a rank 0: region 1 of 'w' has slot -1, expected an integer from 0 on"),
        ("instances/a/ranks/0/1/slot", True, "a rank 0: region 1 of 'w' has slot True, expected an integer from 0 on"),
        ("instances/a/ranks/0/1/slot", None, "a rank 0: region 1 of 'w' has slot None, expected an integer from 0 on"),
        (
            "instances/a/ranks/0/1/slots",
            1,
            "a rank 0: region 1: key 'slots' is not known; known are tensor, offset, size, slot",
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
        (b"\x80", "'tensors' is missing"),
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
        (msgpack.packb({b"tensors": 2}), "'tensors' is missing|not known"),
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
