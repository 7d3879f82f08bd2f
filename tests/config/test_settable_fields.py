"""Fields of layers in messages have the paths that `--set` takes."""

import jax
import jax.numpy as jnp
import pytest

from praxis_lite import REQUIRED, Config, Layer, SingleTask, SplitMapping, WeightHParams, child, template
from praxis_lite.common.config.fields_at_fault import name_settable_fields
from praxis_lite.common.config.overrides import apply_overrides
from praxis_lite.common.errors import UserError
from praxis_lite.layers import Linear, RMSNorm
from praxis_lite.models import BaseModel, weighted_mean
from praxis_lite.training import partition_spmd_model


class Weights(SplitMapping):
  wt: tuple | None = None


class Block(Layer):
  dims: int = REQUIRED
  width: int = 4
  epsilon: float = 1e-6
  norm_tpl: Config = template(RMSNorm)
  weight_split_dims_mapping: Config = template(Weights)

  def setup(self):
    split = self.weight_split_dims_mapping.wt
    self.create_child('norm', self.norm_tpl.clone(dims=self.dims, epsilon=self.epsilon))
    self.create_variable('w', WeightHParams((self.width, self.width), tensor_split_dims_mapping=split))
    self.create_variable('b', WeightHParams((self.dims,)))

  def __call__(self, x_BD):
    return self.norm(x_BD) @ self.theta.w + self.theta.b


class Stack(BaseModel):
  dims: int = 4
  block_tpl: Config = template(Block)

  blocks: list[Block] = child()
  other: Linear = child()

  def setup(self):
    self.create_children('blocks', templates=[self.block_tpl.clone(dims=self.dims)] * 2)
    self.create_child('other', Config(Linear, input_dims=self.dims, output_dims=1))

  def compute_predictions(self, batch):
    x_BD = batch['x']
    for block in self.blocks:
      x_BD = block(x_BD)
    return self.other(x_BD)[:, 0]

  def compute_loss(self, predictions, batch):
    return {'loss': weighted_mean(jnp.square(predictions), batch['weights'])}, {}


def message_of(*overrides):
  task = Config(SingleTask, model=Config(Stack), mesh_axis_names=('data',))
  apply_overrides({'task': task}, overrides)
  with pytest.raises(UserError) as told:
    partition_spmd_model(task, jax.random.key(0), {'x': jax.ShapeDtypeStruct((2, 4), jnp.float32)}).train_step.trace()
  return str(told.value)


@pytest.mark.parametrize(
  ('override', 'field'),
  [
    (
      "task.model.block.weight_split_dims_mapping.wt=('x', None)",
      'task.model.block.weight_split_dims_mapping.wt: axis',
    ),
    ("task.model.block.weight_split_dims_mapping.wt=('data',)", 'dimension in task.model.block.weight_split_dims_map'),
    ('task.model.block.norm.dtype=int8', 'task.model.block.norm.dtype: expected a floating dtype'),
    ('task.model.block.width=3', '; task.model.block.width = 4 would fit'),
  ],
)
def test_a_field_of_a_child_of_a_list(override, field):
  assert field in message_of(override)


@pytest.mark.parametrize('field', ['blocks_0.dims', 'other.input_dims', 'blocks_0.w.shape', 'stack_2.py', 'blocks_0'])
def test_what_no_one_can_set_does_not_change(field):
  """A field that the parent sets, a field of a layer without a template, and what is no field."""
  error = UserError(f'{field}: wrong')
  name_settable_fields(error, Config(Stack), 'task.model')
  assert str(error) == f'{field}: wrong'


def test_a_weight_without_a_mapping_beside_one_that_has_a_mapping():
  layer = Config(Block, name='block', dims=4)
  declared = layer.instantiate().abstract_init()
  assert declared['b'].full_split_dims_mapping.sources == ('block.weight_split_dims_mapping.wt is not set',)
  layer.weight_split_dims_mapping.wt = ('data', None)
  declared = layer.instantiate().abstract_init()
  assert declared['b'].full_split_dims_mapping.sources == ('block.b.tensor_split_dims_mapping is not set',)
