"""What the Numba kernels of the package share: compiler options, and an instruction it lacks."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

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


def _prefetch(_: Any, array: Any, index: Any) -> Any:
    """Numba's recipe for the instruction that brings array[index] near, without waiting for it."""

    def generate(context: Any, builder: Any, _: Any, values: Any) -> Any:
        data = context.make_array(array)(context, builder, values[0]).data
        place, flag = builder.gep(data, [values[1]]), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [place.type, flag, flag, flag])
        fetch = builder.module.declare_intrinsic("llvm.prefetch", [place.type], kind)
        builder.call(fetch, [place, flag(0), flag(3), flag(1)])  # to read it, soon; it is no code
        return context.get_dummy_value()

    return types.void(array, index), generate


prefetch = cast(Callable[[Any, int], None], intrinsic(_prefetch))
