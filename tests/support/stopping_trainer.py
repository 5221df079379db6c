"""usage: stopping_trainer.py URL CHECKPOINT

A trainer rank, token in WEIGHTCAST_TOKEN, that stops itself right after it has registered and begun to connect, the
first STOPS times. When it is continued it connects anew, updates the pair "main" to version 1, and ends.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

from weightcast.adapters.unsharded import CheckpointSource
from weightcast.gateway.client import GatewayClient
from weightcast.gateway.ranks.trainer import TrainerWorker
from weightcast.transfer.errors import WeightcastError

STOPS = 3


def main(url: str, folder: str) -> None:
    start_connect = GatewayClient.start_connect
    stopped = []

    def and_stop(client: GatewayClient, *args: Any, **named: Any) -> Any:
        answer = start_connect(client, *args, **named)  # type: ignore[func-returns-value]
        if len(stopped) < STOPS:
            stopped.append(True)
            os.kill(os.getpid(), signal.SIGSTOP)
        return answer

    GatewayClient.start_connect = and_stop  # type: ignore[method-assign]
    worker = TrainerWorker(url, "main", CheckpointSource(folder), rank=0, world_size=1)
    for attempt in range(STOPS + 3):
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
