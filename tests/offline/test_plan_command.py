"""`weightcast plan` on literal bundles, its output judged element by element."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import msgpack
import pytest

from weightcast.cli import main

CASES = Path(__file__).parent.parent / "cases"
GOOD = sorted(path.name for path in CASES.glob("*.json") if not path.name.startswith(("bad-", "incomplete-")))
ITEMSIZE = {"bfloat16": 2, "float32": 4}
SEND_KEYS = {"kind", "tensor", "src_rank", "instance", "dst_rank", "dst_region", "offset", "size"}
COPY_KEYS = {"kind", "tensor", "instance", "dst_rank", "src_region", "dst_region", "offset", "size"}
SUMMARY_KEYS = {"bytes_sent", "bytes_copied", "max_send_bytes", "max_receive_bytes", "seconds_to_plan"}


def run(capsys, *arguments: object) -> tuple[int, str, str]:
    status = main(["plan", *map(str, arguments)])
    out, err = capsys.readouterr()
    return status, out, err


def points(op) -> list[tuple[int, ...]]:
    """Coordinates of every element of a box of the logical tensor."""
    return list(itertools.product(*(range(o, o + s) for o, s in zip(op["offset"], op["size"], strict=True))))


def replay(bundle, document) -> tuple[Counter, Counter]:
    """Plays the operations; every slot ends up with its own element. Gives bytes sent by rank, and needed by rank."""
    held = {
        (rank, r["tensor"], p) for rank, rows in bundle["trainer"]["ranks"].items() for r in rows for p in points(r)
    }
    memory: dict[tuple, tuple] = {}
    slots = {}
    needed: Counter = Counter()
    for name, side in bundle["instances"].items():
        for rank, rows in side["ranks"].items():
            for k, r in enumerate(rows):
                slots |= {(name, int(rank), k, p): r["tensor"] for p in points(r)}
            for tensor, _ in {(r["tensor"], p) for r in rows for p in points(r)}:
                needed[name, int(rank)] += ITEMSIZE[bundle["tensors"][tensor]["dtype"]]
    sent: Counter = Counter()
    got: Counter = Counter()
    for op in sorted(document["ops"], key=lambda op: op["kind"] != "send"):
        assert set(op) == (SEND_KEYS if op["kind"] == "send" else COPY_KEYS)
        for p in points(op):
            slot = (op["instance"], op["dst_rank"], op["dst_region"], p)
            assert slots[slot] == op["tensor"]
            assert slot not in memory
            if op["kind"] == "send":
                assert (str(op["src_rank"]), op["tensor"], p) in held
                memory[slot] = (op["tensor"], p)
                nbytes = ITEMSIZE[bundle["tensors"][op["tensor"]]["dtype"]]
                sent[op["src_rank"]] += nbytes
                got[slot[:2]] += nbytes
            else:
                memory[slot] = memory[op["instance"], op["dst_rank"], op["src_region"], p]
    assert memory == {slot: (tensor, slot[3]) for slot, tensor in slots.items()}
    assert got == needed
    return sent, got


@pytest.mark.parametrize("name", GOOD)
def test_good_cases(name, capsys):
    status, out, err = run(capsys, "--layouts", CASES / name, "--json")
    assert (status, err) == (0, "")
    document = json.loads(out)
    assert set(document) == {"ops", "summary"}
    sent, got = replay(json.loads((CASES / name).read_text()), document)
    summary = document["summary"]
    assert set(summary) == SUMMARY_KEYS
    assert summary["bytes_sent"] == sum(got.values())
    assert (summary["max_send_bytes"], summary["max_receive_bytes"]) == (max(sent.values()), max(got.values()))
    assert 0 < summary["seconds_to_plan"] < 60


def test_two_instances_with_two_shards_take_four_sends(capsys):
    _, out, _ = run(capsys, "--layouts", CASES / "two-instances-two-shards.json", "--json")
    assert [op["kind"] for op in json.loads(out)["ops"]] == ["send"] * 4


def test_same_rank_replicas_are_copied(capsys):
    _, out, _ = run(capsys, "--layouts", CASES / "same-rank-pair.json", "--json")
    assert Counter(op["kind"] for op in json.loads(out)["ops"]) == {"send": 120, "copy": 24}


@pytest.mark.parametrize(
    ("name", "status", "message"),
    [
        (
            "bad-box-outside-tensor",
            2,
            "rollout-0 rank 0: region 0 of 'w' has offset [6, 0] and size [4, 4], which is not inside",
        ),
        ("bad-missing-shape", 2, "the bundle: tensors.w.shape is missing"),
        ("bad-negative-offset", 2, "rollout-0 rank 0: region 0 of 'w' has offset [-2, 0]"),
        (
            "bad-rank-mismatch-of-box",
            2,
            "trainer rank 0: region 0 of 'w' has offset [0] and size [8], expected 2 numbers each",
        ),
        ("bad-unknown-tensor", 2, "rollout-0 rank 0: region 0 names tensor 'v', which is not in the bundle's tensors"),
        ("incomplete-trainer-holds-half", 3, "w[4:8, 0:4] of shape [8, 4]: on no trainer rank"),
        (
            "incomplete-experts-32-to-127-never-named",
            3,
            "layers 0, experts 32-127, gate_proj/up_proj/down_proj: on no rank of rollout-0",
        ),
    ],
)
@pytest.mark.parametrize("options", [[], ["--json"], ["--no-check"]])
def test_faults_are_one_line_and_a_status(name, status, message, options, capsys):
    got, out, err = run(capsys, "--layouts", CASES / f"{name}.json", *options)
    assert (got, out) == (status, "")
    assert message in err
    assert err.startswith("weightcast plan: ")
    assert err.count("\n") == 1


def test_a_file_that_cannot_be_read(tmp_path, capsys):
    for path, message in ((tmp_path / "none.json", "No such file"), (tmp_path, "Is a directory")):
        status, out, err = run(capsys, "--layouts", path)
        assert (status, out, err.count("\n")) == (2, "", 1)
        assert message in err


def test_msgpack_gives_the_same_operations(tmp_path, capsys):
    text = (CASES / "random-101.json").read_text()
    packed = tmp_path / "layouts.msgpack"
    packed.write_bytes(msgpack.packb(json.loads(text)))
    outputs = [
        json.loads(run(capsys, "--layouts", path, "--json")[1])["ops"] for path in (CASES / "random-101.json", packed)
    ]
    assert outputs[0] == outputs[1]


def test_the_table(capsys):
    status, out, _ = run(capsys, "--layouts", CASES / "same-rank-pair.json")
    lines = out.splitlines()
    assert status == 0
    assert lines[0].split() == ["rank", "bytes", "sent", "bytes", "received", "bytes", "copied"]
    assert lines[1].split() == ["trainer", "0", "1,920"]
    assert lines[3].split() == ["rollout-0", "1", "768", "384"]
    assert "120 sends, 24 copies, 0 relays of 96 tensors" in out
    assert "planned and checked in" in out


def test_planning_needs_no_torch():
    code = (
        "import sys; from weightcast.cli import main; "
        f"status = main(['plan', '--layouts', {str(CASES / 'two-instances-two-shards.json')!r}]); "
        "sys.exit(status or ('torch' in sys.modules) * 9)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_as_a_module():
    path = CASES / "incomplete-trainer-holds-half.json"
    done = subprocess.run(
        [sys.executable, "-m", "weightcast", "plan", "--layouts", str(path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 3
    assert "on no trainer rank" in done.stderr
