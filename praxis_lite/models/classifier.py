"""Classifier: the base of models with a softmax over classes; ClassificationModel: a network with such a softmax.

An ImageFeatureModel has the same network, but no softmax.

B batch, F features, V classes, T tokens, D model dims.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from praxis_lite.common.config import REQUIRED, Config, child, template
from praxis_lite.common.errors import ConfigError
from praxis_lite.common.trees import NestedDict
from praxis_lite.common.weighted import WeightedScalars, weighted_mean
from praxis_lite.inputs.base import BaseInput
from praxis_lite.layers.base import SplitMapping
from praxis_lite.layers.convnext import ConvNeXt
from praxis_lite.layers.image_mixing import ImageMixing, other_rows
from praxis_lite.layers.images import ConvNet, Mlp
from praxis_lite.layers.resnet import ResNet
from praxis_lite.layers.softmax import FullSoftmax, SoftmaxOutput, cross_entropy
from praxis_lite.layers.vision_transformer import VisionTransformer
from praxis_lite.models.base import BaseModel
from praxis_lite.models.labels import check_labels


class Classifier(BaseModel[SoftmaxOutput]):
  """Base of models that predict one of several classes; batches have `label`, [B] int32, `weights`, [B], and an input.

  Subclasses define `compute_features`, and call `create_softmax` in `setup`.

  Attributes:
    num_classes: V.
    softmax_tpl: config of the child `softmax`; predictions use all of its logits.
  """

  num_classes: int = REQUIRED
  softmax_tpl: Config = template(FullSoftmax, use_bias=True, chunk_size=None)

  softmax: FullSoftmax = child()

  def create_softmax(self, dims: int) -> None:
    """Creates the child `softmax`, whose inputs have this many dims."""
    self.create_child('softmax', self.softmax_tpl.clone(input_dims=dims, num_classes=self.num_classes))

  def compute_features(self, batch: NestedDict) -> jax.Array:
    """Returns the inputs of the softmax, [B, F]."""
    raise NotImplementedError

  def check_input(self, data: BaseInput, batch: NestedDict) -> None:
    """Raises a `ConfigError` if a label is not in [0, V)."""
    labels = {'label': np.asarray(batch['label'])} if 'label' in batch else {}
    check_labels(data, labels, batch, 'task.model.num_classes', self.num_classes)

  def compute_predictions(self, batch: NestedDict) -> SoftmaxOutput:
    """Returns logits [B, V] and cross entropies [B]."""
    labels, weights = self._leaf(batch, 'label'), self._leaf(batch, 'weights')
    return self.softmax(self.compute_features(batch), labels, weights)

  def compute_loss(self, predictions: SoftmaxOutput, batch: NestedDict) -> tuple[WeightedScalars, NestedDict]:
    """Returns metrics (`loss`, cross entropy in nats, and `accuracy`), and each example's `loss` and `prediction`."""
    predicted = jnp.argmax(predictions.logits, axis=-1).astype(jnp.int32)
    correct = predicted == batch['label']
    metrics = {
      'loss': weighted_mean(predictions.xent, batch['weights']),
      'accuracy': weighted_mean(correct, batch['weights']),
    }
    return metrics, {'loss': predictions.xent, 'prediction': predicted}

  def predict(self, batch: NestedDict) -> dict[str, jax.Array]:
    """Returns each example's `prediction`, [B] int32, and `probabilities`, [B, V]; the batch needs no labels."""
    probabilities = jax.nn.softmax(self.softmax.get_logits(self.compute_features(batch)))
    return {'prediction': jnp.argmax(probabilities, axis=-1).astype(jnp.int32), 'probabilities': probabilities}

  def decode(self, batch: NestedDict) -> tuple[WeightedScalars, NestedDict]:
    """Returns the metric `confidence`, the mean probability of the predicted classes, and the result of `predict`."""
    predictions = self.predict(batch)
    confidence = weighted_mean(jnp.max(predictions['probabilities'], axis=-1), self._leaf(batch, 'weights'))
    return {'confidence': confidence}, predictions


class ClassificationModel(Classifier):
  """A classifier of inputs such as images: batches have the leaves `label`, [B] int32, `weights`, [B], and the input.

  Attributes: the same as for `Classifier`, and
    network_tpl: config of the child `network`, from (input, weights) to features [B, F]; its `output_dims` is F.
    input_name: the leaf of the batch that is the network's input.
    mixing_tpl: template of the child `mixing`, such as `ImageMixing`, which mixes each image of a training batch with
      another one. The loss is then the mean of the losses for both labels, weighted by their shares. None disables it.
  """

  network_tpl: Config = template(Mlp)
  input_name: str = 'image'
  mixing_tpl: Config | None = None
  activation_split_dims_mapping: Config = template(SplitMapping)

  network: Mlp | ConvNet | VisionTransformer | ResNet | ConvNeXt = child()
  mixing: ImageMixing = child()

  def setup(self) -> None:
    self.create_child('network', self.network_tpl)
    if self.mixing_tpl is not None:
      self.create_child('mixing', self.mixing_tpl)
    self.create_softmax(self.network.output_dims)

  def compute_predictions(self, batch: NestedDict) -> SoftmaxOutput:
    if self.mixing_tpl is None or self.do_eval:
      return super().compute_predictions(batch)
    weights_B = self._leaf(batch, 'weights')
    mixed = self.mixing(self._leaf(batch, self.input_name), weights_B)
    output = super().compute_predictions({**batch, self.input_name: mixed.image})
    other_B, _ = cross_entropy(
      output.logits, other_rows(batch['label'], batch['weights']), self.softmax.label_smoothing
    )
    # A row whose partner is padding has a share of 1; the partner's label may be any number.
    share_B = mixed.share
    return output._replace(xent=jnp.where(share_B == 1, output.xent, share_B * output.xent + (1 - share_B) * other_B))

  def compute_features(self, batch: NestedDict) -> jax.Array:
    """Returns the result of the network, [B, F]."""
    return self.network(self._leaf(batch, self.input_name), self._leaf(batch, 'weights'))


class ImageFeatureModel(BaseModel[jax.Array]):
  """A model that computes features of images; it has no loss, so it cannot be trained.

  Its variables have the same paths as in a `ClassificationModel`, which can therefore be initialized with it.

  Attributes:
    network_tpl: config of the child `network`.
    input_name: the leaf of the batch with the images.
  """

  network_tpl: Config = template(VisionTransformer)
  input_name: str = 'image'

  network: VisionTransformer = child()

  def setup(self) -> None:
    self.create_child('network', self.network_tpl)

  def compute_predictions(self, batch: NestedDict) -> jax.Array:
    """Raises ConfigError: there is no loss."""
    raise ConfigError(
      f'task.model: a {type(self).__name__} has no head and no loss; train a ClassificationModel that starts from this '
      r"run, with task.train.init_from.path and rules=((r'softmax\..*', None),)"
    )

  def predict(self, batch: NestedDict) -> dict[str, jax.Array]:
    """Returns `features`, [B, D], and `states` of all tokens, [B, T, D]."""
    states_BTD = self.network.encode(batch[self.input_name])
    return {'features': self.network.pool(states_BTD), 'states': states_BTD}
