"""The one place that imports torchvision.

The torchvision wheel for Linux links CUDA libraries. Beside a CPU build of torch its compiled operators do not load,
and the import stops while it describes two of them, `nms` and `qnms`. Nothing here uses either.
"""

import importlib
import sys
from types import ModuleType

from torch.library import Library

#: The declared schemas live as long as this object does.
_schemas: Library | None = None


def torchvision() -> ModuleType:
    """Import torchvision, declaring its box operators first where a CPU build of torch cannot load them."""
    global _schemas
    try:
        return importlib.import_module("torchvision")
    except RuntimeError as error:
        if "operator torchvision::nms does not exist" not in str(error):
            raise
    # The failed import removes the package itself but leaves its finished submodules, bound to a package that is gone.
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]
    _schemas = Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
    for operator in ("nms", "qnms"):
        schema = f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        _schemas.define(schema)  # type: ignore[no-untyped-call]
    return importlib.import_module("torchvision")
