"""Guards against operations that XLA's partitioner computes wrongly without reporting an error.

`guard` reads a lowered program, including its backward pass and any layers of the user, and finds out how Shardy will
split each array (`sharding/propagation.py`). Around an operation that XLA may compute wrongly, the guard constrains the
arrays to splits that are known to be right. It changes nothing else.

Each guard names the smallest program that shows the fault, and a test in `tests/sharding/test_guards.py` that runs this
program without the guard. When that test fails, XLA computes the program correctly and the guard can be removed. All
faults were seen with jaxlib 0.4.36 to 0.12, on CPU and in programs compiled for GPU, with Shardy and without.

    products    products of matrices
    images      convolutions, windows and pads
    lookups     gathers, slices and scatters
    reshapes    reshapes that abort the process
    transforms  Fourier transforms
    starts      slices that begin past the end; wrong even on one device
    crops       convolutions and pads that crop; wrong even on one CPU device
    lapack      factorizations of matrices, which may wait forever on a CPU
"""

from praxis_lite.sharding.guards.guard import Guarded, GuardedJit, guard

__all__ = ['Guarded', 'GuardedJit', 'guard']
