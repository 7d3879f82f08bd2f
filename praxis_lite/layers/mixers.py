"""Mixer: the base of layers that mix the tokens of a row by a recurrence, in place of attention.

B batch, T length, D model dims, N heads, H dims per head.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import jax

from praxis_lite.common.config import REQUIRED, Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.layers.base import ActivationSplit, Layer
from praxis_lite.layers.base.facts import Exchange
from praxis_lite.sharding.specs import spec_axes
from praxis_lite.sharding.weights import DeclaredSplit, SplitDimsMapping

Axes = str | tuple[str, ...] | None


class MixerActivationSplit(ActivationSplit):
  """`blnh`: values and results by head, [B, T, N, H], and states, [B, N, H, ...]; `out`: [B, T, D]."""

  blnh: SplitDimsMapping = None


class Mixer(Layer):
  """A causal layer with a state of fixed size, from [B, T, D] to [B, T, D].

  A subclass defines `mix`, and `init_decode_state`. Segments of packed rows do not see each other.

  Attributes:
    input_dims: D, also of the output.
  """

  causal: ClassVar[bool] = True
  _passes_states: ClassVar[bool] = False  # Whether the mixer scans the parts of a split length separately.
  # For each dimension of the state, the dimension of `blnh` with the same split.
  _state_split: ClassVar[tuple[int | None, ...]] = (0, 2)

  input_dims: int = REQUIRED

  @classmethod
  def set_split(cls, config: Config[Any], *, batch: Axes, length: Axes, data: Axes, mdl: Axes) -> None:
    """Sets the split mappings of a config of this class: of weights [D, N, H], and of activations.

    Args:
      config: the config.
      batch, length: mesh or logical axes that split the rows and the length of activations.
      data, mdl: axes that split the model dims of weights, and the heads or channels.
    """
    config.weight_split_dims_mapping.wt = (data, mdl, None)
    scanned = length if cls._passes_states else None  # A device that passes on no states scans whole rows.
    config.activation_split_dims_mapping.set(blnh=(batch, scanned, mdl, None), out=(batch, length, None))

  def __call__(
    self,
    x_BTD: jax.Array,
    *,
    segment_ids: jax.Array | None = None,
    segment_pos: jax.Array | None = None,
    prefix_lengths: jax.Array | None = None,
  ) -> jax.Array:
    """Returns [B, T, D].

    Args:
      x_BTD: rows of tokens.
      segment_ids: [B, T] int32; each segment starts with an empty state. None means that a row is one segment.
      segment_pos: not used, because a recurrence depends only on the order of tokens.
      prefix_lengths: must be None.

    Raises:
      ConfigError: `prefix_lengths` is not None; a recurrence cannot see later tokens.
    """
    self._refuse_prefixes(prefix_lengths)
    return self.mix(x_BTD, segment_ids, None)

  def init_decode_state(self, batch_size: int, max_len: int) -> None:
    """Allocates the state of `batch_size` rows without tokens; its size does not depend on `max_len`."""
    raise NotImplementedError

  def extend_step(self, x_BTD: jax.Array, pos_BT: jax.Array, prefix_lengths: jax.Array | None = None) -> jax.Array:
    """Returns [B, T, D] for the next tokens, and keeps the state after them.

    Args:
      x_BTD: the next token (T = 1) or tokens of each row.
      pos_BT: int32, positions of the tokens; -1 is padding, which comes after the tokens of a row.
      prefix_lengths: must be None.
    """
    if not self.decode_state:
      raise ConfigError(f'{self.path_name}: extend_step needs the decode state that init_decode_state allocates')
    self._refuse_prefixes(prefix_lengths)
    return self.mix(x_BTD, None, pos_BT)

  def mix(self, x_BTD: jax.Array, segment_ids: jax.Array | None, pos_BT: jax.Array | None) -> jax.Array:
    """Returns [B, T, D] for whole rows if `pos_BT` is None; otherwise for the next tokens, from the decode state."""
    raise NotImplementedError

  def _keep(self, state: jax.Array) -> None:
    """In decoding: stores the state, [B, N, ...], split as `blnh` says."""
    split = pick_entries(self.activation_split_dims_mapping.blnh, *self._state_split)
    self.update_decode_state('state', self.shard(state, split))

  def exchanges(self) -> list[Exchange]:
    axes = self._length_axes() if self._passes_states else ()
    field = 'activation_split_dims_mapping.blnh'
    return [Exchange('exchange of states between parts of a sequence', field, axes, by_compiler=True)] if axes else []

  def _length_axes(self) -> tuple[str, ...]:
    """Returns the mesh axes over which `blnh` splits the length."""
    mapping = getattr(self.activation_split_dims_mapping, 'blnh', None)
    placement = self._resolve(mapping, f'{self.path_name}.activation_split_dims_mapping.blnh', rank=4)
    return () if placement is None else spec_axes(placement.spec[1])

  def _num_parts(self) -> int:
    """In a call: returns the number of parts into which the mesh splits the length."""
    sizes, manual = jax.sharding.get_abstract_mesh().shape, self.surroundings.manual_axes
    return math.prod(sizes.get(axis, 1) for axis in self._length_axes() if axis not in manual)

  def _shard_parts(self, x: jax.Array, letters: tuple[str, ...]) -> jax.Array:
    """Constrains an array by `blnh`; `letters` name its dimensions: B rows, P parts of a row, N heads, '' others."""
    places = {'B': 0, 'P': 1, 'N': 2, '': None}
    return self.shard(x, pick_entries(self.activation_split_dims_mapping.blnh, *(places[letter] for letter in letters)))

  def _refuse_prefixes(self, prefix_lengths: jax.Array | None) -> None:
    if prefix_lengths is not None:
      raise ConfigError(
        f"{self.path_name}: a recurrence sees no later token, so a model with one has no model_type 'prefix'; "
        "set it to 'causal'"
      )


def pick_entries(split: SplitDimsMapping, *dims: int | None) -> SplitDimsMapping:
  """Returns a mapping with the entries of `split` at the indices `dims`, or None if `split` is not a mapping.

  An index of None stands for a dimension that is not split.
  """
  return split.pick(*dims) if isinstance(split, DeclaredSplit) else None
