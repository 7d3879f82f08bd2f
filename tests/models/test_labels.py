"""Labels that a model has no class for are found on the host, in a user's own model too, before a step is taken."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.inputs import ArrayInput
from praxis_lite.layers import Embedding, FullSoftmax, Linear
from praxis_lite.models import BaseModel, ClassificationModel, transformer_lm, weighted_mean
from praxis_lite.runs.records.run_inputs import Datasets


class Own(BaseModel):
  """With a loss that takes -1 for the last class, silently."""

  num_classes: int | None = 3

  def setup(self):
    self.create_child('head', Config(Linear, input_dims=2, output_dims=3))

  def compute_predictions(self, batch):
    return self.head(batch['x'])

  def compute_loss(self, predictions, batch):
    losses = optax.softmax_cross_entropy_with_integer_labels(predictions, batch['labels'])
    return {'loss': weighted_mean(jnp.asarray(losses), batch['weights'])}, {}


class WithSoftmax(Own):
  """The layer knows how many classes there are, not the model."""

  def setup(self):
    self.create_child('embedding', Config(Embedding, num_classes=50, input_dims=2))
    self.create_child('softmax', Config(FullSoftmax, input_dims=2, num_classes=3))


class Ignores(Own):
  def check_input(self, data, batch):
    pass


def check(model, labels, name='labels', weights=None, batch_size=2):
  arrays = {'x': np.ones((len(labels), 2), np.float32), name: np.asarray(labels)}
  if weights is not None:
    arrays['weights'] = np.asarray(weights, np.float32)
  data = ArrayInput(name='train', arrays=arrays, batch_size=batch_size)
  Datasets('datasets', [data]).check([data], model.instantiate())


@pytest.mark.parametrize('name', ['labels', 'y', 'target'])
@pytest.mark.parametrize('bad', [-1, 3])
def test_a_label_without_a_class_is_told_though_it_is_not_in_the_first_batch(name, bad):
  told = (
    rf"^datasets\[0\]: train: found {bad} in '{name}', but task\.model\.num_classes is 3; all must be from 0 to 2, "
  )
  with pytest.raises(ConfigError, match=told + r'or have weight 0; a model whose loss ignores .* has a check_input\('):
    check(Config(Own), [0, 1, 2, bad], name)


def test_softmax_layers_say_how_many_classes_there_are():
  with pytest.raises(ConfigError, match=r"found 3 in 'labels', but softmax\.num_classes is 3; all must be from 0 to 2"):
    check(Config(WithSoftmax, num_classes=None), [2, 3])


def test_what_is_no_label_or_weighs_nothing_may_be_any_integer():
  check(Config(Own), [0, 1, 2, -1], weights=[1, 1, 1, 0])
  check(Config(Own), [0, 1, 2, -1], name='position')
  check(Config(Own), [0.0, 1.0, -1.0], name='y')
  check(Config(Own, num_classes=None), [0, 1, 2, -1])  # Nothing says how many there are.
  check(Config(Ignores), [0, 1, 2, -1])


def test_labels_of_the_models_of_the_package():
  classifier = Config(ClassificationModel, num_classes=3)
  classifier.network_tpl.set(input_dims=2, hidden_dims=(2,))
  with pytest.raises(ConfigError, match=r"found -1 in 'label', but task\.model\.num_classes is 3; .*or have weight 0$"):
    check(classifier, [0, -1], 'label')
  lm = transformer_lm(vocab_size=4, model_dims=4, num_layers=1, num_heads=1)
  rows = {'ids': np.ones((2, 3), np.int32), 'labels': np.array([[1, 2, -1], [-1, -1, -1]], np.int32)}
  data = ArrayInput(name='train', arrays={**rows, 'weights': np.array([[1, 1, 0], [0, 0, 0]])}, batch_size=2)
  Datasets('datasets', [data]).check([data], lm.instantiate())
  data = ArrayInput(name='train', arrays=rows, batch_size=2)
  with pytest.raises(ConfigError, match=r"found -1 in 'labels', but task\.model\.vocab_size is 4; all must be from 0 "):
    Datasets('datasets', [data]).check([data], lm.instantiate())
