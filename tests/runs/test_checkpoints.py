"""Checkpoints: what comes back, on which mesh, which are kept, and what is refused."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_states import Layout, assert_same, layout_on, random_state, true_values

from praxis_lite.checkpoints import Checkpointer
from praxis_lite.common.errors import CheckpointError, ConfigError


def save(directory, state, layout, step=1, input_state=None, **options):
  checkpointer = Checkpointer(directory, **options)
  checkpointer.save(step, state, layout.true_shapes, input_state)
  checkpointer.close()


def test_from_8_devices_to_1_to_8_to_3_nothing_changes(tmp_path):
  layout = layout_on(8, with_key=True, with_ema=True)
  state = random_state(layout, step=3)
  expected = true_values(state, layout)
  for hop, devices in enumerate((1, 8, 3)):
    save(tmp_path / str(hop), state, layout, step=3)
    layout = layout_on(devices, with_key=True, with_ema=True)
    checkpointer = Checkpointer(tmp_path / str(hop))
    state = checkpointer.restore(*layout)
    checkpointer.close()
    assert_same(true_values(state, layout), expected)
    jax.tree.map(lambda x, s: (x.shape, x.sharding) == (s.shape, s.sharding) or pytest.fail(), state, layout.shapes)
    assert state.mdl_vars['lm']['w'].shape == {1: (10, 7), 8: (16, 7), 3: (12, 7)}[devices]


def test_a_state_donated_right_after_saving_is_saved_as_it_was(tmp_path):
  layout = layout_on(8)
  state = random_state(layout)
  expected = true_values(state, layout)
  overwrite = jax.jit(lambda s: jax.tree.map(lambda x: x * 0 - 1, s), donate_argnums=0)
  jax.block_until_ready(overwrite(jax.tree.map(jnp.copy, state)))
  checkpointer = Checkpointer(tmp_path)
  checkpointer.save(1, state, layout.true_shapes, None)
  for _ in range(20):
    state = overwrite(state)
  restored = true_values_of_restored(checkpointer, layout)
  checkpointer.close()
  assert_same(restored, expected)


def true_values_of_restored(checkpointer, layout):
  checkpointer.wait()
  return true_values(checkpointer.restore(*layout), layout)


def test_the_input_state_is_that_of_the_same_step(tmp_path):
  layout = layout_on(1)
  checkpointer = Checkpointer(tmp_path)
  for step in (1, 2):
    checkpointer.save(step, random_state(layout, seed=step), layout.true_shapes, {'epoch': 0, 'position': 10 * step})
  checkpointer.wait()
  assert checkpointer.input_state() == {'epoch': 0, 'position': 20}
  assert checkpointer.input_state(1) == {'epoch': 0, 'position': 10}
  restored = checkpointer.restore(*layout, step=1)
  checkpointer.close()
  assert_same(true_values(restored, layout), true_values(random_state(layout, seed=1), layout))


def test_the_newest_and_every_mth_checkpoint_are_kept(tmp_path):
  layout = layout_on(1)
  state = random_state(layout)
  checkpointer = Checkpointer(tmp_path, max_to_keep=2, keep_interval_steps=4)
  for step in range(1, 12):
    checkpointer.save(step, state, layout.true_shapes, None)
  checkpointer.wait()
  assert checkpointer.steps() == [4, 8, 10, 11]
  assert sorted(int(p.name) for p in (tmp_path / 'checkpoints').iterdir()) == [4, 8, 10, 11]
  checkpointer.close()


def test_a_step_is_saved_once(tmp_path):
  layout = layout_on(1)
  checkpointer = Checkpointer(tmp_path)
  assert checkpointer.save(1, random_state(layout, seed=1), layout.true_shapes, None)
  assert not checkpointer.save(1, random_state(layout, seed=2), layout.true_shapes, None)
  assert_same(true_values_of_restored(checkpointer, layout), true_values(random_state(layout, seed=1), layout))
  checkpointer.close()


def test_variables_come_back_without_the_optimizer(tmp_path):
  layout = layout_on(8, with_ema=True)
  state = random_state(layout)
  save(tmp_path, state, layout)
  wanted = layout_on(1, with_ema=True)
  shapes = wanted.shapes.replace(opt_states=None)
  restored = Checkpointer(tmp_path, read_only=True).restore(shapes, wanted.true_shapes)
  assert restored.opt_states is None
  trimmed = Layout(shapes, wanted.true_shapes.replace(opt_states=None))
  assert_same(true_values(restored, trimmed), true_values(state.replace(opt_states=None), trimmed_8(layout)))


def trimmed_8(layout):
  return Layout(layout.shapes.replace(opt_states=None), layout.true_shapes.replace(opt_states=None))


def test_a_float_is_cast_to_the_dtype_of_the_run(tmp_path):
  layout = layout_on(8)
  state = random_state(layout)
  save(tmp_path, state, layout)
  restored = Checkpointer(tmp_path).restore(*layout_on(3, dtype=jnp.bfloat16))
  expected = np.asarray(state.mdl_vars['lm']['b'])[:5].astype(jnp.bfloat16)
  np.testing.assert_array_equal(np.asarray(restored.mdl_vars['lm']['b'])[:5], expected)


def changed(layout, **changes):
  """The layout with arrays replaced: name -> shape, or None for none."""
  out = []
  for state in layout:
    variables = {'lm': dict(state.mdl_vars['lm']), 'scale': state.mdl_vars['scale']}
    for name, shape in changes.items():
      like = variables['lm'].pop(name, variables['lm'].get('w'))
      if shape is not None:
        variables['lm'][name] = jax.ShapeDtypeStruct(shape, like.dtype, sharding=like.sharding)
    out.append(state.replace(mdl_vars=variables))
  return Layout(*out)


@pytest.mark.parametrize(
  ('changes', 'told'),
  [
    ({'w': (10, 8)}, r'mdl_vars\.lm\.w is float32\[10, 7\] in the checkpoint and float32\[10, 8\] in'),
    ({'w': (12, 7)}, r'mdl_vars\.lm\.w is float32\[10, 7\] in the checkpoint and float32\[12, 7\] in'),
    ({'gate': (3, 3)}, r'mdl_vars\.lm\.gate is missing in the checkpoint and float32\[3, 3\] in the task'),
    ({'b': None}, r'mdl_vars\.lm\.b is float32\[5\] in the checkpoint and missing in the task'),
  ],
)
def test_a_checkpoint_of_another_model_is_refused_and_told_apart(tmp_path, changes, told):
  # (12, 7) is what (10, 7) is padded to on 4 devices: a comparison of stored shapes would let it pass.
  layout = layout_on(4)
  save(tmp_path, random_state(layout), layout)
  with pytest.raises(CheckpointError, match=told) as error:
    Checkpointer(tmp_path).restore(*changed(layout, **changes))
  assert 'a checkpoint of another model' in str(error.value) and '--job_log_dir' in str(error.value)
  assert '\n' not in str(error.value)


def test_a_checkpoint_with_another_optimizer_is_told_as_that(tmp_path):
  layout = layout_on(1)
  save(tmp_path, random_state(layout), layout)
  sgd = Layout(*(s.replace(opt_states=({'trace': s.mdl_vars},)) for s in layout))
  with pytest.raises(CheckpointError, match='of another learner') as error:
    Checkpointer(tmp_path).restore(*sgd)
  assert 'task.train.learner' in str(error.value)
  checkpointer = Checkpointer(tmp_path)
  assert checkpointer.restore(*(s.replace(opt_states=None) for s in sgd)).opt_states is None


def test_no_checkpoint_and_no_such_step_are_told(tmp_path):
  with pytest.raises(CheckpointError, match=r'there is no checkpoint in .*train first'):
    Checkpointer(tmp_path, read_only=True).restore(*layout_on(1))
  layout = layout_on(1)
  save(tmp_path, random_state(layout), layout, step=7)
  with pytest.raises(CheckpointError, match=r'no checkpoint of step 3 in .*; there are \[7\]'):
    Checkpointer(tmp_path).restore(*layout, step=3)
  assert not (tmp_path / 'elsewhere').exists()


def test_a_damaged_checkpoint_is_told(tmp_path):
  layout = layout_on(1)
  save(tmp_path, random_state(layout), layout)
  (tmp_path / 'checkpoints' / '1' / 'about' / 'metadata').write_text('{"variab')
  with pytest.raises(CheckpointError, match=r'cannot be read.*remove this folder'):
    Checkpointer(tmp_path).restore(*layout)


def test_what_a_killed_save_left_is_no_checkpoint_and_is_cleaned_up(tmp_path):
  layout = layout_on(1)
  save(tmp_path, random_state(layout), layout, step=1)
  left = tmp_path / 'checkpoints' / '2.orbax-checkpoint-tmp'
  (left / 'state').mkdir(parents=True)
  reader = Checkpointer(tmp_path, read_only=True)
  assert reader.steps() == [1] and left.exists()  # it may be another process that is saving
  reader.close()
  checkpointer = Checkpointer(tmp_path)
  assert checkpointer.latest_step() == 1
  checkpointer.save(2, random_state(layout), layout.true_shapes, None)
  checkpointer.close()
  assert not left.exists()


def test_true_shapes_and_mesh_are_on_record(tmp_path):
  layout = layout_on(4)
  save(tmp_path, random_state(layout), layout)
  about = Checkpointer(tmp_path).about()
  assert about['mesh'] == {'data': 4}
  assert about['variables']['mdl_vars.lm.w'] == {'shape': [10, 7], 'dtype': 'float32'}
  assert about['variables']['opt_states.0.mu.lm.b'] == {'shape': [5], 'dtype': 'float32'}
  assert about['praxis_lite']
  json.dumps(about)


@pytest.mark.parametrize('options', [{'max_to_keep': 0}, {'keep_interval_steps': 0}])
def test_numbers_that_keep_nothing_are_refused(tmp_path, options):
  with pytest.raises(ConfigError, match=f'task.train.{next(iter(options))} = 0'):
    Checkpointer(tmp_path, **options)
