"""DiffusionModel: generates images from noise in steps (DDPM, Ho et al., 2020; flow matching, Lipman et al., 2023).

    loss = mean |network(x_t, t, class) - target|^2,  x_t and target of a random t and random noise; see `diffusion.py`
    guided = network(x_t, t, none) + guidance (network(x_t, t, class) - network(x_t, t, none))   (Ho and Salimans, 2022)

B batch, H height, W width, C channels.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from praxis_lite.common.config import REQUIRED, Config, child, template
from praxis_lite.common.errors import ConfigError, DataError, check_choice
from praxis_lite.common.trees import NestedDict
from praxis_lite.common.weighted import WeightedScalars, weighted_mean
from praxis_lite.inputs.base import BaseInput
from praxis_lite.layers.base import SplitMapping
from praxis_lite.layers.diffusion import SAMPLERS, add_noise, check_process, prediction_target, sample
from praxis_lite.layers.diffusion_transformer import DiffusionTransformer, ModulatedBlock
from praxis_lite.layers.repeat import Repeat
from praxis_lite.models.base import BaseModel
from praxis_lite.models.labels import IdLimit, check_images, check_labels
from praxis_lite.models.split_configs import set_sharding


class DiffusionOutput(NamedTuple):
  """The prediction of the network and its target, each [B, H, W, C]."""

  output: jax.Array
  target: jax.Array


class DiffusionModel(BaseModel[DiffusionOutput]):
  """A generator of images. Batches have images [B, H, W, C], `weights` [B] and, with classes, `label` [B] int32.

  `predict` generates an image for each row. Each row draws its own random numbers, so an image does not depend on the
  other rows or on the mesh. The same holds for the loss, except that with `partitioning='shard_map'` each device draws
  its own numbers.

  Attributes:
    network_tpl: config of the child `network`.
    image_size: (H, W) of the images.
    schedule, prediction: 'cosine' or 'linear' with 'v' or 'epsilon', or 'flow' with 'velocity'; see `diffusion.py`.
    class_dropout: fraction of the training rows that are trained without their class, which `guidance` needs.
    time_sampling: distribution of times in training: 'uniform', or 'logit_normal', the sigmoid of normal numbers, which
      favors the middle (Esser et al., 2024).
    sampler: 'ddim', 'ancestral', 'euler' or 'heun'.
    num_sampling_steps: number of steps of the sampler.
    guidance: how much samples follow their class. 1 is the network's own prediction, which takes half the time of any
      other value.
    sample_limit: bound of the absolute values of the image that the network estimates in each step, where -1 to 1 is
      the `value_range`; None means no bound.
    value_range: (least, greatest) value of a pixel; the network sees values from -1 to 1.
    input_name: the leaf of the batch with the images.
  """

  network_tpl: Config = template(DiffusionTransformer)
  image_size: tuple[int, int] = REQUIRED
  schedule: str = 'flow'
  prediction: str = 'velocity'
  class_dropout: float = 0.1
  time_sampling: str = 'uniform'
  sampler: str = 'euler'
  num_sampling_steps: int = 50
  guidance: float = 1.0
  sample_limit: float | None = 1.0
  value_range: tuple[float, float] = (0.0, 1.0)
  input_name: str = 'image'
  activation_split_dims_mapping: Config = template(SplitMapping)

  network: DiffusionTransformer = child()

  def setup(self) -> None:
    check_process(self.schedule, self.prediction, self.path_name)
    check_choice(f'{self.path_name}.sampler', self.sampler, SAMPLERS)
    check_choice(f'{self.path_name}.time_sampling', self.time_sampling, ('uniform', 'logit_normal'))
    self._check_range('class_dropout', least=0, below=1)
    self._check_range('image_size', 'num_sampling_steps', least=1)
    if not self.value_range[0] < self.value_range[1]:
      raise ConfigError(f'{self.path_name}.value_range: expected (least, greatest), got {self.value_range}')
    self.create_child('network', self.network_tpl)

  def check_input(self, data: BaseInput, batch: NestedDict) -> None:
    """Raises a `ConfigError` if images or needed labels are missing, or images or labels do not fit the model."""
    check_images(data, batch, self.input_name, (*self.image_size, self.network.image_channels))
    if self.network.num_classes and 'label' not in batch:
      raise ConfigError(f"{data.label}: no 'label', but task.model.network.num_classes is {self.network.num_classes}")
    if self.network.num_classes:
      labels = {'label': np.asarray(batch['label'])}
      check_labels(data, labels, batch, 'task.model.network.num_classes', self.network.num_classes)

  def id_limits(self) -> dict[str, IdLimit]:
    count = self.network.num_classes
    if not count:
      return {}
    return {'label': IdLimit(count + 1, f'the model has classes 0 to {count - 1}, and {count} stands for any class')}

  def compute_predictions(self, batch: NestedDict) -> DiffusionOutput:
    """Returns the prediction and its target for a random time and random noise of each row."""
    image, rows = batch[self.input_name], batch[self.input_name].shape[0]
    low, high = self.value_range
    x = (image.astype(jnp.float32) - low) * (2 / (high - low)) - 1
    keys = _keys_of_rows(self.next_prng_key(), jnp.arange(rows))
    t_B = jax.vmap(lambda key: self._draw_time(jax.random.fold_in(key, 0)))(keys)
    noise = jax.vmap(lambda key: jax.random.normal(jax.random.fold_in(key, 1), x.shape[1:]))(keys)
    class_B = None
    if self.network.num_classes:
      class_B = jnp.where(batch['weights'] == 0, 0, batch['label'])
      if self.class_dropout and not self.do_eval:
        drops = jax.vmap(lambda key: jax.random.bernoulli(jax.random.fold_in(key, 2), self.class_dropout))(keys)
        class_B = jnp.where(drops, self.network.num_classes, class_B)
    output = self.network(add_noise(x, noise, t_B, self.schedule), t_B, class_B)
    target = prediction_target(x, noise, t_B, self.schedule, self.prediction)
    return DiffusionOutput(output.astype(jnp.float32), target)

  def compute_loss(self, predictions: DiffusionOutput, batch: NestedDict) -> tuple[WeightedScalars, NestedDict]:
    """Returns the metric `loss`, the mean squared error of the predicted values, and the `loss` of each example."""
    loss_B = jnp.mean(jnp.square(predictions.output - predictions.target), axis=(1, 2, 3))
    return {'loss': weighted_mean(loss_B, batch['weights'])}, {'loss': loss_B}

  def predict(self, batch: NestedDict) -> dict[str, jax.Array]:
    """Returns `image`, [B, H, W, C], a generated image for each row.

    Args:
      batch: a dict of arrays. A model with classes needs `label`, [B] int32: the class of each image, or `num_classes`
        for an image of any class. It also takes `guidance`, [B], which overrides the field of this name, and `seed`,
        by default 0, 1, 2, ... A model without classes needs `seed`, [B] int32. Different seeds give different images.
    """
    needed, optional = ('label', ', and perhaps seed and guidance') if self.network.num_classes else ('seed', '')
    if needed not in batch:
      got = ', '.join(name for name in batch if name != 'weights') or 'nothing'
      raise DataError(f'{self.path_name}: to make images, a batch needs {needed}{optional}; it has {got}')
    class_B = batch['label'] if self.network.num_classes else None
    rows = batch['label' if self.network.num_classes else 'seed'].shape[0]
    seeds = batch.get('seed', jnp.arange(rows))
    return {'image': self.make_images(seeds, class_B, batch.get('guidance'))}

  def make_images(
    self, seed_B: jax.Array, class_B: jax.Array | None = None, guidance_B: jax.Array | None = None
  ) -> jax.Array:
    """Returns generated images [B, H, W, C]; see `predict` for the arguments."""
    keys = _keys_of_rows(self.next_prng_key(), seed_B)
    shape = (*self.image_size, self.network.image_channels)
    variables, network = self.network.variables, self.network
    guidance = None if guidance_B is None else guidance_B.astype(jnp.float32)[:, None, None, None]
    if guidance is None and self.guidance != 1:
      guidance = jnp.asarray(self.guidance, jnp.float32)

    def draw(number: jax.Array | int) -> jax.Array:
      return jax.vmap(lambda key: jax.random.normal(jax.random.fold_in(key, number), shape))(keys)

    def call(x_t: jax.Array, t: jax.Array, class_B: jax.Array | None) -> jax.Array:
      t_B = jnp.broadcast_to(t, x_t.shape[:1])
      output, _ = network.apply(variables, x_t, t_B, class_B, do_eval=True)
      return output.astype(jnp.float32)

    def predict(x_t: jax.Array, t: jax.Array) -> jax.Array:
      output = call(x_t, t, class_B)
      if guidance is None or class_B is None:
        return output
      without = call(x_t, t, jnp.full_like(class_B, network.num_classes))
      return without + guidance * (output - without)

    x = sample(
      predict,
      draw(0),
      lambda number: draw(number + 1),
      num_steps=self.num_sampling_steps,
      schedule=self.schedule,
      prediction=self.prediction,
      sampler=self.sampler,
      limit=self.sample_limit,
    )
    low, high = self.value_range
    images = (x + 1) * ((high - low) / 2) + low
    return images if self.sample_limit is None else jnp.clip(images, low, high)

  def _draw_time(self, key: jax.Array) -> jax.Array:
    if self.time_sampling == 'uniform':
      return jax.random.uniform(key)
    return jax.nn.sigmoid(jax.random.normal(key))


def _keys_of_rows(key: jax.Array, numbers: jax.Array) -> jax.Array:
  """Returns a PRNG key for each row, [B], which depends only on `key` and the number of the row."""
  return jax.vmap(lambda number: jax.random.fold_in(key, number))(numbers)


def diffusion_transformer(
  *,
  image_channels: int,
  model_dims: int,
  num_layers: int,
  num_heads: int,
  patch_size: int = 2,
  num_classes: int = 0,
  remat: str = 'auto',
  batch_axes: str | tuple[str, ...] | None = ('replica', 'data'),
  data_axis: str | None = 'data',
  mdl_axis: str | None = 'mdl',
) -> Config[DiffusionTransformer]:
  """Returns the config of a DiT that scans over its blocks, split over a mesh as `set_sharding` splits language models.

  Args:
    image_channels, model_dims, num_layers, num_heads, patch_size, num_classes: see `DiffusionTransformer`.
    remat: see `layers/remat.py`.
    batch_axes, data_axis, mdl_axis: mesh axes that split rows, model dims of weights, and heads and hidden dims; None
      does not split.
  """
  network = Config(
    DiffusionTransformer,
    image_channels=image_channels,
    patch_size=patch_size,
    model_dims=model_dims,
    num_layers=num_layers,
    num_heads=num_heads,
    num_classes=num_classes,
    blocks_tpl=Config(Repeat, layers_tpl=Config(ModulatedBlock), remat=remat),
  )
  return set_sharding(network, batch_axes=batch_axes, data_axis=data_axis, mdl_axis=mdl_axis)
