"""GroupedMixer: the projections, convolutions and rates of mixers whose heads share keys and queries in groups.

    value = f(conv(x W_v)) [N, H],  key = f(conv(x W_k)) [G, S],  query = f(conv(x W_q)) [G, S]
    step = softplus(x W_s + bias) [N]

B batch, T length, D model dims, N heads, G groups, H dims per head, S dims of keys and queries.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from praxis_lite.common.config import REQUIRED, Config, child, template
from praxis_lite.common.errors import ConfigError
from praxis_lite.common.trees import Path
from praxis_lite.layers.activations import get_activation
from praxis_lite.layers.base import WeightSplit
from praxis_lite.layers.causal_conv import CausalConv
from praxis_lite.layers.mixers import Axes, Mixer, MixerActivationSplit, pick_entries
from praxis_lite.layers.precision import to_sum_dtype
from praxis_lite.layers.projections import Projection, split_projection
from praxis_lite.sharding.weights import NO_DECAY_FLOAT32, JointInit, SplitDimsMapping, WeightHParams, WeightInit

_LARGEST_DECAY = 16.0


class GroupWeightSplit(WeightSplit):
  """`wt`: weights of heads, [D, N, H]; `groups`: weights of keys and queries, [D, G, S]."""

  groups: SplitDimsMapping = None


class GroupedMixer(Mixer):
  """The base of mixers with values by head, and keys and queries by group of heads.

  Attributes:
    num_heads: N.
    dims_per_head: H.
    num_groups: G, a divisor of N.
    kernel_size: width of the convolutions.
    activation: name of f; see `activations.py`.
    step_range: the least and the largest step at the start of training; steps are drawn between them.
    chunk_size: tokens of a chunk, in which the cost is quadratic; see `state_space.py`.
    proj_tpl: template of the children `value`, `key`, `query` and `step`, and of the subclass's projections by head.
    conv_tpl: template of the children `value_conv`, `key_conv` and `query_conv`.
    out_tpl: template of the child `out`.
    weight_split_dims_mapping: `wt`, [D, N, H]; the convolutions, the output and the variables [N] are split along the
      same dimensions. `groups`, [D, G, S], splits the projections to keys and queries, which have S dims each.
    activation_split_dims_mapping: `blnh`, [B, T, N, H]; `out`, [B, T, D].
  """

  count_fields = ('chunk_size',)

  num_heads: int = REQUIRED
  dims_per_head: int = REQUIRED
  num_groups: int = 1
  kernel_size: int = 4
  activation: str = 'silu'
  step_range: tuple[float, float] = (0.001, 0.1)
  chunk_size: int = 64
  proj_tpl: Config = template(Projection)
  conv_tpl: Config = template(CausalConv)
  out_tpl: Config = template(Projection)
  weight_split_dims_mapping: Config = template(GroupWeightSplit)
  activation_split_dims_mapping: Config = template(MixerActivationSplit)

  value: Projection = child()
  key: Projection = child()
  query: Projection = child()
  step: Projection = child()
  value_conv: CausalConv = child()
  key_conv: CausalConv = child()
  query_conv: CausalConv = child()
  out: Projection = child()

  @classmethod
  def set_split(cls, config: Config[Any], *, data: Axes, **axes: Axes) -> None:
    super().set_split(config, data=data, **axes)
    config.weight_split_dims_mapping.groups = (data, None, None)

  def _create_parts(
    self, key_dims: int, by_head: Mapping[str, tuple[int, ...]], *, use_bias: bool = False, use_conv_bias: bool = False
  ) -> None:
    """Checks the sizes, and creates the children and variables that all subclasses have.

    `key_dims` is S. `by_head` has the names of further projections, each with the shape of its output, (N,) or (N, H).
    """
    self._check_range('num_heads', 'dims_per_head', 'num_groups', 'chunk_size', least=1)
    get_activation(self.activation, f'{self.path_name}.activation')
    D, N, H, G = self.input_dims, self.num_heads, self.dims_per_head, self.num_groups
    if N % G:
      raise ConfigError(f'{self.path_name}.num_groups: {G} does not divide num_heads, {N}')
    low, high = self.step_range
    self._check_steps('step_range', low, high, 0 < low <= high < np.inf)
    wt, groups = self.weight_split_dims_mapping.wt, self.weight_split_dims_mapping.groups
    self._resolve(wt, f'{self.path_name}.weight_split_dims_mapping.wt', rank=3)
    self._resolve(groups, f'{self.path_name}.weight_split_dims_mapping.groups', rank=3)
    convolved = {'value': ((N, H), wt), 'key': ((G, key_dims), groups), 'query': ((G, key_dims), groups)}
    plain = {name: (shape, wt) for name, shape in {'step': (N,), **by_head}.items()}
    for name, (shape, split) in {**convolved, **plain}.items():
      proj = self.proj_tpl.clone(in_shape=(D,), out_shape=shape, use_bias=use_bias)
      self.create_child(name, split_projection(proj, split, (0, 1, 2)[: 1 + len(shape)], rank_in=1))
    for name, (shape, split) in convolved.items():
      conv = self.conv_tpl.clone(shape=shape, kernel_size=self.kernel_size, use_bias=use_conv_bias)
      conv.weight_split_dims_mapping.wt = pick_entries(split, None, 1, 2)
      self.create_child(f'{name}_conv', conv)
    out = self.out_tpl.clone(in_shape=(N, H), out_shape=(D,), use_bias=use_bias)
    self.create_child('out', split_projection(out, wt, (1, 2, 0), rank_in=2))
    draw = functools.partial(_draw_rates, N, self.step_range)
    for name in ('log_decay', 'step_bias'):
      self._create_by_head(name, JointInit((name,), draw))

  def _create_by_head(self, name: str, init: WeightInit | JointInit) -> None:
    """Creates a variable [N]."""
    split = pick_entries(self.weight_split_dims_mapping.wt, 1)
    weight = WeightHParams((self.num_heads,), init=init, tensor_split_dims_mapping=split, collections=NO_DECAY_FLOAT32)
    self.create_variable(name, weight)

  def _check_steps(self, field: str, low: float, high: float, are_right: bool) -> None:
    """Raises a `ConfigError` about the range (low, high) in `field` if `are_right` is False."""
    if not are_right:
      raise ConfigError(
        f'{self.path_name}.{field}: expected two numbers, the least and the largest step, got {(low, high)}'
      )

  def _read(
    self, x_BTD: jax.Array, segment_ids: jax.Array | None, pos_BT: jax.Array | None
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns values, [B, T, N, H], and keys and queries, both [B, T, G, S].

    With `pos_BT`, `x_BTD` holds the next tokens in decoding.
    """

    def read(proj: Projection, conv: CausalConv) -> jax.Array:
      x = proj(x_BTD)
      y = conv(x, segment_ids) if pos_BT is None else conv.extend_step(x, pos_BT)
      return get_activation(self.activation)(y)

    return read(self.value, self.value_conv), read(self.key, self.key_conv), read(self.query, self.query_conv)

  def _steps(self, x_BTD: jax.Array) -> jax.Array:
    """Returns the steps, [B, T, N], in the dtype of sums."""
    return jax.nn.softplus(to_sum_dtype(self.step(x_BTD)) + self.theta.step_bias)

  def _start_convolutions(self, batch_size: int) -> None:
    for conv in (self.value_conv, self.key_conv, self.query_conv):
      conv.init_decode_state(batch_size)


def _draw_rates(N: int, step_range: tuple[float, float], key: jax.Array) -> Mapping[Path, jax.Array]:
  """Returns decays from 1 to 16, and biases for step sizes; the logarithms of the step sizes are uniform in a range."""
  of_decay, of_step = jax.random.split(key)
  low, high = np.log(step_range)
  step_N = jnp.exp(jax.random.uniform(of_step, (N,), minval=low, maxval=high))
  return {
    ('log_decay',): jnp.log(jax.random.uniform(of_decay, (N,), minval=1.0, maxval=_LARGEST_DECAY)),
    ('step_bias',): step_N + jnp.log(-jnp.expm1(-step_N)),  # The inverse of softplus.
  }
