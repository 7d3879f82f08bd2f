"""The seal of checkpoints: parts of two of them, each whole, are not one; nor is a folder that was renamed."""

from __future__ import annotations

import itertools
import shutil

import fsspec
import numpy as np
import pytest
from small_states import assert_same, layout_on, random_state, true_values

from praxis_lite.checkpoints import Checkpointer, checkpointer
from praxis_lite.checkpoints.failures import DamagedError
from praxis_lite.checkpoints.stored import StoredCheckpoint
from praxis_lite.cli.main import main
from praxis_lite.runs.cluster import emergency
from praxis_lite.runs.cluster.object_store import ObjectStore
from praxis_lite.runs.cluster.remote import RemoteRun
from praxis_lite.runs.observer import StateToCopy

PARTS = ('state', 'inputs', 'about')
LAYOUT_ROWS = 12


def save(directory, *steps, seed=0):
  layout = layout_on(2, with_key=True, rows=LAYOUT_ROWS)
  saved = Checkpointer(directory)
  for step in steps:
    saved.save(step, random_state(layout, seed=seed + step, step=step), layout.true_shapes, {'position': step})
  saved.close()
  return layout


def swap(first, second, parts):
  for part in parts:
    (first / part).rename(first / 'swapped')
    (second / part).rename(first / part)
    (first / 'swapped').rename(second / part)


def verified(directory, capsys):
  code = main(['checkpoints', 'verify', str(directory)])
  return code, capsys.readouterr().out


@pytest.mark.slow_cases
@pytest.mark.parametrize('parts', [c for n in (1, 2, 3) for c in itertools.combinations(PARTS, n)], ids='-'.join)
def test_parts_of_two_steps_are_not_one_checkpoint(tmp_path, capsys, parts):
  layout = save(tmp_path, 1, 3, 6)
  folder = tmp_path / 'checkpoints'
  swap(folder / '3', folder / '6', parts)
  code, out = verified(tmp_path, capsys)
  assert code == 1 and f'{folder}/6: damaged\n  seal: ' in out and f'{folder}/1: whole' in out
  with pytest.raises(DamagedError, match=f'{folder}/6 cannot be read .*; remove this folder'):
    Checkpointer(tmp_path, read_only=True, on_damage='fail').restore(*layout)
  assert main(['checkpoints', 'copy', str(tmp_path), str(tmp_path / 'copy'), '--step=6']) == 2
  expected = true_values(random_state(layout, seed=1, step=1), layout)
  for read_only in (True, False):
    opened = Checkpointer(tmp_path, on_damage='previous', read_only=read_only)
    assert_same(true_values(opened.restore(*layout), layout), expected)
    assert opened.input_state() == {'position': 1} and len(opened.notes) == 2
    opened.close()
  assert sorted(p.name for p in folder.iterdir()) == ['1', '3.damaged', '6.damaged']


@pytest.mark.parametrize('parts', [(part,) for part in PARTS], ids='-'.join)
def test_nor_are_those_of_one_step_of_two_runs(tmp_path, capsys, parts):
  layout = save(tmp_path / 'a', 3, 6)
  save(tmp_path / 'b', 6, seed=1)
  swap(tmp_path / 'a/checkpoints/6', tmp_path / 'b/checkpoints/6', parts)
  assert verified(tmp_path / 'a', capsys)[0] == 1
  with pytest.raises(DamagedError, match='its parts come from different saves: about of step 6, number'):
    Checkpointer(tmp_path / 'a', read_only=True).restore(*layout)
  with pytest.raises(DamagedError):  # What evaluation and exports of large models read.
    reader = Checkpointer(tmp_path / 'b', read_only=True)
    reader.streamed_variables(layout.true_shapes.mdl_vars, use_ema=False)


def test_a_folder_that_was_renamed_is_not_a_checkpoint_of_that_step(tmp_path, capsys):
  layout = save(tmp_path, 3, 6)
  folder = tmp_path / 'checkpoints'
  (folder / '6').rename(folder / '12')
  code, out = verified(tmp_path, capsys)
  assert code == 1 and 'it is a checkpoint of step 6, and its folder was renamed' in out
  main(['checkpoints', 'list', str(tmp_path)])
  assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()] == ['state', '2', 'damaged']
  opened = Checkpointer(tmp_path, on_damage='previous')
  assert_same(true_values(opened.restore(*layout), layout), true_values(random_state(layout, seed=3, step=3), layout))
  assert (folder / '12.damaged').exists() and 'of step 6, and its folder was renamed), and is kept in' in opened.notes[
    0
  ]


def test_a_record_of_its_arrays_from_another_step_is_noticed(tmp_path, capsys):
  """Within `state`, the database of one step and the rest of another."""
  layout = save(tmp_path, 3, 6)
  for name in ('manifest.ocdbt', 'd', 'ocdbt.process_0'):
    ours, theirs = (tmp_path / 'checkpoints' / step / 'state' / name for step in ('6', '3'))
    if ours.exists():
      shutil.rmtree(ours, ignore_errors=True)
      ours.unlink(missing_ok=True)
      (shutil.copytree if theirs.is_dir() else shutil.copy)(theirs, ours)
  assert verified(tmp_path, capsys)[0] == 1
  with pytest.raises(DamagedError):
    Checkpointer(tmp_path, read_only=True).restore(*layout)


def test_checkpoints_of_earlier_versions_have_no_seal_and_are_read(tmp_path, capsys, monkeypatch):
  with monkeypatch.context() as earlier:
    earlier.setattr(checkpointer, 'SEAL', 'of_no_meaning')
    layout = save(tmp_path, 3, 6)
  assert verified(tmp_path, capsys)[0] == 0
  opened = Checkpointer(tmp_path)
  assert_same(true_values(opened.restore(*layout), layout), true_values(random_state(layout, seed=6, step=6), layout))
  opened.close()
  save(tmp_path, 9)
  for part in PARTS:  # A part without a seal does not fit to those with one.
    swap(tmp_path / 'checkpoints/6', tmp_path / 'checkpoints/9', [part])
    assert verified(tmp_path, capsys)[1].count('damaged') == 2
    swap(tmp_path / 'checkpoints/6', tmp_path / 'checkpoints/9', [part])
  assert verified(tmp_path, capsys)[0] == 0


def test_what_is_fetched_from_an_object_store_is_of_one_save(tmp_path, capsys):
  layout = save(tmp_path / 'here', 3, 6)
  folder = tmp_path / 'here/checkpoints'
  url = 'memory://seals/runs/1'
  run = RemoteRun(ObjectStore(url))
  try:
    run.upload(folder / '3', 0)
    swap(folder / '3', folder / '6', ['inputs'])
    run.upload(folder / '6', 0)  # Mixed before it was copied, so that all sums are right.
    code, out = verified(url, capsys)
    assert code == 1 and f'{url}/checkpoints/3: whole' in out and f'{url}/checkpoints/6: damaged\n  seal: ' in out
    (tmp_path / 'there/checkpoints').mkdir(parents=True)
    first, second = run.checkpoints()
    with pytest.raises(DamagedError, match=f'{url}/checkpoints/6 cannot be read .*different saves'):
      second.fetch(tmp_path / 'there')
    fetched = first.fetch(tmp_path / 'there')
    assert StoredCheckpoint(fetched).damage() == {} and [p.name for p in fetched.parent.iterdir()] == ['3']
    assert Checkpointer(tmp_path / 'there').restore(*layout) is not None
  finally:
    fsspec.filesystem('memory').store.clear()


def test_an_emergency_copy_that_was_renamed_is_not_used(tmp_path):
  layout = layout_on(2)
  for name in ('run', 'disk'):
    (tmp_path / name).mkdir()

  def opened():
    return emergency.EmergencyCopies(tmp_path / 'run', [str(tmp_path / 'disk')], *layout)

  copies = opened()
  copies.write(StateToCopy(6, random_state(layout, 6, 6), {'position': 6}, 0))
  copies.close()
  (file,) = tmp_path.glob('disk/*/*/*/6.0')
  file.rename(file.with_name('12.0'))
  copy, note = opened().newest(8)
  assert copy is None and 'is a copy of step 6, and was renamed' in note


def test_parts_of_different_copies_on_the_hosts_are_not_one_copy(tmp_path, monkeypatch):
  """As the processes tell each other: one has a part of the same step, of another position in the data."""
  layout = layout_on(2)
  for name in ('run', 'disk'):
    (tmp_path / name).mkdir()
  copies = emergency.EmergencyCopies(tmp_path / 'run', [str(tmp_path / 'disk')], *layout)
  for step in (4, 6):
    copies.write(StateToCopy(step, random_state(layout, step, step), {'position': step}, 0))
    copies.close()
  monkeypatch.setattr(emergency, 'gather_texts', lambda text: [text, text.replace('6:', '6:0')])
  copy, note = copies.newest(0)
  assert copy.step == 4 and 'the parts of step 6 on the hosts come from different copies' in note
  assert np.asarray(copy.restore(layout.shapes).step) == 4
