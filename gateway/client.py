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

from weightcast.gateway.addresses import UNKNOWN, Place, transport_to, trusted
from weightcast.gateway.incarnations import HEADER, Incarnation
from weightcast.gateway.ray_address import SCHEME, node_address
from weightcast.gateway.records import Order, WaitRecord
from weightcast.gateway.reminder import Reminder
from weightcast.gateway.versions import Version
from weightcast.transfer.documents import as_json
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
from weightcast.transfer.transports.addresses import numeric
from weightcast.transfer.wire import messages as wire
from weightcast.transfer.wire.messages import MSGPACK

__all__ = ["TOKEN_VARIABLE", "Begun", "GatewayClient", "Offered", "Orders", "Registered", "Seat", "check_token"]

TOKEN_VARIABLE = "WEIGHTCAST_TOKEN"
"""Environment variable that holds the bearer token."""
POLL = 20.0
"""Seconds of one long poll at most."""
_GONE = (httpx.codes.BAD_GATEWAY, httpx.codes.SERVICE_UNAVAILABLE, httpx.codes.GATEWAY_TIMEOUT)
"""Answers of a gateway that is stopping, and of a proxy in front of one that is not there."""
_LATER = (httpx.codes.TOO_MANY_REQUESTS, *_GONE)
_AGAIN = 0.2
"""Seconds between two attempts to reach a gateway that is not there."""
_ONCE = 1.0
"""Seconds that one attempt may take to reach a gateway that has been gone for longer than `outage`."""

_ENDING = 300.0
"""Seconds in which a connect or update ends that is called off: calls to an engine are waited for."""


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


class Offered(NamedTuple):
    """Life of the pair that has taken an offer, and the version that the pair makes of it."""

    boot: str
    version: Version


class Begun(NamedTuple):
    """Instances of an update that has begun, none when it is over; the number of its first order; and how many of its
    instances it needs, None for all.
    """

    instances: list[str]
    first_order: int
    min_instances: int | None


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


def check_token(token: str, source: str) -> None:
    """Raises InputError for a token that no HTTP header can carry, and does not repeat it. `source` is its origin."""
    bad_places = [place for place, character in enumerate(token, 1) if not "!" <= character <= "~"]
    if bad_places:
        raise InputError(
            f"the bearer token of {source} has a character that is not printable ASCII, number {bad_places[0]} of "
            f"{len(token)}; set it again, without spaces and line ends"
        )


class GatewayClient:
    """Connection to a gateway: `GatewayClient("http://127.0.0.1:8900")`. WEIGHTCAST_TOKEN has the token unless given.

    Within a Ray cluster the address may be `ray://NAME` of a gateway's actor. Methods raise what the gateway answered,
    or TransferError when it cannot be reached.

    `identity` stands for the process of an instance's rank, and goes with every request. `outage` is for how many
    seconds a gateway that has answered before is asked again. They count from the moment when it was lost, over all
    calls until `begin`. `timeout` is the number of seconds that one which has not answered before may take.
    `incarnation` is that of the trainer rank which this client has registered, or speaks for: every request says it.
    While `once` is set, a request is made a single time. It may take `once` seconds beyond the `wait` that it asks for.
    `reminder` is asked after each long poll that brings nothing.
    """

    def __init__(
        self, url: str, token: str | None = None, *, timeout: float = 60.0, outage: float = 0.0, identity: str = ""
    ) -> None:
        if not isinstance(url, str):
            raise InputError(f"gateway url is {url!r}, expected http://host:port of the gateway, or ray://NAME")
        source = TOKEN_VARIABLE if token is None else "the argument token"
        token = os.environ.get(TOKEN_VARIABLE, "") if token is None else str(token)
        if not token:
            raise InputError(f"no bearer token for {url}: {source} is empty; set {TOKEN_VARIABLE} to the gateway's")
        check_token(token, source)
        transport = transport_to(url)
        self.url = url.rstrip("/")
        self.outage, self._timeout, self._reached = outage, timeout, False
        self._lost: float | None = None
        self._local_address = ""
        self.incarnation: Incarnation | None = None
        self.once: float | None = None
        self.reminder: Reminder | None = None
        self._client = httpx.Client(
            base_url=self.url,
            headers={"Authorization": f"Bearer {token}"},
            params={"identity": identity} if identity else {},
            trust_env=False,
            transport=transport,
            verify=transport is not None or trusted(self.url),
            event_hooks={"response": [self._note_address]},
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

    @property
    def local_address(self) -> str:
        """This process's address: that of its Ray node for `ray://`, else its end of the connection to the gateway.

        Empty until the gateway has answered.
        """
        return node_address() if self.url.startswith(f"{SCHEME}://") else self._local_address

    def _note_address(self, response: httpx.Response) -> None:
        stream = response.extensions.get("network_stream")
        if stream is not None:
            self._local_address = numeric(str(stream.get_extra_info("client_addr")[0]))

    def begin(self) -> None:
        """Starts the seconds of `outage` anew, also for a gateway that was lost before, and those of the reminder."""
        self._lost = None
        if self.reminder is not None:
            self.reminder.begin()

    @property
    def _patience(self) -> float:
        return self.outage if self.outage and self._reached else self._timeout

    @property
    def _longest_poll(self) -> float:
        """Seconds of a long poll, so short that a late answer shows before `outage` is over."""
        longest = min(POLL, self._patience / 2)
        return longest if self.reminder is None else min(longest, self.reminder.left)

    def _nothing_came(self) -> None:
        if self.reminder is not None:
            self.reminder.tick()

    def _call(self, method: str, path: str, json: object = None, **request: Any) -> httpx.Response:
        if self._client.is_closed:
            raise ControlError(f"gateway {self.url}: {method} {path}: this client was closed; make a new one")
        start = time.monotonic()
        if json is not None:
            request |= {"content": as_json(json), "headers": {"Content-Type": "application/json"}}
        retry_seconds = self.outage if self._reached and self.once is None else 0.0
        if (incarnation := self.incarnation) is not None:
            request["headers"] = {**request.get("headers", {}), HEADER: str(incarnation)}
        while True:
            asked_at = time.monotonic()
            outage_start = self._lost if self.once is not None or (self.outage and self._reached) else None
            deadline = (start if outage_start is None else outage_start) + self._patience
            if outage_start is not None and "wait" in request.get("params", {}):
                request["params"] = {**request["params"], "wait": 0.0}  # first see if anybody answers
            seconds = max(self._at_once(request, deadline - asked_at), _ONCE)
            try:
                response = self._client.request(method, path, timeout=seconds, **request)
            except httpx.HTTPError as error:
                now = time.monotonic()
                # A broken connection shows when it broke; silence may have begun with the request.
                lost_at = self._lost or (asked_at if isinstance(error, httpx.TimeoutException) else now)
                self._lost = lost_at
                if now >= lost_at + retry_seconds:
                    raise TransferError(
                        f"gateway {self.url}: {method} {path}: {type(error).__name__} {error}; {_remedy(error)}"
                    ) from None
            else:
                self._lost = None
                # Wrong tokens from this address make the gateway deaf for some seconds; or it is stopping.
                if response.status_code not in _LATER or time.monotonic() >= start + retry_seconds:
                    break
            time.sleep(_AGAIN)
        is_deaf = self._reached and self.once is not None and response.status_code in _LATER
        if is_deaf or response.status_code in _GONE:
            self._lost = time.monotonic()
            answer = f"answered {response.status_code}: {' '.join(response.text.split())[:200]}"
            raise TransferError(f"gateway {self.url}: {method} {path} {answer}; is it up?")
        self._reached = True
        if response.is_success:
            return response
        raise _error_of(response, f"gateway {self.url}: {method} {path}")

    def _at_once(self, request: Mapping[str, Any], seconds: float) -> float:
        """The smaller of `seconds` and what a single attempt may take."""
        return seconds if self.once is None else min(seconds, request.get("params", {}).get("wait", 0.0) + self.once)

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
            self._nothing_came()

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
        min_instances: int | None = None,
        *,
        replace: bool = False,
    ) -> None:
        """Creates a pair. The same one again changes nothing. With `replace` one of that name is deleted first, with
        what it has under way, and versions begin anew.

        `instances` maps names to fields of `EngineSpec`: `{"kind": "sglang", "url": .., "world_size": ..}`, perhaps
        with "pause", "backend", "hold", "non_finite", "allow_non_finite", "stamps", "api_key_variable". `settings`
        are of `Settings`. `commit` says who gets a version, "each" or "all". `min_instances` is how many instances an
        update needs, all unless given. `bucket_bytes` bounds the memory that a rank takes to pack and unpack. `verify`
        is "full", "sampled" or "off". `topology` has fields of `Topology`, at least `{"nic_gbps": ..}`. With it ranks
        of an instance forward to each other the weights that they share, where that is faster.
        """
        body: dict[str, Any] = {"trainer_world": trainer_world, "instances": _plain(instances)}
        body |= {"commit": commit, "verify": verify}
        if settings:
            body["settings"] = _plain(settings)
        if bucket_bytes is not None:
            body["bucket_bytes"] = bucket_bytes
        if min_instances is not None:
            body["min_instances"] = min_instances
        if topology is not None:
            body["topology"] = Topology.given(topology).document
        if replace:
            self._ended("PUT", pair, body, replace="true")
        else:
            self._call("PUT", f"/pairs/{pair}", json=body)

    def delete_pair(self, pair: str, *, force: bool = False) -> None:
        """Makes the gateway forget a pair. With `force` a connect or update that is under way is ended first."""
        if force:
            self._ended("DELETE", pair, None, force="true")
        else:
            self._call("DELETE", f"/pairs/{pair}")

    def _ended(self, method: str, pair: str, body: object, **parameters: str) -> None:
        """Asks for what waits for the end of all that a pair has under way."""
        what, deadline = f"the end of what pair {pair} has under way", time.monotonic() + _ENDING
        self._poll(f"/pairs/{pair}", deadline, what, method=method, json=body, **parameters)

    def join_instance(self, pair: str, instance: str, engine: Mapping[str, Any]) -> None:
        """Adds an instance to a pair at run time, with `engine` as in `create_pair`. The next update brings it up."""
        self._call("PUT", f"/pairs/{pair}/instances/{instance}", json=_plain(engine))

    def leave_instance(self, pair: str, instance: str) -> None:
        """Takes an instance out of a pair at run time."""
        self._call("DELETE", f"/pairs/{pair}/instances/{instance}")

    def status(self) -> list[dict[str, Any]]:
        """All pairs as the gateway reports them."""
        return list(self._call("GET", "/pairs").json()["pairs"])

    def pair_status(self, pair: str) -> dict[str, Any]:
        """One pair as the gateway reports it."""
        return dict(self._call("GET", f"/pairs/{pair}").json())

    def waiting(self, pair: str, instance: str = "") -> list[WaitRecord]:
        """Waits of a pair that are under way; with `instance` those for it alone."""
        records = self._call("GET", f"/pairs/{pair}/waiting").json()["waiting"]
        return [WaitRecord(**record) for record in records if record.pop("instance") == instance or not instance]

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

    def offer(self, pair: str, rank: int, number: int, deadline: float, *, restart: bool = False) -> Offered | None:
        """Says that a trainer rank is ready to send a version, of a new lineage with `restart`. The first rank's offer
        starts the update.

        Returns None if the rank is not known, as after a restart of the gateway: register first. An update that this
        rank has given up ends before.
        """
        path = f"/pairs/{pair}/trainer/{rank}/offers"
        body = {"version": number, **({"restart": True} if restart else {})}
        try:
            answer = self._poll(path, deadline, "the end of the update before", method="POST", json=body).json()
        except UnregisteredError:
            return None
        return Offered(str(answer["boot"]), Version.parse(answer["version"]))

    def begun(self, pair: str, version: Version, known: str, deadline: float) -> Begun:
        """Waits for an update to begin. `known` is what `offer` has returned."""
        path = f"/pairs/{pair}/updates/{version}/instances"
        answer = self._poll(path, deadline, f"the beginning of version {version}", known=known).json()
        return Begun(list(answer["instances"]), int(answer["first_order"]), answer.get("min_instances"))

    def pair_orders(self, pair: str, after: int, wait: float = POLL, known: str = "") -> Orders:
        """Orders for all instances of a pair, for the trainer; otherwise like `orders`."""
        return self._orders(f"/pairs/{pair}/orders", after, wait, known)

    def _orders(self, path: str, after: int, wait: float, known: str) -> Orders:
        params = {"after": after, "wait": min(wait, self._longest_poll), "known": known}
        answer = _orders_of(self._call("GET", path, params=params).json())
        if not answer.orders:
            self._nothing_came()
        return answer

    def result(self, pair: str, version: Version, deadline: float, known: str = "") -> dict[str, dict[str, Any]]:
        """Waits for the end of an update. Returns its record for each instance."""
        path, what = f"/pairs/{pair}/updates/{version}", f"the result of version {version}"
        return dict(self._poll(path, deadline, what, known=known).json())

    # Single ranks

    def register_trainer(
        self,
        pair: str,
        report: RankReport,
        start: str = "",
        *,
        resumes: bool = False,
        takeover: bool = False,
        place: Place = UNKNOWN,
    ) -> Registered:
        """Registers a trainer rank; from then on its incarnation is that of this client.

        `start`, `resumes`, `takeover` and `place` are those of `Pair.register_trainer`. Without `start` every call is
        another start.
        """
        path, start = f"/pairs/{pair}/trainer/{report.rank}/report", start or uuid.uuid4().hex
        params: dict[str, Any] = {"start": start, "pid": os.getpid(), "resumes": resumes, "takeover": takeover}
        if self.incarnation is not None:
            params["was"] = self.incarnation.generation
        params |= {"address": place.address, "network": place.network}
        answer = self._send(path, params, wire.encode_report(report))
        registered = Registered(int(answer["generation"]), int(answer["first_order"]), str(answer["boot"]))
        self.incarnation = Incarnation(report.rank, registered.generation, registered.boot, start)
        return registered

    def register_instance(
        self,
        seat: Seat,
        report: RankReport,
        *,
        verified: Version | None = None,
        of: str = "",
        uncommitted: bool = False,
        followed: int = 0,
        place: Place = UNKNOWN,
    ) -> tuple[bool, str]:
        """Registers a rank of an instance for one epoch, with its account of its memory: see `Holding`. `followed` is
        the generation of the trainer that has written that memory last, `place` is where the rank is.

        Returns True if the rank holds the committed version, and the uid of the pair.
        """
        params: dict[str, Any] = {"of": of, "uncommitted": uncommitted, "followed": followed}
        params |= {"address": place.address, "network": place.network}
        if verified is not None:
            params["verified"] = str(verified)
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

    def moved(self, seat: Seat, version: Version, layers: list[int]) -> None:
        """Reports layers whose placement changed during the transfer, in place of digests."""
        body = {"version": version.as_json(), "layers": layers}
        self._call("POST", f"{seat.epoch_path}/ranks/{seat.rank}/moved", json=body)

    def digests(
        self,
        seat: Seat,
        version: Version,
        report: DigestReport,
        *,
        first: bool = False,
        after: int | None = None,
        known: str = "",
    ) -> Orders | None:
        """Reports the digests of a rank: of a trainer rank's `first` pass or of its second. With `after` it waits for
        orders like `orders`, up to POLL seconds, and returns them.
        """
        params: dict[str, Any] = {"version": str(version), "first": first}
        if after is not None:
            params |= {"after": after, "wait": self._longest_poll, "known": known}
        answer = self._send(f"{seat.path}/digests", params, wire.encode_digests(report))
        return None if after is None else _orders_of(answer)


def _plain(value: object) -> object:
    """Mappings of any kind as dicts, for JSON. Other values stay: the gateway says what it expected."""
    return {key: _plain(item) for key, item in value.items()} if isinstance(value, Mapping) else value


def _orders_of(answer: dict[str, Any]) -> Orders:
    return Orders([Order.parse(record) for record in answer["orders"]], str(answer["boot"]), int(answer["given"]))


def _remedy(error: httpx.HTTPError) -> str:
    """The likely reason why a gateway gave no answer, as a question or an advice."""
    return "it speaks http: begin its URL with http://" if "WRONG_VERSION_NUMBER" in str(error) else "is it up?"


def _error_of(response: httpx.Response, what: str) -> WeightcastError:
    """The error that the gateway raised, from its answer; ControlError for an answer that names none."""
    try:
        answer = response.json()
    except ValueError:
        answer = {}
    kind, message = error_named(answer.get("error")), answer.get("message")
    if kind is not None and isinstance(message, str):
        return kind(message)
    text = " ".join(response.text.split())[:200]
    return ControlError(f"{what} answered {response.status_code}, and not as a gateway does; is this its URL? ({text})")
