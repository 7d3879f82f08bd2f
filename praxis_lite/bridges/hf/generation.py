"""generation_config.json: the settings of sampling that the authors of a checkpoint recommend."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from praxis_lite.bridges.hf.hf_config import read_json
from praxis_lite.bridges.hf.reader import HfCheckpoint
from praxis_lite.bridges.hf.whisper import TRANSCRIPTION_FIELDS
from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.models.decoding import BeamSearch, Decoder, Sampler

GENERATION_FILE = 'generation_config.json'
# Settings with the same meaning in a `Sampler`, and their defaults in transformers. Those in `_SAMPLED` have an effect
# only if tokens are sampled.
_SAMPLED: dict[str, Any] = {'temperature': 1.0, 'top_k': 50, 'top_p': 1.0, 'min_p': None, 'typical_p': 1.0}
_ALWAYS: dict[str, Any] = {
  'repetition_penalty': 1.0,
  'no_repeat_ngram_size': 0,
  'max_new_tokens': None,
  'min_new_tokens': 0,
}
# Settings of beam search, which is used if `num_beams` is over 1 and tokens are not sampled.
_OF_BEAMS: dict[str, Any] = {'num_beams': 1, 'length_penalty': 1.0, 'num_beam_groups': 1, 'diversity_penalty': 0.0}
_USED = {*_SAMPLED, *_ALWAYS, 'do_sample', 'eos_token_id'}
# Settings that never change a token. For a setting that is in none of these tables, `_unused_lines` writes a line,
# unless it is off: null, false, 0, 1 or empty.
_NO_EFFECT = {
  *('transformers_version', '_from_model_config', 'bos_token_id', 'pad_token_id', 'decoder_start_token_id'),
  *('use_cache', 'cache_implementation', 'assistant_confidence_threshold', 'num_assistant_tokens'),
  *('num_assistant_tokens_schedule', 'assistant_lookbehind', 'target_lookbehind', 'trust_remote_code', 'chat_format'),
}


def set_decoder(model: Config, checkpoint: HfCheckpoint) -> list[str]:
  """Sets the defaults of decoding from generation_config.json.

  Args:
    model: config of the model, whose `decoder_tpl` is a `Sampler`. It becomes a `BeamSearch` if the file asks for
      several beams, as in transformers.
    checkpoint: the checkpoint. If its folder lacks the file, decoding is greedy, as in transformers.

  Returns:
    Lines about the settings in the file that are not used.

  Raises:
    ConfigError: a value in the file has the wrong type, or the number of beams is invalid.
  """
  file = os.path.join(checkpoint.folder, GENERATION_FILE)
  given: dict[str, Any] = read_json(file) if os.path.isfile(file) else {}
  says = {name: value for name, value in given.items() if value is not None}
  for name in {*_SAMPLED, *_ALWAYS, *_OF_BEAMS} & says.keys():
    if type(says[name]) not in (int, float):
      raise ConfigError(f'{file}: {name} = {says[name]!r}: expected a number')
  end = says.get('eos_token_id', checkpoint.config.values.get('eos_token_id'))
  ends = end if isinstance(end, list) else [] if end is None else [end]
  if not all(type(i) is int for i in ends):
    raise ConfigError(f'{checkpoint.folder}: eos_token_id = {end!r}: expected a number, or a list of them')
  size = checkpoint.config.size('vocab_size')
  searches = says.get('num_beams', 1) > 1 and not says.get('do_sample')
  if searches:
    model.decoder_tpl = _beam_search(file, says).set(max_context=model.decoder_tpl.max_context)
  decoder: Config = model.decoder_tpl
  decoder.stop_ids = tuple(i for i in ends if 0 <= i < size)
  if not searches:
    decoder.temperature = float(says.get('temperature', 1.0)) if says.get('do_sample') else 0.0
  if says.get('do_sample'):
    decoder.top_k = int(says.get('top_k', _SAMPLED['top_k'])) or None
    decoder.top_p = None if says.get('top_p', 1.0) == 1 else float(says['top_p'])
    decoder.min_p = says.get('min_p')
    decoder.typical_p = None if says.get('typical_p', 1.0) == 1 else float(says['typical_p'])
  decoder.repetition_penalty = float(says.get('repetition_penalty', 1.0))
  decoder.no_repeat_ngram_size = int(says.get('no_repeat_ngram_size', 0)) or None
  decoder.min_decode_steps = int(says.get('min_new_tokens', 0))
  if 'max_new_tokens' in says:
    decoder.max_decode_steps = int(says['max_new_tokens'])
  of_family = TRANSCRIPTION_FIELDS if checkpoint.family.model_type == 'whisper' else frozenset()
  lines = _unused_lines(file, {n: value for n, value in says.items() if n not in of_family}, searches)
  if len(decoder.stop_ids) < len(ends):
    no_stop = '' if decoder.stop_ids else '; no token ends a continuation'
    lines.append(f'{checkpoint.folder}: eos_token_id = {end!r} is not in the vocabulary of {size} tokens{no_stop}')
  return lines


def _beam_search(file: str, says: Mapping[str, Any]) -> Config:
  """Returns the config of the beam search that the file asks for."""
  beams, groups = (int(says.get(name, 1)) for name in ('num_beams', 'num_beam_groups'))
  if groups < 1 or beams % groups:
    raise ConfigError(f'{file}: num_beam_groups = {groups} does not divide num_beams = {beams}')
  return Config(
    BeamSearch,
    beam_size=beams,
    num_groups=groups,
    diversity_penalty=float(says.get('diversity_penalty', 0.0)) if groups > 1 else 0.0,
    length_norm='length',
    length_penalty=max(float(says.get('length_penalty', 1.0)), 0.0),
    early_stopping=says.get('early_stopping') is True,
  )


def write_generation(folder: Path, decoder: Decoder, kept: Path) -> None:
  """Writes generation_config.json: the settings of a decoder, and other settings from the imported file.

  The length penalty of a `BeamSearch` is written only if its `length_norm` is 'length', which transformers uses.

  If the imported file, in the folder `kept`, limits the number of tokens, the new one does too.
  """
  says: dict[str, Any] = read_json(kept / GENERATION_FILE) if (kept / GENERATION_FILE).is_file() else {}
  values: dict[str, Any] = {'do_sample': decoder.is_random, 'repetition_penalty': decoder.repetition_penalty}
  values['no_repeat_ngram_size'] = decoder.no_repeat_ngram_size or 0
  if isinstance(decoder, Sampler) and decoder.is_random:
    # Writes `top_k` even if it is off, because transformers' default is 50.
    values |= {'temperature': decoder.temperature, 'top_k': decoder.top_k or 0, 'top_p': decoder.top_p or 1.0}
    values |= {'min_p': decoder.min_p, 'typical_p': decoder.typical_p}
  if decoder.min_decode_steps:
    values['min_new_tokens'] = decoder.min_decode_steps
  if isinstance(decoder, BeamSearch):
    values |= {'num_beams': decoder.beam_size, 'early_stopping': decoder.early_stopping}
    values['length_penalty'] = decoder.length_penalty if decoder.length_norm == 'length' else None
    if decoder.num_groups > 1:
      values |= {'num_beam_groups': decoder.num_groups, 'diversity_penalty': decoder.diversity_penalty}
  if decoder.stop_ids:
    values['eos_token_id'] = list(decoder.stop_ids) if len(decoder.stop_ids) > 1 else decoder.stop_ids[0]
  if 'max_new_tokens' in says:
    values['max_new_tokens'] = decoder.max_decode_steps
  own = {*_SAMPLED, *_OF_BEAMS, 'early_stopping', 'min_new_tokens'}
  kept_values = {name: value for name, value in says.items() if name not in own}
  content = {name: value for name, value in (kept_values | values).items() if value is not None}
  (folder / GENERATION_FILE).write_text(f'{json.dumps(content, indent=2, sort_keys=True)}\n', encoding='utf-8')


def _unused_lines(file: str, says: Mapping[str, Any], searches: bool) -> list[str]:
  greedy = [n for n, default in _SAMPLED.items() if not says.get('do_sample') and says.get(n, default) != default]
  used = _USED | _NO_EFFECT | ({*_OF_BEAMS, 'early_stopping'} if searches else set())
  negative = searches and says.get('length_penalty', 1.0) < 0
  others = [n for n, value in says.items() if n not in used and (value is True or value not in (0, 1, '', [], {}))]
  lines = []
  if greedy:
    draws = 'beam search draws no tokens' if searches else 'decoding is greedy'
    lines.append(f'{file}: without do_sample, {draws}, so it ignores {_format_settings(greedy, says)}')
  if negative:
    lines.append(f'{file}: length_penalty = {says["length_penalty"]} is less than 0; 0 is used')
  if others:
    what = 'beam search' if searches else 'sampler'
    lines.append(f'{file}: the {what} has no such settings, so they are not used: {_format_settings(others, says)}')
  return lines


def _format_settings(names: list[str], says: Mapping[str, Any]) -> str:
  return ', '.join(f'{name} = {says[name]!r}' for name in names)
