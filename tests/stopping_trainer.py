"""usage: stopping_trainer.py URL CHECKPOINT

A trainer rank, token in WEIGHTCAST_TOKEN, that stops itself right after it has registered. When it is continued it
joins, once more from the beginning if that is too late, updates the pair "main" to version 1, and ends.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

from weightcast.adapters.plain import CheckpointSource
from weightcast.gateway.client import GatewayClient
from weightcast.gateway.worker import TrainerWorker
from weightcast.transfer.errors import WeightcastError


def main(url: str, folder: str) -> None:
    register = GatewayClient.register_trainer
    stopped = []

    def and_stop(client: GatewayClient, *args: Any, **named: Any) -> Any:
        registered = register(client, *args, **named)
        if not stopped:
            stopped.append(True)
            os.kill(os.getpid(), signal.SIGSTOP)
        return registered

    GatewayClient.register_trainer = and_stop  # type: ignore[method-assign]
    worker = TrainerWorker(url, "main", CheckpointSource(folder), rank=0, world_size=1)
    for attempt in range(5):
        try:
            worker.connect()
            worker.update(1)
            break
        except WeightcastError as error:
            print(f"attempt {attempt}: {error}", file=sys.stderr, flush=True)
            time.sleep(1.0)
    else:
        sys.exit(1)
    worker.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
