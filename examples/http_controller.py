"""A controller that speaks nothing but the gateway's HTTP API, as one in any language can; here by httpx alone.

    WEIGHTCAST_TOKEN=... python examples/http_controller.py http://127.0.0.1:8900 main rollout-1 3

It makes the pair, waits until the trainer's ranks and the instance are there, and then follows each version to its end.
When to train and to offer a version is between it and its trainer, whose ranks call `TrainerWorker.update`. Try it with
`examples/own_engine.py` and `examples/own_trainer.py`.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import httpx

CONNECTED = ("connected", "preparing", "transferring", "verifying")


class Controller:
    """What a control plane asks of the gateway."""

    def __init__(self, url: str, token: str) -> None:
        headers = {"Authorization": f"Bearer {token}"}
        self.http = httpx.Client(base_url=url, headers=headers, timeout=60.0, trust_env=False)

    def ask(self, method: str, path: str, **request: Any) -> httpx.Response:
        """An answer. What the gateway refuses has an error's class and one line that says what to do."""
        response = self.http.request(method, path, **request)
        if response.is_error:
            refused = response.json()
            raise SystemExit(f"{refused['error']}: {refused['message']}")
        return response

    def create(self, pair: str, instances: dict[str, Any], trainer_world: int) -> None:
        """The same again changes nothing, so that a controller may start anew."""
        self.ask("PUT", f"/pairs/{pair}", json={"trainer_world": trainer_world, "instances": instances})

    def wait_connected(self, pair: str) -> None:
        """Until every rank of the trainer has registered and every instance is connected."""
        while True:
            status = self.ask("GET", f"/pairs/{pair}").json()
            instances = {name: i for name, i in status["instances"].items() if i["phase"] != "left"}
            failed = {name: i["reason"] for name, i in instances.items() if i["phase"] == "failed"}
            if failed:
                raise SystemExit(f"not connected: {failed}")
            ranks = len(status["trainer"]["registered"])
            if ranks == status["trainer"]["world_size"] and all(i["phase"] in CONNECTED for i in instances.values()):
                return
            time.sleep(0.2)

    def result(self, pair: str, version: int) -> dict[str, Any]:
        """How the update to a version ended on each instance. A long poll: 204 says "not yet, ask again"."""
        while True:
            response = self.ask("GET", f"/pairs/{pair}/updates/{version}", params={"wait": 20})
            if response.status_code == httpx.codes.OK:
                return dict(response.json())

    def serving(self, pair: str) -> dict[str, int | str | None]:
        """The version of each instance, None for one that may not be asked for tokens now; text as "81@2" of a version
        that a trainer made after it had resumed from an older step.
        """
        instances = self.ask("GET", f"/pairs/{pair}").json()["instances"]
        return {name: i["version"] if i["serves"] else None for name, i in instances.items()}


def main(url: str, pair: str, instance: str, versions: int) -> None:
    controller = Controller(url, os.environ["WEIGHTCAST_TOKEN"])
    controller.create(pair, {instance: {"kind": "worker", "world_size": 1}}, trainer_world=1)
    controller.wait_connected(pair)
    print("connected", flush=True)
    for version in range(1, versions + 1):
        for name, record in controller.result(pair, version).items():
            outcome = "committed" if record["committed"] else f"not committed: {record['reason']}"
            print(f"version {version} {name} {outcome}", flush=True)
    print("serving", controller.serving(pair), flush=True)


if __name__ == "__main__":
    if len(sys.argv) != 5:
        sys.exit(__doc__)
    main(*sys.argv[1:4], int(sys.argv[4]))
