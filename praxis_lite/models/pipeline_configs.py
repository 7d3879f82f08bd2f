"""set_pipeline: the usual way to run the blocks of a model in stages."""

from __future__ import annotations

from typing import Any

from praxis_lite.common.config import Config, field_names, target
from praxis_lite.common.errors import ConfigError
from praxis_lite.layers.pipeline import Pipelined
from praxis_lite.layers.repeat import Repeat
from praxis_lite.layers.transformer import PipelinedTransformer, RepeatedTransformer
from praxis_lite.models.masked_image_model import MaskedAutoencoder
from praxis_lite.models.networks import LmT, find_network, is_a, stack_fields
from praxis_lite.models.two_towers import TwoTowerModel


def set_pipeline(
  config: Config[LmT],
  *,
  num_stages: int,
  num_microbatches: int | None = None,
  microbatch_size: int | None = None,
  circular_repeat: int = 1,
  batch_axes: str | tuple[str, ...] | None = None,
  gather_axes: str | tuple[str, ...] | None = None,
  stage_remat: str = 'none',
  stage_axis: str | None = 'stage',
) -> Config[LmT]:
  """Makes a model run its blocks in stages of a pipeline; changes the config in place, and returns it.

  The variables are the same as for a scan over blocks, so checkpoints can be restored with and without a pipeline.
  An encoder-decoder, two towers and a masked autoencoder have two pipelines on the same stages; the second one begins
  when the first one has ended.

  Args:
    config: the config of a model or of its network, as for `set_sharding`. Each of its stacks of blocks must be a
      `Repeat`; the pipeline gets the fields of the `Repeat`.
    num_stages, num_microbatches, microbatch_size, circular_repeat: see `Pipelined`.
    batch_axes, gather_axes, stage_remat: see `Pipelined`.
    stage_axis: the mesh axis of the stages; None runs all stages on each device.

  Raises:
    ConfigError: a stack is not a `Repeat`, or there is none.
  """
  fields: dict[str, Any] = {'num_stages': num_stages, 'num_microbatches': num_microbatches}
  fields |= {'microbatch_size': microbatch_size, 'circular_repeat': circular_repeat, 'stage_remat': stage_remat}
  fields |= {'batch_axes': batch_axes, 'gather_axes': gather_axes}
  stacks = [(network, name) for network in _networks(config) for name in stack_fields(network)]
  if not stacks:
    network = target(find_network(config))
    name = getattr(network, '__name__', network)
    raise ConfigError(f'set_pipeline: {name} has no stack of repeated blocks, so it has no stages')
  pipelined = [_to_stages(getattr(network, name), name).set(**fields) for network, name in stacks]
  for (network, name), stack in zip(stacks, pipelined):
    stack.weight_split_dims_mapping.stages = None if stage_axis is None else (stage_axis,)
    setattr(network, name, stack)
  return config


def _networks(config: Config) -> list[Config]:
  """Returns the configs of the networks whose stacks become stages."""
  if is_a(config, TwoTowerModel):
    return [config.image_tpl, config.text_tpl]
  if is_a(config, MaskedAutoencoder):
    return [config.network_tpl, config.patch_decoder_tpl]
  return [find_network(config)]


def _to_stages(repeated: Config, field: str) -> Config:
  """Returns the config of a pipeline with the fields of the `Repeat` config `repeated`, which messages call `field`."""
  if not is_a(repeated, Repeat):
    name = getattr(target(repeated), '__name__', target(repeated))
    raise ConfigError(
      f'set_pipeline: {field} is the Config of {name}; stages need repeated blocks, so it must be that of a Repeat '
      'or a RepeatedTransformer'
    )
  of_transformer = is_a(repeated, RepeatedTransformer)
  pipelined: Config[Any] = Config(PipelinedTransformer if of_transformer else Pipelined)
  for name in field_names(RepeatedTransformer if of_transformer else Repeat) or ():
    if name in repeated.__arguments__ and name != 'weight_split_dims_mapping':
      setattr(pipelined, name, getattr(repeated, name))
  return pipelined
