"""SpeechModel: the base of speech recognition models: audio features, an encoder, labels and error rates.

    states = encoder(augmenter(frontend(audio)))

B batch, N samples, T frames, U frames of the encoder, L labels, M features, D dims of the encoder.

A batch holds `audio`, [B, N] float32 samples, and `audio_lengths`, [B] int32, how many of them are not padding. If the
model has no front end, it holds `features`, [B, T, M], and `feature_lengths`, [B] int32, instead. Without lengths there
is no padding. `labels`, [B, L] int32, are symbols other than the blank, followed by blanks as padding; `weights` are
[B] float32.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from praxis_lite.common.config import REQUIRED, Config, child, template
from praxis_lite.common.errors import ConfigError
from praxis_lite.common.trees import NestedDict
from praxis_lite.common.weighted import WeightedScalars, weighted_mean
from praxis_lite.inputs.base import BaseInput
from praxis_lite.layers.base import SplitMapping
from praxis_lite.layers.conformer import ConformerEncoder
from praxis_lite.layers.log_mel import LogMel
from praxis_lite.layers.spectrum_augmenter import SpectrumAugmenter
from praxis_lite.models.base import BaseModel, PredictionsT
from praxis_lite.models.edit_distance import edit_distance, error_rate, hash_words
from praxis_lite.models.labels import check_labels


class Labels(NamedTuple):
  """The labels of a batch: `ids`, [B, L] int32, and `lengths`, [B] int32, 0 for rows of weight zero."""

  ids: jax.Array
  lengths: jax.Array

  @property
  def paddings(self) -> jax.Array:
    """Paddings [B, L] int32: 1 after the last label of a row, 0 before."""
    return (jnp.arange(self.ids.shape[1]) >= self.lengths[:, None]).astype(jnp.int32)


class SpeechModel(BaseModel[PredictionsT]):
  """Base of models that transcribe speech, trained on labels without timestamps.

  Attributes:
    vocab_size: number of symbols, including the blank.
    blank_id: the blank symbol, which is also the padding of the tokenizer.
    space_id: the symbol between words, which evaluation needs to report `word_error_rate`; None omits this metric.
    frontend_tpl: config of the child `frontend`, from samples to features; None reads `features` from the batch.
    augmenter_tpl: config of the child `augmenter`, which hides parts of the features in training; None disables it.
    encoder_tpl: config of the child `encoder`, from features and paddings to states and paddings.
  """

  vocab_size: int = REQUIRED
  blank_id: int = 0
  space_id: int | None = None
  frontend_tpl: Config | None = template(LogMel, normalize=True)
  augmenter_tpl: Config | None = template(SpectrumAugmenter)
  encoder_tpl: Config = template(ConformerEncoder)
  activation_split_dims_mapping: Config = template(SplitMapping)

  frontend: LogMel = child()
  augmenter: SpectrumAugmenter = child()
  encoder: ConformerEncoder = child()

  def setup(self) -> None:
    for name in ('blank_id', 'space_id'):
      symbol = getattr(self, name)
      if symbol is not None and not 0 <= symbol < self.vocab_size:
        raise ConfigError(
          f'{self.path_name}.{name}: {symbol} is not a symbol; it must be from 0 to {self.vocab_size - 1}'
        )
    encoder = self.encoder_tpl
    if self.frontend_tpl is not None:
      frontend = self.create_child('frontend', self.frontend_tpl)
      encoder = encoder.clone(input_dims=frontend.num_mels)
    if self.augmenter_tpl is not None:
      self.create_child('augmenter', self.augmenter_tpl)
    self.create_child('encoder', encoder)

  def check_input(self, data: BaseInput, batch: NestedDict) -> None:
    """Raises a `ConfigError` if audio is missing, or a label is not a symbol.

    Also raises it if the sample rate or the blank of the data is not that of the model.
    """
    leaf = 'features' if self.frontend_tpl is None else 'audio'
    if leaf not in batch:
      raise ConfigError(
        f'{data.label}: a {type(self).__name__} needs {leaf!r} in each batch; this one has {", ".join(sorted(batch))}'
      )
    blank = getattr(data, 'blank_id', self.blank_id)
    if blank != self.blank_id:
      got = 'its labels are of a decoder: set prefix_ids=None' if blank is None else f'symbol {blank} ends its labels'
      raise ConfigError(f'{data.label}: {got}, but task.model.blank_id is {self.blank_id}; set it to the same symbol')
    if self.frontend_tpl is not None:
      check_sample_rate(data, self.frontend)
    if 'labels' in batch:
      labels = {'labels': np.asarray(batch['labels'])}
      check_labels(data, labels, batch, 'task.model.vocab_size', self.vocab_size)

  def encode(self, batch: NestedDict) -> tuple[jax.Array, jax.Array]:
    """Returns the states of the encoder, [B, U, D], and their paddings, [B, U], nonzero for padding."""
    leaf, lengths = ('features', 'feature_lengths') if self.frontend_tpl is None else ('audio', 'audio_lengths')
    x = self._leaf(batch, leaf)
    is_real = jnp.ones(x.shape[:2], bool)
    if batch.get(lengths) is not None:
      is_real &= jnp.arange(x.shape[1]) < batch[lengths][:, None]
    if 'weights' in batch:  # Rows of weight zero may hold NaN.
      is_real &= (batch['weights'] != 0)[:, None]
    paddings = (~is_real).astype(jnp.int32)
    if self.frontend_tpl is not None:
      x_BTM, paddings = self.frontend(x, paddings)
    else:
      x_BTM = jnp.where(is_real[..., None], x, 0)
    if self.augmenter_tpl is not None:
      x_BTM = self.augmenter(x_BTM, paddings)
    x_BUD, paddings_BU = self.encoder(x_BTM, paddings)
    assert paddings_BU is not None  # The encoder returns None only if it gets no paddings.
    return x_BUD, paddings_BU

  def labels_of(self, batch: NestedDict) -> Labels:
    """Returns the labels of a batch: the symbols of each row before its first blank."""
    labels_BL = self._leaf(batch, 'labels')
    is_label_BL = jnp.cumsum(labels_BL == self.blank_id, axis=1) == 0
    is_label_BL &= (self._leaf(batch, 'weights') != 0)[:, None]
    lengths_B = jnp.sum(is_label_BL, axis=1, dtype=jnp.int32)
    return Labels(jnp.where(is_label_BL, labels_BL, self.blank_id).astype(jnp.int32), lengths_B)

  def loss_metrics(self, loss_B: jax.Array, fits_B: jax.Array, batch: NestedDict) -> WeightedScalars:
    """Returns `loss`, nats per row, over rows where `fits_B` is true, and `too_short`, the fraction of other rows."""
    weights_B = self._leaf(batch, 'weights')
    return {
      'loss': weighted_mean(loss_B, jnp.where(fits_B, weights_B, 0)),
      'too_short': weighted_mean(~fits_B, weights_B),
    }

  def error_metrics(
    self, ids_BT: jax.Array, lengths_B: jax.Array, labels: Labels, weights_B: jax.Array
  ) -> WeightedScalars:
    """Returns `token_error_rate` and, if `space_id` is set, `word_error_rate`.

    An error rate is a number of edits divided by the number of symbols, or words, of the labels. The edits are the
    insertions, deletions and substitutions that turn the transcripts `ids_BT`, of these lengths, into the labels.
    """
    errors_B = edit_distance(ids_BT, lengths_B, *labels)
    metrics = {'token_error_rate': error_rate(errors_B, labels.lengths, weights_B)}
    if self.space_id is not None:
      words, said = hash_words(ids_BT, lengths_B, self.space_id), hash_words(*labels, self.space_id)
      metrics['word_error_rate'] = error_rate(edit_distance(*words, *said), said[1], weights_B)
    return metrics

  def decode(self, batch: NestedDict) -> tuple[WeightedScalars, NestedDict]:
    """Returns metrics and the result of `predict`.

    Metrics: `log_prob`, the mean in nats per row, and error rates if the batch has labels.
    """
    if 'prompt_lengths' in batch:
      raise prompts_error(self)
    found, weights_B = self.predict(batch), self._leaf(batch, 'weights')
    metrics = {'log_prob': weighted_mean(found['log_prob'], weights_B)}
    if 'labels' in batch:
      metrics |= self.error_metrics(found['ids'], found['lengths'], self.labels_of(batch), weights_B)
    return metrics, found

  def predict(self, batch: NestedDict) -> dict[str, jax.Array]:
    """Returns transcripts: `ids`, [B, ...] int32 symbols and then blanks, `lengths`, [B], and `log_prob`, [B], nats."""
    raise NotImplementedError


def check_sample_rate(data: BaseInput, frontend: LogMel) -> None:
  """Raises a `ConfigError` if the data has a sample rate that differs from the one of the model's front end."""
  rate = getattr(data, 'sample_rate', None)
  if rate not in (None, frontend.sample_rate):
    raise ConfigError(
      f'{data.label}.sample_rate: {rate} samples in a second, but task.model.frontend_tpl.sample_rate is '
      f'{frontend.sample_rate}; set the same in both'
    )


def prompts_error(model: object) -> ConfigError:
  """Returns the error for a call that asks a model of recordings to continue a text."""
  return ConfigError(
    f'task.model: a {type(model).__name__} writes down recordings and continues no prompts; praxis-lite predict '
    'takes WAV files, and decode without a prompt the decode_datasets of the experiment'
  )
