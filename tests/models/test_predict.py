"""`predict`: what a user of a trained model gets, without labels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.layers.images import Mlp
from praxis_lite.models import transformer_lm
from praxis_lite.models.base import BaseModel
from praxis_lite.models.classifier import ClassificationModel
from praxis_lite.training import PartitionedTask
from praxis_lite.training.task import SingleTask

KEY = jax.random.key(0)


@pytest.mark.slow
@pytest.mark.parametrize('packed', [True, False])
def test_a_language_model_predicts_the_logits_that_its_loss_is_of(packed):
  model = transformer_lm(vocab_size=11, model_dims=4, num_layers=1, num_heads=1).set(packed=packed).instantiate()
  variables = model.init(KEY)
  ids = np.array([[1, 2, 3, 4], [5, 6, -1, -1]], np.int32)
  weights = (ids >= 0).astype(np.float32)
  segments = {'segment_ids': np.array([[1, 1, 2, 2], [1, 1, 0, 0]]), 'segment_pos': np.array([[0, 1, 0, 1]] * 2)}
  batch = {'ids': ids, 'weights': weights, **segments}
  predicted, _ = model.apply(variables, batch, method='predict', do_eval=True)
  whole, _ = model.apply(variables, {**batch, 'labels': ids}, method='compute_predictions', do_eval=True)
  np.testing.assert_array_equal(predicted['logits'], whole.logits)
  assert np.isfinite(predicted['logits']).all()
  alone, _ = model.apply(variables, {'ids': ids[:1], 'weights': np.ones(1)}, method='predict', do_eval=True)
  assert np.allclose(alone['logits'], predicted['logits'][:1]) != packed  # The second segment does not see the first.


def test_a_classifier_predicts_classes_and_probabilities():
  network = Config(Mlp, input_dims=3, hidden_dims=(4,))
  model = Config(ClassificationModel, num_classes=5, network_tpl=network, input_name='x').instantiate()
  variables = model.init(KEY)
  batch = {'x': np.random.default_rng(0).standard_normal((6, 3)).astype(np.float32), 'weights': np.ones(6, np.float32)}
  predicted, _ = model.apply(variables, batch, method='predict', do_eval=True)
  whole, _ = model.apply(variables, {**batch, 'label': np.zeros(6, int)}, method='compute_predictions', do_eval=True)
  np.testing.assert_allclose(predicted['probabilities'], jax.nn.softmax(whole.logits), rtol=1e-6)
  np.testing.assert_array_equal(predicted['prediction'], np.argmax(whole.logits, -1))
  (_, decoded), _ = model.apply(variables, batch, method='decode', do_eval=True)
  assert decoded.keys() == predicted.keys()


class Sum(BaseModel):
  def compute_predictions(self, batch):
    return {'rows': batch['x'], 'sum': jnp.sum(batch['x'])}


def test_predictions_that_are_not_of_the_rows_are_told_before_anything_is_compiled():
  task = Config(SingleTask, model=Config(Sum)).instantiate()
  told = r'^task\.model: of 4 examples, Sum predicts sum of shape \(\); predict\(batch\) takes a whole batch, and '
  with pytest.raises(ConfigError, match=told):
    PartitionedTask(task, {'x': np.zeros((4, 2), np.float32)}).predict_step.trace()
