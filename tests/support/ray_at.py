"""A pair on a Ray node at an address: gateway and engine as actors, a trainer and an own engine without addresses.

python ray_at.py ADDRESS      prints as JSON where each of them is, and what came of a version
"""

from __future__ import annotations

import json
import sys
import threading

import torch
from plain_support import Piece, PlainSink

from weightcast.adapters.unsharded import PlainSource
from weightcast.cluster.ray_actors import EngineActor, Launch, end_actor, spawn
from weightcast.gateway.client import GatewayClient
from weightcast.gateway.ranks.instance import InstanceWorker
from weightcast.gateway.ranks.trainer import TrainerWorker
from weightcast.gateway.ray_address import NAMESPACE, gateway_url
from weightcast.gateway.server.ray_actor import start_gateway

URL = "ray://weightcast"


def serve(served: list[object]) -> None:
    sink = PlainSink([Piece("w", (8,), (0,), torch.zeros(8))])
    worker = InstanceWorker(URL, "main", "rollout-0", sink, rank=0, world_size=1)
    while (version := worker.serve(wait=1.0)) is None:
        pass
    served += [version, worker._place.address]
    worker.close()


def main(address: str) -> None:
    import ray

    local = {"num_cpus": 2, "include_dashboard": False, "log_to_driver": False, "logging_level": "error"}
    ray.init(address="local", _node_ip_address=address, namespace=NAMESPACE, **local)
    gateway = start_gateway()
    engine = spawn(EngineActor, "engine")
    ray.get(
        engine.start.remote(Launch(["{python}", "-m", "http.server", "--bind", "{host}", "{port}"], {}, health="/"))
    )
    with GatewayClient(URL) as client:
        client.create_pair("main", 1, {"rollout-0": {"kind": "worker", "world_size": 1}})
    served: list[object] = []
    thread = threading.Thread(target=serve, args=(served,))
    thread.start()
    trainer = TrainerWorker(URL, "main", PlainSource({"w": torch.ones(8)}), rank=0, world_size=1)
    trainer.connect()
    trainer.update(1)
    thread.join()
    urls = [gateway_url(), ray.get(engine.wait_up.remote(60.0))]
    print(json.dumps({"urls": urls, "trainer": trainer._place.address, "engine": served}))
    trainer.close()
    for actor in (engine, gateway):
        end_actor(actor)
    ray.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
