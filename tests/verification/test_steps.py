"""What `verify` decodes, from the shapes of a training batch."""

from __future__ import annotations

import jax
import numpy as np

from praxis_lite.instruments.verification.steps import decode_inputs


def test_prompts_are_the_first_half_of_the_ids_of_a_batch_or_of_its_first_part():
  def ids(*shape):
    return jax.ShapeDtypeStruct(shape, np.int32)

  expected = {'ids': ids(3, 4), 'prompt_lengths': ids(3)}
  assert decode_inputs({'ids': ids(3, 9), 'weights': ids(3, 9)}) == expected
  assert decode_inputs({'chosen': {'ids': ids(3, 9)}, 'rejected': {'ids': ids(3, 9)}, 'weights': ids(3)}) == expected
  assert decode_inputs(images := {'image': ids(3, 4, 4, 1)}) is images
