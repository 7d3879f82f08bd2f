"""`DecodingSteps` of networks whose decode state is the caches of their layers; and `OwnHeads`, for heads that draft.

B batch, T tokens in one step, S slots, D model dims, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from praxis_lite.common.trees import NestedDict
from praxis_lite.layers.attention import MultiHeadAttention
from praxis_lite.layers.base import Layer
from praxis_lite.layers.base.call import Surroundings
from praxis_lite.layers.decode_caches import place_caches
from praxis_lite.layers.latent_attention import LatentAttention
from praxis_lite.layers.moe import MoeFeedForward
from praxis_lite.layers.packed_prompts import PackedPrompts
from praxis_lite.layers.repeat import unstack_for_decoding
from praxis_lite.layers.transformer import RepeatedTransformer, StackedTransformer
from praxis_lite.layers.transformer_block import TransformerBlock
from praxis_lite.layers.transformer_lm import TransformerLm
from praxis_lite.models.decoding import find_row_axes


def start_caches(
  lm: Layer,
  variables: NestedDict,
  num_rows: int,
  num_slots: int,
  can_go_back: bool,
  method: str = 'init_decode_state',
) -> NestedDict:
  """Returns the decode state of rows without tokens, which `method` creates; see `DecodingSteps` for `can_go_back`."""
  state = lm.apply(variables, num_rows, num_slots, method=method)[1].decode_state
  return place_caches(state, num_slots) if can_go_back else state


# Like `start_caches`, for the caches of the heads that predict further tokens.
start_heads = functools.partial(start_caches, can_go_back=True, method='init_further_state')


def start_with_hidden(lm: TransformerLm, variables: NestedDict, num_rows: int, num_slots: int) -> NestedDict:
  """Returns the state of `StepsWithHidden` for rows without tokens."""
  hidden = jnp.zeros((num_rows, num_slots, lm.model_dims), lm.fprop_dtype)
  return {'caches': start_caches(lm, variables, num_rows, num_slots, True), 'hidden': hidden}


class CachedSteps:
  """`DecodingSteps` of a network whose state is the caches of its layers.

  Args:
    lm: the network, in a call of its parent.
    prompt_arguments: further arguments of the network's `extend_step` for prompts.
    can_go_back: see `DecodingSteps`.
    adapters_B: the index of each row's adapter, stored in the state; None if rows do not choose adapters.
  """

  def __init__(
    self,
    lm: Layer,
    prompt_arguments: tuple[jax.Array, ...],
    can_go_back: bool = False,
    adapters_B: jax.Array | None = None,
  ):
    self._lm, self.can_go_back, self._adapters_B = lm, can_go_back, adapters_B
    self._variables = unstack_for_decoding(lm, lm.cast_variables(lm.variables))
    self._prompt_arguments = prompt_arguments

  @property
  def max_positions(self) -> int | None:
    return getattr(self._lm, 'max_positions', None)

  def start(self, num_rows: int, num_slots: int) -> NestedDict:
    caches = start_caches(self._lm, self._variables, num_rows, num_slots, self.can_go_back)
    return caches if self._adapters_B is None else {'caches': caches, 'adapters': self._adapters_B}

  def row_axes(self, num_rows: int, num_slots: int) -> NestedDict:
    start = functools.partial(start_caches, self._lm, self._variables)
    few, many = (jax.eval_shape(lambda n=n: start(n, num_slots, self.can_go_back)) for n in (num_rows, 2 * num_rows))
    axes: NestedDict = find_row_axes(few, many)
    return axes if self._adapters_B is None else {'caches': axes, 'adapters': 0}

  def extend(
    self, ids_BT: jax.Array, pos_BT: jax.Array, last_B: jax.Array, state: NestedDict
  ) -> tuple[jax.Array, NestedDict]:
    if self._adapters_B is None:
      return self._call('extend_step', ids_BT, pos_BT, last_B, state)
    surroundings = dataclasses.replace(self._lm.surroundings, adapters=state['adapters'])
    logits_BV, caches = self._call('extend_step', ids_BT, pos_BT, last_B, state['caches'], surroundings)
    return logits_BV, {**state, 'caches': caches}

  def _call(
    self,
    method: str,
    ids_BT: jax.Array,
    pos_BT: jax.Array,
    last_B: jax.Array,
    caches: NestedDict,
    surroundings: Surroundings | None = None,
  ) -> tuple[Any, NestedDict]:
    """Calls a method of the network with the next tokens; returns its result and the new caches."""
    arguments = ids_BT, pos_BT, last_B, *(self._prompt_arguments if ids_BT.shape[1] > 1 else ())
    result, side = self._lm.apply(
      self._variables, *arguments, decode_state=caches, method=method, surroundings=surroundings
    )
    return result, side.decode_state


class PackedSteps(CachedSteps):
  """Steps that read packed prompts: a row holds several of them, and `packed` says where each is."""

  def __init__(self, lm: Layer, packed: PackedPrompts, can_go_back: bool = False):
    super().__init__(lm, (), can_go_back)
    self._packed = packed

  def read_prompts(
    self, ids_BP: jax.Array, pos_BP: jax.Array, last_B: jax.Array, state: NestedDict
  ) -> tuple[jax.Array, NestedDict]:
    """Reads packed prompts; returns the logits of the token after each prompt, [B, V], and the new caches."""
    packed = self._packed
    arguments = packed.pack(ids_BP), packed.pos, packed.last, None, packed
    logits_RSV, side = self._lm.apply(self._variables, *arguments, decode_state=state, method='extend_step')
    return logits_RSV.reshape(-1, logits_RSV.shape[-1]), side.decode_state


def can_read_packed(lm: Layer) -> bool:
  """Whether a network can read packed prompts, with the same results as one prompt in each row.

  This needs attention layers of known classes, caches that are not quantized or rounded, and experts without capacity
  limits.
  """

  def is_known(layer: Layer) -> bool:
    if isinstance(layer, MultiHeadAttention):  # A subclass may define another mask.
      return type(layer) in (MultiHeadAttention, LatentAttention) and layer.cache_dtype in (None, layer.fprop_dtype)
    if isinstance(layer, MoeFeedForward):
      return layer.dispatch == 'dropless' and layer.exchange_factor is None
    return type(layer) in (TransformerBlock, StackedTransformer, RepeatedTransformer) or not hasattr(
      layer, 'extend_step'
    )

  return type(lm) is TransformerLm and all(is_known(layer) for layer in lm.transformer.descendants())


class StepsWithHidden(CachedSteps):
  """Steps whose state also stores the input of the softmax at each token, for `OwnHeads`.

  The state is the caches, and `hidden`, [B, S, D], indexed by position.
  """

  def __init__(self, lm: TransformerLm, prompt_arguments: tuple[jax.Array, ...]):
    super().__init__(lm, prompt_arguments, can_go_back=True)
    self._network = lm

  def start(self, num_rows: int, num_slots: int) -> NestedDict:
    return start_with_hidden(self._network, self._variables, num_rows, num_slots)

  def extend(
    self, ids_BT: jax.Array, pos_BT: jax.Array, last_B: jax.Array, state: NestedDict
  ) -> tuple[jax.Array, NestedDict]:
    (logits_BV, hidden_BTD), caches = self._call('extend_with_hidden', ids_BT, pos_BT, last_B, state['caches'])
    hidden_BSD = state['hidden']
    place_BT = jnp.where(pos_BT >= 0, pos_BT, hidden_BSD.shape[1])
    row_B1 = jnp.arange(len(pos_BT))[:, None]
    hidden_BSD = hidden_BSD.at[row_B1, place_BT].set(hidden_BTD.astype(hidden_BSD.dtype), mode='drop')
    return logits_BV, {'caches': caches, 'hidden': hidden_BSD}


class OwnHeads:
  """The `FurtherHeads` of a network; made in a call of the network's parent. The state is the caches of the heads."""

  def __init__(self, lm: TransformerLm):
    self._lm = lm
    self._variables = unstack_for_decoding(lm, lm.cast_variables(lm.variables))
    self.num_heads = lm.mtp.num_modules

  def start(self, num_rows: int, num_slots: int) -> NestedDict:
    return start_heads(self._lm, self._variables, num_rows, num_slots)

  def read_hidden(self, state: NestedDict, place_BT: jax.Array) -> jax.Array:
    return jnp.take_along_axis(state['hidden'], place_BT[..., None], axis=1, mode='clip')

  def extend(
    self,
    number: int,
    hidden_BTD: jax.Array,
    ids_BT: jax.Array,
    pos_BT: jax.Array,
    last_B: jax.Array,
    state: NestedDict,
  ) -> tuple[jax.Array, jax.Array, NestedDict]:
    arguments: tuple[Any, ...] = number, hidden_BTD, ids_BT, pos_BT, last_B
    (logits_BV, hidden_BTD), side = self._lm.apply(
      self._variables, *arguments, decode_state=state, method='extend_further'
    )
    return logits_BV, hidden_BTD, side.decode_state
