"""What verification adds to a whole update: plain processes and a gateway over HTTP, with `full`, `sampled` and `off`.

    python benchmarks/bench_verify.py --mib 256 --tensors 500 --updates 20

Two trainer ranks and an instance of one rank each, live at the same time, and updated by turns. An update is timed on
trainer rank 0 from the offer to the decision: orders, transfer, digests on both sides and their comparison.
bench_transfer.py has what digests take beside the transfer alone.
"""

from __future__ import annotations

from contextlib import ExitStack

from bench_ray import INSTANCE, PAIR, TRAINERS, Plain, begin, measure, plain_gateway

from weightcast.gateway.client import GatewayClient

OFF = "off"
WAYS = (OFF, "sampled", "full")


def main() -> None:
    arguments = begin(__doc__)
    with ExitStack() as stack:
        sides = {}
        for way in WAYS:
            url = stack.enter_context(plain_gateway())
            with GatewayClient(url) as client:
                client.create_pair(PAIR, TRAINERS, {INSTANCE: {"kind": "worker", "world_size": 1}}, verify=way)
            sides[way] = Plain(url, arguments)
            stack.callback(sides[way].close)
        seconds = measure(sides, arguments.updates)
    print(f"{'verify':<10}{'median':>10}{'best':>10}{'adds':>8}{'best':>8}")
    for way, turns in seconds.items():
        middle, best = turns.ratio(seconds[OFF])
        taken = f"{turns.seconds * 1e3:>7.1f} ms{min(turns.wall) * 1e3:>7.1f} ms"
        print(f"{way:<10}{taken}{middle - 1:>+8.0%}{best - 1:>+8.0%}")


if __name__ == "__main__":
    main()
