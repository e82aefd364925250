"""The compiler options that every Numba kernel of the package shares."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

Function = TypeVar("Function", bound=Callable[..., Any])


def jit(*, parallel: bool = False, reorder: bool = False) -> Callable[[Function], Function]:
    """Compile a function to native code, keeping its Python signature for type checkers.

    Machine code is cached on disk, the GIL is released, and division by zero follows IEEE 754 (as
    in NumPy) instead of raising. Fast-math stays off: results must not depend on how a loop was
    vectorised. ``reorder`` is for sums that Torch too would add up in an order of its own.
    """
    fastmath = {"reassoc", "nsz", "contract"} if reorder else False
    compiler = numba.njit(
        cache=True, nogil=True, error_model="numpy", parallel=parallel, fastmath=fastmath
    )
    return cast(Callable[[Function], Function], compiler)
