"""Whisper: an encoder of sound and a decoder of text, model_type whisper."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from praxis_lite.bridges.hf.bart import STACKS, sizes_of_stacks, values_of_stacks
from praxis_lite.bridges.hf.family import Family, Values, blocks_of_stack
from praxis_lite.bridges.hf.hf_config import HfConfig
from praxis_lite.bridges.hf.layer_pairs import norm_pairs, stack_pairs
from praxis_lite.bridges.hf.tensors import Pair
from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.layers import AudioEncoderDecoder, FeedForward, LearnedPositions
from praxis_lite.models import BaseModel, SpeechToTextModel, whisper


class Whisper(Family):
  """Whisper's encoder and decoder. The encoder's positions are sinusoids, stored as a table."""

  network = AudioEncoderDecoder

  @property
  def head(self) -> str:
    return 'proj_out.weight'

  def _model(self, hf: HfConfig) -> Config[Any]:
    hf.must_be('scale_embedding', False)
    model = whisper(
      **sizes_of_stacks(hf),
      num_mels=hf.size('num_mel_bins'),
      max_len=hf.size('max_target_positions'),
      max_source_len=hf.size('max_source_positions'),
      start_id=hf['decoder_start_token_id'],
    )
    hf.check_ids('decoder_start_token_id', model.start_id)
    for ours, theirs in _SUPPRESSED.items():
      ids = [i for i in hf[theirs] or () if i >= 0]  # The published files also have -1, which is no token.
      hf.check_ids(theirs, *ids)
      setattr(model, ours, tuple(ids))
    return model

  def values(self, lm: AudioEncoderDecoder) -> Values:
    block, source, target = blocks_of_stack(lm.encoder)[0], lm.encoder_position, lm.decoder_position
    attention, ff = block.attention, block.ff
    if (
      not isinstance(ff, FeedForward)
      or not isinstance(source, LearnedPositions)
      or not isinstance(target, LearnedPositions)
      or attention.dims_per_head != lm.model_dims // attention.num_heads
    ):
      raise ConfigError(
        f'{lm.path_name}: Whisper has tables of positions, dense feed-forward layers, and heads whose dims are '
        'model_dims / num_heads'
      )
    return {
      **values_of_stacks(lm, ff),
      'num_mel_bins': lm.num_mels,
      'max_source_positions': source.max_len,
      'max_target_positions': target.max_len,
      'scale_embedding': False,
    }

  def more_values(self, model: BaseModel) -> Values:
    if not isinstance(model, SpeechToTextModel):
      return {}
    ends: tuple[int | None, ...] = model.decoder.stop_ids[:1]
    if not ends and model.vocab_size <= self.defaults['eos_token_id']:
      ends = (None,)  # transformers cannot load a model if its default ids are not in the vocabulary.
    return {
      'decoder_start_token_id': model.start_id,
      **{name: end for name in ('eos_token_id', 'bos_token_id', 'pad_token_id') for end in ends},
      'suppress_tokens': list(model.suppressed_ids) or None,
      'begin_suppress_tokens': list(model.first_suppressed_ids) or None,
    }

  def table(self, tied: bool) -> list[Pair]:
    pairs = [Pair(f'{self.prefix}decoder.embed_tokens.weight', 'softmax.w')]
    for number in (0, 1):
      theirs, ours = f'{self.prefix}encoder.conv{number + 1}', f'stem.conv_{number}'
      pairs += [Pair(f'{theirs}.weight', f'{ours}.w', 'h w C O -> O C (h w)'), Pair(f'{theirs}.bias', f'{ours}.b')]
    for stack in STACKS:
      theirs = f'{self.prefix}{stack}.'
      pairs.append(Pair(f'{theirs}embed_positions.weight', f'{stack}_position.w'))
      pairs += norm_pairs(f'{theirs}layer_norm', f'{stack}_norm')
      pairs += stack_pairs(theirs, stack, has_key_bias=False)
    return pairs


def set_transcription(model: Config[SpeechToTextModel], generation: Mapping[str, Any]) -> None:
  """Sets how a transcript begins, what is never generated, and how long it may be, from generation_config.json.

  After the start token, a transcript of a multilingual model begins with a token for the language, English, and one for
  the task, transcription. Then comes a token that turns timestamps off. The transcript, including these tokens, has at
  most `max_length` tokens, and never more than the decoder has positions.
  """
  language, task = ((generation.get(f'{name}_to_id') or {}).get(of) for name, of in _GIVEN.items())
  given = () if generation.get('is_multilingual') is False else (language, task)
  model.prefix_ids = tuple(i for i in (*given, generation.get('no_timestamps_token_id')) if type(i) is int)
  positions, most = model.lm_tpl.position_tpl.max_len, generation.get('max_length')
  length = min(most, positions) if type(most) is int else positions
  model.decoder_tpl.max_decode_steps = max(1, length - 1 - len(model.prefix_ids))
  for ours, theirs in _SUPPRESSED.items():
    if isinstance(ids := generation.get(theirs), list):
      setattr(model, ours, tuple(i for i in ids if type(i) is int and i >= 0))


_GIVEN = {'lang': '<|en|>', 'task': 'transcribe'}
_SUPPRESSED = {'suppressed_ids': 'suppress_tokens', 'first_suppressed_ids': 'begin_suppress_tokens'}
# Fields of generation_config.json about transcription, other languages, and timestamps (which are not generated).
TRANSCRIPTION_FIELDS = frozenset(
  {
    *('lang_to_id', 'task_to_id', 'is_multilingual', 'no_timestamps_token_id', 'forced_decoder_ids', 'max_length'),
    *('alignment_heads', 'max_initial_timestamp_index', 'prev_sot_token_id', 'return_timestamps'),
    *_SUPPRESSED.values(),
  }
)
_WHISPER = {
  'vocab_size': 51_865,
  'num_mel_bins': 80,
  'd_model': 384,
  'encoder_layers': 4,
  'decoder_layers': 4,
  'encoder_attention_heads': 6,
  'decoder_attention_heads': 6,
  'encoder_ffn_dim': 1536,
  'decoder_ffn_dim': 1536,
  'activation_function': 'gelu',
  'max_source_positions': 1500,
  'max_target_positions': 448,
  'scale_embedding': False,
  'tie_word_embeddings': True,
  'is_encoder_decoder': True,
  'decoder_start_token_id': 50_257,
  'eos_token_id': 50_256,
  'suppress_tokens': None,
  'begin_suppress_tokens': [220, 50_256],
}
WHISPER = Whisper('whisper', 'WhisperForConditionalGeneration', _WHISPER)
