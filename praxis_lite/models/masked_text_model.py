"""MaskedLanguageModel: an encoder that predicts the masked tokens of its input (BERT, Devlin et al., 2019).

    logits = softmax(transform(encoder(ids)))

B batch, T length, P positions to predict, D model dims, V vocabulary.

A batch holds arrays [B, T]: `ids`, int32, the tokens that the encoder reads; `labels`, int32, the tokens of the text;
and `weights`, float32, above 0 at the positions to predict and 0 at all others. `segment_ids`, int32, is 0 at padding;
without it, all are tokens. If rows are packed, there is also `segment_pos`. `token_type_ids`, int32, are optional.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from praxis_lite.common.config import Config, child, template
from praxis_lite.common.errors import ConfigError
from praxis_lite.common.figures import number_of
from praxis_lite.common.trees import NestedDict
from praxis_lite.common.weighted import WeightedScalars, weighted_mean
from praxis_lite.inputs.base import BaseInput
from praxis_lite.layers.base import SplitMapping
from praxis_lite.layers.encoder import HeadTransform, TransformerEncoder
from praxis_lite.layers.position_limit import PositionLimit
from praxis_lite.layers.softmax import FullSoftmax, SharedEmbeddingSoftmax, SoftmaxOutput
from praxis_lite.models.base import BaseModel
from praxis_lite.models.labels import IdLimit, check_labels
from praxis_lite.models.language_model import clear_padding
from praxis_lite.models.token_checks import check_positions_of_input


class MaskedLanguageModel(BaseModel[SoftmaxOutput]):
  """A model that predicts masked tokens of a text from the tokens before and after them.

  Attributes:
    encoder_tpl: config of the child `encoder`.
    transform_tpl: config of the child `transform`, between the states and the softmax; None disables it.
    softmax_tpl: config of the child `softmax`, with a separate table. With None, the encoder's embedding, a
      `SharedEmbeddingSoftmax`, is also the softmax.
    packed: whether rows may hold several segments, numbered by `segment_ids`. False means that each row is one segment,
      whose padding has segment id 0.
    max_places: P, the largest number of positions to predict in a row. The head then computes only the first P
      positions with a weight, and ignores the others. None computes all positions.
  """

  encoder_tpl: Config = template(TransformerEncoder, embedding_tpl=Config(SharedEmbeddingSoftmax, use_bias=True))
  transform_tpl: Config | None = template(HeadTransform)
  softmax_tpl: Config | None = None
  packed: bool = True
  max_places: int | None = None
  activation_split_dims_mapping: Config = template(SplitMapping)

  encoder: TransformerEncoder = child()
  transform: HeadTransform = child()
  softmax: FullSoftmax = child()

  def setup(self) -> None:
    self._check_range('max_places', least=1)
    encoder = self.create_child('encoder', self.encoder_tpl)
    sizes = {'input_dims': encoder.model_dims, 'num_classes': encoder.vocab_size}
    if self.transform_tpl is not None:
      self.create_child('transform', self.transform_tpl.clone(dims=encoder.model_dims))
    if self.softmax_tpl is not None:
      self.create_child('softmax', self.softmax_tpl.clone(**sizes))
    elif not isinstance(encoder.embedding, SharedEmbeddingSoftmax):
      raise ConfigError(
        f'{self.path_name}.softmax_tpl: None shares the table of the embedding, but a '
        f'{type(encoder.embedding).__name__} has none to share; set softmax_tpl=Config(FullSoftmax) or '
        'encoder_tpl.embedding_tpl=Config(SharedEmbeddingSoftmax)'
      )

  def check_input(self, data: BaseInput, batch: NestedDict) -> None:
    """Raises a `ConfigError` if an id, label, type or position is out of range.

    Also raises it if a row has more than `max_places` positions to predict, or if labels are the next tokens.
    """
    check_tokens(self.encoder, data, batch)
    check_positions_of_input(self.position_limits(), data, batch)
    weights = np.asarray(batch.get('weights', 0))
    if 'labels' in batch and _are_next_tokens(batch['ids'], batch['labels'], weights):
      raise ConfigError(
        f'{data.label}: each of its labels is the next token of the row, which a {type(self).__name__} sees, so it '
        'would learn nothing; expected labels at hidden tokens, as in the batches of MaskedTextInput'
      )
    most = int((weights != 0).sum(axis=1).max(initial=0)) if weights.ndim == 2 else 0
    if self.max_places is not None and most > self.max_places:
      raise ConfigError(
        f'{data.label}: a row has {number_of(most, "place")} to predict, and task.model.max_places is '
        f'{self.max_places}; set it to the largest number, or to None'
      )
    if 'labels' in batch:
      labels = {'labels': np.asarray(batch['labels'])}
      check_labels(data, labels, batch, 'task.model.encoder.vocab_size', self.encoder.vocab_size)

  def compute_predictions(self, batch: NestedDict) -> SoftmaxOutput:
    """Returns cross entropies [B, T], and logits [B, T, V] unless the softmax layer works in chunks of the classes.

    With `max_places`, results have P positions instead of T: first those with a weight, in order, then others.
    """
    x_BTD = encode_batch(self.encoder, batch, packed=self.packed)
    weights_BT = weights_of_places(batch)
    # A label of weight 0 may be any number, such as -100, and its cross entropy would be NaN.
    labels_BT = jnp.where(weights_BT == 0, 0, batch['labels'])
    if self.max_places is not None:
      at_BP = first_places(weights_BT, self.max_places)
      # A product with one-hot rows copies states exactly, and its gradient needs no scatter.
      chosen_BPT = jax.nn.one_hot(at_BP, weights_BT.shape[1], dtype=x_BTD.dtype)
      x_BTD = jnp.einsum('bpt,btd->bpd', chosen_BPT, x_BTD, precision=jax.lax.Precision.HIGHEST)
      labels_BT, weights_BT = (jnp.take_along_axis(x, at_BP, axis=1) for x in (labels_BT, weights_BT))
    return self._softmax(self._transform(x_BTD), labels_BT, weights_BT)

  def compute_loss(self, predictions: SoftmaxOutput, batch: NestedDict) -> tuple[WeightedScalars, NestedDict]:
    """Returns metrics and per-example outputs.

    Metrics: `loss`, nats per predicted token; `accuracy`, the fraction of labels that are the most probable token; and
    with `max_places`, `left_out`, the share of the weights that is at positions which the head leaves out.
    Per example: `loss`, the mean over the tokens of a row, and `weights`, the sum of their weights.
    """
    weights_BT = all_BT = weights_of_places(batch)
    if self.max_places is not None:
      weights_BT = jnp.take_along_axis(weights_BT, first_places(weights_BT, self.max_places), axis=1)
    loss_B, weights_B = weighted_mean(predictions.xent, weights_BT, axis=1)
    metrics = {
      'loss': weighted_mean(loss_B, weights_B),
      'accuracy': weighted_mean(predictions.correct, weights_BT),
    }
    if self.max_places is not None:
      kept_B, all_B = jnp.sum(weights_BT, axis=1), jnp.sum(all_BT, axis=1)
      metrics['left_out'] = weighted_mean(1 - kept_B / jnp.where(all_B == 0, 1, all_B), all_B)
    return metrics, {'loss': loss_B, 'weights': weights_B}

  def predict(self, batch: NestedDict) -> dict[str, jax.Array]:
    """Returns `logits`, [B, T, V] float32, of the token at each position; the batch needs no labels."""
    states_BTD = encode_batch(self.encoder, batch, packed=self.packed)
    return {'logits': self._softmax.get_logits(self._transform(states_BTD))}

  def position_limits(self) -> dict[str, PositionLimit]:
    limit = self.encoder.position_limit
    return {'segment_pos': limit} if self.packed and limit is not None else {}

  def id_limits(self) -> dict[str, IdLimit]:
    return type_limits(self.encoder)

  @property
  def num_ids(self) -> int | None:
    return self.encoder.vocab_size

  @property
  def _softmax(self) -> FullSoftmax:
    if self.softmax_tpl is not None:
      return self.softmax
    assert isinstance(self.encoder.embedding, SharedEmbeddingSoftmax)
    return self.encoder.embedding

  def _transform(self, x_BTD: jax.Array) -> jax.Array:
    """Returns the inputs of the softmax, [B, T, D], given the states of the encoder."""
    return x_BTD if self.transform_tpl is None else self.transform(x_BTD)


def first_places(weights_BT: jax.Array, count: int) -> jax.Array:
  """Returns `count` positions of each row, [B, P]: first those with a weight, in order, then those without."""
  return jnp.argsort(weights_BT == 0, axis=1, stable=True)[:, :count]


def weights_of_places(batch: NestedDict) -> jax.Array:
  """Returns the weights [B, T] of a batch; raises ConfigError if there is not one for each token."""
  weights = batch['weights']
  if weights.ndim != batch['ids'].ndim:
    raise ConfigError(
      f'a masked language model needs a weight for each token, {list(batch["ids"].shape)}, which is 0 for tokens that '
      f'are not predicted; these weights have shape {list(weights.shape)}'
    )
  return weights


def encode_batch(encoder: TransformerEncoder, batch: NestedDict, *, packed: bool) -> jax.Array:
  """Returns the states of the tokens of a batch, [B, T, D]; negative ids in rows of weight 0 count as 0.

  If the batch is not `packed`, segment ids only mark padding.
  """
  ids_BT, segments_BT, types_BT = batch['ids'], batch.get('segment_ids'), batch.get('token_type_ids')
  if (weights := batch.get('weights')) is not None:  # The vector of a negative id is NaN.
    weights_B1 = jnp.any(weights.reshape(len(weights), -1) != 0, axis=1, keepdims=True)
    ids_BT = clear_padding(ids_BT, weights_B1)
    types_BT = None if types_BT is None else clear_padding(types_BT, weights_B1)
  if segments_BT is not None:
    ids_BT = jnp.where(segments_BT == 0, 0, ids_BT)  # Padding may be an invalid id, whose vector is NaN.
    if not packed:
      segments_BT = (segments_BT != 0).astype(jnp.int32)
  pos_BT = batch.get('segment_pos') if packed else None
  return encoder(ids_BT, segment_ids=segments_BT, segment_pos=pos_BT, token_type_ids=types_BT)


def type_limits(encoder: TransformerEncoder) -> dict[str, IdLimit]:
  """Returns the limit of `token_type_ids`, see `BaseModel.id_limits`; {} if the encoder has no table of types."""
  if encoder.token_type_tpl is None:
    return {}
  count = encoder.token_type.num_classes
  return {'token_type_ids': IdLimit(count, f'the model has types of tokens 0 to {count - 1}', 'segment_ids')}


def _are_next_tokens(ids_BT: np.ndarray, labels_BT: np.ndarray, weights_BT: np.ndarray) -> bool:
  """Whether most places have a weight, and at nearly all of these that change the id the label is the id after."""
  if not np.shape(ids_BT) == np.shape(labels_BT) == weights_BT.shape or weights_BT.ndim != 2:
    return False
  places = weights_BT[:, :-1] != 0
  here, after = np.asarray(ids_BT)[:, :-1], np.asarray(ids_BT)[:, 1:]
  changes = places & (here != after)  # Where a row repeats an id, as made-up rows may, nothing can be told.
  is_after = np.asarray(labels_BT)[:, :-1] == after
  return places.sum() > places.size / 2 and changes.any() and bool(is_after[changes].mean() > 0.9)


def check_tokens(
  encoder: TransformerEncoder, data: BaseInput, batch: NestedDict, where: str = 'task.model.encoder'
) -> None:
  """Raises a `ConfigError` if the id or type of a token, except padding, is not in the encoder's tables.

  `where` is the path of the encoder for messages.
  """
  known, size = encoder.vocab_size, getattr(data, 'vocab_size', None)
  if isinstance(size, int) and size > known:
    remedy = f'it must be at least {size}'
    if getattr(data, 'mask', -1) == size - 1:  # Often the mask id follows the tokenizer's own ids.
      remedy += f', or set its mask_id, which is {size - 1} now, to an id below {known} that no text has'
    raise ConfigError(f'{data.label}: its ids go up to {size - 1}, but {where}.vocab_size is {known}; {remedy}')
  types = f'{where}.token_type.num_classes is'
  if encoder.token_type_tpl is None:
    types = f'{where}.token_type_tpl is None, so the number of types is'
  num_types = getattr(encoder.token_type_tpl, 'num_classes', 1)
  tables = {'ids': (f'{where}.vocab_size is', known), 'token_type_ids': (types, num_types)}
  for name, (says, count) in tables.items():
    found, segments = np.asarray(batch.get(name, ())), batch.get('segment_ids')
    if not found.size:
      continue
    is_token = np.ones(found.shape, bool) if segments is None else np.asarray(segments) != 0
    bad = is_token & ((found < 0) | (found >= count))
    if bad.any():
      raise ConfigError(
        f'{data.label}: found {found[bad][0]} in {name!r}, but {says} {count}; all must be from 0 to {count - 1}, or '
        'be padding'
      )
