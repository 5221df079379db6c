"""Lets torchvision's CUDA wheel be imported beside a CPU build of torch.

Its compiled part does not load there, so the operators that it would define are unknown, and `import torchvision`
fails with "operator torchvision::nms does not exist" when it attaches shapes to them. Declaring the schemas just before
the import is enough: nothing here ever calls them.
"""

from __future__ import annotations

import functools
import importlib.metadata
import sys

SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


@functools.cache
def declare() -> object:
    """Declare the schemas once, if torch is a CPU build and torchvision is not; they live as long as the result."""
    import torch

    if torch.version.cuda is not None or importlib.metadata.version("torchvision").endswith("+cpu"):
        return None
    library = torch.library.Library("torchvision", "FRAGMENT")
    for schema in SCHEMAS:
        library.define(schema)
    return library


class BeforeTorchvision:
    """A finder that finds nothing: whoever looks for torchvision passes it first."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "torchvision":
            declare()


# At the start of every interpreter (the .pth file), so imports must be few. Python may run a .pth file twice.
sys.meta_path.insert(0, BeforeTorchvision())
