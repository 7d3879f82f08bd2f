"""What is said of experts: what is wrong with them, what a token uses of them, and what a device stores of them."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from praxis_lite.common.config import Config
from praxis_lite.instruments.explain import check, explain_task, format_parameter_table, parameter_table
from praxis_lite.layers import MoeFeedForward
from praxis_lite.models import set_sharding, transformer_lm
from praxis_lite.training import registry
from praxis_lite.training.experiment import configure
from praxis_lite.training.task import SingleTask

AXES = ('data', 'expert')
TOKENS = jax.ShapeDtypeStruct((8, 4), np.int32)
BATCH = {'ids': TOKENS, 'labels': TOKENS, 'weights': jax.ShapeDtypeStruct((8, 4), np.float32)}


def task(mesh=(2, 4), expert_axis='expert', router=None, **fields):
  experts = Config(MoeFeedForward, num_experts=8, **fields)
  experts.router_tpl.set(**{'load_balance_loss_weight': 0.01} if router is None else router)
  model = transformer_lm(vocab_size=16, model_dims=8, num_layers=2, num_heads=2, hidden_dims=16, experts=experts)
  splits = {'batch_axes': AXES, 'data_axis': 'data', 'mdl_axis': None}
  model = set_sharding(model.set(packed=False), expert_axis=expert_axis, **splits)
  if expert_axis is None:
    model.lm_tpl.transformer_tpl.layers_tpl.ff_tpl.weight_split_dims_mapping.wt = ('expert', 'data', None)
  config = Config(SingleTask, model=model, mesh_axis_names=AXES, ici_mesh_shape=mesh)
  config.train.inputs_split_mapping = {'map_2d': (AXES, None)}
  return config


@pytest.mark.slow_cases
@pytest.mark.parametrize(
  ('fields', 'kind', 'path', 'message'),
  [
    ({'expert_axis': None}, 'gathered experts', 'ff.expert_axis', 'split over 4 devices, and is None'),
    ({}, 'large exchange', 'ff.exchange_factor', 'room for 4 times its tokens'),
    ({'router': {}, 'dispatch': 'capacity'}, 'unbalanced experts', 'ff.router', 'nothing keeps experts equally loaded'),
    (
      {'router': {'choice': 'expert'}, 'dispatch': 'capacity'},
      'experts see later tokens',
      'ff.router.choice',
      'knows what comes next',
    ),
  ],
)
def test_a_problem_of_experts_is_found_alone(fields, kind, path, message):
  (problem,) = check(task(**fields), BATCH)
  assert (problem.kind, problem.path) == (kind, f'lm.transformer.layers.{path}')
  assert message in problem.message


@pytest.mark.slow_cases
@pytest.mark.parametrize('fields', [{'dispatch': 'capacity'}, {'exchange_factor': 2.0}, {'mesh': (4, 2)}])
def test_nothing_is_said_of_experts_that_are_right(fields):
  assert not check(task(**fields), BATCH)


@pytest.mark.slow
def test_parameters_and_slots_on_each_device_fall_with_the_devices_that_split_experts():
  def of_experts(parts):
    report = explain_task(task(mesh=(1, parts)), BATCH)
    return [
      e.bytes_per_device for e in (*report.variables, *report.slots) if e.path.endswith(('.gate', '.up', '.down'))
    ]

  one, eight = of_experts(1), of_experts(8)
  assert len(one) == 9 and [8 * b for b in eight] == one


def test_the_parameters_that_a_token_uses_are_counted():
  config = configure(registry.get('moe.Mixtral8x7B')).task.instantiate()
  rows = parameter_table(config, config.mesh_sizes())
  table = format_parameter_table(rows, config.mesh_sizes())
  assert '46,702,792,704 parameters (12,879,925,248 active for each token), all trained' in table
  (gate,) = (row for row in rows if row.path.endswith('ff.gate'))
  assert gate.remarks == ('one token uses 0.25 of it',)
  assert gate.num_active * 4 == 32 * 8 * 4096 * 14336
