"""SpeechToTextModel: an encoder-decoder that reads a window of sound and writes its transcript (Whisper).

B batch, N samples, S frames, M mel bands, T length of the targets, L largest number of tokens to decode, V ids.

A batch holds `audio`, [B, N] float32, and optionally `audio_lengths`, [B] int32, how many samples are not padding. For
training it also holds `ids`, `labels` and `weights` [B, T] of the transcripts, as a `RecordingInput` with `prefix_ids`
makes them.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from praxis_lite.common.config import Config, child, template
from praxis_lite.common.errors import ConfigError
from praxis_lite.common.trees import NestedDict
from praxis_lite.inputs.base import BaseInput
from praxis_lite.layers.audio_encoder_decoder import AudioEncoderDecoder, WindowLogMel
from praxis_lite.layers.position_limit import PositionLimit
from praxis_lite.models.base import ScoreLimits
from praxis_lite.models.encoder_decoder_model import EncoderDecoderModel, SourceSteps
from praxis_lite.models.language_model import LanguageModel
from praxis_lite.models.speech_model import check_sample_rate, prompts_error


class _Suppression(NamedTuple):
  """Which tokens are not written at which positions.

  Attributes:
    always: [V] bool, True for tokens that are never written.
    first: [V] bool, True for tokens that are never the first one after the prefix.
    given: the position of the last prefix token.
  """

  always: jax.Array
  first: jax.Array
  given: int


class SpeechToTextModel(EncoderDecoderModel):
  """A model over an `AudioEncoderDecoder`, trained with teacher forcing.

  Attributes: those of `EncoderDecoderModel`, and
    frontend_tpl: config of the child `frontend`, from samples to features.
    prefix_ids: given tokens after `start_id` in each transcript, such as the language and the task.
    suppressed_ids: tokens that decoding never writes.
    first_suppressed_ids: tokens that no transcript begins with.
  """

  prompts_are_sources: ClassVar[bool] = False

  lm_tpl: Config = template(AudioEncoderDecoder)
  frontend_tpl: Config = template(WindowLogMel)
  packed: bool = False
  prefix_ids: tuple[int, ...] = ()
  suppressed_ids: tuple[int, ...] = ()
  first_suppressed_ids: tuple[int, ...] = ()

  lm: AudioEncoderDecoder = child()
  frontend: WindowLogMel = child()

  def setup(self) -> None:
    super().setup()
    self.create_child('frontend', self.frontend_tpl.clone(num_mels=self.lm.num_mels))
    if self.packed:
      raise ConfigError(f'{self.path_name}.packed: a row is one window of sound and its transcript; set it to False')
    for name in ('prefix_ids', 'suppressed_ids', 'first_suppressed_ids'):
      bad = [i for i in getattr(self, name) if not 0 <= i < self.lm.vocab_size]
      if bad:
        raise ConfigError(f'{self.path_name}.{name}: {bad[0]} is not a token; they are 0 to {self.lm.vocab_size - 1}')

  def check_input(self, data: BaseInput, batch: NestedDict) -> None:
    """Raises a `ConfigError` if audio is missing, an id is out of range, or the prefixes of data and model differ."""
    LanguageModel.check_input(self, data, batch)
    if 'audio' not in batch:
      raise ConfigError(
        f'{data.label}: a {type(self).__name__} needs audio in each batch; this one has {", ".join(sorted(batch))}'
      )
    given = getattr(data, 'prefix_ids', (self.start_id, *self.prefix_ids))
    if given != (self.start_id, *self.prefix_ids):
      raise ConfigError(
        f'{data.label}.prefix_ids: transcripts begin with {given}, but those of task.model with start_id and '
        f'prefix_ids, {(self.start_id, *self.prefix_ids)}; set the same in both'
      )
    check_sample_rate(data, self.frontend)

  # ---------------------------------------------------------------- training and evaluation

  def features(self, batch: NestedDict) -> jax.Array:
    """Returns the inputs of the encoder, [B, S, M]."""
    if 'audio' not in batch:
      raise prompts_error(self)
    audio_BN, lengths_B = batch['audio'], batch.get('audio_lengths')
    if lengths_B is None:
      return self.frontend(jnp.nan_to_num(audio_BN))[0]
    return self.frontend(audio_BN, jnp.arange(audio_BN.shape[1]) >= lengths_B[:, None])[0]

  def predict(self, batch: NestedDict) -> dict[str, jax.Array]:
    """Returns `logits`, [B, T, V] float32, if the batch has `ids`; otherwise transcripts.

    Transcripts are `ids`, [B, L] int32; `lengths`, [B] int32: the first `lengths` ids of a row are its transcript; and
    `log_prob`, [B] float32, the log-probability of the transcript in nats.
    """
    if 'ids' in batch:
      return super().predict(batch)
    _, decoded = self.decode(batch)
    is_token_BL = jnp.arange(decoded['ids'].shape[1]) < decoded['lengths'][:, None]
    log_prob_B = jnp.sum(jnp.where(is_token_BL, decoded['log_probs'], 0), axis=1)
    return {'ids': decoded['ids'], 'lengths': decoded['lengths'], 'log_prob': log_prob_B}

  def position_limits(self) -> dict[str, PositionLimit]:
    return LanguageModel.position_limits(self)

  def score_limits(self) -> ScoreLimits | None:  # type: ignore[override]
    return None

  def most_prompt_tokens(self) -> int | None:
    return None

  def _source(self, batch: NestedDict) -> tuple[jax.Array, dict[str, jax.Array | None]]:
    return self.features(batch), {}

  # ---------------------------------------------------------------- decoding

  def _sources_to_decode(self, batch: NestedDict) -> tuple[jax.Array, jax.Array, NestedDict]:
    x_BSM = self.features(batch)
    rows = len(x_BSM)
    is_row_B = batch['weights'].reshape(rows, -1).max(axis=1) != 0 if 'weights' in batch else jnp.ones(rows, bool)
    if batch.get('audio_lengths') is not None:
      is_row_B &= batch['audio_lengths'] > 0
    given_BP = jnp.broadcast_to(jnp.array(self.prefix_ids, jnp.int32), (rows, len(self.prefix_ids)))
    prompts = {'ids': given_BP, 'prompt_lengths': jnp.full(rows, len(self.prefix_ids), jnp.int32)}
    labels = {}
    if 'labels' in batch:  # Labels begin with `prefix_ids`, which are not decoded.
      labels = {name: batch[name][:, len(self.prefix_ids) :] for name in ('labels', 'weights')}
    return x_BSM, is_row_B.astype(jnp.int32)[:, None], {**batch, **labels, **prompts}

  def _steps_of(self, source: jax.Array, is_token: jax.Array) -> SourceSteps:
    at_V = jnp.arange(self.lm.vocab_size)
    always_V, first_V = (
      jnp.isin(at_V, jnp.array(ids, jnp.int32)) for ids in (self.suppressed_ids, self.first_suppressed_ids)
    )
    suppression = _Suppression(always_V, first_V, len(self.prefix_ids))
    options = self.decoder.goes_back, self.decoder.needs_coverage
    return _TranscriptSteps(self.lm, source, is_token, suppression, *options)

  def _tokens_to_look_up(self, source: jax.Array, is_token: jax.Array) -> None:
    return None


class _TranscriptSteps(SourceSteps):
  """`SourceSteps` that exclude some tokens."""

  def __init__(
    self, lm: AudioEncoderDecoder, source: jax.Array, is_token: jax.Array, suppression: _Suppression, *options: bool
  ):
    super().__init__(lm, source, is_token, *options)
    self._suppression = suppression

  def extend(
    self, ids_BT: jax.Array, pos_BT: jax.Array, last_B: jax.Array, state: NestedDict
  ) -> tuple[jax.Array, NestedDict]:
    logits_BV, state = super().extend(ids_BT, pos_BT, last_B, state)
    always_V, first_V, given = self._suppression
    is_first_BN = jnp.take_along_axis(pos_BT, last_B.reshape(len(last_B), -1), axis=1) == given
    is_first = is_first_BN.reshape(*last_B.shape, 1)
    return jnp.where(always_V | (first_V & is_first), -jnp.inf, logits_BV), state
