"""torchvision for tests of images, beside a torch that its native part was not built for.

Processors of images use torchvision's functions on tensors, which are written in Python. Its import fails where its
native operators do not load: their names are declared here, and nobody calls them.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys

_DIRECTORY = "ROOTSTOCK_TORCHVISION"  # of an installation outside the environment


def has_torchvision() -> bool:
    """Imports torchvision. Returns whether that succeeds."""
    if directory := os.environ.get(_DIRECTORY):
        sys.path.append(directory)
    if importlib.util.find_spec("torchvision") is None:
        return False
    import torch

    for _ in range(32):
        try:
            importlib.import_module("torchvision")
            return True
        except ImportError:
            return False
        except RuntimeError as error:
            missing = re.search(r"operator (torchvision::\w+) does not exist", str(error))
            if missing is None:
                raise
            torch.library.define(missing[1], "(Tensor given) -> Tensor")
            for name in [each for each in sys.modules if each.split(".")[0] == "torchvision"]:
                del sys.modules[name]
    return False


HAS_TORCHVISION = has_torchvision()
