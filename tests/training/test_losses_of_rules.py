"""Rules with losses of their own: each counts by its own weight, over microbatches and devices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.common.weighted import weighted_mean
from praxis_lite.models.base import BaseModel
from praxis_lite.sharding.weights import WeightHParams
from praxis_lite.training import PartitionedTask
from praxis_lite.training.learning import Learner, LearnerRule, MultiLearner
from praxis_lite.training.steps import loss_and_gradients
from praxis_lite.training.task import SingleTask

X = np.array([1, 10, 100, 1000], np.float32)
BATCH = {'x': X, 'weights': np.ones(4, np.float32), 'counts': np.array([1, 1, 1, 0], np.float32)}


class TwoLosses(BaseModel):
  """The gradient of each loss is the mean of x over the rows that count in it."""

  def setup(self) -> None:
    for name in ('of_all', 'of_some'):
      self.create_variable(name, WeightHParams((6,), tensor_split_dims_mapping=('data',)))

  def compute_predictions(self, batch: Any) -> Any:
    return batch['x'][:, None] * self.theta.of_all, batch['x'][:, None] * self.theta.of_some

  def compute_loss(self, predictions: Any, batch: Any) -> Any:
    of_all, of_some = (jnp.sum(x, axis=1) for x in predictions)
    some = weighted_mean(of_some, batch['weights'] * batch['counts'])
    constant = (jnp.ones(()), some[1])
    return {
      'loss': weighted_mean(of_all, batch['weights']),
      'some': some,
      'constant': constant,
      'rows': (of_some, batch['weights']),
    }, {}


def task(mesh: tuple[int, ...], how: str, microbatches: int, loss: str = 'some') -> Any:
  made = Config(
    SingleTask, model=Config(TwoLosses), mesh_axis_names=('data', 'unused'), ici_mesh_shape=mesh, partitioning=how
  )
  sgd = Config(Learner, optimizer=Config(optax.sgd), learning_rate=1.0)
  made.train.learner = Config(
    MultiLearner,
    num_microbatches=microbatches,
    rules=(
      Config(LearnerRule, name='all', regex='of_all', learner=sgd),
      Config(LearnerRule, name='some', regex='of_some', learner=sgd, loss=loss),
    ),
  )
  return made.instantiate()


@pytest.mark.parametrize(
  ('mesh', 'how', 'microbatches'),
  [((1, 1), 'auto', 1), ((1, 1), 'auto', 2), ((3, 2), 'shard_map', 1), ((2, 1), 'shard_map', 2), ((3, 2), 'auto', 2)],
)
def test_each_loss_counts_by_its_own_weight(mesh: tuple[int, ...], how: str, microbatches: int) -> None:
  partitioned = PartitionedTask(task(mesh, how, microbatches), BATCH)
  state = partitioned.init_state(jax.random.key(0))
  start = jax.tree.map(np.asarray, partitioned.unpad(state).mdl_vars)
  out = partitioned.train_step(state, jax.random.key(1), BATCH)
  changed = partitioned.unpad(out.state).mdl_vars
  for name, mean in (('of_all', X.mean()), ('of_some', X[:3].mean())):
    np.testing.assert_allclose(start[name] - changed[name], mean, rtol=1e-4, err_msg=name)
  total = start['of_all'].sum() * X.mean() + start['of_some'].sum() * X[:3].mean()
  np.testing.assert_allclose(out.weighted_loss, total, rtol=1e-4)


@pytest.mark.parametrize(
  ('loss', 'message'),
  [
    ('constant', r"the metric 'constant', the loss of a rule, depends on none of the rule's variables"),
    ('rows', r"rules: a rule has the loss 'rows', a metric of shape \(4,\) with a weight of shape \(4,\); both must"),
  ],
)
def test_a_metric_that_is_no_loss_of_the_rule_is_refused(loss: str, message: str) -> None:
  made = task((1, 1), 'auto', 1, loss)
  with pytest.raises(ConfigError, match=message):
    loss_and_gradients(made, made.model.init(jax.random.key(0)), jnp.int32(0), jax.random.key(1), BATCH)
