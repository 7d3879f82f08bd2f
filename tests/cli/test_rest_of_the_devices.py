"""`ici_mesh_shape=(-1,2,1)`: the rest of the devices, in every command that knows or is given their number."""

from __future__ import annotations

import json

import jax
import pytest

from praxis_lite.cli.main import main
from praxis_lite.common.config.overrides import apply_overrides
from praxis_lite.experiments.lm import SyntheticLmTiny
from praxis_lite.instruments.plan import plan
from praxis_lite.runs import open_run, run_train
from praxis_lite.training.experiment import configure

REST = ['lm.SyntheticLmTiny', '--set=task.ici_mesh_shape=(-1,2,1)']
MESH = 'replica 4 x data 2 x mdl 1 = 8 devices'


@pytest.fixture(autouse=True)
def eight_devices():
  """JAX runs already, so that no command chooses another number of devices."""
  assert jax.device_count() == 8


@pytest.mark.slow_cases
@pytest.mark.parametrize(
  'command', [['show'], ['show', '--sharding'], ['show', '--devices=8'], ['plan', '--topology=cpu:8', '--nocompile']]
)
def test_commands_show_the_mesh_of_the_number_they_are_given(capsys, command):
  assert main([command[0], *REST, *command[1:]]) == 0
  out, err = capsys.readouterr()
  assert MESH in out.replace('mesh replica=4 data=2 mdl=1', MESH)
  is_assumed = command[0] == 'show' and '--devices=8' not in command
  note = 'task.ici_mesh_shape = (-1, 2, 1): this is the mesh of 8 devices; --devices=8 shows another\n'
  assert err == (note if is_assumed else '')


@pytest.mark.parametrize('command', [['check'], ['show'], ['plan', '--topology=cpu:8', '--nocompile']])
def test_a_number_that_does_not_divide_is_one_line_with_the_path_of_the_field(capsys, command):
  code = main([*command, REST[0], '--set=task.ici_mesh_shape=(-1,3,1)'])
  out, err = capsys.readouterr()
  assert code in (1, 2)
  wrong = 'task: ici_mesh_shape = (-1, 3, 1): there are 8 devices, not a multiple of 3, the product of the other sizes'
  assert wrong in out + err and 'Traceback' not in err


@pytest.mark.parametrize(
  'given, sizes',
  [
    ('auto', (8, 1, 1)),
    ('-1', (8, 1, 1)),
    ('(auto,2,1)', (4, 2, 1)),
    ("(1,'auto',2)", (1, 4, 2)),
    ('(8,1,1)', (8, 1, 1)),
  ],
)
def test_auto_is_the_rest_of_the_devices_in_overrides_and_in_python(capsys, given, sizes):
  assert main(['show', REST[0], f'--set=task.ici_mesh_shape={given}', '--devices=8', '--noparameters']) == 0
  assert f'replica {sizes[0]} x data {sizes[1]} x mdl {sizes[2]} = 8 devices' in capsys.readouterr().out
  config = configure(SyntheticLmTiny)
  apply_overrides(config.roots(), [f'task.ici_mesh_shape={given}'])
  assert tuple(config.task.instantiate().mesh_sizes(8).values()) == sizes
  with_attribute = type('Given', (SyntheticLmTiny,), {'ici_mesh_shape': config.task.ici_mesh_shape})
  assert set(map(type, configure(with_attribute).task.ici_mesh_shape)) == {int}


@pytest.mark.parametrize('given', ['8', 'atuo', '(atuo,1,1)', '(1.5,1,1)'])
def test_another_shape_is_one_line_with_what_to_write(capsys, given):
  assert main(['show', REST[0], f'--set=task.ici_mesh_shape={given}']) == 2
  assert 'task.ici_mesh_shape: expected a tuple of integers' in (err := capsys.readouterr().err)
  assert 'as in (-1, 1, 1)' in err and err.count('\n') == 1


@pytest.mark.slow_cases
@pytest.mark.parametrize('command', [['show'], ['check'], ['plan', '--topology=cpu:8', '--nocompile']])
def test_devices_that_suffice_for_a_mesh_are_accepted(capsys, command):
  arguments = [*command, REST[0], '--set=task.ici_mesh_shape=(2,2,2)']
  assert [main([*arguments, f'--devices={n}']) for n in (8, 9, 7)] == [0, 0, 2]
  assert 'error: --devices=7: task.ici_mesh_shape = (2, 2, 2) needs 8 devices' in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_records_the_shape_as_it_was_given_and_loads_on_other_devices(tmp_path):
  config = configure(SyntheticLmTiny)
  apply_overrides(config.roots(), ['task.ici_mesh_shape=(-1,2,1)', 'task.train.num_train_steps=1'])
  config.datasets = config.datasets[:1]
  assert plan(config, None, 'cpu:4', compile=False).topology.num_devices == 4
  run_train(config, tmp_path)
  record = json.loads((tmp_path / 'run.json').read_text())
  assert record['launches'][0]['mesh'] == {'replica': 4, 'data': 2, 'mdl': 1}
  assert open_run(tmp_path).config.task.ici_mesh_shape == (-1, 2, 1)
  assert open_run(tmp_path).load(mesh=(1, -1, 2)).tasks.mesh.shape['data'] == 4
