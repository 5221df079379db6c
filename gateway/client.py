"""Client of the gateway's HTTP server, for ranks, drivers of a training loop, and the command line.

Its calls block, because the ranks that use it do. Long polls are repeated until the caller's deadline. An error that
the gateway answers is raised here as the same class with the same message.

A gateway that has answered before, and does not now, may be starting anew. So it is asked again for a while, because
every request can be made twice. That while is the same when connections are refused and when packets vanish.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Mapping
from types import TracebackType
from typing import Any, NamedTuple

import httpx

from weightcast.gateway.addresses import transport_to, trusted
from weightcast.gateway.incarnations import HEADER, Incarnation
from weightcast.gateway.records import Order
from weightcast.transfer.errors import (
    ControlError,
    DeadlineError,
    InputError,
    TransferError,
    UnregisteredError,
    WeightcastError,
    error_named,
)
from weightcast.transfer.layout.tables import RankReport, TensorSpec
from weightcast.transfer.plan.digest_report import DigestReport
from weightcast.transfer.plan.operations import RankPart
from weightcast.transfer.planner.topology import Topology
from weightcast.transfer.wire import messages as wire
from weightcast.transfer.wire.messages import MSGPACK

__all__ = ["TOKEN_VARIABLE", "GatewayClient", "Orders", "Registered", "Seat"]

TOKEN_VARIABLE = "WEIGHTCAST_TOKEN"
"""Environment variable that holds the bearer token."""
POLL = 20.0
"""Seconds of one long poll at most."""
_LATER = (httpx.codes.TOO_MANY_REQUESTS, httpx.codes.SERVICE_UNAVAILABLE)
_AGAIN = 0.2
"""Seconds between two attempts to reach a gateway that is not there."""
_ONCE = 1.0
"""Seconds that one attempt may take to reach a gateway that has been gone for longer than `outage`."""


class Orders(NamedTuple):
    """Orders of an instance, the life of the pair that gave them (`Pair.boot`), and the number of all so far."""

    orders: list[Order]
    boot: str
    given: int


class Registered(NamedTuple):
    """Number of the trainer's start, the number of its first order since, and the life of the pair."""

    generation: int
    first_order: int
    boot: str


class Seat(NamedTuple):
    """Place of a rank in the communicator of one epoch of an instance; `side` is "trainer" or "instance"."""

    pair: str
    instance: str
    epoch: int
    side: str
    rank: int

    @property
    def epoch_path(self) -> str:
        """Path of what is asked for the epoch."""
        return f"/pairs/{self.pair}/instances/{self.instance}/{self.epoch}"

    @property
    def path(self) -> str:
        """Path of what members of the communicator ask, those of both sides."""
        return f"{self.epoch_path}/{self.side}/{self.rank}"


class GatewayClient:
    """Connection to a gateway: `GatewayClient("http://127.0.0.1:8900")`. WEIGHTCAST_TOKEN has the token unless given.

    Within a Ray cluster the address may be `ray://NAME` of a gateway's actor. Methods raise what the gateway answered,
    or TransferError when it cannot be reached.

    `identity` stands for the process of an instance's rank, and goes with every request. `outage` is for how many
    seconds a gateway that has answered before is asked again. They count from the moment when it was lost, over all
    calls until `begin`. `timeout` is the number of seconds that one which has not answered before may take.
    `incarnation` is that of the trainer rank which this client has registered, or speaks for: every request says it.
    """

    def __init__(
        self, url: str, token: str | None = None, *, timeout: float = 60.0, outage: float = 0.0, identity: str = ""
    ) -> None:
        token = token if token is not None else os.environ.get(TOKEN_VARIABLE, "")
        if not token:
            raise InputError(f"no bearer token for {url}; give one or set {TOKEN_VARIABLE}")
        transport = transport_to(url)
        self.url = url.rstrip("/")
        self.outage, self._timeout, self._reached = outage, timeout, False
        self._lost: float | None = None
        self.incarnation: Incarnation | None = None
        self._client = httpx.Client(
            base_url=self.url,
            headers={"Authorization": f"Bearer {token}"},
            params={"identity": identity} if identity else {},
            trust_env=False,
            transport=transport,
            verify=transport is not None or trusted(self.url),
        )

    def __enter__(self) -> GatewayClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connections to the gateway."""
        self._client.close()

    @property
    def lost(self) -> bool:
        """True if the last request got no answer."""
        return self._lost is not None

    def begin(self) -> None:
        """Starts the seconds of `outage` anew, also for a gateway that was lost before."""
        self._lost = None

    @property
    def _patience(self) -> float:
        return self.outage if self.outage and self._reached else self._timeout

    @property
    def _longest_poll(self) -> float:
        """Seconds of a long poll, so short that a late answer shows before `outage` is over."""
        return min(POLL, self._patience / 2)

    def _call(self, method: str, path: str, **request: Any) -> httpx.Response:
        start = time.monotonic()
        if (incarnation := self.incarnation) is not None:
            request["headers"] = {**request.get("headers", {}), HEADER: str(incarnation)}
        while True:
            asked_at = time.monotonic()
            outage_start = self._lost if self.outage and self._reached else None
            deadline = (start if outage_start is None else outage_start) + self._patience
            if outage_start is not None and "wait" in request.get("params", {}):
                request["params"] = {**request["params"], "wait": 0.0}  # first see if anybody answers
            try:
                response = self._client.request(method, path, timeout=max(deadline - asked_at, _ONCE), **request)
            except httpx.HTTPError as error:
                now = time.monotonic()
                # A broken connection shows when it broke; silence may have begun with the request.
                lost_at = self._lost or (asked_at if isinstance(error, httpx.TimeoutException) else now)
                self._lost = lost_at
                if now >= lost_at + (self.outage if self._reached else 0.0):
                    raise TransferError(
                        f"gateway {self.url}: {method} {path}: {type(error).__name__} {error}; is it up?"
                    ) from error
            else:
                self._lost = None
                # Wrong tokens from this address make the gateway deaf for some seconds; or it is stopping.
                retry_seconds = self.outage if self._reached else 0.0
                if response.status_code not in _LATER or time.monotonic() >= start + retry_seconds:
                    break
            time.sleep(_AGAIN)
        self._reached = True
        if response.is_success:
            return response
        raise _error_of(response, f"gateway {self.url}: {method} {path}")

    def _poll(
        self, path: str, deadline: float, what: str, *, method: str = "GET", json: object = None, **parameters: str
    ) -> httpx.Response:
        """Long-polls until the answer is not 204. Raises DeadlineError after `deadline`, a `time.monotonic()`."""
        while True:
            seconds = deadline - time.monotonic()
            if seconds <= 0:
                raise DeadlineError(f"gateway {self.url}: {what} did not come in time")
            params = {"wait": min(self._longest_poll, seconds), **parameters}
            response = self._call(method, path, params=params, json=json)
            if response.status_code != httpx.codes.NO_CONTENT:
                return response

    # Whole pairs

    def create_pair(
        self,
        pair: str,
        trainer_world: int,
        instances: Mapping[str, Mapping[str, Any]],
        settings: Mapping[str, float] | None = None,
        bucket_bytes: int | None = None,
        commit: str = "each",
        verify: str = "full",
        topology: Mapping[str, Any] | None = None,
    ) -> None:
        """Creates a pair.

        `instances` maps names to fields of `EngineSpec`: `{"kind": "sglang", "url": .., "world_size": .., "pause": ..,
        "backend": ..}`, perhaps with "hold", "non_finite" and "allow_non_finite". `settings` are fields of `Settings`.
        `commit` says who gets a version, "each" or "all". `bucket_bytes` bounds the memory that a rank takes to pack
        and unpack. `verify` is "full", "sampled" or "off". `topology` has fields of `Topology`, at least `{"nic_gbps":
        ..}`. With it ranks of an instance pass on to each other what they receive alike, where that is faster.
        """
        body: dict[str, Any] = {"trainer_world": trainer_world, "instances": {k: dict(v) for k, v in instances.items()}}
        body |= {"commit": commit, "verify": verify}
        if settings:
            body["settings"] = dict(settings)
        if bucket_bytes is not None:
            body["bucket_bytes"] = bucket_bytes
        if topology is not None:
            body["topology"] = Topology.given(topology).document
        self._call("PUT", f"/pairs/{pair}", json=body)

    def delete_pair(self, pair: str) -> None:
        """Makes the gateway forget a pair."""
        self._call("DELETE", f"/pairs/{pair}")

    def join_instance(self, pair: str, instance: str, engine: Mapping[str, Any]) -> None:
        """Adds an instance to a pair at run time, with `engine` as in `create_pair`. The next update brings it up."""
        self._call("PUT", f"/pairs/{pair}/instances/{instance}", json=dict(engine))

    def leave_instance(self, pair: str, instance: str) -> None:
        """Takes an instance out of a pair at run time."""
        self._call("DELETE", f"/pairs/{pair}/instances/{instance}")

    def status(self) -> list[dict[str, Any]]:
        """All pairs as the gateway reports them."""
        return list(self._call("GET", "/pairs").json()["pairs"])

    def pair_status(self, pair: str) -> dict[str, Any]:
        """One pair as the gateway reports it."""
        return dict(self._call("GET", f"/pairs/{pair}").json())

    def settings(self, pair: str) -> dict[str, float]:
        """The settings of a pair."""
        return dict(self._call("GET", f"/pairs/{pair}/settings").json())

    def catalog(self, pair: str, deadline: float) -> dict[str, TensorSpec]:
        """The trainer's tensors by name, once all of its ranks have registered. Raises DeadlineError."""
        what = f"the catalog of pair {pair}'s trainer"
        return wire.decode_catalog(self._poll(f"/pairs/{pair}/catalog", deadline, what).content).specs()

    def inspect(self, pair: str, instance: str) -> dict[str, Any]:
        """Coverage, slots, replicas and same-rank pairs of an instance."""
        return dict(self._call("GET", f"/pairs/{pair}/instances/{instance}/inspect").json())

    def inspect_text(self, pair: str, instance: str) -> str:
        """The inspection of an instance as text for people."""
        return self._call("GET", f"/pairs/{pair}/instances/{instance}/inspect", params={"text": True}).text

    def start_connect(self, pair: str) -> None:
        """Makes the gateway connect the instances of a pair."""
        self._call("POST", f"/pairs/{pair}/connect")

    def offer(self, pair: str, rank: int, version: int, deadline: float) -> str | None:
        """Says that a trainer rank is ready to send a version; the first rank's offer starts the update.

        Returns the life of the pair that took the offer. None means that the rank is not known, as after a restart:
        register first. An update that this rank has given up ends before.
        """
        path, body = f"/pairs/{pair}/trainer/{rank}/offers", {"version": version}
        try:
            answer = self._poll(path, deadline, "the end of the update before", method="POST", json=body).json()
        except UnregisteredError:
            return None
        return str(answer["boot"])

    def begun(self, pair: str, version: int, known: str, deadline: float) -> tuple[list[str], int]:
        """Waits for an update to begin. Returns its instances, none when it is over, and the number of its first order.
        `known` is what `offer` has returned.
        """
        path = f"/pairs/{pair}/updates/{version}/instances"
        answer = self._poll(path, deadline, f"the beginning of version {version}", known=known).json()
        return list(answer["instances"]), int(answer["first_order"])

    def pair_orders(self, pair: str, after: int, wait: float = POLL, known: str = "") -> Orders:
        """Orders for all instances of a pair, for the trainer; otherwise like `orders`."""
        return self._orders(f"/pairs/{pair}/orders", after, wait, known)

    def _orders(self, path: str, after: int, wait: float, known: str) -> Orders:
        params = {"after": after, "wait": min(wait, self._longest_poll), "known": known}
        return _orders_of(self._call("GET", path, params=params).json())

    def result(self, pair: str, version: int, deadline: float, known: str = "") -> dict[str, dict[str, Any]]:
        """Waits for the end of an update. Returns its record for each instance."""
        path, what = f"/pairs/{pair}/updates/{version}", f"the result of version {version}"
        return dict(self._poll(path, deadline, what, known=known).json())

    # Single ranks

    def register_trainer(
        self, pair: str, report: RankReport, start: str = "", *, resumes: bool = False, takeover: bool = False
    ) -> Registered:
        """Registers a trainer rank; from then on its incarnation is that of this client.

        `start`, `resumes` and `takeover` are those of `Pair.register_trainer`. Without `start` every call is another
        start.
        """
        path, start = f"/pairs/{pair}/trainer/{report.rank}/report", start or uuid.uuid4().hex
        params: dict[str, Any] = {"start": start, "pid": os.getpid(), "resumes": resumes, "takeover": takeover}
        if self.incarnation is not None:
            params["was"] = self.incarnation.generation
        answer = self._send(path, params, wire.encode_report(report))
        registered = Registered(int(answer["generation"]), int(answer["first_order"]), str(answer["boot"]))
        self.incarnation = Incarnation(report.rank, registered.generation, registered.boot, start)
        return registered

    def register_instance(
        self,
        seat: Seat,
        report: RankReport,
        *,
        verified: int | None = None,
        of: str = "",
        uncommitted: bool = False,
        followed: int = 0,
    ) -> tuple[bool, str]:
        """Registers a rank of an instance for one epoch, with its account of its memory: see `Holding`. `followed` is
        the generation of the trainer that has written that memory last.

        Returns True if the rank holds the committed version, and the uid of the pair.
        """
        params: dict[str, Any] = {"of": of, "uncommitted": uncommitted, "followed": followed}
        if verified is not None:
            params["verified"] = verified
        answer = self._send(f"{seat.epoch_path}/ranks/{seat.rank}/report", params, wire.encode_report(report))
        return bool(answer["committed"]), str(answer["uid"])

    def _send(self, path: str, params: dict[str, Any], content: bytes) -> dict[str, Any]:
        """Posts a message of `wire.messages`. Returns the answer."""
        headers = {"Content-Type": MSGPACK}
        return dict(self._call("POST", path, params=params, content=content, headers=headers).json())

    def beat(self, path: str, identity: str) -> int | None:
        """Says that a rank lives. `path` is "PAIR/trainer/RANK" or "PAIR/instances/INSTANCE/ranks/RANK". Returns
        `Instance.running` for a rank of an instance, None for one of the trainer.
        """
        answer = self._call("POST", f"/pairs/{path}/beat", json={"identity": identity}).json()
        return None if answer.get("running") is None else int(answer["running"])

    def restarted(self, pair: str, instance: str, rank: int) -> None:
        """Says that a rank started anew after its instance had joined."""
        self._call("POST", f"/pairs/{pair}/instances/{instance}/ranks/{rank}/restarted")

    def part(self, seat: Seat, deadline: float) -> RankPart:
        """Waits for the plan, and returns a rank's part of it."""
        path, what = f"parts/{seat.side}/{seat.rank}", f"the part of {seat.side} rank {seat.rank} for {seat.instance}"
        return wire.decode_part(self._poll(f"{seat.epoch_path}/{path}", deadline, what).content)

    def set_rendezvous(self, seat: Seat, host: str, port: int) -> None:
        """Says that this rank, the first member of a communicator, listens at `host` and `port`."""
        self._call("PUT", f"{seat.path}/rendezvous", json={"host": host, "port": port})

    def rendezvous(self, seat: Seat, deadline: float) -> tuple[str, int]:
        """Waits until the first member of a communicator listens. Returns its host and port."""
        answer = self._poll(f"{seat.path}/rendezvous", deadline, f"the rendezvous of {seat.instance}").json()
        return str(answer["host"]), int(answer["port"])

    def joined(self, seat: Seat) -> None:
        """Says that a member of a communicator has joined."""
        self._call("POST", f"{seat.path}/joined")

    def fail(self, seat: Seat, error: BaseException, *, uid: str = "") -> None:
        """Says what stopped a rank, so that nobody waits for it. `uid` is that of the pair with which it registered."""
        name = type(error).__name__
        message = " ".join(str(error).split())[:9_000]
        if error_named(name) is None:
            name, message = "ControlError", f"{name}: {message}"
        params = {"uid": uid} if uid else {}
        self._call("POST", f"{seat.path}/failures", params=params, json={"error": name, "message": message})

    def orders(self, pair: str, instance: str, after: int, wait: float = POLL, known: str = "") -> Orders:
        """Orders of an instance from number `after` on; waits up to `wait` seconds, POLL at most, for the first.

        `known` is the life of the pair that numbered them: another life answers at once, without orders.
        """
        return self._orders(f"/pairs/{pair}/instances/{instance}/orders", after, wait, known)

    def ready(self, seat: Seat, stale: str, layers: list[int] | None, deadline: float) -> tuple[int, Order]:
        """Reports a rank's check before the transfer, see `Instance.ready`. Waits for the next order: RUN, or END when
        the update was called off. Returns the number of the order, and the order.
        """
        wait = max(0.0, min(self._longest_poll, deadline - time.monotonic()))
        body = {"stale": stale, "layers": layers}
        answer = self._call("POST", f"{seat.epoch_path}/ranks/{seat.rank}/ready", params={"wait": wait}, json=body)
        if answer.status_code == httpx.codes.NO_CONTENT:
            answer = self._poll(f"{seat.epoch_path}/go", deadline, f"the go-ahead for {seat.instance}")
        record = answer.json()
        return int(record["number"]), Order.parse(record)

    def moved(self, seat: Seat, version: int, layers: list[int]) -> None:
        """Reports layers whose placement changed during the transfer, in place of digests."""
        self._call("POST", f"{seat.epoch_path}/ranks/{seat.rank}/moved", json={"version": version, "layers": layers})

    def digests(
        self,
        seat: Seat,
        version: int,
        report: DigestReport,
        *,
        first: bool = False,
        after: int | None = None,
        known: str = "",
    ) -> Orders | None:
        """Reports the digests of a rank: of a trainer rank's `first` pass or of its second. With `after` it waits for
        orders like `orders`, up to POLL seconds, and returns them.
        """
        params: dict[str, Any] = {"version": version, "first": first}
        if after is not None:
            params |= {"after": after, "wait": self._longest_poll, "known": known}
        answer = self._send(f"{seat.path}/digests", params, wire.encode_digests(report))
        return None if after is None else _orders_of(answer)


def _orders_of(answer: dict[str, Any]) -> Orders:
    return Orders([Order.parse(record) for record in answer["orders"]], str(answer["boot"]), int(answer["given"]))


def _error_of(response: httpx.Response, what: str) -> WeightcastError:
    """The error that the gateway raised, from its answer; ControlError for an answer that names none."""
    try:
        answer = response.json()
    except ValueError:
        answer = {}
    kind, message = error_named(answer.get("error")), answer.get("message")
    if kind is not None and isinstance(message, str):
        return kind(message)
    return ControlError(f"{what} answered {response.status_code}: {' '.join(response.text.split())[:500]}")
