"""Keeps the engines of SGLang's router (0.3.2) to those that serve, as the gateway knows it; httpx is all it needs.

    WEIGHTCAST_READY_TOKEN=... python examples/router_follower.py http://127.0.0.1:8900 main http://127.0.0.1:30000 \
        rollout-0=http://10.0.0.7:30000 rollout-1=http://10.0.0.8:30000

The arguments are the gateway, the pair, the router, and the instances with their URLs. An instance that is fenced, or
of which a rank is missed, is taken out of the router and comes back when it serves. The router's own health checks
stay useful, but ask the engine alone: it does not know whether it is fenced. Start the router without --worker-urls.

A gateway that does not answer says nothing about engines, so the router is left as it is.
"""

from __future__ import annotations

import os
import sys
import time

import httpx

SECONDS = 1.0


class Gateway:
    """A gateway's word on the instances of a pair."""

    def __init__(self, url: str, pair: str, token: str) -> None:
        headers = {"Authorization": f"Bearer {token}"}
        self.http = httpx.Client(base_url=f"{url}/pairs/{pair}", headers=headers, timeout=5.0, trust_env=False)

    def readiness(self, instance: str) -> tuple[bool | None, str]:
        """True if the instance may get requests, None if the gateway does not say, and its reason."""
        try:
            answer = self.http.get(f"/instances/{instance}/ready")
            if answer.status_code == httpx.codes.OK:
                return True, "it serves"
            refused = answer.json()
            # A gateway that is stopping answers 503 as well, with another error.
            return False if refused["error"] == "PairStateError" else None, refused["message"]
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:  # of a proxy that has no gateway behind it
            return None, f"{type(error).__name__} {error}"


class Router:
    """SGLang's router, by its API for workers."""

    def __init__(self, url: str) -> None:
        self.http = httpx.Client(base_url=url, timeout=5.0, trust_env=False)

    def workers(self) -> dict[str, str]:
        """The number of each worker by its URL."""
        answer = self.http.get("/workers").raise_for_status()
        return {worker["url"]: worker["id"] for worker in answer.json()["workers"]}

    def add(self, url: str) -> None:
        self.http.post("/workers", json={"url": url}).raise_for_status()

    def remove(self, worker: str) -> None:
        self.http.delete(f"/workers/{worker}").raise_for_status()


def follow(gateway: Gateway, router: Router, urls: dict[str, str]) -> None:
    """Brings the workers of the router to what the gateway says now."""
    workers = router.workers()
    for instance, url in urls.items():
        ready, reason = gateway.readiness(instance)
        if ready and url not in workers:
            router.add(url)
            print(f"{instance} in: {reason}", flush=True)
        elif ready is False and url in workers:
            router.remove(workers[url])
            print(f"{instance} out: {reason}", flush=True)
        elif ready is None:
            print(f"{instance}: {reason}", file=sys.stderr, flush=True)


def main(gateway_url: str, pair: str, router_url: str, urls: dict[str, str]) -> None:
    gateway, router = Gateway(gateway_url, pair, os.environ["WEIGHTCAST_READY_TOKEN"]), Router(router_url)
    while True:
        try:
            follow(gateway, router, urls)
        except httpx.HTTPError as error:  # the router starts again, without workers
            print(f"router: {type(error).__name__} {error}", file=sys.stderr, flush=True)
        time.sleep(SECONDS)


if __name__ == "__main__":
    if len(sys.argv) < 5 or not all("=" in instance for instance in sys.argv[4:]):
        sys.exit(__doc__)
    main(*sys.argv[1:4], dict(instance.split("=", 1) for instance in sys.argv[4:]))
