"""MultiTokenPrediction: heads that predict further tokens, after the next one (DeepSeek-AI, 2024, DeepSeek-V3).

    h_0 = what the softmax of the model reads at each token, which predicts the next one
    h_k = norm_k(block_k([norm(embedding(ids[t + k])); norm(h_{k-1}[t])] join_k)),  k = 1, 2, ...
    softmax(h_k[t]) predicts ids[t + k + 1]

The modules use the embedding and the softmax of the model. Module k reads the true token t + k, so all modules are
trained at once.

B batch, T length, D model dims, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from praxis_lite.common.config import REQUIRED, Config, child, template
from praxis_lite.common.weighted import weighted_mean
from praxis_lite.layers.base import Layer, SplitMapping
from praxis_lite.layers.linears import Linear
from praxis_lite.layers.normalizations import Norm, RMSNorm
from praxis_lite.layers.remat import Remat
from praxis_lite.layers.softmax import FullSoftmax


class MultiTokenModule(Layer):
  """Computes h_k from h_{k-1} and the embedding of the token k places later.

  Attributes:
    input_dims: D.
    block_tpl: template of the child `block`, with the interface of `TransformerBlock`.
    norm_tpl: template of the children `embedding_norm`, `hidden_norm` and `norm`.
    join_tpl: template of the child `join`, [2 D, D]; its first D inputs are the embedding.
  """

  input_dims: int = REQUIRED
  block_tpl: Config = REQUIRED
  norm_tpl: Config = template(RMSNorm)
  join_tpl: Config = template(Linear)
  activation_split_dims_mapping: Config = template(SplitMapping)

  embedding_norm: Norm = child()
  hidden_norm: Norm = child()
  join: Linear = child()
  block: Any = child()
  norm: Norm = child()

  def setup(self) -> None:
    D = self.input_dims
    self.create_children('embedding_norm', 'hidden_norm', 'norm', template=self.norm_tpl.clone(dims=D))
    self.create_child('join', self.join_tpl.clone(input_dims=2 * D, output_dims=D))
    self.create_child('block', self.block_tpl)

  def __call__(self, hidden_BTD: jax.Array, embedded_BTD: jax.Array, **block: Any) -> jax.Array:
    """Returns h_k, [B, T, D], given h_{k-1} and the embeddings; `block` are keyword arguments of the block."""
    y_BTD: jax.Array = self.block(self._join(hidden_BTD, embedded_BTD), **block)
    return self.norm(y_BTD)

  def init_decode_state(self, batch_size: int, max_len: int) -> None:
    """Allocates the cache of the block."""
    self.block.init_decode_state(batch_size, max_len)

  def extend_step(self, hidden_BTD: jax.Array, embedded_BTD: jax.Array, pos_BT: jax.Array) -> jax.Array:
    """Returns h_k for the next tokens, [B, T, D]; `pos_BT` are the positions of `hidden_BTD`, -1 for padding."""
    y_BTD: jax.Array = self.block.extend_step(self._join(hidden_BTD, embedded_BTD), pos_BT)
    return self.norm(y_BTD)

  def _join(self, hidden_BTD: jax.Array, embedded_BTD: jax.Array) -> jax.Array:
    both = self.embedding_norm(embedded_BTD), self.hidden_norm(hidden_BTD)
    return self.join(jnp.concatenate(both, axis=-1))


class MultiTokenPrediction(Layer):
  """The modules of a `TransformerLm` that predict further tokens; they add auxiliary losses in training.

  The loss of module k, `loss_k`, is the cross entropy of the tokens k + 1 places later. It is summed over the tokens
  with such a later token in their row and segment. As in DeepSeek-V3's report, the sum is divided by the sum of the
  weights of all labels. So the loss does not depend on how a batch is cut. Labels have the same weights as in the
  model's loss.

  Attributes:
    input_dims: D, set by the `TransformerLm`.
    num_modules: how many further tokens are predicted, at least 1.
    loss_weight: the sum of the factors of the auxiliary losses, which is divided evenly.
    in_evaluation: whether evaluation adds the losses too.
    module_tpl: template of the children `modules_0`, `modules_1`, ..., of modules 1, 2, ...
    block_tpl: template of the block of each module; None means the template of the model's last block. The block is
      causal, even in a prefix-LM.
    norm_tpl: template of the norms of each module; None means the final norm of the model.
    remat, remat_save_names, remat_offload_names: what each module keeps for the backward pass; see `remat.py`.
  """

  input_dims: int = REQUIRED
  num_modules: int = 1
  loss_weight: float = 0.3
  in_evaluation: bool = False
  module_tpl: Config = template(MultiTokenModule)
  block_tpl: Config | None = None
  norm_tpl: Config | None = None
  remat: str = 'auto'
  remat_save_names: tuple[str, ...] = ()
  remat_offload_names: tuple[str, ...] = ()
  activation_split_dims_mapping: Config = template(SplitMapping)

  modules: list[MultiTokenModule] = child()

  def setup(self) -> None:
    self._check_range('num_modules', least=1)
    self._check_range('loss_weight', least=0)
    self._remat = Remat.read(self)
    module = self.module_tpl.clone(input_dims=self.input_dims)
    for name in ('block_tpl', 'norm_tpl'):
      if getattr(self, name) is not None:
        setattr(module, name, getattr(self, name))
    self.create_children('modules', templates=(module,) * self.num_modules)

  @property
  def is_used(self) -> bool:
    """In a call: whether this layer's losses are used, which is always so in training."""
    return self.in_evaluation or not self.do_eval

  def __call__(self, hidden_BTD: jax.Array, embedded_BTD: jax.Array, **block: Any) -> tuple[jax.Array, ...]:
    """Returns the h_k of each module, [B, T, D], given h_0, embeddings of the ids, and arguments of the blocks."""
    found = []
    for k, module in enumerate(self.modules, start=1):
      hidden_BTD = self._remat.run(self, module, hidden_BTD, _shift(embedded_BTD, -k), **block)
      found.append(hidden_BTD)
    return tuple(found)

  def add_losses(
    self,
    hidden: Sequence[jax.Array],
    labels_BT: jax.Array,
    weights_BT: jax.Array | None,
    segment_ids: jax.Array | None,
    softmax: FullSoftmax,
  ) -> None:
    """In a call: adds the losses; `hidden` is the result of `__call__`. See `TransformerLm` for the other arguments."""
    weights_BT = jnp.ones(labels_BT.shape, jnp.float32) if weights_BT is None else weights_BT
    for k, hidden_BTD in enumerate(hidden, start=1):
      xent_BT = softmax.compute_xent(hidden_BTD, _shift(labels_BT, -k))
      # From here on, entry t belongs to the label `labels_BT[:, t]`.
      is_counted_BT = jnp.broadcast_to(jnp.arange(labels_BT.shape[1]) >= k, labels_BT.shape)
      if segment_ids is not None:
        is_counted_BT &= _shift(segment_ids, k) == segment_ids
      loss, _ = weighted_mean(jnp.where(is_counted_BT, _shift(xent_BT, k), 0.0), weights_BT)
      self.add_aux_loss(f'loss_{k}', loss, weight=self.loss_weight / self.num_modules)

  def init_decode_state(self, batch_size: int, max_len: int) -> None:
    """Allocates the caches of all modules."""
    for module in self.modules:
      module.init_decode_state(batch_size, max_len)

  def extend_step(self, number: int, hidden_BTD: jax.Array, embedded_BTD: jax.Array, pos_BT: jax.Array) -> jax.Array:
    """Returns h_k for the next tokens, where k is `number` + 1; see `MultiTokenModule.extend_step`."""
    return self.modules[number].extend_step(hidden_BTD, embedded_BTD, pos_BT)


def _shift(x: jax.Array, count: int) -> jax.Array:
  """Returns [B, T, ...] with x[:, t - count] as entry t; zeros if t - count is not in [0, T)."""
  T = x.shape[1]
  zeros = jnp.zeros((x.shape[0], min(abs(count), T), *x.shape[2:]), x.dtype)
  if count < 0:
    return jnp.concatenate([x[:, -count:], zeros], axis=1)
  return jnp.concatenate([zeros, x[:, : max(T - count, 0)]], axis=1)
