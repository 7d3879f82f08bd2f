"""Lists which implementation each kind of layer of a model uses, and why."""

from __future__ import annotations

from praxis_lite.layers.base import Layer


def describe_implementations(model: Layer, length: int, packed: bool) -> list[str]:
  """Returns a line for each choice of an implementation in a model.

  The line names one of the layers that made this choice, and says how many others did.

  Sequences have `length` tokens; `packed` says whether a row has several.
  """
  layers: dict[str, list[str]] = {}
  for layer in model.descendants():
    if text := layer.implementation_of(length, packed):
      layers.setdefault(text, []).append(layer.path_name)
  more = {text: f' and {len(paths) - 1} more' if len(paths) > 1 else '' for text, paths in layers.items()}
  return [f'{paths[0]}{more[text]}: {text}' for text, paths in layers.items()]
