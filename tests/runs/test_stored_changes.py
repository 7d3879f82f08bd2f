"""Checkpoints that leave out what another run's checkpoint has: they are small, and read like whole ones."""

from __future__ import annotations

import contextlib
import shutil
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from praxis_lite.bridges.hf import export_run
from praxis_lite.bridges.hf.files import read_folder
from praxis_lite.checkpoints import Checkpointer
from praxis_lite.checkpoints.base import Base
from praxis_lite.checkpoints.seal import SEAL
from praxis_lite.checkpoints.stored import checkpoints_at
from praxis_lite.checkpoints.streamed import stored_arrays
from praxis_lite.common.config import Config
from praxis_lite.common.errors import CheckpointError, ConfigError
from praxis_lite.common.trees import leaves, path_name
from praxis_lite.experiments.lm import SyntheticLmTiny, SyntheticLoraTiny
from praxis_lite.layers import QuantizedWeights
from praxis_lite.models import quantize_weights
from praxis_lite.runs import open_run, run_train
from praxis_lite.runs.init_from import constant_variables
from praxis_lite.runs.loop.start import _base_of_newest
from praxis_lite.runs.quantized import quantize_run
from praxis_lite.training.experiment import configure
from praxis_lite.training.state import TrainState

pytestmark = pytest.mark.usefixtures('shared_programs')


def base_config(steps=1, seed=0):
  config = configure(SyntheticLmTiny)
  config.task.train.set(num_train_steps=steps, save_interval_steps=1, eval_interval_steps=None)
  config.datasets = [data.clone(seed=seed) if data.is_training else data for data in config.datasets[:1]]
  return config


def tuned_config(base, steps, changes_only=True, mesh=(1, 1, 1)):
  config = configure(SyntheticLoraTiny)
  config.task.train.set(num_train_steps=steps, save_interval_steps=2, eval_interval_steps=None)
  config.task.train.learner.schedule.set(warmup_steps=1, total_steps=8)
  config.task.train.init_from.set(path=str(base), store_changes_only=changes_only)
  config.task.set(ici_mesh_shape=mesh)
  config.datasets = config.datasets[:1]
  return config


def variables_of(directory):
  return leaves(open_run(directory).load().variables)


def assert_equal(found, expected):
  assert found.keys() == expected.keys()
  for path, value in expected.items():
    np.testing.assert_array_equal(found[path], value, err_msg=path_name(path))


@pytest.mark.slow
def test_checkpoints_of_adapters_alone(tmp_path):
  run_train(base_config(), tmp_path / 'base')
  run_train(tuned_config(tmp_path / 'base', 4, changes_only=False), tmp_path / 'whole')
  run_train(tuned_config(tmp_path / 'base', 2), tmp_path / 'parts')
  (stored,) = checkpoints_at(tmp_path / 'parts')
  names = [name for name in stored.variables() if name.startswith('mdl_vars.')]
  own = [name for name in names if 'lora' in name]
  stored_arrays(str(stored.folder / 'state'), dict.fromkeys(own))
  for name in names:
    if name not in own:
      with pytest.raises(CheckpointError, match='cannot be read'):
        stored_arrays(str(stored.folder / 'state'), {name: None})

  # On another mesh, the run goes on and ends almost as the whole one; on the same mesh, with the same bits.
  shutil.copytree(tmp_path / 'parts', tmp_path / 'split')
  run_train(tuned_config(tmp_path / 'base', 4), tmp_path / 'parts')
  whole = variables_of(tmp_path / 'whole')
  assert_equal(variables_of(tmp_path / 'parts'), whole)
  run_train(tuned_config(tmp_path / 'base', 4, mesh=(1, 3, 1)), tmp_path / 'split')
  split = variables_of(tmp_path / 'split')
  assert all(np.allclose(split[path], x, atol=1e-5) for path, x in whole.items())

  # What reads checkpoints without a mesh reads them too.
  newest, full = checkpoints_at(tmp_path / 'parts')[-1], checkpoints_at(tmp_path / 'whole')[-1]
  assert not newest.damage() and newest.num_bytes < full.num_bytes
  assert all(difference.largest == 0 for difference in newest.differences(full))
  newest.copy(tmp_path / 'copy', optimizer=False)
  assert_equal(variables_of(tmp_path / 'copy'), whole)
  config = tuned_config(tmp_path / 'base', 4)
  for name in ('parts', 'whole'):
    export_run(config, tmp_path / name, tmp_path / f'exported_{name}')
  one, other = (read_folder(tmp_path / f'exported_{name}') for name in ('parts', 'whole'))
  assert all(np.array_equal(one[name].read_all(), other[name].read_all()) for name in other)

  # Both may move together; a base that is missing, or another one, is an error.
  (tmp_path / 'moved').mkdir()
  for name in ('base', 'parts'):
    (tmp_path / name).rename(tmp_path / 'moved' / name)
  assert_equal(variables_of(tmp_path / 'moved' / 'parts'), whole)
  base = tmp_path / 'moved' / 'base'
  base.rename(tmp_path / 'away')
  with pytest.raises(CheckpointError, match=r'has only what training has changed, and needs .*1, which does not exist'):
    variables_of(tmp_path / 'moved' / 'parts')
  run_train(base_config(seed=1), base)
  with pytest.raises(CheckpointError, match='which is another checkpoint now; put the one back'):
    variables_of(tmp_path / 'moved' / 'parts')
  assert checkpoints_at(tmp_path / 'moved' / 'parts')[-1].damage().keys() == {'base'}


@pytest.mark.slow
def test_a_run_that_cannot_leave_anything_out(tmp_path):
  run_train(base_config(), tmp_path / 'base')
  config = base_config(2)
  config.task.train.init_from.set(path=str(tmp_path / 'base'), store_changes_only=True)
  with pytest.raises(ConfigError, match=r'init_from.store_changes_only: the learner trains all variables'):
    run_train(config, tmp_path / 'run')
  config.task.train.init_from.path = None
  with pytest.raises(ConfigError, match=r'store_changes_only: checkpoints can leave out only .* set task.train.init'):
    run_train(config, tmp_path / 'run')


# ---------------------------------------------------------------- without training


def state_of(**variables):
  return TrainState(np.int32(1), {name: jnp.asarray(x) for name, x in variables.items()}, None)


def structs_of(state):
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype), state)


def save(directory, base=None, **variables):
  """Saves variables as step 1 of a run; returns its checkpoint as a base that has all of them."""
  with contextlib.closing(Checkpointer(directory)) as checkpointer:
    checkpointer.base = base
    state = state_of(**variables)
    checkpointer.save(1, state, structs_of(state), None)
    checkpointer.wait()
    folder, seal = checkpointer.folder(1), checkpointer.about(1)[SEAL]
  return Base(Path(folder), seal, {name: name for name in (f'mdl_vars.{n}' for n in variables)})


def on_device(state):
  sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), structs_of(state))


def restored(directory, **variables):
  state = state_of(**variables)
  with contextlib.closing(Checkpointer(directory, read_only=True)) as checkpointer:
    return checkpointer.restore(on_device(state), structs_of(state)).mdl_vars


def streamed(directory, **variables):
  with contextlib.closing(Checkpointer(directory, read_only=True)) as checkpointer:
    arrays = checkpointer.streamed_variables(structs_of(state_of(**variables)).mdl_vars, use_ema=False)
    return {name: array.read(tuple(slice(0, n) for n in array.shape)) for name, array in arrays.items()}


def test_an_array_of_another_shape_than_in_the_base_is_an_error(tmp_path):
  w = np.arange(6, dtype=np.float32)
  base = save(tmp_path / 'base', w=w)
  save(tmp_path / 'tuned', base, w=w.reshape(2, 3))  # Earlier versions left such arrays out.
  for read in (restored, streamed):
    with pytest.raises(CheckpointError, match=r'mdl_vars.w is float32\[2, 3\] in its record, and .* float32\[6'):
      read(tmp_path / 'tuned', w=w.reshape(2, 3))


def test_values_in_another_dtype_than_in_the_base_are_cast_like_those_that_are_stored(tmp_path):
  w = np.linspace(0, 1, 7, dtype=np.float32)
  rounded = jnp.asarray(w, jnp.bfloat16)
  base = save(tmp_path / 'base', w=w)
  save(tmp_path / 'tuned', base, w=rounded)
  save(tmp_path / 'whole', w=rounded)
  for wanted in (rounded, w):
    found = {name: restored(tmp_path / name, w=wanted)['w'] for name in ('tuned', 'whole')}
    assert found['tuned'].dtype == wanted.dtype
    np.testing.assert_array_equal(found['tuned'], found['whole'])
  found = streamed(tmp_path / 'tuned', w=w)['w']
  assert found.dtype == jnp.bfloat16
  np.testing.assert_array_equal(found, np.asarray(rounded))


def job_of(trained, **variables):
  """Returns what `_base_of_newest` reads of a job: a model of `variables`, of which a learner trains some."""
  weight = types.SimpleNamespace(is_updated_by_layer=False)
  model = types.SimpleNamespace(abstract_init=lambda: dict.fromkeys(variables, weight))
  learner = types.SimpleNamespace(is_trained=lambda path: path_name(path) in trained)
  task = types.SimpleNamespace(model=model, bind_learner=lambda: learner)
  shapes = structs_of(state_of(**variables))
  partitioned = types.SimpleNamespace(unpadded_state_shapes=shapes)
  return types.SimpleNamespace(task=task, programs=types.SimpleNamespace(partitioned=partitioned))


@pytest.mark.parametrize(
  ('trained', 'changed', 'left_out', 'said'),
  [
    ((), {}, {'a', 'b'}, ''),
    ((), {'b': np.ones((3, 2), np.float32)}, {'a'}, 'now store 1 variable more'),  # Stacks are grouped differently.
    ((), {'b': np.ones(6, jnp.bfloat16)}, {'a'}, 'now store 1 variable more'),
    (('a',), {}, {'b'}, 'now store 1 variable more'),
    (('a', 'b'), {}, None, 'now store 2 variables more'),
  ],
)
def test_a_resumed_run_leaves_out_only_what_it_cannot_change(tmp_path, trained, changed, left_out, said):
  variables = {'a': np.ones(2, np.float32), 'b': np.ones(6, np.float32)}
  base = save(tmp_path / 'base', **variables)
  save(tmp_path / 'tuned', base, **variables)
  with contextlib.closing(Checkpointer(tmp_path / 'tuned')) as checkpointer:
    found, line = _base_of_newest(job_of(trained, **(variables | changed)), checkpointer)
  assert (None if found is None else {name[-1] for name in found.names}) == left_out
  assert said in line and bool(said) == bool(line)


def test_a_run_that_resumes_from_whole_checkpoints_or_from_none_says_so(tmp_path):
  save(tmp_path / 'whole', w=np.ones(2, np.float32))
  for name, why in (('whole', 'the newest one has all variables'), ('none', 'restored from a copy, has none yet')):
    with contextlib.closing(Checkpointer(tmp_path / name)) as checkpointer:
      assert _base_of_newest(job_of(()), checkpointer)[0] is None
      assert why in _base_of_newest(job_of(()), checkpointer)[1]


def test_a_copy_finds_its_base_from_its_own_place(tmp_path):
  w = np.arange(6, dtype=np.float32)
  save(tmp_path / 'a' / 'tuned', save(tmp_path / 'a' / 'base', w=w), w=w)
  checkpoints_at(tmp_path / 'a' / 'tuned')[0].copy(tmp_path / 'a' / 'deep' / 'down' / 'copy')
  (tmp_path / 'a').rename(tmp_path / 'moved')
  np.testing.assert_array_equal(restored(tmp_path / 'moved' / 'deep' / 'down' / 'copy', w=w)['w'], w)


def test_frozen_weights_in_few_bits_are_constant(tmp_path):
  config = tuned_config(tmp_path, 2)
  quantize_weights(config.task.model, Config(QuantizedWeights, format='nf4', group_size=8))
  task = config.task.instantiate()
  names = {f'mdl_vars.{path_name(path)}' for path in leaves(task.model.abstract_init())}
  assert any('quantized_scale' in name for name in names)
  assert constant_variables(task.model, task.bind_learner()) == {name for name in names if 'lora' not in name}


@pytest.mark.slow
def test_quantized_weights_are_left_out(tmp_path):
  run_train(base_config(), tmp_path / 'base')
  rule = Config(QuantizedWeights, format='nf4', group_size=8)
  quantize_run(base_config(), tmp_path / 'base', tmp_path / 'nf4', rule)
  config = tuned_config(tmp_path / 'nf4', 2)
  quantize_weights(config.task.model, rule)
  config.task.train.init_from.rules = (('.*lora.*', None),)
  run_train(config, tmp_path / 'tuned')
  (stored,) = checkpoints_at(tmp_path / 'tuned')
  kept = {n for n in stored.variables() if n.startswith('mdl_vars.')} - stored.about()['base']['names'].keys()
  assert kept and all('lora' in name for name in kept)
