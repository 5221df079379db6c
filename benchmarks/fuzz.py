"""Mutated messages and requests against the gateway's application: nothing may crash, hang, grow or answer in riddles.

    python benchmarks/fuzz.py [--count 1000000] [--jobs 2] [--seed 1]

Each is a valid request that something was done to: to its path, query, headers, JSON or message, inside the message's
compression too. Every answer must be a success or a 4xx with one line that says why, and come within a second. The
process's memory is measured along the way. Reports that pass are merged, as a connect would.

The application runs in this process, because a socket would be the slowest part of it. Mutations are drawn from a seed
that is printed with a failure; they are not guided by coverage.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import random
import resource
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from weightcast.gateway.control.gateway import Gateway
from weightcast.gateway.incarnations import HEADER, Incarnation
from weightcast.gateway.layouts.merge import merge_instance, merge_trainer
from weightcast.gateway.records import EngineSpec, PairSpec
from weightcast.gateway.server.app import make_app
from weightcast.gateway.server.tokens import Tokens
from weightcast.gateway.settings import Settings
from weightcast.transfer.errors import WeightcastError
from weightcast.transfer.layout.placement import ExpertPlacement, RankPlacement
from weightcast.transfer.layout.tables import LayoutNotes, RankReport, Region, RegionTable, TensorSpec
from weightcast.transfer.plan.digest_report import DigestReport
from weightcast.transfer.wire import messages as wire
from weightcast.transfer.wire.messages import MSGPACK

TOKEN = "fuzz-fuzz-fuzz-fuzz"
START = "a.1"
"""Of the trainer rank that is believed."""
SLOWEST = 1.0
"""Seconds that an answer may take on a machine that does nothing else; ten times that counts as hanging."""
GROWTH = 256 << 20
"""Bytes that the process may grow by: a message's own limit is 64 MiB."""
FRAME = 16
"""Bytes before the compressed body of a message: magic, version, kind, length of the body."""
ODD_NUMBERS = (
    0,
    1,
    -1,
    2,
    7,
    255,
    256,
    65535,
    1 << 31,
    (1 << 31) - 1,
    1 << 32,
    (1 << 53) + 1,
    (1 << 62),
    1 << 63,
    -(1 << 63),
    1 << 64,
)
ODD_TEXTS = (
    "",
    "\0",
    "a" * 300,
    "..",
    "../../etc/passwd",
    "%00",
    "é",
    "\ud800",
    "null",
    "NaN",
    "1e999",
    "-",
    "{}",
    "\U0001d4b3",
)


@dataclass(frozen=True, slots=True)
class Asked:
    """A request."""

    method: str
    path: str
    query: str = ""
    kind: str = "application/json"
    body: bytes = b""
    token: str = TOKEN
    incarnation: str = ""


def reports() -> list[RankReport]:
    """Of a trainer rank, and of a rank of an instance with a placement."""
    names = [f"model.layers.{layer}.mlp.experts.{e}.down_proj.weight" for layer in range(2) for e in range(4)]
    specs = {"w": TensorSpec((8, 4), "bfloat16"), **{name: TensorSpec((3, 5), "float32") for name in names}}
    whole = [Region(name, (0,) * len(spec.shape), spec.shape) for name, spec in specs.items()]
    trainer = RankReport(0, 1, "host", RegionTable.from_regions(specs, whole))
    row = [0, 1, 2, 3, 3, 0]
    slots = [Region(names[4 * n + e], (0, 0), (3, 5), slot) for n in range(2) for slot, e in enumerate(row)]
    placement = RankPlacement(ExpertPlacement(np.array([row] * 2), 4, 1), 0, 6, 6, 0)
    table = RegionTable.from_regions(specs, [whole[0], *slots])
    return [trainer, RankReport(0, 1, "host", table, placement, LayoutNotes(parameter_bytes=64 + 12 * 60))]


def requests() -> list[Asked]:
    """One valid request to every route that takes anything."""
    trainer, instance = (wire.encode_report(report) for report in reports())
    digests = wire.encode_digests(DigestReport(None, 0, np.arange(9), np.arange(9, dtype=np.uint64)))
    base = "/pairs/p/instances/i/1"
    pair = {"trainer_world": 1, "instances": {"i": {"kind": "worker", "world_size": 1}}, "settings": {"offer": 5.0}}
    bodies: list[tuple[str, str, Any]] = [
        ("PUT", "/pairs/p", pair),
        ("PUT", "/pairs/p/instances/i", pair["instances"]["i"]),  # type: ignore[index]
        ("POST", "/pairs/p/trainer/0/beat", {}),
        ("POST", "/pairs/p/instances/i/ranks/0/beat", {"identity": "x"}),
        ("POST", "/pairs/p/instances/i/ranks/0/restarted", {}),
        ("POST", "/pairs/p/trainer/0/offers", {"version": 1}),
        ("PUT", f"{base}/trainer/0/rendezvous", {"host": "127.0.0.1", "port": 29500}),
        ("POST", f"{base}/trainer/0/joined", {}),
        ("POST", f"{base}/instance/0/joined", {}),
        ("POST", f"{base}/trainer/0/failures", {"error": "TransferError", "message": "lost"}),
        ("POST", f"{base}/instance/0/failures", {"error": "TransferError", "message": "lost"}),
        ("POST", f"{base}/ranks/0/ready", {"stale": "", "layers": [0, 1]}),
        ("POST", f"{base}/ranks/0/moved", {"version": 1, "layers": [0]}),
    ]
    asked = [
        Asked("POST", "/pairs/p/trainer/0/report", f"start={START}", MSGPACK, trainer),
        Asked(
            "POST", "/pairs/p/trainer/0/report", "start=b.2&pid=5&was=1&resumes=true&takeover=true", MSGPACK, trainer
        ),
        Asked("POST", f"{base}/ranks/0/report", "identity=a&uncommitted=false&verified=3", MSGPACK, instance),
        Asked("POST", f"{base}/trainer/0/digests", "version=1", MSGPACK, digests),
        Asked("GET", "/pairs"),
        Asked("GET", "/pairs/p"),
        Asked("GET", "/healthz"),
        Asked("GET", "/pairs/p/updates/1"),
        Asked("GET", "/pairs/p/updates/1/instances"),
        Asked("GET", "/pairs/p/instances/i/inspect", "text=true"),
        Asked("GET", "/pairs/p/instances/i/orders", "after=0&known=x"),
        Asked("GET", "/pairs/p/orders", "after=0&known=x"),
        Asked("GET", f"{base}/parts/trainer/0"),
        Asked("GET", f"{base}/instance/0/rendezvous"),
        Asked("GET", f"{base}/go"),
    ]
    for method, path, body in bodies:
        bare, _, query = path.partition("?")
        asked.append(Asked(method, bare, query, body=json.dumps(body).encode()))
    return asked


# ---- mutations


def of_bytes(raw: bytes, chance: random.Random) -> bytes:
    """Bits flipped, bytes cut out, put in, or moved."""
    data = bytearray(raw)
    for _ in range(chance.choice((1, 1, 1, 2, 4, 16))):
        at = chance.randrange(len(data) + 1)
        kind = chance.randrange(5)
        if kind == 0 and at < len(data):
            data[at] ^= 1 << chance.randrange(8)
        elif kind == 1:
            del data[at : at + chance.choice((1, 2, 8, 64))]
        elif kind == 2:
            data[at:at] = chance.randbytes(chance.choice((1, 2, 8, 64)))
        elif kind == 3:
            end = at + chance.choice((1, 4, 32))
            data[at:at] = data[at:end]
        elif at < len(data):
            data[at] = chance.choice((0, 255, 128, 127))
    return bytes(data)


def of_value(value: Any, chance: random.Random, depth: int = 0) -> Any:
    """Something inside nested lists and maps becomes something else."""
    if depth > 6 or chance.random() < 0.25:
        odd = (None, True, 1.5, [], {}, [[]], {"a": 1}, chance.choice(ODD_NUMBERS), chance.choice(ODD_TEXTS))
        return chance.choice(odd)
    if isinstance(value, dict) and value:
        key = chance.choice(list(value))
        changed = dict(value)
        if chance.random() < 0.15:
            del changed[key]
        elif chance.random() < 0.15:
            changed[chance.choice(ODD_TEXTS)] = changed.pop(key)
        else:
            changed[key] = of_value(value[key], chance, depth + 1)
        return changed
    if isinstance(value, list) and value:
        at = chance.randrange(len(value))
        if chance.random() < 0.15:
            return value[:at] + value[at + 1 :]
        return [*value[:at], of_value(value[at], chance, depth + 1), *value[at + 1 :]]
    if isinstance(value, int) and not isinstance(value, bool):
        return chance.choice((*ODD_NUMBERS, value + 1, value - 1, value * 1000))
    return chance.choice((*ODD_TEXTS, *ODD_NUMBERS))


def of_message(raw: bytes, chance: random.Random) -> bytes:
    """A message, from outside or inside its compression: its header by its structure, or its payload by its bytes."""
    if len(raw) < FRAME or chance.random() < 0.2:
        return of_bytes(raw, chance)
    body = zlib.decompress(raw[FRAME:])
    length = int.from_bytes(body[:4], "little")
    header, payload = body[4 : 4 + length], body[4 + length :]
    if chance.random() < 0.7:
        changed = of_value(msgpack.unpackb(header), chance)
        try:
            header = msgpack.packb(changed)
        except (OverflowError, ValueError):  # a number or text that no message can carry
            header = of_bytes(header, chance)
    else:
        payload = of_bytes(payload, chance)
    size = len(header) if chance.random() < 0.95 else chance.choice((0, 1, 1 << 16, (1 << 32) - 1))
    body = size.to_bytes(4, "little") + header + payload
    said = len(body) if chance.random() < 0.95 else chance.choice((0, 1, 1 << 26, 1 << 40, (1 << 64) - 1))
    return raw[:8] + said.to_bytes(8, "little") + zlib.compress(body, 1)


def of_text(text: str, chance: random.Random) -> str:
    """A path or a query: one part of it becomes another."""
    parts = text.split("/") if "/" in text else text.split("&")
    at = chance.randrange(len(parts))
    parts[at] = str(
        chance.choice((*ODD_NUMBERS, *ODD_TEXTS, "p", "q", "i", "trainer", "instance", "version=" + "9" * 30))
    )
    return ("/" if "/" in text else "&").join(parts)


def of_json(raw: bytes, chance: random.Random) -> bytes:
    """A JSON body, by its structure or by its bytes; sometimes it is nested without end."""
    draw = chance.random()
    if draw < 0.02:
        return b"[" * chance.choice((100, 10_000, 200_000))
    if draw < 0.25 or not raw:
        return of_bytes(raw or b"{}", chance)
    return json.dumps(of_value(json.loads(raw), chance)).encode()


def mutated(asked: Asked, chance: random.Random) -> Asked:
    """A valid request that something was done to. None of them waits: long polls are no hangs."""
    draw = chance.random()
    if draw < 0.75 and asked.body:
        return replace(asked, body=(of_message if asked.kind == MSGPACK else of_json)(asked.body, chance))
    if draw < 0.85:
        return replace(asked, path=of_text(asked.path, chance))
    if draw < 0.95 and asked.query:
        return replace(asked, query=of_text(asked.query, chance))
    if draw < 0.96:
        said = asked.incarnation
        return replace(asked, incarnation=chance.choice(("", of_text(said, chance), *ODD_TEXTS) if said else ODD_TEXTS))
    if draw < 0.97:
        return replace(asked, kind=chance.choice(("", "text/plain", MSGPACK, "application/json", "\0")))
    return replace(asked, method=chance.choice(("GET", "PUT", "POST", "DELETE", "PATCH", "OPTIONS", "HEAD", "BREW")))


# ---- asking


async def ask(app: Callable[..., Any], asked: Asked) -> tuple[int, bytes]:
    """Status and body of the answer."""
    said: list[Any] = []
    headers = [(b"authorization", f"Bearer {asked.token}".encode()), (b"content-length", str(len(asked.body)).encode())]
    headers.append((b"content-type", asked.kind.encode()))
    if asked.incarnation:
        headers.append((HEADER.lower().encode(), asked.incarnation.encode("utf-8", "replace")))
    path = asked.path.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
    scope = {"type": "http", "http_version": "1.1", "method": asked.method, "path": path, "raw_path": path.encode()}
    scope |= {
        "query_string": asked.query.encode("utf-8", "replace"),
        "headers": headers,
        "root_path": "",
        "scheme": "http",
    }
    scope |= {"client": ("127.0.0.1", 5), "server": ("127.0.0.1", 1), "asgi": {"version": "3.0"}, "state": {}}
    sent = False

    async def receive() -> dict[str, Any]:
        nonlocal sent
        if sent:
            await asyncio.Event().wait()
        sent = True
        return {"type": "http.request", "body": asked.body, "more_body": False}

    async def send(message: Any) -> None:
        said.append(message)

    await app(scope, receive, send)
    return int(said[0]["status"]), b"".join(m.get("body", b"") for m in said[1:])


def fault_of(asked: Asked, status: int, body: bytes, seconds: float) -> str:
    """What is wrong with an answer; empty when nothing is."""
    if seconds > 10 * SLOWEST:
        return f"took {seconds:.1f} s"
    if 200 <= status < 300:
        return ""
    if not 400 <= status < 500:
        return f"status {status}: {body[:300]!r}"
    if asked.method == "HEAD":
        return ""
    answer = json.loads(body)
    message = answer.get("message", "")
    return "" if answer.get("error") and message and "\n" not in message else f"says {body[:300]!r}"


def merged(body: bytes) -> str:
    """What a connect makes of a report that was taken; what it raises that is none of our errors."""
    try:
        report = wire.decode_report(body)
        for merge in (lambda: merge_trainer([report]), lambda: merge_instance("i", [report])):
            try:
                merge()
            except WeightcastError as error:
                if "\n" in str(error):
                    return f"merge says {str(error)[:300]!r}"
    except WeightcastError:
        return ""
    except Exception as error:
        return f"merge raised {type(error).__name__}: {error}"
    return ""


def resident() -> int:
    """Bytes of this process that are in memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


async def play(count: int, seed: int) -> tuple[Counter[int], list[str], int]:
    """Statuses, faults, and bytes by which the process has grown."""
    gateway = Gateway("127.0.0.1", 1)
    app = make_app(gateway, Tokens(TOKEN))
    seeds, chance = requests(), random.Random(seed)
    quick = dict.fromkeys(("offer", "register", "join", "prepare", "transfer", "verify", "clean_up"), 0.5)
    engines, settings = {"i": EngineSpec(kind="worker", world_size=1)}, Settings(**quick)  # type: ignore[arg-type]
    spec = PairSpec("p", trainer_world=1, instances=engines, settings=settings)
    statuses: Counter[int] = Counter()
    faults: list[str] = []
    before = generation = 0
    for number in range(count):
        if number % 250 == 0:  # what was asked of it so far may have changed it, as it should
            gateway.pairs.clear()
            gateway._processes.clear()  # of a pair that was deleted: they may have displaced the rank that asks here
            pair = await gateway.create(spec)
            generation, _ = await pair.register_trainer(0, reports()[0], START)
            if number == 5000:
                before = resident()
        valid = chance.choice(seeds)
        if "trainer" in valid.path or valid.path.endswith(("p/orders", "/connect", "1/instances")):
            valid = replace(valid, incarnation=str(Incarnation(0, generation, pair.boot, START)))
        asked = mutated(valid, chance)
        begun = time.perf_counter()
        try:
            status, body = await asyncio.wait_for(ask(app, asked), 60.0)
            fault = fault_of(asked, status, body, time.perf_counter() - begun)
            if not fault and status == 200 and asked.path.endswith("/report"):
                fault = merged(asked.body)
        except Exception as error:
            status, fault = 0, f"{type(error).__name__}: {error}"
        statuses[status] += 1
        if fault:
            faults.append(f"seed {seed}, number {number}: {asked.method} {asked.path[:100]!r}: {fault}")
    return statuses, faults, resident() - before if before else 0


def job(count: int, seed: int) -> tuple[Counter[int], list[str], int]:
    """One process's share."""
    logging.disable(logging.CRITICAL)
    return asyncio.run(play(count, seed))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    begun = time.monotonic()
    share = [arguments.count // arguments.jobs] * arguments.jobs
    with ProcessPoolExecutor(arguments.jobs) as executor:
        found = list(executor.map(job, share, range(arguments.seed, arguments.seed + arguments.jobs)))
    statuses: Counter[int] = sum((statuses for statuses, _, _ in found), Counter())
    faults = [fault for _, some, _ in found for fault in some]
    growth = max(grown for _, _, grown in found)
    seconds = time.monotonic() - begun
    print(f"{sum(statuses.values())} requests in {seconds:.0f} s, {sum(statuses.values()) / seconds:.0f} a second")
    print("answers " + ", ".join(f"{status}: {n}" for status, n in sorted(statuses.items())))
    print(f"memory grew by {growth / (1 << 20):.1f} MiB, limit {GROWTH >> 20} MiB")
    print(f"{len(faults)} that crashed, hung or were answered with anything but success or one line of 4xx")
    for fault in faults[:20]:
        print(f"  {fault[:500]}")
    return 4 if faults or growth > GROWTH else 0


if __name__ == "__main__":
    sys.exit(main())
