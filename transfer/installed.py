"""Check for packages that only some commands and classes need."""

from __future__ import annotations

import importlib.util
from contextlib import suppress

from weightcast.transfer.errors import InputError

__all__ = ["check_installed"]


def check_installed(name: str, extra: str, module: str | None = None) -> None:
    """Raises InputError where a module is missing that one of weightcast's extras installs, by default of its name."""
    with suppress(ModuleNotFoundError):  # of the package that it is in
        if importlib.util.find_spec(module or extra) is not None:
            return
    raise InputError(f"{name} is not installed: pip install 'weightcast[{extra}]'")
