"""Writes down what is said in WAV files, with a model of speech."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from praxis_lite.common.config import Config, target
from praxis_lite.common.errors import ConfigError, DataError, prefix_errors
from praxis_lite.inputs import RecordingInput
from praxis_lite.inputs.rows import Rows, canonical_rows
from praxis_lite.runs.trained import TrainedModel


def transcribe_files(model: TrainedModel, files: Sequence[str], batch_size: int) -> Iterator[dict[str, Any]]:
  """Yields for each file, in their order, its name, the `text` that is heard in it, and further values of `predict`.

  Args:
    model: see `SavedRun.load`; a dataset of its run is a `RecordingInput`, which says how files are read.
    files: paths of WAV files.
    batch_size: number of files that are computed together.

  Raises:
    UserError: a file cannot be read, or the run has no recordings.
  """
  reader = _reader(model, files[0])
  for start in range(0, len(files), batch_size):
    several = files[start : start + batch_size]
    batch = _read(reader, several)
    with prefix_errors(several[0] if len(several) == 1 else f'{several[0]} and {len(several) - 1} more'):
      found = model.predict(batch)
    if not isinstance(found, dict) or not {'ids', 'lengths'} <= found.keys():
      raise ConfigError(f'{files[0]}: a {type(model.layer).__name__} writes down no recordings')
    for row, file in enumerate(several):
      ids = np.asarray(found['ids'])[row, : int(found['lengths'][row])].tolist()
      more = {name: np.asarray(x)[row].tolist() for name, x in found.items() if np.ndim(x) == 1 and name != 'lengths'}
      yield {'file': file, 'text': reader.tokenizer.decode(ids), **more}


def _reader(model: TrainedModel, file: str) -> RecordingInput:
  """Returns the first dataset of the run that reads recordings, one for evaluation if there is one."""
  configs = sorted(model.config.datasets, key=lambda config: bool(config.is_training))
  config = next((c for c in configs if _reads_recordings(c)), None)
  if config is None:
    raise ConfigError(f'{file}: the datasets of the run read no recordings; pass .npz or .jsonl files')
  reader: RecordingInput = config.clone(path=file).instantiate()
  return reader


def _reads_recordings(config: Config) -> bool:
  return isinstance(kind := target(config), type) and issubclass(kind, RecordingInput)


def _read(reader: RecordingInput, files: Sequence[str]) -> Rows:
  audio = np.zeros((len(files), reader.num_samples), np.float32)
  lengths = np.zeros(len(files), np.int32)
  for row, file in enumerate(files):
    if not os.path.exists(file):
      raise DataError(f'there is no file {file}')
    with prefix_errors(file):
      samples = reader.read_audio(file)
    audio[row, : len(samples)], lengths[row] = samples, len(samples)
  return canonical_rows({'audio': audio, 'audio_lengths': lengths}, 'audio')
