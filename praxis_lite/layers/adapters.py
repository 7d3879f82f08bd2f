r"""Residual adapters: small bottlenecks between the layers of a trained model (Houlsby et al., 2019).

To train only the adapters on a new task, set `learner.bprop_variable_inclusion = r'.*\.adapter\..*'`.

B batch, T length, D model dims, F bottleneck dims, K tasks.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from praxis_lite.common.config import REQUIRED, Config, child, template
from praxis_lite.common.errors import ConfigError, check_choice
from praxis_lite.layers.activations import get_activation
from praxis_lite.layers.base import ActivationSplit, Layer, WeightSplit
from praxis_lite.layers.feedforward import FeedForward, GatedFeedForward
from praxis_lite.layers.linears import bias_weight
from praxis_lite.layers.moe import MoeFeedForward
from praxis_lite.layers.normalizations import LayerNorm, Norm
from praxis_lite.sharding.weights import SplitDimsMapping, WeightHParams, WeightInit


class AdapterActivationSplit(ActivationSplit):
  """`hidden`: the bottlenecks of all tasks, [..., K, F]; `out`: [..., D]."""

  hidden: SplitDimsMapping = None


class MultitaskResidualAdapter(Layer):
  """y = x + f(norm(x) W_down + b_down) W_up + b_up, with weights for each of K tasks.

  `up_w` and `up_b` begin at 0, so y = x at first. Each token is computed with the weights of all tasks, and the result
  of its own task is selected. This avoids gathering weights for each token, and costs little as long as K F is not much
  more than D.

  Attributes:
    input_dims: D.
    bottleneck_dims: F.
    num_tasks: K.
    activation: name of f.
    norm_tpl: template of the child `norm`; None disables it.
    weight_split_dims_mapping: `wt` splits `down_w`, [K, D, F]; `up_w`, [K, F, D], and the biases, [K, F] and [K, D],
      are split accordingly.
  """

  input_dims: int = REQUIRED
  bottleneck_dims: int = REQUIRED
  num_tasks: int = 1
  activation: str = 'relu'
  norm_tpl: Config | None = template(LayerNorm)
  weight_split_dims_mapping: Config = template(WeightSplit)
  activation_split_dims_mapping: Config = template(AdapterActivationSplit)

  norm: Norm = child()

  def setup(self) -> None:
    get_activation(self.activation, f'{self.path_name}.activation')
    wt, K, D, F = self.weight_split_dims_mapping.wt, self.num_tasks, self.input_dims, self.bottleneck_dims
    down = up = of_hidden = of_out = None
    if wt is not None:
      down, up, of_hidden, of_out = wt, wt.pick(0, 2, 1), wt.pick(0, 2), wt.pick(0, 1)
    way_in = WeightHParams((K, D, F), tensor_split_dims_mapping=down, fan_in_axes=(1,), fan_out_axes=(2,))
    self.create_variable('down_w', way_in)
    self.create_variable('down_b', bias_weight((K, F), of_hidden))
    self.create_variable('up_w', WeightHParams((K, F, D), init=WeightInit.Constant(0.0), tensor_split_dims_mapping=up))
    self.create_variable('up_b', bias_weight((K, D), of_out))
    if self.norm_tpl is not None:
      self.create_child('norm', self.norm_tpl.clone(dims=D))

  def __call__(self, x: jax.Array, tasks: jax.Array | None = None, add_residual: bool = True) -> jax.Array:
    """Returns [..., D].

    Args:
      x: [..., D], such as [B, T, D].
      tasks: the task of each token or row, an integer in [0, K), of the shape of the first dimensions of x, such as [B]
        or [B, T]; any other number gives NaN. None is allowed only if K is 1.
      add_residual: False leaves out the first summand, x.

    Raises:
      ConfigError: K is more than 1 and `tasks` is None, or `tasks` has the wrong shape.
    """
    x = x.astype(self.fprop_dtype)
    if tasks is None and self.num_tasks > 1:
      raise ConfigError(
        f'{self.path_name}: num_tasks is {self.num_tasks}, so a call needs `tasks`, such as integers [B]'
      )
    if tasks is not None and (tasks.ndim >= x.ndim or tasks.shape != x.shape[: tasks.ndim]):
      raise ConfigError(
        f'{self.path_name}: `tasks` has shape {tasks.shape}, and x {x.shape}; expected the first dimensions of x'
      )
    h = x if self.norm_tpl is None else self.norm(x)
    h = jnp.einsum('...d,kdf->...kf', h, self.theta.down_w) + self.theta.down_b
    h = get_activation(self.activation)(self.shard(h, 'hidden'))
    chosen = jnp.ones((1,), x.dtype) if tasks is None else self._one_hot(tasks, x.ndim - tasks.ndim - 1)
    change = jnp.einsum('...kf,kfd->...d', h * chosen[..., None], self.theta.up_w) + chosen @ self.theta.up_b
    return self.shard(x + change if add_residual else change)

  def _one_hot(self, tasks: jax.Array, num_axes: int) -> jax.Array:
    """Returns `tasks` [...] as one-hot vectors, [..., 1, ..., 1, K] with `num_axes` dims of size 1.

    The vector of a number that is no task is NaN.
    """
    in_range = (tasks >= 0) & (tasks < self.num_tasks)
    one_hot = jax.nn.one_hot(tasks, self.num_tasks, dtype=self.fprop_dtype)
    one_hot = jnp.where(in_range[..., None], one_hot, jnp.nan)
    return one_hot.reshape(*tasks.shape, *(1,) * num_axes, self.num_tasks)


class AdaptedFeedForward(Layer):
  """A feed-forward layer with an adapter, in place of the feed-forward layer of a transformer block.

      sequential    y = ff(x) + adapter(ff(x))
      parallel      y = ff(x) + adapter(x)           (He et al., 2022)

  Attributes:
    input_dims: D.
    hidden_dims: hidden dims of the feed-forward layer.
    mode: 'sequential' or 'parallel'.
    ff_tpl: template of the child `ff`.
    adapter_tpl: template of the child `adapter`, for a single task.
  """

  takes_paddings = True

  input_dims: int = REQUIRED
  hidden_dims: int = REQUIRED
  mode: str = 'sequential'
  ff_tpl: Config = template(GatedFeedForward)
  adapter_tpl: Config = template(MultitaskResidualAdapter, norm_tpl=None)

  ff: FeedForward | MoeFeedForward = child()
  adapter: MultitaskResidualAdapter = child()

  def setup(self) -> None:
    check_choice(f'{self.path_name}.mode', self.mode, ('sequential', 'parallel'))
    self.create_child('ff', self.ff_tpl.clone(input_dims=self.input_dims, hidden_dims=self.hidden_dims))
    self.create_child('adapter', self.adapter_tpl.clone(input_dims=self.input_dims))

  def __call__(self, x: jax.Array, paddings: jax.Array | None = None) -> jax.Array:
    """Returns [..., D] for x [..., D].

    `paddings`, [B, T], are nonzero for padding tokens, for a feed-forward layer that takes them; None means no padding.
    """
    feed_forward: Callable[..., jax.Array] = self.ff
    y = feed_forward(x, paddings=paddings) if self.ff.takes_paddings else feed_forward(x)
    return self.shard(y + self.adapter(y if self.mode == 'sequential' else x, add_residual=False))
