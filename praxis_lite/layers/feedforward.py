"""Feed-forward layers of a transformer block; norms and residual connections belong to the block.

D model dims, F hidden dims.
"""

from __future__ import annotations

from typing import ClassVar

import jax
from jax.ad_checkpoint import checkpoint_name

from praxis_lite.common.config import REQUIRED, Config, child, template
from praxis_lite.layers.activations import get_activation
from praxis_lite.layers.base import ActivationSplit, Layer, WeightSplit
from praxis_lite.layers.base.facts import InputSource
from praxis_lite.layers.dropout import Dropout
from praxis_lite.layers.linears import Linear
from praxis_lite.sharding.weights import SplitDimsMapping, WeightInit


class FeedForwardWeightSplit(WeightSplit):
  """`wt`: weights into the hidden layer, [D, F]; `down`: the weight out of it, [F, D], by default `wt` reversed."""

  down: SplitDimsMapping = None


class FeedForwardActivationSplit(ActivationSplit):
  """`hidden`: [..., F]; `out`: [..., D]."""

  hidden: SplitDimsMapping = None


class FeedForward(Layer):
  """y = f(x W_up) W_down, with biases (Vaswani et al., 2017).

  Attributes:
    input_dims: D, also of the output.
    hidden_dims: F.
    activation: name of f; see `activations.py`.
    use_bias: whether the linear layers have biases.
    proj_tpl: template of the children `up` and `down`.
    dropout_tpl: template of the child `dropout`, on the hidden layer.
    out_init: initializer of the weight out of the hidden layer; None uses that of the other weights.
  """

  _inward: ClassVar[tuple[str, ...]] = ('up',)  # Names of the linear layers from D to F.

  input_dims: int = REQUIRED
  hidden_dims: int = REQUIRED
  activation: str = 'gelu_tanh'
  use_bias: bool = True
  proj_tpl: Config = template(Linear)
  dropout_tpl: Config = template(Dropout)
  out_init: WeightInit | None = None
  weight_split_dims_mapping: Config = template(FeedForwardWeightSplit)
  activation_split_dims_mapping: Config = template(FeedForwardActivationSplit)

  up: Linear = child()
  down: Linear = child()
  dropout: Dropout = child()

  def setup(self) -> None:
    get_activation(self.activation, f'{self.path_name}.activation')
    split, D, F = self.weight_split_dims_mapping, self.input_dims, self.hidden_dims
    up = self.proj_tpl.clone(input_dims=D, output_dims=F, use_bias=self.use_bias)
    down = self.proj_tpl.clone(input_dims=F, output_dims=D, use_bias=self.use_bias)
    if split.wt is not None:
      up.weight_split_dims_mapping.wt, down.weight_split_dims_mapping.wt = split.wt, split.wt[::-1]
    if split.down is not None:
      down.weight_split_dims_mapping.wt = split.down
    if self.out_init is not None:
      down.params_init = self.out_init
    self.create_children(*self._inward, template=up)
    self.create_child('dropout', self.dropout_tpl)
    self.create_child('down', down)

  def input_readers(self) -> tuple[str, ...]:
    return self._inward

  def _compute_hidden(self, x: jax.Array) -> jax.Array:
    """Returns [..., F], before dropout."""
    up = checkpoint_name(self.shard(self.up(x), 'hidden'), 'ffn_up')
    return get_activation(self.activation)(up)

  def __call__(self, x: jax.Array) -> jax.Array:
    """Returns [..., D] for x [..., D]."""
    out = self.down(self.dropout(self._compute_hidden(x)))
    return checkpoint_name(self.shard(out), 'ffn_out')


class GatedFeedForward(FeedForward):
  """y = (f(x W_gate) * (x W_up)) W_down, without biases: SwiGLU if f is SiLU (Shazeer, 2020).

  Attributes: the same as for `FeedForward`; `proj_tpl` is also the template of the child `gate`.
  """

  _inward = ('gate', 'up')

  activation: str = 'silu'
  use_bias: bool = False

  gate: Linear = child()

  def input_sources(self) -> tuple[InputSource, ...]:
    return (InputSource('up', ('down',)),)

  def _compute_hidden(self, x: jax.Array) -> jax.Array:
    gate = checkpoint_name(self.shard(self.gate(x), 'hidden'), 'ffn_gate')
    up = checkpoint_name(self.shard(self.up(x), 'hidden'), 'ffn_up')
    return get_activation(self.activation)(gate) * up
