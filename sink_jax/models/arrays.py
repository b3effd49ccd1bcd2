"""Names for the types of arrays that models take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Array

AnyArray = Array | np.ndarray
# A tree of parameters as Flax makes it: nested mappings from names to arrays, or to their shapes.
ParamTree = Mapping[str, Any]
ArrayTree = Any  # any tree of arrays that JAX knows: a named tuple, a mapping, one array
