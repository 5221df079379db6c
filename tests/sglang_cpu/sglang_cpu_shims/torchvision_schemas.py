"""Lets torchvision's CUDA wheel be imported beside a CPU build of torch.

Its compiled part does not load there, so the operators that it would define are unknown, and `import torchvision`
fails with "operator torchvision::nms does not exist" when it attaches shapes to them. Declaring the schemas just before
the import is enough: nothing here ever calls them.
"""

from __future__ import annotations

import importlib.metadata
import sys

SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)

# A library lives as long as its handle: the schemas go when it is collected.
_libraries: list[object] = []


def declare() -> None:
    """Declare the schemas, if torch is a CPU build and torchvision is not."""
    import torch

    if torch.version.cuda is None and not importlib.metadata.version("torchvision").endswith("+cpu"):
        library = torch.library.Library("torchvision", "FRAGMENT")
        for schema in SCHEMAS:
            library.define(schema)
        _libraries.append(library)


class BeforeTorchvision:
    """A finder that finds nothing: the import of torchvision passes it first, once."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "torchvision":
            sys.meta_path.remove(self)
            declare()


def install() -> None:
    """Wait for the import of torchvision; imports nothing by itself, as this runs at the start of every interpreter."""
    sys.meta_path.insert(0, BeforeTorchvision())
