"""The fuzzer's whole tasks: random splits of all they hold, compared with one device."""

import numpy as np
import pytest

from praxis_lite.training import partitioned_step
from tools import hunt_shardings
from tools.graphs import tasks
from tools.graphs.tasks import Task
from tools.hunt.cases import num_devices

FIELDS = {
  **{'optimizer': 'momentum', 'num_microbatches': 1, 'ema_decay': 0.0, 'clip': 0.0, 'batch': 4, 'seed': 1},
  **{'dropout': 0.0, 'classes': 3, 'groups': 2, 'height': 4, 'width': 3, 'filters': (1,), 'filter_size': (2, 1)},
  **{'channels': 2, 'strides': (1, 1), 'padding': 'SAME', 'norm': None, 'pooling': None},
}
# Rows over one axis; beside the other, which splits nothing, XLA multiplies a filter's gradient.
GROUPED = Task(
  'convolutions',
  tuple(FIELDS.items()),
  mesh=(('a', 2), ('b', 2)),
  inputs=(('1', (('a',),)), ('4', (('a',), (), (), ()))),
)
TOWER = Task(
  'tower',
  (
    *{**FIELDS, 'dims': 6, 'length': 3, 'hidden_dims': 9, 'heads': 2, 'head_dims': 3, 'rows': 5}.items(),
    ('layers', ('heads', 'memory')),
    ('dispatch', 'dropless'),
  ),
  mesh=(('a', 2), ('b', 3)),
  weights=(('network.layer_0.w', (('b',), ('a',))), ('network.layer_1.w', (('a',), ('b',)))),
  activations=(('network.layer_0.out', (('a',), (), ('b',))), ('network.out', ((), ('b', 'a'), ()))),
  steps=('train', 'evaluate'),
)


def draw(seed, **options):
  return tasks.draw_task(np.random.default_rng(seed), **options)


def test_a_task_is_a_function_of_its_seed():
  assert draw(3) == draw(3) and draw(3) != draw(4)


def test_layouts_of_a_model_differ_in_all_but_the_model():
  first, second = (tasks.draw_task(np.random.default_rng(i), of_model=np.random.default_rng(9)) for i in (1, 2))
  assert first.alone() == second.alone() and first != second
  reports = [hunt_shardings.draw_case('tasks', 60, number) for number in range(6)]
  assert [case.alone() == reports[0].alone() for case in reports] == [True] * 3 + [False] * 3


@pytest.mark.slow_cases
@pytest.mark.parametrize('family', ['lm', 'tower', 'convolutions'])
def test_tasks_of_each_family_have_splits_of_all_they_hold(family):
  drawn = [draw(seed, only=family) for seed in range(3)]
  assert all(case.family == family and 2 <= num_devices(case.mesh) <= 24 for case in drawn)
  assert any(case.weights for case in drawn) and any(case.inputs for case in drawn)
  expected = {'lm': '.attention.', 'tower': 'network.', 'convolutions': '.conv_'}[family]
  assert any(expected in path for case in drawn for path, _ in case.activations)


@pytest.mark.slow
def test_a_task_with_layers_of_a_users_own_is_right():
  outcome = TOWER.run()
  assert outcome.kind == 'right', outcome.why
  specs = TOWER.results('float32')[0]
  assert {'first_mdl_vars network.layer_1.w', 'loss of step 1', 'loss of evaluation'} <= {*specs}
  assert any(name.startswith('opt_states') and 'gradients' in name for name in specs)


@pytest.mark.slow
def test_a_wrong_gradient_is_found(monkeypatch):
  assert GROUPED.run().kind == 'right'
  monkeypatch.setattr(partitioned_step, 'guard', lambda lowered: [])
  outcome = GROUPED.run()
  assert outcome.kind == 'wrong' and 'conv_0.w' in outcome.why
  assert all(case != GROUPED for case in GROUPED.smaller())
  assert 'Task(\n' in GROUPED.script() and "family='convolutions'" in GROUPED.script()
