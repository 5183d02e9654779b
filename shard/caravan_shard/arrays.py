"""The types of arrays."""

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int32]


Flags = NDArray[np.int8]


Floats = NDArray[np.float32]


# What the cache held of a sequence: only the backend that wrote it knows what is in it.
State = NDArray[np.uint8]
