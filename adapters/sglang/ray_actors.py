"""SGLang's schedulers as actors of Ray (`--use-ray`): the plugin goes into them, too.

SGLang 0.5.23 loads plugins in `run_scheduler_process`. Its `SchedulerActor` (`srt/ray/scheduler_actor.py`), a process
that Ray starts on whatever node, replaces that function, and loads none. The process that starts the actors does load
them: there the class is exchanged for one that loads them first.
"""

from __future__ import annotations

import os
import sys
from typing import Any

__all__ = ["load_in_actors"]

_ENGINE = "sglang.srt.ray.engine"


def load_in_actors(variables: tuple[str, ...], address_variable: str) -> None:
    """Makes scheduler actors load plugins, in a process that starts them; does nothing in any other.

    The actors' environment is that of their node, so `variables` are handed over from this one's; `address_variable`
    gets the address of the actor's node unless it is among them.
    """
    engine = sys.modules.get(_ENGINE)
    if engine is None:
        return
    import ray

    actor_class = engine.SchedulerActor.__ray_metadata__.modified_class.__ray_actor_class__
    if getattr(actor_class, "with_plugins", False):
        return
    environment = {name: os.environ[name] for name in variables if name in os.environ}
    engine.SchedulerActor = ray.remote(_with_plugins(actor_class, environment, address_variable))  # type: ignore[attr-defined]


def _with_plugins(plain: Any, environment: dict[str, str], address_variable: str) -> type:
    class SchedulerActor(plain):  # type: ignore[misc]
        with_plugins = True

        def __init__(self, *arguments: Any, **named: Any) -> None:
            import ray
            from sglang.srt.plugins import load_plugins

            os.environ.update({address_variable: ray.util.get_node_ip_address(), **environment})
            load_plugins()
            super().__init__(*arguments, **named)

    return SchedulerActor
