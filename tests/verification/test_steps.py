"""What `verify` decodes, from the shapes of a training batch."""

from __future__ import annotations

import jax
import numpy as np

from praxis_lite.common.config import Config
from praxis_lite.instruments.verification.steps import decode_inputs, values_of_batch
from praxis_lite.models import CtcModel
from praxis_lite.training.task import SingleTask


def test_prompts_are_the_first_half_of_the_ids_of_a_batch_or_of_its_first_part():
  def ids(*shape):
    return jax.ShapeDtypeStruct(shape, np.int32)

  expected = {'ids': ids(3, 4), 'prompt_lengths': ids(3)}
  assert decode_inputs({'ids': ids(3, 9), 'weights': ids(3, 9)}) == expected
  assert decode_inputs({'chosen': {'ids': ids(3, 9)}, 'rejected': {'ids': ids(3, 9)}, 'weights': ids(3)}) == expected
  assert decode_inputs(images := {'image': ids(3, 4, 4, 1)}) is images


def test_made_up_recordings_have_enough_frames_for_their_labels():
  model = Config(CtcModel, vocab_size=9, blank_id=3)
  model.encoder_tpl.set(model_dims=4, num_layers=1, num_heads=2)
  task = Config(SingleTask, model=model).instantiate()
  shapes = {'audio': ((400,), np.float32), 'audio_lengths': ((), np.int32), 'labels': ((24,), np.int32)}
  inputs = {name: jax.ShapeDtypeStruct((8, *shape), dtype) for name, (shape, dtype) in shapes.items()}
  batch = values_of_batch(task, inputs, 50)
  assert 200 <= batch['audio_lengths'].min() < batch['audio_lengths'].max() <= 400
  assert (batch['labels'][:, 3:] == 3).all() and set(np.unique(batch['labels'][:, :3])) == set(range(9))
