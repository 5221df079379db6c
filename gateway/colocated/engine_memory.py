"""Engines that can give up memory and take it back, by their own API."""

from __future__ import annotations

from typing import Literal, Protocol

import httpx

from weightcast.gateway.addresses import check_url, key_fault, key_header, trusted
from weightcast.transfer.errors import EngineError

__all__ = ["EngineMemory", "SGLangMemory", "UncertainError"]


class EngineMemory(Protocol):
    """An engine that can give up memory. Each call raises EngineError, or UncertainError when it may have been done."""

    name: str

    def pause(self) -> None:
        """Stops generation and empties the batch."""

    def release(self, tag: str) -> None:
        """Gives up what the tag names; its contents are lost."""

    def resume(self, tag: str) -> None:
        """Takes back what the tag names, with undefined contents."""

    def proceed(self) -> None:
        """Goes on with generation after a pause."""


class UncertainError(EngineError):
    """Nobody knows whether the engine did what it was asked: the connection broke after the request had gone out."""


class SGLangMemory:
    """Memory of an SGLang engine, by its HTTP API (0.5.23, `srt/entrypoints/http_server.py`).

    SGLang ends its scheduler when it is asked to release while it generates, or to resume what it has not released. So
    it is paused first, in a mode that empties its batch, and ColocatedCycle asks for nothing twice.
    """

    def __init__(
        self,
        name: str,
        url: str,
        *,
        pause: Literal["abort", "retract"] = "retract",
        timeout: float = 600.0,
        transport: httpx.BaseTransport | None = None,
        api_key_variable: str = "",
    ) -> None:
        """`api_key_variable` names the variable of this process's environment with the key of the server.

        That is its `--admin-api-key`, or its `--api-key` where it has no other. Raises EngineError for a variable that
        is not set.
        """
        check_url(f"instance {name}: ", url, "its SGLang server")
        self.name, self._pause, self._key_variable = name, pause, api_key_variable
        header = key_header(f"instance {name}: ", api_key_variable, "this process")
        self._client = httpx.Client(
            base_url=url, timeout=timeout, transport=transport, trust_env=False, verify=trusted(url), headers=header
        )

    def pause(self) -> None:
        self._post("/pause_generation", {"mode": self._pause})

    def release(self, tag: str) -> None:
        self._post("/release_memory_occupation", {"tags": [tag]})

    def resume(self, tag: str) -> None:
        self._post("/resume_memory_occupation", {"tags": [tag]})

    def proceed(self) -> None:
        self._post("/continue_generation", {})

    def close(self) -> None:
        """Closes the connection to the engine's server."""
        self._client.close()

    def _post(self, path: str, body: dict[str, object]) -> None:
        try:
            response = self._client.post(path, json=body)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise EngineError(f"instance {self.name}: {path} was not asked: {error}; is the server up?") from None
        except httpx.HTTPError as error:
            raise UncertainError(
                f"instance {self.name}: {path} was asked, but not answered: {type(error).__name__} {error}"
            ) from None
        if response.status_code != httpx.codes.OK:
            fault = key_fault(response.status_code, self._key_variable, "api_key_variable")
            text = fault or " ".join(response.text.split())[:500]
            raise EngineError(f"instance {self.name}: {path} answered {response.status_code}: {text}")
