"""Arrays that are split in one way, and then in another: changes that the guards leave to XLA."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import numpy as np

from tools.splits.batches import Program


def reshard_programs() -> Iterator[Program]:
  for shape in ((12,), (5,), (12, 12), (3, 7), (12, 4, 6), (5, 2, 3), (2, 3, 4, 2)):
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    names = tuple('tuvw'[: len(shape)])
    # For an elementwise operation, XLA reshards the operand to the split of the result.
    yield Program(f'{shape}', 'stablehlo.negate', jax.lax.neg, (x,), -x, (names, names))
