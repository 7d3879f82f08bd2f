"""Today's names of modules, classes and functions that moved; recorded configs and users' files may have old ones."""

from __future__ import annotations

import re

# Classes and functions, relative to praxis_lite, that were renamed, or moved to another module.
_MOVED_OBJECTS = {
  'inputs.arrays.ArrayInput': 'inputs.random_access.ArrayInput',
  'inputs.stdlib_text.stdlib_files': 'inputs.text.stdlib_files',
  'layer.splits.ActivationSplit': 'layers.base.ActivationSplit',
  'layer.splits.SplitMapping': 'layers.base.SplitMapping',
  'layer.splits.WeightSplit': 'layers.base.WeightSplit',
  'layers.attention.AttentionActivationSplit': 'layers.attention_heads.AttentionActivationSplit',
  'layers.attention.Projection': 'layers.projections.Projection',
  'layers.attention.ProjectionWeightSplit': 'layers.projections.ProjectionWeightSplit',
  'layers.convolutions.Conv2D': 'layers.images.Conv2D',
  'layers.image_networks.ConvNet': 'layers.images.ConvNet',
  'layers.image_networks.Mlp': 'layers.images.Mlp',
  'layers.mamba2.GroupWeightSplit': 'layers.grouped_mixer.GroupWeightSplit',
  'layers.pooling.GlobalPooling': 'layers.images.GlobalPooling',
  'layers.pooling.Pooling': 'layers.images.Pooling',
  'layers.transformer.TransformerBlock': 'layers.transformer_block.TransformerBlock',
  'layers.transformer.TransformerLm': 'layers.transformer_lm.TransformerLm',
  'learning.schedules.Linear': 'training.learning.schedules.LinearRamp',
  'models.image_features.ImageFeatureModel': 'models.classifier.ImageFeatureModel',
  'models.without_adapters': 'models.remove_adapters',
  'models.without_quantization': 'models.remove_quantization',
  'runs.loggers.AimLogger': 'runs.loggers.services.AimLogger',
  'runs.loggers.CometLogger': 'runs.loggers.services.CometLogger',
  'runs.loggers.LoggedRun': 'runs.loggers.base.LoggedRun',
  'runs.loggers.Logger': 'runs.loggers.base.Logger',
  'runs.loggers.MlflowLogger': 'runs.loggers.services.MlflowLogger',
  'runs.loggers.PrometheusLogger': 'runs.loggers.services.PrometheusLogger',
  'runs.loggers.WandbLogger': 'runs.loggers.services.WandbLogger',
  'training.learning.Linear': 'training.learning.LinearRamp',
  'training.learning.schedules.Linear': 'training.learning.schedules.LinearRamp',
}
# Modules and packages, relative to praxis_lite, as they were called in the first releases.
_MOVED = {
  'call': 'layers.base.call',
  'config': 'common.config',
  'decoding': 'models.decoding',
  'errors': 'common.errors',
  'experiment': 'training.experiment',
  'explain': 'instruments.explain',
  'hf': 'bridges.hf',
  'hosts': 'runs.cluster',
  'layer': 'layers.base',
  'learning': 'training.learning',
  'partitioning.hlo': 'instruments.plan.hlo',
  'partitioning': 'sharding',
  'plan': 'instruments.plan',
  'records': 'runs.records',
  'registry': 'training.registry',
  **{
    f'runs.loggers.{name}_logger': 'runs.loggers.services' for name in ('aim', 'comet', 'mlflow', 'prometheus', 'wandb')
  },
  'runtime': 'runs',
  'sharding.hlo': 'instruments.plan.hlo',
  't5x': 'bridges.t5x',
  'task': 'training.task',
  'testing': 'instruments.testing',
  'training.distillation': 'training.post_training',
  'training.preferences': 'training.post_training',
  'trees': 'common.trees',
  'verification': 'instruments.verification',
  'weighted': 'common.weighted',
  'weights': 'sharding.weights',
}


def to_current_names(text: str) -> str:
  """Returns a text with today's names of the modules, classes and functions in it."""
  return re.sub(r'\bpraxis_lite(\.\w+)+(:\w+)?', lambda match: current_name(match[0]), text)


def current_name(name: str) -> str:
  """Returns today's name of a module, or of something in it such as 'praxis_lite.layer:WeightSplit'.

  Names that did not change are returned as they are.
  """
  package, _, rest = name.partition('.')
  if package != 'praxis_lite':
    return name
  if moved := _MOVED_OBJECTS.get(rest.replace(':', '.')):
    return 'praxis_lite.' + (':'.join(moved.rsplit('.', 1)) if ':' in rest else moved)
  for old, new in _MOVED.items():
    if rest == old or rest.startswith((f'{old}.', f'{old}:')):
      return f'praxis_lite.{new}{rest.removeprefix(old)}'
  return name
