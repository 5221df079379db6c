"""Stand-in for DeepEP that lets SGLang build layers with `moe_a2a_backend="deepep"` on a machine without a GPU.

SGLang constructs a `Buffer` only at the first dispatch, so a model can be built and loaded, which is what shows how the
a2a path places experts; a forward pass fails. Tests that want it put `tests/stand_ins` on PYTHONPATH of the processes
they start.
"""

from __future__ import annotations


class Buffer:
    """Never constructed: communication is what this stand-in lacks."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        raise RuntimeError(f"deep_ep.{type(self).__name__} was constructed, but this deep_ep is a stand-in")


class Config(Buffer):
    """Never constructed, like `Buffer`."""
