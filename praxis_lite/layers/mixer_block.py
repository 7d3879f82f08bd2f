"""MixerBlock: a transformer block with a recurrence in place of attention.

    pre-norm     x = x + mixer(norm(x));  x = x + ff(norm(x))

A stack may alternate such blocks with blocks of attention, by a pattern; see `repeat.py`.

B batch, T length, D model dims.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from praxis_lite.common.config import REQUIRED, Config, child, template
from praxis_lite.common.errors import check_choice
from praxis_lite.layers.base.facts import LayerProblem
from praxis_lite.layers.feedforward import GatedFeedForward
from praxis_lite.layers.mixers import Mixer
from praxis_lite.layers.normalizations import Norm
from praxis_lite.layers.transformer_block import NORM_POLICIES, TransformerBlock


class MixerBlock(TransformerBlock):
  """A block that mixes tokens by a recurrence, such as `Mamba2`.

  Attributes:
    mixer_tpl: template of the child `mixer`, a `Mixer`.
    ff_tpl: template of the child `ff`; None leaves out the feed-forward layer, as in Mamba-2.
    norm_tpl: template of the children `mixer_norm` and `ff_norm`, and with 'primer_hybrid' of `mixer_out_norm` and
      `ff_out_norm`.
    num_heads, num_kv_heads, dims_per_head, attention_tpl: not used; a stack sets them for blocks of all classes.
    others: see `TransformerBlock`.
  """

  num_heads: int = 1
  attention_tpl: Config | None = None  # type: ignore[assignment]  # TransformerLm leaves it alone if it is None.
  mixer_tpl: Config = REQUIRED
  ff_tpl: Config | None = template(GatedFeedForward)  # type: ignore[assignment]

  mixer: Mixer = child()
  mixer_norm: Norm = child()
  mixer_out_norm: Norm = child()

  def setup(self) -> None:
    check_choice(f'{self.path_name}.norm_policy', self.norm_policy, NORM_POLICIES)
    norm = self.norm_tpl.clone(dims=self.input_dims)
    for name in ('mixer', 'ff')[: 1 if self.ff_tpl is None else 2]:
      self.create_child(f'{name}_norm', norm)
      if self._is_hybrid:
        self.create_child(f'{name}_out_norm', norm)
    self.create_child('mixer', self.mixer_tpl.clone(input_dims=self.input_dims))
    if self.ff_tpl is not None:
      self.create_child('ff', self.ff_tpl.clone(input_dims=self.input_dims, hidden_dims=self.hidden_dims))
    self.create_child('residual_dropout', self.dropout_tpl)
    if self.residual_tpl is not None:
      self.create_child('residual', self.residual_tpl)

  def __call__(self, x_BTD: jax.Array, *, paddings: jax.Array | None = None, **rows: Any) -> jax.Array:
    """Returns [B, T, D].

    Args:
      x_BTD: the residual stream.
      paddings: [B, T], nonzero for padding tokens, for feed-forward layers that take them; None means no padding.
      **rows: keyword arguments of `mixer`: segment_ids, segment_pos.
    """
    return self._add_feed_forward(self._add_mixer(x_BTD, lambda x: self.mixer(x, **rows)), paddings)

  def init_decode_state(self, batch_size: int, max_len: int) -> None:
    """Allocates the state; see `Mixer.init_decode_state`."""
    self.mixer.init_decode_state(batch_size, max_len)

  def extend_step(self, x_BTD: jax.Array, pos_BT: jax.Array, *rows: Any) -> jax.Array:
    """Returns [B, T, D] for the next tokens; passes `rows` on to the `extend_step` of the mixer."""
    x_BTD = self._add_mixer(x_BTD, lambda x: self.mixer.extend_step(x, pos_BT, *rows))
    return self._add_feed_forward(x_BTD, pos_BT < 0)

  def problems(self, mesh_sizes: Mapping[str, int]) -> Iterator[LayerProblem]:
    return iter(())

  def _add_mixer(self, x_BTD: jax.Array, mix: Callable[[jax.Array], jax.Array]) -> jax.Array:
    return self._add_sublayer(x_BTD, mix, self.mixer_norm, self.mixer_out_norm if self._is_hybrid else None)

  def _add_feed_forward(self, x_BTD: jax.Array, paddings: jax.Array | None) -> jax.Array:
    return x_BTD if self.ff_tpl is None else super()._add_feed_forward(x_BTD, paddings)
