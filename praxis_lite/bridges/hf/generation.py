"""generation_config.json: the settings of sampling that the authors of a checkpoint recommend."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from praxis_lite.bridges.hf.hf_config import read_json
from praxis_lite.bridges.hf.reader import HfCheckpoint
from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.models.decoding import BeamSearch, Decoder, Sampler

GENERATION_FILE = 'generation_config.json'
# Numbers with the same meaning in a `Sampler`. Those of the first group have an effect only if tokens are sampled; then
# transformers takes the 50 most probable tokens unless the file says otherwise.
_SAMPLED: dict[str, Any] = {'temperature': 1.0, 'top_k': 50, 'top_p': 1.0, 'min_p': None}
_ALWAYS: dict[str, Any] = {'repetition_penalty': 1.0, 'no_repeat_ngram_size': 0, 'max_new_tokens': None}
_USED = {*_SAMPLED, *_ALWAYS, 'do_sample', 'eos_token_id'}
# Settings that change no token. Others change none if they are null, false, 0, 1 or empty.
_NO_EFFECT = {
  *('transformers_version', '_from_model_config', 'bos_token_id', 'pad_token_id', 'decoder_start_token_id'),
  *('use_cache', 'cache_implementation', 'assistant_confidence_threshold', 'num_assistant_tokens'),
  *('num_assistant_tokens_schedule', 'assistant_lookbehind', 'target_lookbehind', 'trust_remote_code', 'chat_format'),
}


def set_decoder(decoder: Config, checkpoint: HfCheckpoint) -> list[str]:
  """Sets the defaults of a sampler from generation_config.json.

  Args:
    decoder: config of the `Sampler`.
    checkpoint: its folder may have the file; without it, decoding is greedy, as in transformers.

  Returns:
    Lines about the settings in the file that are not used.

  Raises:
    ConfigError: a value in the file has the wrong type.
  """
  file = os.path.join(checkpoint.folder, GENERATION_FILE)
  given: dict[str, Any] = read_json(file) if os.path.isfile(file) else {}
  says = {name: value for name, value in given.items() if value is not None}
  for name in {*_SAMPLED, *_ALWAYS} & says.keys():
    if type(says[name]) not in (int, float):
      raise ConfigError(f'{file}: {name} = {says[name]!r}: expected a number')
  end = says.get('eos_token_id', checkpoint.config.values.get('eos_token_id'))
  ends = end if isinstance(end, list) else [] if end is None else [end]
  if not all(type(i) is int for i in ends):
    raise ConfigError(f'{checkpoint.folder}: eos_token_id = {end!r}: expected a number, or a list of them')
  size = checkpoint.config.size('vocab_size')
  decoder.stop_ids = tuple(i for i in ends if 0 <= i < size)
  decoder.temperature = float(says.get('temperature', 1.0)) if says.get('do_sample') else 0.0
  if says.get('do_sample'):
    decoder.top_k = int(says.get('top_k', _SAMPLED['top_k'])) or None
    decoder.top_p = None if says.get('top_p', 1.0) == 1 else float(says['top_p'])
    decoder.min_p = says.get('min_p')
  decoder.repetition_penalty = float(says.get('repetition_penalty', 1.0))
  decoder.no_repeat_ngram_size = int(says.get('no_repeat_ngram_size', 0)) or None
  if 'max_new_tokens' in says:
    decoder.max_decode_steps = int(says['max_new_tokens'])
  lines = _unused_lines(file, says)
  if len(decoder.stop_ids) < len(ends):
    no_stop = '' if decoder.stop_ids else '; no token ends a continuation'
    lines.append(f'{checkpoint.folder}: eos_token_id = {end!r} is not in the vocabulary of {size} tokens{no_stop}')
  return lines


def write_generation(folder: Path, decoder: Decoder, kept: Path) -> None:
  """Writes generation_config.json: the settings of a decoder, and what the file of the import says of others.

  The length penalty of a `BeamSearch` is not among them: that of transformers is another formula.

  Args:
    folder: where to write the file.
    decoder: the `Sampler` or `BeamSearch` of the exported model.
    kept: the folder that may have the file of the import. If that limits the number of tokens, the new one does too.
  """
  says: dict[str, Any] = read_json(kept / GENERATION_FILE) if (kept / GENERATION_FILE).is_file() else {}
  values: dict[str, Any] = {'do_sample': decoder.is_random, 'repetition_penalty': decoder.repetition_penalty}
  values['no_repeat_ngram_size'] = decoder.no_repeat_ngram_size or 0
  if isinstance(decoder, Sampler) and decoder.is_random:
    # The default of transformers is 50.
    values |= {'temperature': decoder.temperature, 'top_k': decoder.top_k or 0, 'top_p': decoder.top_p or 1.0}
    values['min_p'] = decoder.min_p
  if isinstance(decoder, BeamSearch):
    values |= {'num_beams': decoder.beam_size, 'early_stopping': decoder.early_stopping}
  if decoder.stop_ids:
    values['eos_token_id'] = list(decoder.stop_ids) if len(decoder.stop_ids) > 1 else decoder.stop_ids[0]
  if 'max_new_tokens' in says:
    values['max_new_tokens'] = decoder.max_decode_steps
  kept_values = {name: value for name, value in says.items() if name not in _SAMPLED}
  content = {name: value for name, value in (kept_values | values).items() if value is not None}
  (folder / GENERATION_FILE).write_text(f'{json.dumps(content, indent=2, sort_keys=True)}\n', encoding='utf-8')


def _unused_lines(file: str, says: Mapping[str, Any]) -> list[str]:
  greedy = [n for n, default in _SAMPLED.items() if not says.get('do_sample') and says.get(n, default) != default]
  others = [n for n, value in says.items() if n not in _USED | _NO_EFFECT and value not in (False, 0, 1, [], {})]
  lines = []
  if greedy:
    lines.append(f'{file}: without do_sample, decoding is greedy, so it ignores {_format_settings(greedy, says)}')
  if others:
    lines.append(f'{file}: the sampler has no such settings, so they are not used: {_format_settings(others, says)}')
  return lines


def _format_settings(names: list[str], says: Mapping[str, Any]) -> str:
  return ', '.join(f'{name} = {says[name]!r}' for name in names)
