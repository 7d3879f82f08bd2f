"""The names of a classifier's classes, if its data or the checkpoint that it was imported from knows them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from praxis_lite.common.files import parse_json, read_plain, user_path
from praxis_lite.models.classifier import Classifier
from praxis_lite.runs.records.id2label import names_of_classes
from praxis_lite.runs.records.moved_files import FOLDER
from praxis_lite.runs.trained import TrainedModel


def find_class_names(model: TrainedModel) -> Sequence[str] | None:
  """Returns the name of each class, in the order of their numbers; None if the names are unknown.

  They are `classes` of a dataset of the run, or `id2label` of the Hugging Face checkpoint that the run began from.
  """
  if not isinstance(model.layer, Classifier):
    return None
  found = [getattr(config, 'classes', None) for config in model.config.datasets]
  if model.directory is not None:
    # The run may not be an imported one, and a file that is not a checkpoint's config.json names nothing.
    with contextlib.suppress(OSError, ValueError, AttributeError):
      values = parse_json(read_plain(user_path(model.directory) / FOLDER / 'config.json'))
      found.append(names_of_classes(values))
  return next((names for names in found if names and len(names) == model.layer.num_classes), None)


def add_class_names(examples: Iterable[dict[str, Any]], names: Sequence[str] | None) -> Iterator[dict[str, Any]]:
  """Yields examples, as JSON values, with a value `class`: the name of the class whose number is `prediction`."""
  for example in examples:
    number = example.get('prediction')
    if names and type(number) is int and 0 <= number < len(names):
      example = {'class': names[number]} | example
    yield example
