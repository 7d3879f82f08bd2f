"""ImageFeatureModel: computes features of images, without a head; classifiers can be initialized with it.

B batch, T tokens, D model dims.
"""

from __future__ import annotations

import jax

from praxis_lite.common.config import Config, child, template
from praxis_lite.common.errors import ConfigError
from praxis_lite.common.trees import NestedDict
from praxis_lite.layers.vision_transformer import VisionTransformer
from praxis_lite.models.base import BaseModel


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
