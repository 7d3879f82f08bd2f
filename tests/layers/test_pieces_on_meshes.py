"""Small layers on meshes with an axis of 3 and an unused axis: results and every gradient are those of one device."""

from __future__ import annotations

import jax
import pytest
from jax.sharding import AxisType, NamedSharding
from padded_layers import place_variables, step_on_mesh
from small_layers import AXES, BATCH, CASES, X
from test_every_layer import assert_close, on_one_device, step

LAYERS = (
  'AdaptedFeedForward',
  'BiTemperedSoftmax',
  'DiffusionTransformer',
  'GumbelQuantizer',
  'ImageDecoder',
  'ImageEncoder',
  'LookupFreeQuantizer',
  'MultitaskResidualAdapter',
  'RandomVectorQuantizer',
  'SigmoidCrossEntropy',
  'SpectralNormLinear',
  'StackingOverTime',
  'StochasticResidual',
  'VectorQuantizer',
  'WeightNormalizedLinear',
)
ALSO_ROWS = (
  'MultitaskResidualAdapter',
  'SpectralNormLinear',
  'StackingOverTime',
  'StochasticResidual',
  'VectorQuantizer',
)
NAMES = (*AXES, 'unused')


@pytest.mark.slow
@pytest.mark.parametrize('name, sizes', [*((n, (1, 1, 3, 2)) for n in LAYERS), *((n, (1, 3, 1, 2)) for n in ALSO_ROWS)])
def test_an_axis_of_3_and_an_unused_axis_change_nothing(name, sizes):
  variables, args, _, expected = on_one_device(name)
  config = CASES[name]().config.set(mesh_axis_names=NAMES)
  if name == 'StackingOverTime':  # Its length is split too.
    config.activation_split_dims_mapping.out = (BATCH[0], ('data', 'mdl'), None)
    config.inputs_split_mapping = {'map_3d': (None, ('data', 'mdl'), None)}
    assert X.shape[1] % 3
  layer = config.instantiate()
  mesh = jax.make_mesh(sizes, NAMES, axis_types=(AxisType.Auto,) * 4, devices=jax.devices()[:6])

  args = jax.device_put(args, NamedSharding(mesh, jax.sharding.PartitionSpec()))
  padded = place_variables(layer, variables, mesh)
  assert_close(step_on_mesh(step, layer, variables, mesh)(padded, args), expected, 1e-5)
