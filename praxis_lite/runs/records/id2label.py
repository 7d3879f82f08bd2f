"""The field `id2label` in a config.json of Hugging Face: the numbers and the names of a classifier's classes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def read_id2label(values: Mapping[str, Any]) -> dict[str, Any] | None:
  """Returns `id2label` of config.json, which has an entry for each class; None if the file does not have it."""
  labels = values.get('id2label')
  return labels if isinstance(labels, dict) else None


def names_of_classes(values: Mapping[str, Any]) -> list[str] | None:
  """Returns the names of classes, in the order of their numbers; None if one is missing, or all are default names."""
  labels = read_id2label(values) or {}
  found = (labels.get(str(number)) for number in range(len(labels)))
  names = [name for name in found if isinstance(name, str)]
  # Without names, transformers writes these.
  is_named = len(names) == len(labels) and names != [f'LABEL_{number}' for number in range(len(names))]
  return names if is_named else None
