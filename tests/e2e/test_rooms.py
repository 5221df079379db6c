"""Packages list their modules in their docstrings, and pages name files that are there: newcomers find them."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

ROOMS = ("adapters", "cluster", "commands", "demo", "gateway", "offline", "transfer")
NAMED = re.compile(r"`((?:[a-z_]+/)+[\w.]+\.(?:py|md|json|toml|txt))`")
LISTED = re.compile(r"^- `(\w+)`: \S", re.MULTILINE)


def test_packages_list_their_modules(root: Path) -> None:
    inits = [init for room in ROOMS for init in sorted((root / room).rglob("__init__.py"))]
    assert {init.relative_to(root).parts[0] for init in inits} == set(ROOMS)
    faults = [fault for init in inits for fault in _faults(init, root)]
    assert not faults, "\n".join(["package docstrings differ from the folders:", *faults])


def test_pages_name_files_that_are_there(root: Path) -> None:
    pages = [root / "README.md", *sorted((root / "docs").glob("*.md"))]
    named = {(page.name, path) for page in pages for path in NAMED.findall(page.read_text(encoding="utf-8"))}
    assert len(named) > 40
    gone = sorted(f"{page}: {path}" for page, path in named if not (root / path).exists())
    assert not gone, "\n".join(["pages name files that are gone:", *gone])


def _faults(init: Path, root: Path) -> list[str]:
    """Lines about names that are missing in the docstring of a package, gone from its folder, or listed twice."""
    listed = Counter(LISTED.findall(ast.get_docstring(ast.parse(init.read_text(encoding="utf-8"))) or ""))
    present = _contents(init.parent)
    differences = {
        "missing": present - set(listed),
        "gone": set(listed) - present,
        "listed twice": {name for name, count in listed.items() if count > 1},
    }
    return [f"{init.relative_to(root)}: {kind}: {', '.join(sorted(n))}" for kind, n in differences.items() if n]


def _contents(folder: Path) -> set[str]:
    """Names of a package's modules and sub-packages."""
    modules = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    return modules | {path.parent.name for path in folder.glob("*/__init__.py")}
