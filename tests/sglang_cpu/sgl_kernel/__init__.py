"""Stand-in for SGLang's kernel package, which has no CPU wheel: every name can be imported, no name can be called.

SGLang imports names from it at module level once its CPU flag is set (0.5.23, for example
srt/mem_cache/allocation.py); on the paths that the tests take it calls none of them.
"""

from __future__ import annotations


class Missing:
    """A kernel that is not there."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *args: object, **kwargs: object) -> object:
        raise RuntimeError(f"sgl_kernel.{self.name} was called, but this sgl_kernel is a stand-in that has no kernels")


def __getattr__(name: str) -> Missing:
    if name.startswith("__"):
        raise AttributeError(name)
    return Missing(name)
