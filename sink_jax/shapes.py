"""Types of arrays with their axes; without jaxtyping they say nothing.

Metrics of maps take their types from here: they need only NumPy and JAX.
"""

from typing import TYPE_CHECKING, Any

try:
  from jaxtyping import Array, Bool, Float, Integer, Real, Shaped
except ImportError:
  if not TYPE_CHECKING:
    from jax import Array

    class _Unchecked:
      """Stands for the types of jaxtyping: `Float[Array, 'H T']` is any object."""

      def __class_getitem__(cls, axes: Any) -> type:
        return object

    Bool = Float = Integer = Real = Shaped = _Unchecked
