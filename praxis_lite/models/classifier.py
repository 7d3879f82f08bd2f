"""ClassificationModel: a network, and a softmax over classes.

B batch, V classes.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from praxis_lite.common.config import REQUIRED, Config, child, template
from praxis_lite.common.errors import DataError, did_you_mean
from praxis_lite.common.trees import NestedDict
from praxis_lite.common.weighted import WeightedScalars, weighted_mean
from praxis_lite.inputs.base import BaseInput
from praxis_lite.layers.base import SplitMapping
from praxis_lite.layers.images import ConvNet, Mlp
from praxis_lite.layers.softmax import FullSoftmax, SoftmaxOutput
from praxis_lite.models.base import BaseModel
from praxis_lite.models.labels import check_labels


class ClassificationModel(BaseModel[SoftmaxOutput]):
  """Classifies inputs such as images: batches have the leaves `label`, [B] int32, `weights`, [B], and the input.

  Attributes:
    num_classes: V.
    network_tpl: config of the child `network`, from (input, weights) to features [B, F]; its `output_dims` is F.
    softmax_tpl: config of the child `softmax`; predictions use all of its logits.
    input_name: the leaf of the batch that is the network's input.
  """

  num_classes: int = REQUIRED
  network_tpl: Config = template(Mlp)
  softmax_tpl: Config = template(FullSoftmax, use_bias=True, chunk_size=None)
  input_name: str = 'image'
  activation_split_dims_mapping: Config = template(SplitMapping)

  network: Mlp | ConvNet = child()
  softmax: FullSoftmax = child()

  def setup(self) -> None:
    self.create_child('network', self.network_tpl)
    softmax = self.softmax_tpl.clone(input_dims=self.network.output_dims, num_classes=self.num_classes)
    self.create_child('softmax', softmax)

  def check_input(self, data: BaseInput, batch: NestedDict) -> None:
    """Raises a `ConfigError` if a label is not in [0, V)."""
    labels = {'label': np.asarray(batch['label'])} if 'label' in batch else {}
    check_labels(data, labels, batch, 'task.model.num_classes', self.num_classes)

  def compute_predictions(self, batch: NestedDict) -> SoftmaxOutput:
    """Returns logits [B, V] and cross entropies [B]."""
    labels, weights = self._leaf(batch, 'label'), self._leaf(batch, 'weights')
    return self.softmax(self._features(batch), labels, weights)

  def compute_loss(self, predictions: SoftmaxOutput, batch: NestedDict) -> tuple[WeightedScalars, NestedDict]:
    """Returns the metrics `loss`, cross entropy in nats, and `accuracy`; each example's `loss` and `prediction`."""
    predicted = jnp.argmax(predictions.logits, axis=-1).astype(jnp.int32)
    correct = predicted == batch['label']
    metrics = {
      'loss': weighted_mean(predictions.xent, batch['weights']),
      'accuracy': weighted_mean(correct, batch['weights']),
    }
    return metrics, {'loss': predictions.xent, 'prediction': predicted}

  def predict(self, batch: NestedDict) -> dict[str, jax.Array]:
    """Returns each example's `prediction`, [B] int32, and `probabilities`, [B, V]; the batch needs no labels."""
    probabilities = jax.nn.softmax(self.softmax.get_logits(self._features(batch)))
    return {'prediction': jnp.argmax(probabilities, axis=-1).astype(jnp.int32), 'probabilities': probabilities}

  def decode(self, batch: NestedDict) -> tuple[WeightedScalars, NestedDict]:
    """Returns the result of `predict`; the metric is `confidence`, the mean probability of the predictions."""
    predictions = self.predict(batch)
    confidence = weighted_mean(jnp.max(predictions['probabilities'], axis=-1), self._leaf(batch, 'weights'))
    return {'confidence': confidence}, predictions

  def _features(self, batch: NestedDict) -> jax.Array:
    x, weights = self._leaf(batch, self.input_name), self._leaf(batch, 'weights')
    # Rows of weight zero may hold NaN, and 0 times NaN is not a zero gradient.
    is_padding = jnp.expand_dims(weights == 0, range(1, x.ndim))
    return self.network(jnp.where(is_padding & ~jnp.isfinite(x), 0, x), weights)

  def _leaf(self, batch: NestedDict, name: str) -> jax.Array:
    if name not in batch:
      raise DataError(
        f'{self.path_name}: the batch has no leaf {name!r}.{did_you_mean(name, batch)} Its leaves: {", ".join(batch)}'
      )
    return batch[name]
