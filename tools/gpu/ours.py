"""The framework's step in the GPU benchmark."""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import numpy as np
import optax

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from praxis_lite.common.config import Config
from praxis_lite.common.config.overrides import set_by_path
from praxis_lite.common.trees import NestedDict
from praxis_lite.models import transformer_lm
from praxis_lite.training import PartitionedTask
from praxis_lite.training.learning import Learner
from praxis_lite.training.task import SingleTask
from tools.gpu import case as shared
from tools.gpu.case import ModelCase
from tools.gpu.jax_side import JaxSide, first_params, set_up
from tools.gpu.turn import Options, main


def our_task(case: ModelCase, options: Options) -> Config[SingleTask]:
  """Returns the config of the task. `options` maps paths of its fields to values that replace the defaults."""
  model = transformer_lm(
    vocab_size=case.vocab,
    model_dims=case.model_dims,
    num_layers=case.num_layers,
    num_heads=case.num_heads,
    hidden_dims=case.hidden_dims,
    tie_embeddings=True,
    fprop_dtype=case.compute,
  )
  task = Config(SingleTask, model=model.set(packed=False, dtype=case.state))
  b1, b2 = shared.BETAS
  task.train.learner = Config(
    Learner,
    optimizer=Config(optax.adamw, b1=b1, b2=b2, eps=shared.EPSILON, weight_decay=shared.WEIGHT_DECAY),
    learning_rate=shared.LEARNING_RATE,
    clip_gradient_norm_to_value=shared.CLIP_NORM,
  )
  for path, value in options.items():
    set_by_path(task, path, value)
  return task


def our_weights(case: ModelCase) -> NestedDict:
  """Returns the first weights as variables of our model."""
  w = first_params(case)
  heads = {name: {'w': w[name[0]]} for name in ('query', 'key', 'value', 'out')}
  layers = {
    'attention': heads,
    'attention_norm': {'scale': w['norm1']},
    'ff_norm': {'scale': w['norm2']},
    'ff': {name: {'w': w[name]} for name in ('gate', 'up', 'down')},
  }
  return {
    'lm': {
      'softmax': {'w': w['embedding']},
      'final_norm': {'scale': w['final_norm']},
      'transformer': {'layers': layers},
    }
  }


class Ours(JaxSide):
  """Its options map paths of the task's fields to values."""

  def prepare(self, case: ModelCase, batch: int, options: Options) -> None:
    partitioned = PartitionedTask(our_task(case, options).instantiate(), self.shapes(case, batch))
    self._step = partitioned.train_step
    self._key = jax.random.key(1)
    self._compiled = self._step.compiled
    state = partitioned.init_state(jax.random.key(0))
    state = state.replace(mdl_vars={})  # Frees their memory before the first weights are placed.
    self._state = state.replace(mdl_vars=partitioned.pad(our_weights(case)))

  def take(self, inputs: dict[str, np.ndarray]) -> jax.Array:
    out = self._step(self._state, self._key, inputs)
    self._state = out.state
    return out.weighted_loss


if __name__ == '__main__':
  set_up()
  main(Ours())
