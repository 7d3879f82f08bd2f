"""Transcribes WAV files with a speech model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from praxis_lite.common.errors import ConfigError, prefix_errors
from praxis_lite.inputs import RecordingInput
from praxis_lite.inputs.rows import Rows, canonical_rows
from praxis_lite.runs.file_readers import batches_of_names, check_exists, make_reader
from praxis_lite.runs.trained import TrainedModel


def transcribe_files(model: TrainedModel, files: Sequence[str], batch_size: int) -> Iterator[dict[str, Any]]:
  """Yields for each file, in order, a dict with its name `file`, its `text`, and further values of `predict`.

  Args:
    model: a model from `SavedRun.load`; a dataset of its run must be a `RecordingInput`, which says how to read files.

  Raises:
    UserError: a file cannot be read, or the run has no recordings.
  """
  reader = make_reader(model, RecordingInput, 'path', files[0], 'recordings')
  for where, several in batches_of_names(files, batch_size):
    batch = _read(reader, several)
    with prefix_errors(where):
      found = model.predict(batch)
    if not isinstance(found, dict) or not {'ids', 'lengths'} <= found.keys():
      raise ConfigError(f'{files[0]}: a {type(model.layer).__name__} does not transcribe recordings')
    for row, file in enumerate(several):
      ids = np.asarray(found['ids'])[row, : int(found['lengths'][row])].tolist()
      more = {name: np.asarray(x)[row].tolist() for name, x in found.items() if np.ndim(x) == 1 and name != 'lengths'}
      yield {'file': file, 'text': reader.tokenizer.decode(ids), **more}


def _read(reader: RecordingInput, files: Sequence[str]) -> Rows:
  audio = np.zeros((len(files), reader.num_samples), np.float32)
  lengths = np.zeros(len(files), np.int32)
  for row, file in enumerate(files):
    check_exists(file)
    with prefix_errors(file):
      samples = reader.read_audio(file)
    audio[row, : len(samples)], lengths[row] = samples, len(samples)
  return canonical_rows({'audio': audio, 'audio_lengths': lengths}, 'audio')
