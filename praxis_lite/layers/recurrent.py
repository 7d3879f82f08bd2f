"""Recurrent: layers of a recurrent network; each layer scans a cell over the tokens of a row.

    for each token:  state = cell(state, x_t),  y_t = output of the state

Products with inputs are computed for all tokens at once, before the scan. A segment starts with a state of zeros, and a
padding token leaves the state as it is.

B batch, T length, D input dims, O output dims, C chunks of L tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from praxis_lite.common.config import Config, child, template
from praxis_lite.common.errors import ConfigError, check_choice
from praxis_lite.layers.base import ActivationSplit
from praxis_lite.layers.block_arrays import join_blocks, to_blocks
from praxis_lite.layers.mixers import Axes, Mixer
from praxis_lite.layers.rnn_cells import CellState, LstmCellSimple, RnnCell, Weights
from praxis_lite.layers.state_space import segment_starts


class _Tokens(NamedTuple):
  """The arrays that the scan reads, with an entry for each token, [B, T, ...]."""

  projected: jax.Array
  starts: jax.Array | None
  is_padding: jax.Array | None
  kept: CellState | None  # Which entries of the state zoneout leaves unchanged.


DIRECTIONS = ('forward', 'backward', 'both')


class Recurrent(Mixer):
  """Layers of recurrent cells; each layer reads the outputs of the layer below.

  Attributes:
    input_dims: D.
    output_dims: O; None means D.
    num_layers: number of layers.
    direction: 'forward'; 'backward', from the last token to the first; or 'both', where each layer has a cell for each
      direction with half of the output dims (Schuster and Paliwal, 1997). Only 'forward' is causal.
    cell_tpl: template of the cells, the children `forward_0`, `forward_1`, ... and `backward_0`, ...
    chunk_size: the backward pass keeps the state before each chunk of this many tokens, and computes the chunk again;
      None keeps the values of all steps.
    truncate_gradients: whether gradients stop between chunks (truncated backpropagation through time).
    activation_split_dims_mapping: `out`, [B, T, O].
  """

  count_fields = ('chunk_size',)

  output_dims: int | None = None
  num_layers: int = 1
  direction: str = 'forward'
  cell_tpl: Config = template(LstmCellSimple)
  chunk_size: int | None = None
  truncate_gradients: bool = False
  activation_split_dims_mapping: Config = template(ActivationSplit)

  forward: list[RnnCell] = child()
  backward: list[RnnCell] = child()

  @classmethod
  def set_split(cls, config: Config[Any], *, batch: Axes, length: Axes, data: Axes, mdl: Axes) -> None:
    if length is not None:
      raise ConfigError('a Recurrent reads its tokens one after another, so no axis can split their length')
    config.cell_tpl.weight_split_dims_mapping.wt = (data, mdl)
    config.cell_tpl.activation_split_dims_mapping.gates = (batch, None, None, mdl)
    config.activation_split_dims_mapping.out = (batch, None, None)

  def setup(self) -> None:
    self._check_range('num_layers', 'output_dims', 'chunk_size', least=1)
    check_choice(f'{self.path_name}.direction', self.direction, DIRECTIONS)
    O = self.input_dims if self.output_dims is None else self.output_dims  # noqa: E741
    if self.direction == 'both' and O % 2:
      raise ConfigError(f"{self.path_name}.output_dims: direction = 'both' needs an even number, got {O}")
    if self.truncate_gradients and self.chunk_size is None:
      raise ConfigError(f'{self.path_name}.truncate_gradients: set chunk_size, the tokens between two stops')
    of_cell = O // 2 if self.direction == 'both' else O
    of_direction: dict[str, list[RnnCell]] = {}
    for name in ('forward', 'backward') if self.direction == 'both' else (self.direction,):
      sizes = [self.input_dims, *[O] * (self.num_layers - 1)]
      cells = [self.cell_tpl.clone(num_input_nodes=size, num_output_nodes=of_cell) for size in sizes]
      of_direction[name] = self.create_children(name, templates=cells)
    self._forward, self._backward = (of_direction.get(name, []) for name in ('forward', 'backward'))

  def __call__(
    self,
    x_BTD: jax.Array,
    *,
    segment_ids: jax.Array | None = None,
    segment_pos: jax.Array | None = None,
    prefix_lengths: jax.Array | None = None,
    paddings: jax.Array | None = None,
  ) -> jax.Array:
    """Returns [B, T, O]; see `Mixer`.

    Args:
      x_BTD: rows of tokens.
      segment_ids: [B, T] int32; each segment starts with a state of zeros. None means that a row is one segment.
      segment_pos, prefix_lengths: see `Mixer`.
      paddings: [B, T], nonzero for padding tokens, which repeat the previous token's output; None means no padding.
    """
    self._refuse_prefixes(prefix_lengths)
    return self._read(x_BTD, segment_ids, None if paddings is None else paddings != 0)

  def mix(self, x_BTD: jax.Array, segment_ids: jax.Array | None, pos_BT: jax.Array | None) -> jax.Array:
    return self._read(x_BTD, segment_ids, None if pos_BT is None else pos_BT < 0, keeps=pos_BT is not None)

  def init_decode_state(self, batch_size: int, max_len: int) -> None:
    if self.direction != 'forward':
      raise ConfigError(
        f"{self.path_name}.direction: decoding needs 'forward', since later tokens do not exist yet, not "
        f'{self.direction!r}'
      )
    for number, cell in enumerate(self.forward):
      self.update_decode_state(f'state_{number}', cell.init_states(batch_size))

  def _read(
    self, x_BTD: jax.Array, segment_ids: jax.Array | None, is_padding_BT: jax.Array | None, keeps: bool = False
  ) -> jax.Array:
    for number in range(self.num_layers):
      outputs = []
      for cells, backward in ((self._forward, False), (self._backward, True)):
        if cells:
          state = self.get_decode_state(f'state_{number}') if keeps else None
          y_BTO, state = self._run(cells[number], x_BTD, segment_ids, is_padding_BT, state, backward)
          outputs.append(y_BTO)
          if keeps:
            self.update_decode_state(f'state_{number}', state)
      x_BTD = outputs[0] if len(outputs) == 1 else jnp.concatenate(outputs, axis=-1)
    return self.shard(x_BTD)

  def _run(
    self,
    cell: RnnCell,
    x_BTD: jax.Array,
    segment_ids: jax.Array | None,
    is_padding_BT: jax.Array | None,
    state: CellState | None,
    backward: bool,
  ) -> tuple[jax.Array, CellState]:
    """Returns the outputs of a cell, [B, T, O], and its last state."""
    B, T = x_BTD.shape[:2]
    if backward:
      x_BTD, segment_ids, is_padding_BT = jax.tree.map(lambda x: x[:, ::-1], (x_BTD, segment_ids, is_padding_BT))
    tokens = _Tokens(cell.project_input(x_BTD), segment_starts(segment_ids), is_padding_BT, self._draw_kept(cell, B, T))
    state = cell.init_states(B) if state is None else state
    y_BTO, state = self._scan(cell, tokens, state)
    y_BTO = y_BTO.astype(self.fprop_dtype)
    return (y_BTO[:, ::-1] if backward else y_BTO), state

  def _draw_kept(self, cell: RnnCell, B: int, T: int) -> CellState | None:
    if cell.zo_prob == 0 or self.do_eval:
      return None
    keys = jax.random.split(self.next_prng_key(), len(cell.state_sizes()))
    sizes = cell.state_sizes().items()
    return {name: jax.random.bernoulli(key, cell.zo_prob, (B, T, dims)) for key, (name, dims) in zip(keys, sizes)}

  def _scan(self, cell: RnnCell, tokens: _Tokens, state: CellState) -> tuple[jax.Array, CellState]:
    """Returns the outputs, [B, T, O], and the last state."""
    B, T = tokens.projected.shape[:2]
    weights = cell.step_weights()
    is_mean = self.do_eval

    def step(state: CellState, token: _Tokens) -> tuple[CellState, jax.Array]:
      state = _step(cell, weights, state, token, is_mean)
      return state, cell.get_output(state)

    size = self.chunk_size
    if size is None or size >= T:
      state, y_TBO = jax.lax.scan(step, state, jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), tokens))
      return jnp.moveaxis(y_TBO, 0, 1), state

    def cut(x: jax.Array) -> jax.Array:
      """Returns [C, L, B, ...], with zeros at the end."""
      return jnp.moveaxis(to_blocks(x, size), 1, 2)

    is_padding = tokens.is_padding
    if is_padding is None and T % size:
      is_padding = jnp.zeros((B, T), bool)
    chunks = jax.tree.map(cut, tokens._replace(is_padding=None))
    if is_padding is not None:  # Tokens that are added to fill the last chunk are padding.
      chunks = chunks._replace(is_padding=~cut(~is_padding))

    def read_chunk(state: CellState, chunk: _Tokens) -> tuple[CellState, jax.Array]:
      if self.truncate_gradients:
        state = jax.lax.stop_gradient(state)
      return jax.lax.scan(step, state, chunk)

    state, y_CLBO = jax.lax.scan(jax.checkpoint(read_chunk, prevent_cse=False), state, chunks)
    return join_blocks(jnp.moveaxis(y_CLBO, 1, 2), T), state


def _step(cell: RnnCell, weights: Weights, state: CellState, token: _Tokens, is_mean: bool) -> CellState:
  """Returns the state after a token."""
  if token.starts is not None:
    starts_B1 = token.starts[:, None]
    state = {name: jnp.where(starts_B1, 0, x) for name, x in state.items()}
  new = cell.step(weights, state, token.projected)
  if token.kept is not None:
    new = {name: jnp.where(token.kept[name], state[name], x) for name, x in new.items()}
  elif is_mean and cell.zo_prob:
    new = {name: cell.zo_prob * state[name] + (1 - cell.zo_prob) * x for name, x in new.items()}
  if token.is_padding is not None:
    is_padding_B1 = token.is_padding[:, None]
    new = {name: jnp.where(is_padding_B1, state[name], x) for name, x in new.items()}
  return new
