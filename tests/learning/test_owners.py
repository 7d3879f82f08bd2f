"""Optimizers of matrices on one device: the updates are those of optax, or of a form in NumPy."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec
from small_trees import declarations, values, weight

from praxis_lite.common.config import Config
from praxis_lite.common.trees import leaves
from praxis_lite.sharding.weights import WeightHParams
from praxis_lite.training.learning import Learner, muon
from praxis_lite.training.learning.owners import Splits


def after_steps(optimizer: Config, weights: Any, steps: int = 3) -> Any:
  bound = Config(Learner, optimizer=optimizer, learning_rate=0.05).instantiate().bind(weights)
  params = values(weights)
  state = bound.init(params)
  for step in range(steps):
    gradients = values(weights, step + 1, spread=4.0)
    params, state, *_ = bound.update(gradients, jnp.float32(1), params, state, None, jnp.int32(step))
  return params


@pytest.mark.slow_cases
@pytest.mark.parametrize('fields', [{}, {'nesterov': False, 'consistent_rms': 0.2, 'weight_decay': 0.1, 'beta': 0.9}])
def test_muon_is_that_of_optax(fields: dict[str, Any]) -> None:
  weights = declarations()
  expected = after_steps(Config(optax.contrib.muon, **fields), weights)
  found = after_steps(Config(muon, **fields), weights)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, expected)


def test_each_layer_is_a_matrix_without_a_map_over_layers() -> None:
  """So that the matrices of all layers, also on a mesh, are changed together."""
  weights = declarations()
  bound = Config(Learner, optimizer=Config(muon), per_layer_statistics=True).instantiate().bind(weights)
  assert bound.init(values(weights)).keys() == {'all'}
  assert bound.needs_whole({('lm', 'deep', 'w'): (2,)}) == ('learner.optimizer', [])


def test_beside_a_part_that_is_mapped_over_layers_it_is_mapped_too_and_says_so() -> None:
  weights = declarations()
  chain = Config(optax.chain, Config(muon, placement='owner'), Config(optax.scale_by_trust_ratio))
  bound = Config(Learner, optimizer=chain).instantiate().bind(weights)
  assert bound.init(values(weights)).keys() == {'single', 'repeated_3', 'repeated_2_2'}
  assert bound.needs_whole({('lm', 'deep', 'w'): (2,)})[1] == ['scale_by_trust_ratio', 'muon']
  assert [note.split(',')[0] for note in bound.describe_exchanges(splits_of(weights))] == ['muon: 1 matrix of 4 x 6']


def splits_of(weights: Any, sizes: dict[str, int] | None = None, inside: bool = False) -> Splits:
  """Of variables whose last dimension is split over 'x'."""
  shapes = {path: w.full_shape for path, w in leaves(weights).items()}
  specs = {path: PartitionSpec(*[None] * (len(shape) - 1), 'x') for path, shape in shapes.items()}
  return Splits(shapes, specs, sizes or {'x': 2}, inside)


def test_matrices_in_bfloat16_are_sent_in_float32_and_reports_say_so() -> None:
  weights = {'w': WeightHParams((4, 6), dtype=jnp.bfloat16)}
  bound = Config(Learner, optimizer=Config(muon)).instantiate().bind(weights)
  splits, params = splits_of(weights, inside=True), {'w': jnp.ones((4, 3), jnp.bfloat16)}
  (note,) = bound.describe_exchanges(splits)
  state = jax.eval_shape(bound.init, params)

  def update(params: Any, state: Any) -> Any:
    return bound.update(params, jnp.float32(1), params, state, None, jnp.int32(0), splits=splits).mdl_vars

  program = str(jax.make_jaxpr(update, axis_env=[('x', 2)])(params, state))
  sent = re.findall(r':(\w+)\[([\d,]+)\] = all_to_all', program)
  assert sorted(sent) == [('f32', '1,4,6'), ('f32', '2,4,3')]
  assert 'receives 192 B of all-to-alls' in note  # 24 entries each way, of 4 bytes.


def test_one_device_sends_nothing_and_a_mesh_without_an_axis_left_is_said() -> None:
  weights = {'w': weight(4, 6, repeat=(2,))}
  splits = splits_of(weights, {'x': 1})
  bound = Config(Learner, optimizer=Config(muon, placement='owner')).instantiate().bind(weights)
  assert bound.describe_exchanges(splits) == []
  dealt = Splits(splits.shapes, {('w',): PartitionSpec('x')}, {'x': 2})
  (note,) = bound.describe_exchanges(dealt)
  assert 'not dealt out (no mesh axis is left); each computes 1,' in note
