"""Predicts for the examples in files.

a.npz      arrays by name, with the examples in dimension 0
a.jsonl    an example on each line, as an object of its values; or texts, for a dataset that reads them
a.png      an image, also .jpg, .jpeg, .bmp and .gif; needs a dataset of the run that reads images
a.txt      for a masked language model, a text on each line, in which [MASK] stands for tokens to fill in
a.wav      a recording, which is transcribed; needs a dataset of the run that reads recordings
others     read by one of the run's datasets instead of its own files
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from praxis_lite.common.config import field_names, target
from praxis_lite.common.errors import ConfigError, DataError, UserError, first_line, prefix_errors
from praxis_lite.common.files import open_plain, parse_json_line, unless_empty
from praxis_lite.common.mistakes import ShapesError
from praxis_lite.inputs.image_records import ImageRecordInput
from praxis_lite.inputs.labelled_text import LabelledTextInput
from praxis_lite.inputs.rows import Rows, canonical_rows
from praxis_lite.inputs.text_examples import TextExamplesInput
from praxis_lite.runs.class_names import add_class_names, find_class_names
from praxis_lite.runs.data_shapes import check_shapes, fit_rows, shapes_in_data
from praxis_lite.runs.file_readers import batches_of_names, check_exists, datasets_by_use, is_of, make_reader
from praxis_lite.runs.fill_files import fill_file, fills_texts
from praxis_lite.runs.programs import examples_of
from praxis_lite.runs.trained import TrainedModel
from praxis_lite.runs.transcribe_files import transcribe_files

_ARRAYS = ('.npz', '.jsonl')
_SOUNDS = ('.wav', '.flac', '.mp3', '.ogg', '.opus', '.m4a')  # Only .wav can be read; the error for the others says so.
_IMAGES = ('.png', '.jpg', '.jpeg', '.bmp', '.gif')


def predict_files(
  model: TrainedModel, files: Sequence[str], *, what: str = 'predict', batch_size: int = 32
) -> Iterator[dict[str, Any]]:
  """Yields the predictions for each example of some files, in order, as JSON values.

  Args:
    files: paths of .npz and .jsonl files, of images and recordings, or of files that a dataset of the run can read.
    what: 'predict' for the outputs of `model.predict`, or 'evaluate' for the outputs of `model.evaluate_examples`.
    batch_size: the number of rows computed together; batches that a dataset of the run reads have its own size.

  Raises:
    UserError: a file is missing, empty or cannot be read, or the model cannot compute its examples.
  """
  fills = what == 'predict' and fills_texts(model)
  for kind, together in itertools.groupby(files, lambda file: _kind(file, fills)):
    if kind == 'texts':
      for file in together:
        yield from fill_file(model, file, batch_size)
    elif kind == 'recordings' and what == 'predict':
      yield from transcribe_files(model, list(together), batch_size)
    elif kind == 'recordings':
      raise UserError(f'{next(together)}: has no transcript to compare with; pass a table of files and transcripts')
    else:
      yield from _predict_batches(model, list(together), what, batch_size)


def _kind(file: str, fills: bool) -> str:
  """Returns what a file contains: 'recordings', 'texts' to fill in, or other 'examples'."""
  if _ends_with(file, *_SOUNDS):
    return 'recordings'
  return 'texts' if fills and not _ends_with(file, *_ARRAYS, *_IMAGES) else 'examples'


def _ends_with(file: str, *endings: str) -> bool:
  return file.lower().endswith(endings)


def _predict_batches(model: TrainedModel, files: Sequence[str], what: str, batch_size: int) -> Iterator[dict[str, Any]]:
  compute = model.predict if what == 'predict' else model.evaluate_examples
  classes = find_class_names(model)
  structs = shapes_in_data(model.batch_struct) if any(_ends_with(file, *_ARRAYS) for file in files) else {}
  for where, batch, images in _batches_of_files(model, files, what, batch_size, structs):
    with prefix_errors(where):
      try:
        out = compute(batch)
      except ShapesError:
        check_shapes(batch, structs)
        raise
      weights = np.asarray(canonical_rows(batch, 'batch')['weights'])
      examples = add_class_names(examples_of(name_outputs(model, out), weights), classes)
    yield from ({'file': file} | example for file, example in zip(images, examples)) if images else examples


def _batches_of_files(
  model: TrainedModel, files: Sequence[str], what: str, batch_size: int, structs: Mapping[str, Any]
) -> Iterator[tuple[str, Mapping[str, Any], Sequence[str]]]:
  """Yields batches: (name of the files for messages, batch, the file of each row); the last is () except for images.

  Successive images share batches.
  """
  for are_images, together in itertools.groupby(files, lambda file: _ends_with(file, *_IMAGES)):
    if are_images:
      yield from _image_batches(model, list(together), batch_size)
      continue
    for file in together:
      check_exists(file)
      with prefix_errors(file):
        yield from ((file, batch, ()) for batch in _batches(model, file, what, batch_size, structs))


def _batches(
  model: TrainedModel, file: str, what: str, batch_size: int, structs: Mapping[str, Any]
) -> Iterator[Mapping[str, Any]]:
  if _ends_with(file, '.npy'):
    raise DataError("an array in a .npy has no name; save the arrays by name in a .npz, as np.savez('a.npz', x=x) does")
  if not _ends_with(file, *_ARRAYS) or _has_texts(model, file):
    yield from _dataset_for(model, file, what)
    return
  for rows in (_npz_rows if _ends_with(file, '.npz') else _jsonl_rows)(file, batch_size):
    yield fit_rows(rows, structs)


def name_outputs(model: TrainedModel, out: Any) -> dict[str, Any]:
  """Returns what a model has computed for examples, by name; raises ConfigError if it has computed nothing."""
  named = dict(out) if isinstance(out, Mapping) else {'prediction': out}
  if not named:
    raise ConfigError(
      f'{type(model.layer).__name__}.compute_loss reports no values of single examples; those are its second result, a '
      "dict such as {'loss': loss_B}"
    )
  return named


def _npz_rows(file: str, batch_size: int) -> Iterator[Rows]:
  try:
    with np.load(file) as stored:
      rows = canonical_rows(dict(stored), 'arrays')
  except DataError:
    raise
  except Exception as error:  # NumPy raises many kinds of errors.
    raise DataError(unless_empty(file, f'is not a file of NumPy arrays: {first_line(error)}')) from None
  if not len(rows['weights']):
    raise DataError('has no examples')
  for start in range(0, len(rows['weights']), batch_size):
    yield {name: x[start : start + batch_size] for name, x in rows.items()}


def _jsonl_rows(file: str, batch_size: int) -> Iterator[Rows]:
  with open_plain(file) as opened:
    lines = ((number, line) for number, line in enumerate(opened, 1) if line.strip())
    parsed = (_parse_example(number, line) for number, line in lines)
    first = next(parsed, None)
    if first is None:
      raise DataError('is empty')
    examples = itertools.chain([first], parsed)
    while group := list(itertools.islice(examples, batch_size)):
      names = first[1].keys()
      if other := next((number for number, example in group if example.keys() != names), None):
        raise DataError(f'line {other}: expected the names of line {first[0]}, {", ".join(names)}')
      for name in names:
        _check_equal_shapes(name, {number: example[name] for number, example in group})
      where = f'line {group[0][0]}' if len(group) == 1 else f'lines {group[0][0]} to {group[-1][0]}'
      yield canonical_rows({name: [example[name] for _, example in group] for name in names}, where)


def _check_equal_shapes(name: str, values: Mapping[int, Any]) -> None:
  """Raises DataError unless the values of a name, given by line number, all have the same shape."""
  shapes: dict[int, tuple[int, ...]] = {}
  for line, value in values.items():
    try:
      shapes[line] = np.shape(value)
    except ValueError:
      raise DataError(f'line {line}: {name!r} has lists of unequal lengths') from None
    first = next(iter(shapes))
    if shapes[line] != shapes[first]:
      raise DataError(
        f'line {line}: {name!r} has the shape {list(shapes[line])}, and {list(shapes[first])} in line {first}; '
        'examples of one batch need equal shapes: pad them, or use batch_size=1'
      )


def _parse_example(number: int, line: bytes) -> tuple[int, dict[str, Any]]:
  try:
    example = parse_json_line(line)
  except ValueError as error:
    raise DataError(f'line {number} is not JSON: {error}') from None
  if not isinstance(example, dict) or not example:
    got = type(example).__name__ if example else 'an empty one'
    raise DataError(f'line {number}: expected an object, with the values of an example by name, got {got}')
  return number, example


def _has_texts(model: TrainedModel, file: str) -> bool:
  """Whether the first line of a .jsonl file has texts, and a dataset of the run reads such lines."""
  if not (_ends_with(file, '.jsonl') and any(is_of(each, TextExamplesInput) for each in datasets_by_use(model))):
    return False
  with open_plain(file) as opened:
    first = next((line for line in opened if line.strip()), b'{}')
  with contextlib.suppress(ValueError):
    values = parse_json_line(first)
    return isinstance(values, dict) and any(isinstance(value, str) for value in values.values())
  return False


def _dataset_for(model: TrainedModel, file: str, what: str) -> Iterator[Mapping[str, Any]]:
  """Yields the batches of a file, read by the run's first dataset that reads files, preferably one for evaluation."""
  configs = datasets_by_use(model)
  for config in configs:
    field = next((name for name in ('path', 'file_pattern') if name in (field_names(config) or ())), None)
    if field is not None:
      whole: dict[str, Any] = {field: file, 'is_training': False, 'shuffle': False, 'num_epochs': 1}
      whole |= {'split': None} if 'split' in (field_names(config) or ()) else {}
      whole |= {name: None for name in ('examples', 'pairs') if name in (field_names(config) or ())}
      if is_of(config, LabelledTextInput):
        whole['unlabelled'] = what == 'predict'
      try:
        yield from config.clone(**whole).instantiate()
      except DataError as error:
        kind = target(config).__name__
        remedy = f"the run's {kind} reads files of this kind; .npz and .jsonl files need no dataset"
        raise DataError(f'{error} ({remedy})') from None
      return
  kinds = ', '.join(getattr(config.__fn_or_cls__, '__name__', 'a function') for config in configs) or 'none'
  raise ConfigError(f'the datasets of the run read no files: {kinds}; pass .npz or .jsonl files')


def _image_batches(
  model: TrainedModel, files: Sequence[str], batch_size: int
) -> Iterator[tuple[str, Rows, Sequence[str]]]:
  """Yields batches of images, preprocessed for evaluation by the run's first dataset that reads images."""
  reader = make_reader(model, ImageRecordInput, 'file_pattern', files[0], 'images')
  for where, several in batches_of_names(files, batch_size):
    for file in several:
      check_exists(file)
    yield where, read_images(reader, several), several


def read_images(reader: ImageRecordInput, files: Sequence[str]) -> Rows:
  """Returns a batch of images, each preprocessed by `reader`; raises DataError if a file cannot be read."""
  images = []
  for file in files:
    try:
      with open_plain(file) as opened, prefix_errors(file):
        images.append(reader.read_image(opened.read()))
    except OSError as error:
      raise DataError(f'{file}: {error.strerror}') from None
  return canonical_rows({'image': np.stack(images)}, 'image')
