"""The same small network in four libraries: x w + b, batch norm, dropout, x w + b. Sizes 6 and 7 do not divide.

B batch, I = 7 inputs, H = 10 hidden dims, O = 5 outputs.
"""

from __future__ import annotations

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import numpy as np
from flax import nnx

from praxis_lite.bridges.foreign import EquinoxLayer, HaikuLayer, LinenLayer, NnxLayer
from praxis_lite.common.config import Config

I, H, O = 7, 10, 5  # noqa: E741
X = np.random.default_rng(0).standard_normal((9, I)).astype(np.float32)


class LinenNet(nn.Module):
  rate: float = 0.0
  split: bool = False

  @nn.compact
  def __call__(self, x, train):
    init = nn.initializers.lecun_normal()
    first = nn.with_partitioning(init, ('data', 'mdl')) if self.split else init
    x = nn.Dense(H, kernel_init=first)(x)
    x = nn.BatchNorm(use_running_average=not train, momentum=0.5)(x)
    x = nn.Dropout(self.rate, deterministic=not train)(x)
    second = nn.with_logical_partitioning(init, ('hidden', None)) if self.split else init
    return nn.Dense(O, kernel_init=second)(x)


class NnxNet(nnx.Module):
  def __init__(self, rate=0.0, split=False, *, rngs):
    init = nnx.initializers.lecun_normal()
    first = nnx.with_partitioning(init, ('data', 'mdl')) if split else init
    second = nnx.with_partitioning(init, ('hidden', None)) if split else init
    self.blocks = nnx.List([nnx.Linear(I, H, kernel_init=first, rngs=rngs), nnx.BatchNorm(H, momentum=0.5, rngs=rngs)])
    self.dropout = nnx.Dropout(rate, rngs=rngs)
    self.out = nnx.Linear(H, O, kernel_init=second, rngs=rngs)

  def __call__(self, x):
    return self.out(self.dropout(self.blocks[1](self.blocks[0](x))))


class EquinoxNet(eqx.Module):
  layers: list
  norm: eqx.nn.BatchNorm
  dropout: eqx.nn.Dropout

  def __init__(self, rate=0.0, *, key):
    keys = jax.random.split(key)
    self.layers = [eqx.nn.Linear(I, H, key=keys[0]), eqx.nn.Linear(H, O, key=keys[1])]
    self.norm = eqx.nn.BatchNorm(H, 'batch', momentum=0.5, mode='batch')
    self.dropout = eqx.nn.Dropout(rate)

  def __call__(self, x, state, *, key=None):
    x, state = self.norm(self.layers[0](x), state)
    return self.layers[1](self.dropout(x, key=key)), state


def haiku_net(x, is_training, rate=0.0):
  x = hk.BatchNorm(True, True, 0.5)(hk.Linear(H)(x), is_training)
  x = hk.dropout(hk.next_rng_key(), rate, x) if is_training and rate else x
  return hk.Linear(O, name='out')(x)


EXAMPLE = ((1, I),)


def layer_of(library: str, **module) -> Config:
  """The config of the layer around the network of a library."""
  if library == 'linen':
    tpl = Config(LinenNet, **module)
    return Config(LinenLayer, module_tpl=tpl, example_shapes=EXAMPLE, train_argument='train')
  if library == 'nnx':
    return Config(NnxLayer, module_tpl=Config(NnxNet, **module))
  if library == 'equinox':
    return Config(EquinoxLayer, module_tpl=Config(EquinoxNet, **module))
  tpl = Config(haiku_net, **module)
  return Config(HaikuLayer, module_tpl=tpl, example_shapes=EXAMPLE, train_argument='is_training')


LIBRARIES = ('linen', 'nnx', 'equinox', 'haiku')
# Patterns of the weights of each library: matrices are [in, out], and in Equinox [out, in].
SPLITS = {
  'linen': ((r'.*\.kernel', ('data', 'mdl')), (r'.*\.bias|.*mean|.*var', ('mdl',))),
  'nnx': ((r'.*\.kernel', ('data', 'mdl')), (r'.*\.bias|.*mean|.*var', ('mdl',))),
  'equinox': ((r'.*layers_\d\.weight', ('mdl', 'data')), (r'.*\.bias', ('mdl',)), (r'state.*_[01]', ('data',))),
  'haiku': ((r'.*\.w', ('data', 'mdl')), (r'.*\.b', ('mdl',)), (r'.*\.average', (None, 'mdl'))),
}
