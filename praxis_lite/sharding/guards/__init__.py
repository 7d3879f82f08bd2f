"""Guards: operations that XLA's partitioner computes wrongly without an error, and what is stated so that it does not.

`guard` reads a lowered program, the backward pass and a user's own layers included, and how Shardy will split each of
its arrays (`sharding/propagation.py`). Where an operation is one of those below, the program is told to split its
arrays in another way around it; all else stays as it is. Each guard names the smallest program that shows the fault,
and the test in `tests/sharding/test_guards.py` that runs this program without the guard: when it fails, XLA has
become right and the guard can go. All faults were seen with jaxlib 0.4.36 to 0.12, on CPU and in programs compiled for
GPU, with Shardy and without.

    products    products of matrices
    images      convolutions, windows and pads
    lookups     gathers, slices and scatters
    reshapes    reshapes, which end the process
    transforms  Fourier transforms
    starts      slices that begin past the end, wrong on one device too
    crops       convolutions and pads that crop, wrong on one device of a CPU too
    lapack      factorizations of matrices, which may wait forever on a CPU
"""

from praxis_lite.sharding.guards.guard import Guarded, GuardedJit, guard

__all__ = [
  'Guarded',
  'GuardedJit',
  'guard',
]
