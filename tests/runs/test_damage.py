"""Damaged checkpoints: nothing changed on the disk is restored as if it were what was written."""

from __future__ import annotations

import re
import shutil

import numpy as np
import pytest
from small_states import assert_same, layout_on, random_state, true_values

from praxis_lite.checkpoints import Checkpointer, stored
from praxis_lite.checkpoints.failures import DamagedError
from praxis_lite.checkpoints.retention import being_read, steps_to_remove
from praxis_lite.cli.main import main
from praxis_lite.experiments.lm import SyntheticLmTiny
from praxis_lite.runs.records.record import write_record
from praxis_lite.training.experiment import configure


@pytest.fixture
def saved(tmp_path):
  """A run with checkpoints of steps 1, 2 and 3, and its layout."""
  layout = layout_on(2, with_key=True, rows=99)  # Chunks of more than 1 kB are in files of their own.
  checkpointer = Checkpointer(tmp_path)
  for step in (1, 2, 3):
    checkpointer.save(step, random_state(layout, seed=step, step=step), layout.true_shapes, {'position': step})
  checkpointer.close()
  return tmp_path, layout


def files_of(directory, step):
  return sorted(p for p in (directory / 'checkpoints' / str(step)).rglob('*') if p.is_file())


@pytest.mark.slow
def test_a_flipped_bit_is_noticed_wherever_it_changes_what_is_restored(saved):
  """Bits of every file: restoring fails, or returns what was saved, with the position in the input."""
  directory, layout = saved
  expected = true_values(random_state(layout, seed=3, step=3), layout)
  rng = np.random.default_rng(0)
  noticed = dict.fromkeys(('state/ocdbt.process_0', 'state/manifest', 'about', 'inputs'), 0)
  checkpointer = Checkpointer(directory, read_only=True)
  for path in files_of(directory, 3):
    whole = path.read_bytes()
    name = str(path.relative_to(directory / 'checkpoints' / '3'))
    for at in rng.choice(len(whole), min(len(whole), 6), replace=False):
      data = bytearray(whole)
      data[at] ^= 1 << int(rng.integers(8))
      path.write_bytes(data)
      try:
        state = checkpointer.restore(*layout, step=3)
        assert checkpointer.input_state(3) == {'position': 3}
        assert_same(true_values(state, layout), expected)
      except DamagedError:
        for part in noticed:
          noticed[part] += name.startswith(part)
    path.write_bytes(whole)
  checkpointer.close()
  assert all(noticed.values()), noticed


def flip_a_chunk(directory, step):
  """Changes a byte in the middle of the largest file of arrays."""
  path = max(files_of(directory, step), key=lambda p: p.stat().st_size)
  data = bytearray(path.read_bytes())
  data[len(data) // 2] ^= 4
  path.write_bytes(data)


def test_the_step_before_a_damaged_one_is_used_and_the_damaged_one_kept_aside(saved):
  directory, layout = saved
  folder = directory / 'checkpoints'
  flip_a_chunk(directory, 3)
  shutil.rmtree(folder / '2' / 'state')  # A partial one.
  with pytest.raises(DamagedError, match=f'{folder}/3 cannot be read .*; remove this folder'):
    Checkpointer(directory, on_damage='fail').restore(*layout)
  with pytest.raises(DamagedError, match=f'{folder}/3 cannot be read'):  # A step that is named is not replaced.
    Checkpointer(directory, on_damage='previous').restore(*layout, step=3)
  expected = true_values(random_state(layout, seed=1, step=1), layout)

  reader = Checkpointer(directory, read_only=True, on_damage='previous')
  assert_same(true_values(reader.restore(*layout), layout), expected)
  assert reader.steps() == [1] and (folder / '3').exists()  # Who trains there decides.

  writer = Checkpointer(directory, on_damage='previous')
  assert_same(true_values(writer.restore(*layout), layout), expected)
  assert writer.input_state() == {'position': 1}
  assert [line.partition(' cannot be read (')[0] for line in writer.notes] == [f'{folder}/3', f'{folder}/2']
  assert writer.notes[0].endswith(f'), and is kept in {folder}/3.damaged; the checkpoint of step 2 is used instead')
  assert sorted(p.name for p in folder.iterdir()) == ['1', '2.damaged', '3.damaged']
  assert writer.save(3, random_state(layout, seed=3), layout.true_shapes, None)  # Training has come there again.
  writer.close()
  flip_a_chunk(directory, 3)
  Checkpointer(directory, on_damage='previous').restore(*layout)
  assert sorted(p.name for p in folder.iterdir()) == ['1', '2.damaged', '3.damaged', '3.damaged.2']

  flip_a_chunk(directory, 1)
  with pytest.raises(DamagedError, match=f'{folder}/1 cannot be read'):  # It is the only one: nothing is begun anew.
    Checkpointer(directory, on_damage='previous').restore(*layout)
  assert (folder / '1').exists()


def test_what_is_read_is_not_removed(saved):
  directory, layout = saved
  folder = directory / 'checkpoints'
  (folder / '0.removed').mkdir()  # A kill has interrupted a removal.
  reader = Checkpointer(directory, read_only=True)
  variables = {'mdl_vars': layout.true_shapes.mdl_vars}
  streamed = reader.streamed_variables(variables['mdl_vars'], use_ema=False, step=1)
  writer = Checkpointer(directory, max_to_keep=1)
  with being_read(folder / '2'):
    writer.save(4, random_state(layout), layout.true_shapes, None)
    writer.wait()
    assert sorted(p.name for p in folder.iterdir()) == ['1', '2', '4']
  expected = true_values(random_state(layout, seed=1), layout)[2]
  array = streamed['lm']['w']
  np.testing.assert_array_equal(array.read(tuple(slice(0, n) for n in array.shape)), expected)
  reader.close()
  writer.save(5, random_state(layout), layout.true_shapes, None)
  writer.wait()
  assert writer.steps() == [5]
  writer.close()


@pytest.mark.parametrize(
  ('options', 'removed'),
  [
    ({'max_to_keep': None, 'keep_interval_steps': None}, []),
    ({'max_to_keep': 2, 'keep_interval_steps': None}, [2, 4, 5]),
    ({'max_to_keep': 2, 'keep_interval_steps': 4}, [2, 5]),
    ({'max_to_keep': 2, 'keep_interval_steps': 4, 'kept': {5}}, [2]),
    ({'max_to_keep': 9, 'keep_interval_steps': None}, []),
  ],
)
def test_steps_to_remove(options, removed):
  assert steps_to_remove([2, 4, 5, 6, 7], **options) == removed


def test_a_checkpoint_that_a_run_removes_meanwhile_is_not_listed(saved, capsys, monkeypatch):
  directory, _ = saved
  found = [*stored.checkpoints_at(directory), stored.StoredCheckpoint(directory / 'checkpoints' / '9')]
  monkeypatch.setattr(stored, 'checkpoints_at', lambda *_: found)
  assert main(['checkpoints', 'list', str(directory)]) == 0
  assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ['step', '1', '2', '3']


def test_a_checkpoint_is_not_copied_to_a_run_of_another_model(saved, tmp_path, capsys):
  directory, _ = saved
  other, recorded = tmp_path / 'other', tmp_path / 'recorded'
  narrow = layout_on(2, with_key=True, rows=12)
  run = Checkpointer(other)
  run.save(7, random_state(narrow, seed=7, step=7), narrow.true_shapes, {'position': 7})
  run.close()
  recorded.mkdir()
  write_record(recorded, configure(SyntheticLmTiny))
  for target, array in ((other, 'lm.w is float32'), (recorded, 'lm.embedding.w is missing')):
    before = sorted(tmp_path.rglob('*'))
    for flags in ([], ['--nooptimizer'], ['--step=1']):
      assert main(['checkpoints', 'copy', str(directory), str(target), *flags]) == 2
      assert re.search(f'{target} has another run: .* of another model: .*{array}', capsys.readouterr().err)
    assert sorted(tmp_path.rglob('*')) == before


def test_the_commands_on_checkpoints(saved, capsys):
  directory, layout = saved

  def run(*arguments):
    code = main(['checkpoints', *map(str, arguments)])
    out, err = capsys.readouterr()
    return code, out + err

  code, out = run('verify', directory)
  assert code == 0 and out.count(': whole') == 3
  code, out = run('show', directory, '--step=2')
  assert code == 0 and 'mesh data 2' in out and 'mdl_vars.lm.w          float32   (99, 7)' in out
  code, out = run('diff', directory, '--step=1', '--other_step=2')
  a, b = (true_values(random_state(layout, seed=seed), layout)[2] for seed in (1, 2))
  largest = np.abs(a - b).max()
  assert code == 0 and f'{largest:.3g}' in out and f'{largest / np.abs(a).max():.3g}' in out
  assert run('diff', directory / 'checkpoints' / '1', directory)[0] == 0  # 3 is the newest.
  assert run('diff', directory)[0] == 2 and run('diff')[0] == 2 and run('dif', directory)[0] == 2

  code, out = run('copy', directory, directory / 'alone', '--nooptimizer')
  assert code == 0
  copied = Checkpointer(directory / 'alone')
  shapes, true_shapes = layout_on(3, with_key=True, rows=99)  # On another mesh than it was saved on.
  restored = copied.restore(shapes.replace(opt_states=None), true_shapes)
  expected = random_state(layout, seed=3)
  np.testing.assert_array_equal(
    np.asarray(restored.mdl_vars['lm']['w'])[:99], np.asarray(expected.mdl_vars['lm']['w'])[:99]
  )
  assert copied.has_only_variables() and copied.input_state() is None
  assert run('copy', directory, directory / 'whole', '--step=2')[0] == 0
  assert_same(
    true_values(Checkpointer(directory / 'whole').restore(*layout), layout),
    true_values(random_state(layout, seed=2, step=2), layout),
  )
  code, out = run('diff', directory, directory / 'whole', '--step=2')
  assert code == 0 and '0 differ' in out

  flip_a_chunk(directory, 3)
  code, out = run('verify', directory)
  assert code == 1 and out.count(': whole') == 2 and '.lm.w: ' in out
  code, out = run('copy', directory, directory / 'damaged')
  assert code == 2 and 'is damaged (' in out and not (directory / 'damaged').exists()
  code, out = run('list', directory)
  assert code == 0 and len(out.splitlines()) == 4 and 'data 2' in out
  code, out = run('list', directory / 'nowhere')
  assert code == 2 and f'there is no directory {directory / "nowhere"}' in out
  (directory / 'empty').mkdir()
  code, out = run('list', directory / 'empty')
  assert code == 2 and 'there is no checkpoint in' in out


@pytest.mark.parametrize('command', ['train', 'eval', 'decode', 'checkpoints'])
def test_object_stores_are_refused_in_a_line(command, capsys, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  arguments = ['diff', 's3://bucket/run', 'runs/1'] if command == 'checkpoints' else ['--job_log_dir=s3://bucket/run']
  assert main([command, *arguments]) == 2
  said = capsys.readouterr().err
  assert 's3://bucket/run: runs are in directories of a file system' in said and said.count('\n') == 1
  assert '--set task.train.mirror=s3://bucket/run;' in said and 'checkpoints copy s3://bucket/run runs/1' in said
  assert not list(tmp_path.iterdir())


def test_reads_that_a_failure_leaves_behind_are_not_reported(run_python):
  """As Orbax and TensorStore leave them when another one has failed; what others leave behind is reported."""
  code = """
import asyncio
from praxis_lite.checkpoints.orbax.work_arounds import load_orbax
load_orbax()
loop = asyncio.new_event_loop()
async def read(says):
  try:
    await loop.create_future()
  except BaseException as error:
    raise ValueError(says) from (error if says == 'thrown away' else None)
for says in ('thrown away', 'of others'):
  read(says).send(None)
for says in ("DATA_LOSS [tensorstore_spec='{}']", 'of others, too'):
  loop.create_future().set_exception(ValueError(says))
"""
  _, err = run_python(code).communicate()
  assert [line for line in err.splitlines() if line.startswith('ValueError')] == [
    'ValueError: of others', 'ValueError: of others, too'
  ]  # fmt: skip
