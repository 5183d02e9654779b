"""Names for the types of arrays that rooms exchange."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int32]
Flags = NDArray[np.int8]
Floats = NDArray[np.float32]
# The saved cache contents of a sequence. Only the backend that wrote these bytes can read them.
State = NDArray[np.uint8]
# Rows of a state, as bytes or as elements without a meaning.
Rows = NDArray[np.unsignedinteger[Any]]
