"""The names of a classifier's classes, if its data or the checkpoint that it was imported from knows them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from praxis_lite.common.files import user_path
from praxis_lite.models.classifier import Classifier
from praxis_lite.runs.records.moved_files import FOLDER
from praxis_lite.runs.trained import TrainedModel


def find_class_names(model: TrainedModel) -> Sequence[str] | None:
  """Returns the name of each class, in the order of their numbers; None if the names are unknown.

  They are `classes` of a dataset of the run, or `id2label` of the Hugging Face checkpoint that the run began from.
  """
  if not isinstance(model.layer, Classifier):
    return None
  found = [getattr(config, 'classes', None) for config in model.config.datasets]
  labels: object = None
  imported = None if model.directory is None else user_path(model.directory) / FOLDER / 'config.json'
  if imported is not None and imported.is_file():
    with contextlib.suppress(ValueError, AttributeError):  # A file that is not that of a checkpoint names nothing.
      labels = json.loads(imported.read_bytes()).get('id2label')
  if isinstance(labels, dict):
    names = [str(labels.get(str(number))) for number in range(len(labels))]
    # Without names, transformers writes these.
    found.append(None if names == [f'LABEL_{number}' for number in range(len(names))] else names)
  return next((names for names in found if names and len(names) == model.layer.num_classes), None)


def add_class_names(examples: Iterable[dict[str, Any]], names: Sequence[str] | None) -> Iterator[dict[str, Any]]:
  """Yields examples, as JSON values, with the name of the class whose number is their `prediction` as `class`.

  Args:
    examples: what a model predicts, or reports in evaluation, for single examples.
    names: see `find_class_names`.
  """
  for example in examples:
    number = example.get('prediction')
    is_class = names is not None and type(number) is int and 0 <= number < len(names)
    yield {'class': names[number]} | example if names and is_class else example
