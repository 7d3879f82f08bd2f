"""Where names are today that were recorded, or typed, before the package had wings."""

from __future__ import annotations

# Modules and packages, relative to praxis_lite, until 0.1 and since.
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
  """Returns the name of today for one such as 'praxis_lite.layer:WeightSplit'; others are returned as they are."""
  package, _, rest = name.partition('.')
  for old, new in _MOVED.items():
    if package == 'praxis_lite' and rest.startswith((f'{old}.', f'{old}:')):
      return f'praxis_lite.{new}{rest.removeprefix(old)}'
  return name
