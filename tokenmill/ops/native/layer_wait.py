"""In a recorded step: says which layer comes, and waits for its weights."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tokenmill.ops.native import call
from tokenmill.ops.native.structs import EnterArgs


def enter_layer(
    told: npt.NDArray[np.int64],  # [3] the layer that is computed, how often it was waited for, and how long
    there: npt.NDArray[np.int64] | None,  # whose first number says whether its weights are there; None: they always are
    layer: int,
    bell: int,  # a pipe's end
) -> None:
    call.run(EnterArgs(told=told, there=there, layer=layer, bell=bell))
