"""Recordings of speech with their transcripts, as batches for a speech recognizer.

    digits.tsv    0001.wav   three one four
                  0002.wav   nine

A batch has `audio`, [B, N] float32, samples from -1 to 1 and then zeros; and `audio_lengths`, [B] int32, the numbers of
samples. For CTC and transducers, it has `labels`, [B, L] int32, the tokens of the transcript and then the tokenizer's
padding, which is the model's blank; and `weights`, [B] float32. For a decoder, it has `ids` and `labels`, [B, L] int32,
and `weights`, [B, L] float32:

    ids       s p a b c .         s start token, p other tokens of `prefix_ids`, $ end token
    labels    p a b c $ .
    weights   0 1 1 1 1 0         0 for the prefix, which the decoder is given
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np

from praxis_lite.common.config import REQUIRED, Config, build_at, template
from praxis_lite.common.errors import ConfigError, DataError, UserError
from praxis_lite.common.files import read_plain
from praxis_lite.inputs.bad_records import BadRecord, RecordsInput
from praxis_lite.inputs.files import Paths, find_files
from praxis_lite.inputs.lines import pair_parsers, read_lines
from praxis_lite.inputs.random_access import RandomAccessInput
from praxis_lite.inputs.rows import Rows, Struct, blank_rows
from praxis_lite.inputs.tokenizers import BaseTokenizer, ByteTokenizer
from praxis_lite.inputs.wav_files import read_wav, resample


class _Recording(NamedTuple):
  """A WAV file, the table that names it, the place in the table, and the tokens of its transcript."""

  file: str
  table: str
  place: str
  ids: np.ndarray


class RecordingInput(RecordsInput, RandomAccessInput):
  """WAV files with their transcripts.

  Attributes:
    path: tables `*.tsv`, with a WAV file and a transcript in each line, separated by a tab; or `*.jsonl`, with an
      object in each line. It takes the forms of `TextInput.path`. Paths of WAV files are relative to the folder of the
      table.
    num_samples: N; a longer recording is a bad record.
    label_len: L; for a decoder, this includes the prefix and the end token.
    sample_rate: samples per second; recordings of other rates are resampled.
    fields: the names of the file and of the transcript in an object.
    tokenizer_tpl: config of the tokenizer of transcripts, which is built as `tokenizer`.
    prefix_ids: for a decoder, the tokens before each transcript, the first of them its start token; None makes labels
      for CTC and transducers.

  Raises (when the data is first needed):
    DataError: a path does not exist or cannot be read, or there are no recordings. Unless `on_bad_record` is 'skip',
      also if a line is not a recording, a transcript has too many tokens, or a file is not a WAV file or is too long.
  """

  path: Paths | Callable[[], Paths] | Config = REQUIRED
  num_samples: int = REQUIRED
  label_len: int = REQUIRED
  sample_rate: int = 16_000
  fields: tuple[str, str] = ('audio', 'text')
  tokenizer_tpl: Config = template(ByteTokenizer)
  prefix_ids: tuple[int, ...] | None = None

  def __post_init__(self) -> None:
    super().__post_init__()
    self.check_at_least(num_samples=1, sample_rate=1, label_len=1 + len(self.prefix_ids or ()))
    if self.prefix_ids is not None and not len(self.prefix_ids):
      raise ConfigError(f'{self.label}.prefix_ids: expected the start token of the decoder at least, got none')
    self.tokenizer: BaseTokenizer = build_at(f'{self.label}.tokenizer_tpl', self.tokenizer_tpl)

  @property
  def vocab_size(self) -> int:
    """Number of token ids."""
    return self.tokenizer.vocab_size

  @property
  def blank_id(self) -> int | None:
    """The padding of labels, which is the blank of CTC and transducers; None for a decoder."""
    return self.tokenizer.special_ids[2] if self.prefix_ids is None else None

  @property
  def first_id(self) -> int | None:
    """The start token of the decoder; None without a decoder."""
    return None if self.prefix_ids is None else self.prefix_ids[0]

  @property
  def num_examples(self) -> int:
    return len(self._recordings)

  def example_struct(self) -> Struct:
    shapes = {'audio': ((self.num_samples,), np.float32), 'audio_lengths': ((), np.int32)}
    shapes['labels'] = ((self.label_len,), np.int32)
    if self.prefix_ids is not None:
      shapes['ids'] = shapes['labels']
    shapes['weights'] = (() if self.prefix_ids is None else (self.label_len,), np.float32)
    return {name: jax.ShapeDtypeStruct(shape, dtype) for name, (shape, dtype) in shapes.items()}

  def data_files(self) -> list[str]:
    return find_files(self.path, f'{self.label}.path')

  def rows(self, indices: np.ndarray) -> Rows:
    _, eos, pad = self.tokenizer.special_ids
    batch = blank_rows(len(indices), self.example_struct(), pad)
    for row, index in enumerate(indices):
      recording = self._recordings[index]
      try:
        audio = self.read_audio(recording.file)
      except UserError as error:
        self.leave_out(BadRecord(recording.table, recording.place, f'{recording.file} {error}'))
        continue
      batch['audio'][row, : len(audio)] = audio
      batch['audio_lengths'][row] = len(audio)
      if self.prefix_ids is None:
        batch['labels'][row, : len(recording.ids)] = recording.ids
        batch['weights'][row] = 1
        continue
      ids, given = [*self.prefix_ids, *recording.ids, eos], len(self.prefix_ids) - 1
      batch['ids'][row, : len(ids) - 1] = ids[:-1]
      batch['labels'][row, : len(ids) - 1] = ids[1:]
      batch['weights'][row, given : len(ids) - 1] = 1
    return batch

  def read_audio(self, file: str) -> np.ndarray:
    """Returns the samples of a WAV file, [n] float32, at the rate of this input, n from 1 to N.

    Raises DataError if the file is missing, is not a WAV file, or has no samples or too many.
    """
    try:
      samples, rate = read_wav(read_plain(file))
    except OSError as error:
      raise DataError(f'cannot be read: {error.strerror}') from None
    except ValueError as error:
      raise DataError(str(error)) from None
    samples = resample(samples, rate, self.sample_rate)
    if not 0 < len(samples) <= self.num_samples:
      seconds, most = len(samples) / self.sample_rate, self.num_samples / self.sample_rate
      example = f"--set 'datasets[*].num_samples={len(samples)}'"
      # A decoder with given tokens reads windows of one length.
      longer = '; cut it' if self.prefix_ids else f'; cut it, or allow longer ones, as by {example}'
      longer = longer if len(samples) else ''
      raise DataError(f'lasts {seconds:.2f} s, and must be longer than 0 s and at most {most:.2f} s{longer}')
    if not np.isfinite(samples).all():
      raise DataError('has samples that are not finite numbers')
    return samples

  @functools.cached_property
  def _recordings(self) -> list[_Recording]:
    lines = read_lines(self, self.path, self.fields, pair_parsers('a WAV file and its transcript'))
    kept = [found for source in lines if (found := self._encode(*source)) is not None]
    if not kept:
      raise DataError(f'{self.label}.path: there are no recordings with a transcript')
    return kept

  def _encode(self, table: str, place: str, values: tuple[str, str]) -> _Recording | None:
    """Returns a recording with the tokens of its transcript; None if the recording is bad and left out."""
    file, text = values
    try:
      ids = np.asarray(self.tokenizer.encode(text), np.int32)
      room = self.label_len - len(self.prefix_ids or ())
      if len(ids) > room:
        raise DataError(
          f'the transcript has {len(ids)} tokens, and label_len = {self.label_len} has room for {room}; set a larger '
          'one'
        )
      if self.blank_id is not None and (ids == self.blank_id).any():
        raise DataError(
          f'the transcript has token {self.blank_id}, which is the padding of the tokenizer and the blank'
        )
    except UserError as error:
      self.leave_out(BadRecord(table, place, str(error)))
      return None
    file = os.path.join(os.path.dirname(table), os.path.expanduser(file))
    return _Recording(file, table, place, ids)
