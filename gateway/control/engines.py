"""Drivers that take an engine through an update by the engine's own API.

CUDA graphs, prefix caches, derived weights and the version that an answer carries belong to the engine. So a driver
only calls what the engine offers for them, in the engine's order. Every refusal is a failure of the update.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
import uuid
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import httpx

from weightcast.gateway.addresses import check_url, key_fault, key_header, trusted
from weightcast.gateway.records import EngineSpec
from weightcast.gateway.versions import Version
from weightcast.transfer.deadline import utc
from weightcast.transfer.errors import EngineError, InputError

__all__ = ["Absence", "EngineDriver", "EngineSpec", "SGLangDriver", "make_driver", "one_line"]

log = logging.getLogger("weightcast.gateway")

Done: TypeAlias = tuple[str, str | bool]

LOAD_FORMAT = "weightcast"
"""Load format by which the plugin knows that a transfer is meant for it."""
PLUGIN = "weightcast"
"""Key by which a scheduler with the plugin says so, in its state of the answer of `/server_info`."""
TESTED_VERSION = "0.5.23"
"""Version of SGLang whose answers this module knows."""
CONNECTING = "connecting"
"""Message of a rank with the plugin while it registers and joins."""
BUSY = "busy: "
"""Start of the message of a rank that cannot drop its caches yet, behind the name of the error."""
_FIRST_ASK, _LAST_ASK = 0.05, 1.0
"""Seconds between two questions about a connect: at first, and at most."""
_AGAIN = 0.5
"""Seconds until a busy engine is asked again."""
_KEYS = {
    "api_key_variable": "it names the variable of the gateway's environment with the server's --api-key",
    "admin_api_key_variable": (
        "it names the variable of the gateway's environment with the server's --admin-api-key, and unless it is set "
        "api_key_variable names that with the --api-key"
    ),
}
"""Meaning of the fields of a record that name variables with keys, in words."""
_SHOWN = 2000
"""Characters shown of an engine's message."""
_CONNECT = 5.0
"""Seconds to reach an engine's server, which answers at once if it is there."""
_PROBE = 10.0
"""Seconds that an engine's server may take to answer a probe."""
_ALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 15_000),
)
"""Options by which a connection breaks 15 s after the host at its other end has vanished."""


@dataclass(slots=True)
class Absence:
    """An engine that is not reached since `since` (`time.monotonic`). `refused` says that this shows at once, because
    its host refuses connections.
    """

    since: float
    why: str
    refused: bool


class EngineDriver:
    """The steps of an update, in the order in which they are called. Each raises EngineError.

    Here each does nothing, for ranks that follow the gateway's orders by themselves: there is no engine API to call.
    `absence` is set while an engine with an API is not reached.
    """

    absence: Absence | None = None

    async def connect(self, gateway_host: str, gateway_port: int, group: str) -> None:
        """Makes every rank describe itself, register, fetch its part and join; returns when the first has joined."""

    async def pause(self) -> None:
        """Stops generation until `resume` is called."""

    async def begin(self) -> None:
        """Opens the update session of the engine."""

    async def transfer(self, group: str) -> None:
        """Makes every rank drop its caches and run its part; returns when the first has begun."""

    async def end(self) -> None:
        """Closes the session: derived weights are computed anew, caches dropped. Then every rank begins to digest."""

    async def publish(self, version: Version) -> None:
        """Stamps the version; every rank has dropped its caches before it reported its digests."""

    async def resume(self) -> None:
        """Goes on with the generation that `pause` stopped."""

    async def disconnect(self, group: str) -> None:
        """Makes every rank leave the communicator."""

    async def probe(self, seconds: float = _PROBE) -> bool:
        """Asks the engine whether it is there, for `seconds` at most; `absence` has what came of it."""
        return True

    async def close(self) -> None:
        """Closes connections to the engine; no step follows."""


class SGLangDriver(EngineDriver):
    """Driver of SGLang's HTTP server (0.5.23, `srt/entrypoints/http_server.py`).

    The weightcast plugin runs in the server's scheduler processes.
    """

    def __init__(
        self,
        instance: str,
        spec: EngineSpec,
        timeout: float,
        transport: httpx.AsyncBaseTransport | None = None,
        patience: float = 30.0,
    ) -> None:
        """`timeout` bounds every call, and `patience` how long a busy engine is asked to begin a transfer, in seconds.

        `transport` stands in for the network. Raises InputError for a url that is not http or https with a host.
        """
        self._instance = instance
        self._spec = spec
        self._patience = patience
        check_url(f"instance {instance}: ", spec.url, "its SGLang server")
        # Engines are near: a proxy that the environment names is for the world outside.
        if transport is None:
            transport = httpx.AsyncHTTPTransport(verify=trusted(spec.url), trust_env=False, socket_options=_ALIVE)
        limits = httpx.Timeout(timeout, connect=min(timeout, _CONNECT))
        self._client = httpx.AsyncClient(base_url=spec.url, timeout=limits, transport=transport, trust_env=False)

    async def _post(self, path: str, body: dict[str, Any] | None = None, done: Done = ("success", True)) -> str:
        """Makes one call, and returns its message.

        `done` is the field, and its value, by which the route says that it did what was asked. Raises EngineError.
        """
        response = await self._request("POST", path, "admin_api_key_variable", body or {})
        # SGLang tells success by status and by a field, and either one may tell a failure alone. An answer that is no
        # JSON comes from something in front of it.
        try:
            answer = response.json()
        except ValueError:
            answer = None
        reply = answer if isinstance(answer, dict) else {}
        if response.status_code != httpx.codes.OK or reply.get(done[0]) != done[1]:
            raise EngineError(
                f"instance {self._instance}: {path} answered {response.status_code}: "
                f"{one_line(reply.get('message', response.text)) or 'nothing'}"
            )
        return str(reply.get("message", ""))

    async def _request(self, method: str, path: str, key_field: str, body: Any = None) -> httpx.Response:
        """The answer to one request with the key whose variable a field of the record names.

        Raises EngineError if there is none, and for a key that is missing or another one.
        """
        variable = getattr(self._spec, key_field) or self._spec.api_key_variable
        header = key_header(f"instance {self._instance}: ", variable)
        if self.absence is not None and not self.absence.refused:
            raise EngineError(f"instance {self._instance}: {self.absence.why}")  # instead of one more wait
        try:
            response = await self._client.request(method, path, json=body, headers=header)
        except httpx.HTTPError as error:
            cause = one_line(f"{type(error).__name__} {error}")
            if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
                self._missed(cause, refused=isinstance(error, httpx.ConnectError))
            raise EngineError(
                f"instance {self._instance}: {method} {self._spec.shown_url}{path} failed: {cause}; is the server up?"
            ) from None
        self._reached()
        if fault := key_fault(response.status_code, variable, key_field):
            answer = f"{path} answered {response.status_code}"
            raise EngineError(f"instance {self._instance}: {answer}: {fault}; {_KEYS[key_field]}")
        return response

    def _missed(self, cause: str, *, refused: bool) -> None:
        """Notes that the engine was not reached."""
        if self.absence is None:
            moment = utc(time.time())
            why = f"its engine {self._spec.shown_url} was not reached since {moment}: {cause}; is the server up?"
            log.warning("instance %s: %s", self._instance, why, extra={"instance": self._instance})
            self.absence = Absence(time.monotonic(), why, refused)
        self.absence.refused = refused

    def _reached(self) -> None:
        """Notes that the engine has answered."""
        if self.absence is not None:
            url, labels = self._spec.shown_url, {"instance": self._instance}
            log.warning("instance %s: its engine %s answers again", self._instance, url, extra=labels)
            self.absence = None

    async def probe(self, seconds: float = _PROBE) -> bool:
        limits = httpx.Timeout(seconds, connect=min(seconds, _CONNECT))
        try:
            # Whatever it answers, it is there. So it is asked without a key, and without the user of its url.
            await self._client.get("/server_info", timeout=limits, auth=httpx.Auth())
        except httpx.HTTPError as error:
            cause = one_line(f"{type(error).__name__} {error}")
            self._missed(cause, refused=isinstance(error, httpx.ConnectError))
            return False
        self._reached()
        return True

    async def _check_server(self) -> None:
        """Asks the server what it is, which changes nothing about it. Raises EngineError unless it can be updated."""
        who = f"instance {self._instance}: the server at {self._spec.shown_url}"
        response = await self._request("GET", "/server_info", "api_key_variable")
        try:
            info = _ServerInfo.of(response.json())
        except (ValueError, TypeError, KeyError, AttributeError):
            # The answer of a server has its keys in it: it is not shown.
            raise EngineError(
                f"{who} answered {response.status_code} to /server_info, and not as SGLang {TESTED_VERSION} does; "
                "is this the url of such a server's first node?"
            ) from None
        if fault := info.fault(self._spec.world_size):
            raise EngineError(f"{who} {fault}")
        if info.version != TESTED_VERSION:
            log.warning("%s runs SGLang %s; weightcast was tested with %s", who, info.version, TESTED_VERSION)

    async def connect(self, gateway_host: str, gateway_port: int, group: str) -> None:
        await self._check_server()
        body = {
            "master_address": gateway_host,
            "master_port": gateway_port,
            "rank_offset": 0,
            "world_size": self._spec.world_size,
            "group_name": f"{group}/{self._spec.pause}/{uuid.uuid4().hex[:8]}",
            "backend": self._spec.backend,
        }
        # The call returns at once; made again, it tells how the connect goes on. Ranks report the outcome to the
        # gateway, and a rank that cannot reach the gateway reports it here.
        seconds = _FIRST_ASK
        while await self._post("/init_weights_update_group", body) == CONNECTING:
            await asyncio.sleep(seconds)
            seconds = min(2 * seconds, _LAST_ASK)

    async def pause(self) -> None:
        await self._post("/pause_generation", {"mode": self._spec.pause}, done=("status", "ok"))
        if self._spec.pause == "abort":
            # It ends requests, but the scheduler runs on, and a health check makes it compute. This call stops it.
            await self._post("/pause_generation", {"mode": "retract"}, done=("status", "ok"))

    async def begin(self) -> None:
        await self._post("/begin_weight_update", {"selector": "target"})

    async def transfer(self, group: str) -> None:
        # The version is stamped in `publish`, after the digests agree.
        body = {
            "names": [],
            "dtypes": [],
            "shapes": [],
            "group_name": group,
            "load_format": LOAD_FORMAT,
            "flush_cache": False,
            "selector": "target",
        }
        deadline = time.monotonic() + self._patience
        while True:
            try:
                await self._post("/update_weights_from_distributed", body)
            except EngineError as error:
                # Nothing has been written yet, and requests that hold KV end by themselves.
                if BUSY not in str(error) or time.monotonic() >= deadline:
                    raise
                await asyncio.sleep(_AGAIN)
            else:
                return

    async def end(self) -> None:
        await self._post("/end_weight_update")

    async def publish(self, version: Version) -> None:
        await self._post("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})

    async def resume(self) -> None:
        if self._spec.hold:
            return
        await self._post("/continue_generation", done=("status", "ok"))

    async def disconnect(self, group: str) -> None:
        await self._post("/destroy_weights_update_group", {"group_name": group})

    async def close(self) -> None:
        await self._client.aclose()


class _ServerInfo(NamedTuple):
    """A server, as its answer of `/server_info` tells it: the version of SGLang, its ranks, and whether all of its
    schedulers have the plugin.
    """

    version: str
    has_plugin: bool
    tp_size: int
    pp_size: int
    dp_size: int

    @classmethod
    def of(cls, answer: Any) -> _ServerInfo:
        """Reads an answer. Raises ValueError, TypeError, KeyError or AttributeError for one that is not SGLang's."""
        states = list(answer["internal_states"])
        has_plugin = bool(states) and all(PLUGIN in state for state in states)
        return cls(str(answer["version"]), has_plugin, *(int(answer[f"{axis}_size"]) for axis in ("tp", "pp", "dp")))

    def fault(self, world_size: int) -> str:
        """The reason why an instance of `world_size` ranks cannot be this server, and the remedy; empty if it can."""
        if not self.has_plugin:
            return (
                "runs without the weightcast plugin: install weightcast in its environment, and see that "
                "SGLANG_PLUGINS does not exclude it"
            )
        if self.dp_size != 1:
            return (
                f"has dp_size {self.dp_size}, expected 1, because SGLang updates no data-parallel replicas; start a "
                "server for each replica, and make each an instance of the pair"
            )
        if (ranks := self.tp_size * self.pp_size) != world_size:
            return (
                f"has {ranks} ranks (tp_size {self.tp_size} x pp_size {self.pp_size}), the pair says {world_size}; "
                "correct world_size"
            )
        return ""


def one_line(message: object) -> str:
    """An engine's message without line breaks, for errors that have to stay on one line."""
    return " ".join(str(message).split())[:_SHOWN]


def make_driver(instance: str, spec: EngineSpec, timeout: float, patience: float = 30.0) -> EngineDriver:
    """The driver for a spec, see `SGLangDriver`. Raises InputError for a spec that contradicts itself."""
    if spec.allow_non_finite and spec.non_finite == "report":
        raise InputError(f"instance {instance}: non_finite is 'report', which allows all; leave allow_non_finite out")
    if spec.kind == "worker":
        return EngineDriver()
    return SGLangDriver(instance, spec, timeout, patience=patience)
