"""Maps the names of earlier versions, as in records or overrides, to the present names."""

from __future__ import annotations

# Modules and packages relative to praxis_lite: the names up to version 0.1, and the present names.
_MOVED = {
  'config': 'common.config',
  'decoding': 'models.decoding',
  'experiment': 'training.experiment',
  'hf': 'bridges.hf',
  'layer': 'layers.base',
  'learning': 'training.learning',
  'partitioning': 'sharding',
  'runtime': 'runs',
  'task': 'training.task',
  'weights': 'sharding.weights',
}


def current_name(name: str) -> str:
  """Returns the present name for an earlier one, such as 'praxis_lite.layer:WeightSplit'; returns others unchanged."""
  package, _, rest = name.partition('.')
  for old, new in _MOVED.items():
    if package == 'praxis_lite' and rest.startswith((f'{old}.', f'{old}:')):
      return f'praxis_lite.{new}{rest.removeprefix(old)}'
  return name
