"""Many checkpoints are removed at once, and training does not wait for it."""

from __future__ import annotations

import pathlib
import shutil
import threading

import pytest

from praxis_lite.checkpoints import retention
from praxis_lite.checkpoints.retention import Retention, steps_in, steps_to_remove


def folders(directory, count):
  for step in range(1, count + 1):
    (directory / str(step)).mkdir()
  return Retention(str(directory), max_to_keep=3, keep_interval_steps=None)


def test_700_checkpoints_are_renamed_once_each_and_removed_some_at_a_time(tmp_path, monkeypatch):
  keeper = folders(tmp_path, 700)
  counts = {'list': 0, 'rename': 0, 'remove': 0}
  together = threading.Barrier(retention._AT_ONCE, timeout=20)
  lock, really = threading.Lock(), shutil.rmtree

  def counted(name, call):
    def count(*args, **kwargs):
      with lock:
        counts[name] += 1
        is_first = name == 'remove' and counts[name] <= retention._AT_ONCE
      if is_first:
        together.wait()  # Breaks unless as many are removed at the same time.
      return call(*args, **kwargs)

    return count

  monkeypatch.setattr(retention, 'steps_in', counted('list', steps_in))
  monkeypatch.setattr(pathlib.Path, 'rename', counted('rename', pathlib.Path.rename))
  monkeypatch.setattr(shutil, 'rmtree', counted('remove', really))
  keeper.start(kept={5})
  keeper.wait()
  assert counts == {'list': 1, 'rename': 696, 'remove': 696} and not together.broken
  assert steps_in(tmp_path) == [5, 698, 699, 700] and len(list(tmp_path.iterdir())) == 4


def test_a_save_does_not_wait_for_what_is_still_being_removed(tmp_path, monkeypatch, capsys):
  keeper = folders(tmp_path, 6)
  may, began, really = threading.Event(), threading.Event(), shutil.rmtree

  def slowly(*args, **kwargs):
    began.set()
    assert may.wait(20)
    really(*args, **kwargs)

  monkeypatch.setattr(shutil, 'rmtree', slowly)
  monkeypatch.setattr(retention, '_LONG', 0.1)
  keeper.start(())
  assert began.wait(20)
  for step in (7, 8):
    (tmp_path / str(step)).mkdir()
    keeper.start(kept={4})  # Returns, though nothing is removed yet; the last one counts.
  keeper.start_with_incomplete()
  assert steps_in(tmp_path) == [4, 5, 6, 7, 8]
  threading.Timer(0.5, may.set).start()
  keeper.wait()
  assert 'waiting until old checkpoints in' in capsys.readouterr().err
  assert steps_in(tmp_path) == [4, 6, 7, 8] and len(list(tmp_path.iterdir())) == 4
  keeper.wait()


@pytest.mark.parametrize('count', [0, 1, 3, 4])
def test_few_checkpoints(count, tmp_path):
  keeper = folders(tmp_path, count)
  keeper.wait()
  keeper.start(())
  keeper.wait()
  assert steps_in(tmp_path) == list(range(1, count + 1))[-3:]
  assert steps_to_remove([], max_to_keep=1, keep_interval_steps=2) == []
