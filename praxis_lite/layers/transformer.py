"""Stacks of transformer blocks: in sequence, as a scan, or in the stages of a pipeline.

B batch, T length, D model dims.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, ClassVar, TypeVar

import jax

from praxis_lite.common.config import REQUIRED, Config, child, template
from praxis_lite.common.errors import ConfigError
from praxis_lite.common.figures import number_of
from praxis_lite.layers.base import Layer, SplitMapping
from praxis_lite.layers.pipeline import Pipelined
from praxis_lite.layers.remat import Remat
from praxis_lite.layers.repeat import Repeat, check_pattern, kinds_of_stack, pattern
from praxis_lite.layers.transformer_block import HEADS, TransformerBlock, set_biases
from praxis_lite.layers.value_residual import mixes_values, remove_value_residual

T = TypeVar('T')


def size_stack(stack: Config, model: Any, num_layers: int, *, causal: bool) -> Config:
  """Returns the config of a stack of `num_layers` blocks that have the sizes of a model.

  Args:
    stack: the config of the stack, whose sizes are replaced.
    model: the layer that has the sizes: `model_dims`, `hidden_dims` (None means 4 D), `use_bias` and those in `HEADS`.
    num_layers: the number of blocks.
    causal: whether the self-attention of the blocks is causal.
  """
  stack = stack.clone(num_layers=num_layers)
  sizes = {'input_dims': model.model_dims, **{field: getattr(model, field) for field in HEADS}}
  sizes['hidden_dims'] = 4 * model.model_dims if model.hidden_dims is None else model.hidden_dims
  for block in kinds_of_stack(stack):
    block.set(**sizes)
    block.attention_tpl.causal = causal
    cross_attention = getattr(block, 'cross_attention_tpl', None)
    set_biases(model.use_bias, [block.attention_tpl, block.ff_tpl, block.norm_tpl, cross_attention])
  return stack


class StackedTransformer(Layer):
  """`num_layers` layers in sequence, each with its own variables: `layers_0`, `layers_1`, ...

  Attributes:
    layers_tpl: template of each layer; or a pattern of several templates, used in turn.
    num_layers: number of layers.
    first_tpl: templates of layers before those of `layers_tpl`; see `Repeat`.
    sliding_windows: see `add_windows`.
    remat, remat_save_names, remat_offload_names: what each layer keeps for the backward pass; see `remat.py`.
  """

  counts_layers: ClassVar[bool] = True

  layers_tpl: Config | tuple[Config, ...] = template(TransformerBlock)
  num_layers: int = REQUIRED
  first_tpl: tuple[Config, ...] = ()
  sliding_windows: tuple[int | None, ...] | None = None
  remat: str | tuple[str, ...] = 'auto'
  remat_save_names: tuple[str, ...] = ()
  remat_offload_names: tuple[str, ...] = ()
  activation_split_dims_mapping: Config = template(SplitMapping)

  layers: list[TransformerBlock] = child()

  def setup(self) -> None:
    check_pattern(self.layers_tpl, self.num_layers, self.path_name, self.first_tpl)
    configs = add_windows(self.layers_tpl, self.sliding_windows, self.path_name)
    self._period = len(configs)
    self._remat = Remat.read(self, self._period)
    in_turn = itertools.chain(self.first_tpl, itertools.cycle(configs))
    templates = list(itertools.islice(in_turn, self.num_layers))
    self._mixes_values = any(map(mixes_values, templates))
    if self._mixes_values:
      templates[0] = remove_value_residual(templates[0])
    self.create_children('layers', templates=templates)

  def __call__(self, x_BTD: jax.Array, **kwargs: Any) -> jax.Array:
    """Returns the result of the last layer; all layers get the same `kwargs`."""
    kwargs |= self._first_values(x_BTD)
    remat = self._remat.fit_to_memory(x_BTD, [layer.variables for layer in self.layers])
    for i, layer in enumerate(self.layers):
      kind = max(i - len(self.first_tpl), 0) % self._period
      x_BTD = remat.run(self, layer, x_BTD, kind=kind, **kwargs)
    return x_BTD

  def init_decode_state(self, *args: Any) -> None:
    """Allocates the caches of all layers; the arguments are the same as for one of them."""
    for layer in self.layers:
      layer.init_decode_state(*args)

  def extend_step(self, x_BTD: jax.Array, pos_BT: jax.Array, *attention: Any, **more: Any) -> jax.Array:
    """Returns the result of the last layer for the next tokens; see `TransformerBlock.extend_step`."""
    more |= self._first_values(x_BTD)
    for layer in self.layers:
      x_BTD = layer.extend_step(x_BTD, pos_BT, *attention, **more)
    return x_BTD

  def _first_values(self, x_BTD: jax.Array) -> dict[str, jax.Array]:
    return {'first_values': self.layers[0].first_values(x_BTD)} if self._mixes_values else {}


class RepeatedTransformer(Repeat):
  """A scan over transformer blocks with stacked variables.

  It computes the same as `StackedTransformer`, and compiles faster. With `ValueResidual`, attention mixes its values
  with those of the first block, so the first block is outside of the scan. It is `first_tpl[0]`; if `first_tpl` is
  empty, it is made from `layers_tpl`, which must then be a single template.

  Attributes: the same as for `Repeat`, and
    sliding_windows: see `add_windows`.
  """

  layers_tpl: Config | tuple[Config, ...] = template(TransformerBlock)
  sliding_windows: tuple[int | None, ...] | None = None

  layers: TransformerBlock | Sequence[TransformerBlock] = child()

  def setup(self) -> None:
    if self.sliding_windows is not None:
      self.layers_tpl = add_windows(self.layers_tpl, self.sliding_windows, self.path_name)
    self._mixes_values = any(map(mixes_values, kinds_of_stack(self)))
    if self._mixes_values:
      self._make_first()
    super().setup()

  def __call__(self, x: T, *args: object, **kwargs: Any) -> T:
    """Returns the result of the last layer; see `Repeat.__call__`."""
    return super().__call__(x, *args, **kwargs, **self._first_values(x))

  def extend_step(self, x: T, *args: object, **kwargs: Any) -> T:
    """Returns the result of the last layer for the next tokens; see `TransformerBlock.extend_step`."""
    return super().extend_step(x, *args, **kwargs, **self._first_values(x))

  def _make_first(self) -> None:
    """Changes `first_tpl` so that the first block does not mix its values.

    If `first_tpl` is empty, this makes one from `layers_tpl`, which takes the first block out of the scan.

    Raises ConfigError if there is no `first_tpl`, and the blocks alternate in a pattern.
    """
    if not self.first_tpl:
      if not isinstance(self.layers_tpl, Config):
        raise ConfigError(
          f'{self.path_name}.first_tpl: blocks of a pattern mix their values with those of the first block, which must '
          'be outside of the pattern; set first_tpl to the template of that block'
        )
      self.first_tpl = (self.layers_tpl,)
    self.first_tpl = (remove_value_residual(self.first_tpl[0]), *self.first_tpl[1:])

  def _first_values(self, x: Any) -> dict[str, jax.Array]:
    if not self._mixes_values:
      return {}
    first: Any = self.first[0]
    return {'first_values': first.first_values(x)}


def add_windows(
  layers_tpl: Config | tuple[Config, ...], windows: Sequence[int | None] | None, where: str
) -> tuple[Config, ...]:
  """Returns a pattern of blocks with sliding windows; `where` is the path of their stack, for messages.

  `windows` has the `sliding_window` of each block, and the pattern repeats: (4096, None) alternates local and global
  attention. If `windows` is None, `layers_tpl` is unchanged, and may be a pattern.

  Raises:
    ConfigError: there are both windows and a pattern, or the tuple of windows is empty.
  """
  if windows is None:
    return pattern(layers_tpl)
  if not isinstance(layers_tpl, Config):
    raise ConfigError(
      f'{where}.sliding_windows: layers_tpl is a pattern of {number_of(len(layers_tpl), "block")}; set the '
      'attention_tpl.sliding_window of each instead'
    )
  if not windows:
    raise ConfigError(f'{where}.sliding_windows: expected the windows of one or more blocks, or None')
  blocks = tuple(layers_tpl.clone() for _ in windows)
  for block, window in zip(blocks, windows):
    block.attention_tpl.sliding_window = window
  return blocks


class PipelinedTransformer(Pipelined, RepeatedTransformer):
  """Transformer blocks in stages of a pipeline, with the variables of a `RepeatedTransformer`.

  Attributes: the same as for `Pipelined`, and
    sliding_windows: see `add_windows`.
  """
