"""LoRA: layers whose trained weight is frozen, and which learn an update of low rank (Hu et al., 2021).

    y = x (W + s A B)      computed as x W + s (x A) B; A [I, R], B [R, O]

`Lora` says which layers of a model get an update; `praxis_lite.models.add_adapters` puts it into a model's config.

I input dims, O output dims, R rank, V ids, D model dims, F hidden dims, E experts.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import ClassVar, cast

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from praxis_lite.common.config import REQUIRED, Config, child, target, template
from praxis_lite.common.errors import ConfigError, check_range
from praxis_lite.common.trees import NestedDict, Path, leaves, nest
from praxis_lite.layers.base import Layer
from praxis_lite.layers.embeddings import Embedding
from praxis_lite.layers.expert_mlp import ExpertMlp
from praxis_lite.layers.int8 import RowProduct
from praxis_lite.layers.layer_patterns import LayerPatterns
from praxis_lite.layers.linears import Linear
from praxis_lite.layers.low_rank import A_INIT, LowRankUpdate, derived_split, scaled_product, split_update
from praxis_lite.layers.moe import MoeFeedForward
from praxis_lite.layers.projections import Projection
from praxis_lite.sharding.weights import DeclaredSplit, WeightHParams, WeightInit, is_dtype


class Adapter(LayerPatterns):
  """Base of the adapters of a model: which layers get one, and how.

  Attributes:
    layers: regex, or several, that match whole paths of layers below the model, such as r'lm\\..*\\.(query|value)'; all
      layers that they match must be able to have this adapter. None gives one to every layer that can have it, except
      tables of embeddings.
  """

  # In words, the layers that can have this adapter; used in messages.
  adaptable: ClassVar[str] = 'linear layers, projections, experts and tables of embeddings'
  # For each class of layers that can have this adapter: the class of such a layer with the adapter.
  adapted: ClassVar[Mapping[type[Layer], type[Layer]]] = {}
  # Classes of layers that get the adapter only if a regex of `layers` matches the layer's path.
  only_if_named: ClassVar[frozenset[type[Layer]]] = frozenset({Embedding})

  @property
  def further_patterns(self) -> dict[str, tuple[str, ...]]:
    """The regexes of other fields, by name, which must each match a layer that has this adapter."""
    return {}

  def is_for(self, name: str, config: Config) -> bool:
    """Whether this adapter is for the layer with the path `name` and this config."""
    kind = target(config)
    if kind not in self.adapted:
      return False
    if self.layers is None:
      return kind not in self.only_if_named
    return self.matches(name)

  def adapt(self, config: Config) -> Config:
    """Returns a copy of the config of a layer, with this adapter added."""
    raise NotImplementedError

  def adapt_at(self, name: str, config: Config) -> Config:
    """Returns the result of `adapt`; override it if the adapter depends on `name`, the layer's path below the model."""
    return self.adapt(config)

  def _change_class(self, config: Config, **fields: object) -> Config:
    copied = config.clone()
    return Config(self.adapted[cast(type[Layer], target(config))], **copied.__arguments__, **fields)


class AdaptedLayer(Layer):
  """Base of the layers with an adapter.

  The first base of such a layer is the layer's class without an adapter, so the layer keeps the defaults of that class.
  """

  @classmethod
  def base_class(cls) -> type[Layer]:
    """Returns the class of the layer without an adapter."""
    return next(base for base in cls.__mro__ if issubclass(base, Layer) and not issubclass(base, AdaptedLayer))

  @property
  def update_scale(self) -> float:
    """The factor of the products A B."""
    raise NotImplementedError

  @property
  def adapted_weights(self) -> dict[str, tuple[Path, ...]]:
    """The paths of an adapter's variables below this layer, such as A and B, by the name of the weight they change."""
    raise NotImplementedError

  def weight_shape(self, name: str) -> tuple[int, ...]:
    """Returns the declared shape of a weight, without the dimensions that a repeating layer adds."""
    return tuple(self._weights[name].shape)

  def merge_variables(self, variables: NestedDict, sign: int = 1) -> NestedDict:
    """Returns `variables` with the adapter merged into the weights, for the same layer without an adapter.

    Args:
      variables: the variables of this layer and those below it, in their true shapes; layers that repeat this one may
        stack them.
      sign: 1 merges the adapter; -1 takes a merged one out again.
    """
    merged = leaves(variables)
    for name, paths in self.adapted_weights.items():
      w, parts = merged[(name,)], [merged[path] for path in paths]
      merged[(name,)] = self.merge_weight(name, w, parts, sign).astype(w.dtype)
    for path in {path for paths in self.adapted_weights.values() for path in paths}:
      del merged[path]
    return nest(merged)

  def merge_weight(self, name: str, w: jax.Array, parts: Sequence[jax.Array], sign: int = 1) -> jax.Array:
    """Returns w, the weight called `name`, with its adapter: in the dtype of the adapter, but at least float32.

    `parts` are the values of the variables that `adapted_weights[name]` lists; for `sign`, see `merge_variables`.
    """
    if isinstance(self, LoraLayer) and self.lora.num_adapters is not None:
      raise ConfigError(f'{self.path_name}: several adapters cannot be merged into one weight; merge each by itself')
    a, b = parts
    update = scaled_product(a, b, sign * self.update_scale, w.shape)
    return w.astype(update.dtype) + update


class LoraLayer(AdaptedLayer):
  """Base of the layers with one weight `w` and the child `lora`."""

  lora_tpl: Config = template(LowRankUpdate)

  lora: LowRankUpdate = child()

  def _create_update(self, in_shape: tuple[int, ...], out_shape: tuple[int, ...], **fields: object) -> None:
    update = self.lora_tpl.clone(in_shape=in_shape, out_shape=out_shape, **fields)
    wt: DeclaredSplit | None = self.weight_split_dims_mapping.wt
    self.create_child('lora', split_update(update, wt, len(in_shape), self.path_name))

  @property
  def update_scale(self) -> float:
    return self.lora.scale

  @property
  def adapted_weights(self) -> dict[str, tuple[Path, ...]]:
    return {'w': (('lora', 'a'), ('lora', 'b'))}


class LoraLinear(Linear, LoraLayer):
  """y = x W + b + s (x A) B: a `Linear` with an update of low rank, its child `lora`.

  Attributes: the same as for `Linear`, and
    lora_tpl: template of the child `lora`; the layer sets its shapes and splits.
  """

  def setup(self) -> None:
    super().setup()
    self._create_update((self.input_dims,), (self.output_dims,))

  def __call__(self, x: jax.Array) -> jax.Array:
    """Returns [..., O] for x [..., I]."""
    y = super().__call__(x)
    return y if self.surroundings.without_adapters else self.shard(y + self.lora(x))


class LoraProjection(Projection, LoraLayer):
  """y = x . W + b + s (x . A) B: a `Projection` with an update of low rank, its child `lora`.

  Attributes: the same as for `Projection`, and the `lora_tpl` of `LoraLinear`.
  """

  def setup(self) -> None:
    super().setup()
    self._create_update(self.in_shape, self.out_shape)

  def __call__(self, x: jax.Array) -> jax.Array:
    """Returns [..., *out_shape] for x [..., *in_shape]."""
    y = super().__call__(x)
    return y if self.surroundings.without_adapters else self.shard(y + self.lora(x))

  def weight(self) -> jax.Array:
    w = super().weight()
    return w if self.surroundings.without_adapters else w + self.lora.weight()


class LoraEmbedding(Embedding, LoraLayer):
  """y = w[ids] + s A[ids] B: an `Embedding` with an update of low rank, its child `lora`; A [V, R], B [R, D].

  Attributes: the same as for `Embedding`, and the `lora_tpl` of `LoraLinear`.
  """

  def setup(self) -> None:
    super().setup()
    self._create_update((self.num_classes,), (self.input_dims,), is_table=True)

  def __call__(self, ids: jax.Array) -> jax.Array:
    """Returns vectors [..., D] for integer ids [...]; NaN for an id that is not in [0, V)."""
    x = super().__call__(ids)
    if self.surroundings.without_adapters:
      return x
    update = self.lora(ids)
    return self.shard(x + (update * self.input_dims**0.5 if self.scale_sqrt_depth else update))


@dataclasses.dataclass(frozen=True)
class _LoraExpertMlp(ExpertMlp):
  """Experts whose weights [E, I, O] have updates, A [E, I, R] and B [E, R, O]."""

  scale: float = 1.0

  def multiply(self, weights: Mapping[str, jax.Array], product: RowProduct, rows: jax.Array, name: str) -> jax.Array:
    of_rank = product(rows, weights[f'{name}_lora_a'])
    return super().multiply(weights, product, rows, name) + product(of_rank * self.scale, weights[f'{name}_lora_b'])


class LoraMoeFeedForward(MoeFeedForward, AdaptedLayer):
  """A `MoeFeedForward` in which each expert has an update of low rank.

  The variables are `up_lora_a`, [E, D, R], `up_lora_b`, [E, R, F], and so on for `gate` and `down`.

  Attributes: the same as for `MoeFeedForward`, and
    rank: R.
    lora_scale: factor of the updates.
    lora_dtype: storage dtype of A and B; None uses `dtype`.
  """

  rank: int = REQUIRED
  lora_scale: float = 1.0
  lora_dtype: DTypeLike | None = None

  def setup(self) -> None:
    super().setup()
    self._check_range('rank', least=1)
    for name in (*self._inward, 'down'):
      self._create_update(name)

  def _create_update(self, name: str) -> None:
    weight = self._weights[name]
    experts, inputs, outputs = weight.shape
    wt, a_split, b_split = weight.tensor_split_dims_mapping, None, None
    if wt is not None:
      wt = derived_split(cast(DeclaredSplit, wt), self.path_name)
      a_split, b_split = wt.pick(0, 1, None), wt.pick(0, None, 2)
    declare = functools.partial(
      WeightHParams, dtype=self.lora_dtype, fan_in_axes=(1,), fan_out_axes=(2,), active_share=weight.active_share
    )
    a = declare((experts, inputs, self.rank), A_INIT, tensor_split_dims_mapping=a_split)
    b = declare((experts, self.rank, outputs), WeightInit.Constant(0.0), tensor_split_dims_mapping=b_split)
    self.create_variable(f'{name}_lora_a', a)
    self.create_variable(f'{name}_lora_b', b)

  def _mlp(self) -> ExpertMlp:
    mlp = super()._mlp()
    if self.surroundings.without_adapters:
      return mlp
    return _LoraExpertMlp(**vars(mlp), scale=self.lora_scale)

  @property
  def update_scale(self) -> float:
    return self.lora_scale

  @property
  def adapted_weights(self) -> dict[str, tuple[Path, ...]]:
    return {name: ((f'{name}_lora_a',), (f'{name}_lora_b',)) for name in (*self._inward, 'down')}


class Lora(Adapter):
  """Updates of low rank for linear layers, projections of attention, experts, and tables of embeddings.

  Attributes:
    layers: see `Adapter`. A table of embeddings has an update only if a regex matches it. The softmax of a model,
      convolutions and routers have no updates.
    rank: R.
    alpha: an update is multiplied by alpha / R.
    rank_stabilized: multiply by alpha / sqrt(R) instead (rsLoRA; Kalajdzievski, 2023).
    dropout_rate: probability that an entry of the input of an update is dropped in training.
    dtype: storage dtype of A and B; None uses that of the layer.
    names: names of several adapters, see `praxis_lite.models.combine_adapters`: in decoding, each row uses one of them,
      or none. None means one adapter for all rows.
  """

  adapted = {
    Linear: LoraLinear,
    Projection: LoraProjection,
    MoeFeedForward: LoraMoeFeedForward,
    Embedding: LoraEmbedding,
  }

  rank: int = 8
  alpha: float = 16.0
  rank_stabilized: bool = False
  dropout_rate: float = 0.0
  dtype: DTypeLike | None = 'float32'
  names: tuple[str, ...] | None = None

  def __post_init__(self) -> None:
    super().__post_init__()
    if self.names is not None and not (self.names and len({*self.names}) == len(self.names)):
      raise ConfigError(f'Lora.names: expected at least one name, each once, or None, got {self.names!r}')
    check_range('rank', self.rank, least=1)
    check_range('alpha', self.alpha, above=0)
    check_range('dropout_rate', self.dropout_rate, least=0, below=1)
    if self.dtype is not None and not is_dtype(self.dtype, jnp.floating):
      raise ConfigError(f'Lora.dtype: expected a floating dtype, such as float32, or None, got {self.dtype!r}')

  @property
  def scale(self) -> float:
    """The factor of an update."""
    return self.alpha / (math.sqrt(self.rank) if self.rank_stabilized else self.rank)

  def adapt(self, config: Config) -> Config:
    if self.names is not None and target(config) not in (Linear, Projection):
      raise ConfigError('Lora.names: several adapters are for linear layers and projections')
    if target(config) is MoeFeedForward:
      if self.dropout_rate:
        raise ConfigError(
          'Lora.dropout_rate: experts are multiplied without dropout; set it to 0, or leave out the experts in `layers`'
        )
      return self._change_class(config, rank=self.rank, lora_scale=self.scale, lora_dtype=self.dtype)
    count = None if self.names is None else len(self.names)
    update = Config(LowRankUpdate, rank=self.rank, scale=self.scale, dtype=self.dtype, num_adapters=count)
    update.dropout_tpl.rate = self.dropout_rate
    return self._change_class(config, lora_tpl=update)
