"""A disk that is full, and a checkpoint that is damaged: each is told once, in a line, and nothing else is printed."""

from __future__ import annotations

import contextlib
import json
import pathlib
import resource
import signal
import struct
import sys

import numpy as np
import pytest
from small_states import layout_on, random_state

from praxis_lite.checkpoints import Checkpointer
from praxis_lite.common.errors import UserError
from praxis_lite.runs.records.metrics import SummaryWriter

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent.parent))
from tools.faults.comparison import curves_of

# A limit to the size of files stands for a disk that is full: more cannot be written.
SAVE_WITHOUT_ROOM = """
import resource, sys, time
from small_states import layout_on, random_state
from praxis_lite.common.errors import CheckpointError
from praxis_lite.checkpoints import Checkpointer
layout = layout_on(1)
checkpointer = Checkpointer(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (200, resource.RLIM_INFINITY))
try:
  checkpointer.save(1, random_state(layout), layout.true_shapes, None)
  checkpointer.wait()
except CheckpointError as error:
  print(error, flush=True)
del checkpointer
time.sleep(0.5)
"""

SAVE_WITHOUT_FOLDER = """
import os, sys
from small_states import layout_on, random_state
from praxis_lite.common.errors import CheckpointError
from praxis_lite.checkpoints import Checkpointer
layout = layout_on(1)
make = os.mkdir
def refuse(path, *rest, **more):
  if 'orbax-checkpoint-tmp' in str(path):
    raise PermissionError(1, 'Operation not permitted')
  make(path, *rest, **more)
os.mkdir = refuse
checkpointer = Checkpointer(sys.argv[1])
try:
  checkpointer.save(1, random_state(layout), layout.true_shapes, None)
  checkpointer.wait()
except CheckpointError as error:
  print(error, flush=True)
"""

RESTORE = """
import sys, time
from small_states import layout_on
from praxis_lite.common.errors import CheckpointError
from praxis_lite.checkpoints import Checkpointer
try:
  Checkpointer(sys.argv[1]).restore(*layout_on(1))
except CheckpointError as error:
  print(error, flush=True)
time.sleep(0.5)
"""


def _told(process, timeout=600) -> str:
  out, err = process.communicate(timeout=timeout)
  assert err == ''
  (line,) = out.splitlines()
  assert len(line) < 800
  return line


def test_a_save_that_fails_is_told_in_a_line(tmp_path, run_python):
  line = _told(run_python(SAVE_WITHOUT_ROOM, str(tmp_path)))
  assert line.startswith(f'saving a checkpoint in {tmp_path}/checkpoints failed: ') and 'File too large' in line


def test_a_process_whose_save_failed_before_its_folder_was_there_ends(tmp_path, run_python):
  line = _told(run_python(SAVE_WITHOUT_FOLDER, str(tmp_path)), timeout=300)  # Orbax's threads wait for ten minutes.
  assert line.startswith(f'saving a checkpoint in {tmp_path}/checkpoints failed: PermissionError')


@pytest.mark.parametrize('damaged', ['state/manifest.ocdbt', 'state/d/*', 'state/_METADATA', 'inputs/metadata'])
def test_a_damaged_checkpoint_is_told_in_a_line(tmp_path, run_python, damaged):
  layout = layout_on(1)
  checkpointer = Checkpointer(tmp_path)
  checkpointer.save(1, random_state(layout), layout.true_shapes, None)
  checkpointer.close()
  for path in (tmp_path / 'checkpoints' / '1').glob(damaged):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
  if damaged.startswith('inputs'):
    with pytest.raises(UserError, match=r'cannot be read .*; remove this folder'):
      Checkpointer(tmp_path).input_state()
    return
  line = _told(run_python(RESTORE, str(tmp_path)))
  assert line.startswith(f'{tmp_path}/checkpoints/1 cannot be read (') and 'tensorstore_spec' not in line


def test_metrics_that_cannot_be_written_are_kept_and_told_of_once(tmp_path):
  told = []
  writer = SummaryWriter(tmp_path, report=told.append)
  writer.write(1, 'train', {'loss': 1.0})
  limits = resource.getrlimit(resource.RLIMIT_FSIZE)
  previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
  try:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    for step in range(2, 100):
      writer.write(step, 'train', {'loss': np.float64(step)})
    (tmp_path / 'lost').mkdir()
    lost = SummaryWriter(tmp_path / 'lost')
    for step in range(1, 100):
      lost.write(step, 'train', {'loss': np.float64(step)})
    unwritten = lost.unwritten
    with pytest.raises(UserError, match=rf'metrics cannot be written to {tmp_path}/lost: File too large'):
      lost.close()
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    signal.signal(signal.SIGXFSZ, previous)
  assert told == [f'metrics cannot be written to {tmp_path}: File too large; they are kept, and written later']
  writer.write(100, 'train', {'loss': 100.0})
  writer.close()
  assert told[1:] == [f'metrics are written to {tmp_path}']
  lines = (tmp_path / 'metrics.jsonl').read_text().splitlines()
  assert [json.loads(line)['step'] for line in lines] == list(range(1, 101))
  (events,) = (tmp_path / 'summaries' / 'train').iterdir()
  assert steps_of_events(events) == list(range(1, 101))
  # A run that goes on from a copy of step 90 has taken along what the disk had not.
  with contextlib.closing(SummaryWriter(tmp_path / 'lost', resumed_step=90, lost=unwritten)) as resumed:
    assert resumed.unwritten == () and resumed.was_written('train')
    resumed.write(91, 'train', {'loss': 91.0})
  written = map(json.loads, (tmp_path / 'lost' / 'metrics.jsonl').read_text().splitlines())
  assert [(line['step'], line['metrics']['loss']) for line in written] == [(n, float(n)) for n in range(1, 92)]
  curve = curves_of(tmp_path / 'lost' / 'summaries')['train:loss']
  assert curve == [(n, struct.pack('f', n)) for n in range(1, 92)]


def steps_of_events(path):
  """The steps of the scalars in an event file; a record is a length, its checksum, the event, and its checksum."""
  from tensorboardX.proto.event_pb2 import Event

  data, at, steps = path.read_bytes(), 0, []
  while at < len(data):
    (size,) = struct.unpack_from('<Q', data, at)
    event = Event.FromString(data[at + 12 : at + 12 + size])
    steps += [event.step] * len(event.summary.value)
    at += size + 16
  return steps
