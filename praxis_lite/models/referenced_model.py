"""ReferencedModel: a language model that is compared with a reference, the model before it was tuned.

If the model has adapters, the reference is the model without them, which needs no more memory. Otherwise it is a frozen
copy, without gradients or optimizer state, so it costs much less than the training of the model. Log-probabilities that
are stored with the data could belong to another tokenizer, template or checkpoint, so a run computes them itself.

B batch, T length.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from praxis_lite.common.config import child
from praxis_lite.common.errors import ConfigError
from praxis_lite.common.trees import leaves
from praxis_lite.layers.softmax import SoftmaxOutput
from praxis_lite.layers.transformer_lm import TransformerLm
from praxis_lite.models.adapters import ADAPTER_VARIABLES, adapter_paths
from praxis_lite.models.base import FrozenVariables
from praxis_lite.models.language_model import LanguageModel, clear_padding, sized_network


class ReferencedModel(LanguageModel):
  """A language model that trains on log-probabilities of answers, optionally compared with a reference.

  Subclasses define `needs_reference`, and call `_create_reference` at the end of `setup`.

  Attributes: the same as for `LanguageModel`, and
    reference_dtype: storage dtype of the child `reference`, a frozen copy of the network, which exists if the loss
      needs a reference and the model has no adapters; None uses `dtype`.
  """

  reference_dtype: DTypeLike | None = None

  reference: TransformerLm = child()

  # What the model learns from, for messages.
  _learns_from = 'answers'

  @property
  def needs_reference(self) -> bool:
    """Whether the loss compares the model with the reference."""
    raise NotImplementedError

  def setup(self) -> None:
    super().setup()
    where, what = self.path_name, self._learns_from
    if not isinstance(self.lm, TransformerLm):
      raise ConfigError(f'{where}.lm_tpl: {what} need a TransformerLm, got {type(self.lm).__name__}')
    if self.model_type != 'causal':
      raise ConfigError(f"{where}.model_type: {what} need 'causal', got {self.model_type!r}")
    if self.lm.softmax.label_smoothing:
      raise ConfigError(
        f'{self.lm.softmax.path_name}.label_smoothing: the losses of {what} need log-probabilities without smoothing; '
        f'set it to 0 here{self._other_smoothing}'
      )

  @property
  def _other_smoothing(self) -> str:
    """The end of the error about label smoothing: where users can set it instead; '' if there is no such field."""
    return ''

  def _create_reference(self) -> None:
    """Creates the child `reference`, if the loss needs a reference and the model has no adapters."""
    if self._has_copy:
      network = sized_network(self, self.path_name)
      if self.reference_dtype is not None:
        network.dtype = self.reference_dtype
      self.create_child('reference', network.set(mtp_tpl=None))

  @property
  def _has_copy(self) -> bool:
    return self.needs_reference and not self.adapters

  @property
  def frozen_variables(self) -> FrozenVariables | None:
    if not self.needs_reference:
      return None
    paths = frozenset(leaves(self.abstract_init()))
    if self._has_copy:
      copied = frozenset(path for path in paths if path[0] == 'reference')
      return FrozenVariables(copied, 'bprop_variable_exclusion', r'reference\..*', 'the reference must keep its values')
    return FrozenVariables(
      paths - adapter_paths(self),
      'bprop_variable_inclusion',
      ADAPTER_VARIABLES,
      'the model without adapters is the reference, which must keep its values',
    )

  def log_probs_of_labels(self, rows: dict[str, jax.Array], network: str = 'lm') -> jax.Array:
    """Returns the log-probability of each label times its weight, [B, T] float32, in nats; 0 where the weight is 0.

    `rows` are `ids`, `labels`, `weights`, `segment_ids` and `segment_pos`; `network` is 'lm' or 'reference'.
    """
    lm: TransformerLm = getattr(self, network)
    weights_BT, is_token_BT = rows['weights'], (rows['segment_ids'] > 0).astype(jnp.float32)
    ids_BT, labels_BT = clear_padding(rows['ids'], is_token_BT), clear_padding(rows['labels'], weights_BT)
    visible = {name: rows[name] for name in ('segment_ids', 'segment_pos')} if self.packed else {}
    # Not lm(...), because its heads for later tokens would then learn from all answers, even rejected ones.
    output: SoftmaxOutput = lm.softmax(lm.encode(ids_BT, is_token_BT, **visible), labels_BT, weights_BT)
    return jnp.where(weights_BT == 0, 0, -output.xent * weights_BT)

  def _frozen_log_probs(self, rows: dict[str, jax.Array], of_reference: bool) -> jax.Array:
    """Returns `log_probs_of_labels`, computed without dropout; no gradient flows through it."""
    surroundings = self.surroundings
    if of_reference and not self._has_copy:
      surroundings = dataclasses.replace(surroundings, without_adapters=True)
    log_probs_BT, _ = self.apply(
      jax.lax.stop_gradient(self.variables),
      rows,
      'reference' if of_reference and self._has_copy else 'lm',
      do_eval=True,
      method='log_probs_of_labels',
      surroundings=surroundings,
    )
    return jax.lax.stop_gradient(log_probs_BT)
