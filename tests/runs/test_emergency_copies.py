"""Emergency copies: what is read is what was written, and nothing else is ever used."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_states import layout_on, random_state

from praxis_lite.common.errors import UserError
from praxis_lite.runs.cluster import emergency
from praxis_lite.runs.cluster.emergency import EmergencyCopies, EmergencyCopy
from praxis_lite.runs.cluster.peers import PeerError, Peers, peers_of
from praxis_lite.runs.records.lineage import forget_copies

POSITION = {'epoch': 1, 'position': 12}


@pytest.fixture(scope='module')
def layout():
  return layout_on(3, with_key=True, with_ema=True)


@pytest.fixture
def disk(tmp_path):
  """The directory of copies; the run is in `tmp_path / 'run'`."""
  for name in ('run', 'disk', 'other'):
    (tmp_path / name).mkdir()
  return tmp_path / 'disk'


def opened(disk, layout, *others):
  return EmergencyCopies(disk.parent / 'run', [str(disk), *map(str, others)], *layout)


def written(disk, layout, *steps, checkpoint=0, others=()):
  """Writes copies, whose arrays are drawn from their steps, as a process does that is then killed."""
  copies = opened(disk, layout, *others)
  for step in steps:
    copies.write(step, random_state(layout, step, step), {**POSITION, 'of': step}, checkpoint, [{'step': step}])
  copies.settle()
  return {int(file.name.split('.')[0]): file for file in disk.rglob('*.0')}


def bits(state):
  data = lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x  # noqa: E731
  return [(x.sharding, np.asarray(data(x)).tobytes()) for x in jax.tree.leaves(state)]


def test_the_newest_is_read_as_it_was_written_with_the_position_in_the_data(disk, layout):
  assert list(written(disk, layout, 2, 4, 6)) == [6]
  copy, note = opened(disk, layout).newest(4)
  assert copy.metrics == [{'step': 6}]
  assert (copy.step, copy.input_state, note) == (6, {**POSITION, 'of': 6}, '')
  restored = copy.restore(layout.shapes)
  assert jax.tree.structure(restored) == jax.tree.structure(layout.shapes)
  assert bits(restored) == bits(random_state(layout, 6, 6))
  narrow = layout_on(2, dtype=jnp.bfloat16)
  written(disk, narrow, 8)
  assert bits(opened(disk, narrow).newest(6)[0].restore(narrow.shapes)) == bits(random_state(narrow, 8, 8))


def test_there_is_a_whole_one_while_the_next_is_written_and_no_third(disk, layout, monkeypatch):
  copies = opened(disk, layout)
  copies.write(2, random_state(layout), None, 0)
  copies.close()
  with monkeypatch.context() as killed:
    killed.setattr(EmergencyCopies, '_write', lambda *args: None)
    copies.write(4, random_state(layout), None, 0)
    assert copies.settle().startswith('step 4: the emergency copy failed: it was not written; training goes on')
  (half,) = (file.with_name('4.0.incomplete') for file in disk.rglob('2.0'))
  half.write_bytes(b'half')
  copy, note = opened(disk, layout).newest(0)
  assert (copy.step, note) == (2, '')
  assert [file.name for file in disk.rglob('*.*')] == ['2.0']


def test_no_flipped_bit_and_no_missing_byte_is_read_as_if_it_were_whole(disk, layout):
  file = written(disk, layout, 6)[6]
  data, expected = file.read_bytes(), bits(random_state(layout, 6, 6))
  rng = np.random.default_rng(0)
  for at in [*range(60), *rng.integers(len(data), size=300), len(data) - 1]:
    changed = bytearray(data)
    changed[at] ^= 1 << int(rng.integers(8))
    file.write_bytes(changed)
    with pytest.raises(emergency._NO_COPY):
      EmergencyCopy(file)
  for size in (0, 1, 50, len(data) // 2, len(data) - 1):
    file.write_bytes(data[:size])
    with pytest.raises(emergency._NO_COPY):
      EmergencyCopy(file)
  copy, note = opened(disk, layout).newest(0)
  assert copy is None and note.startswith(f'emergency copies that are not used: {file} is damaged (')
  file.write_bytes(data)
  assert bits(opened(disk, layout).newest(0)[0].restore(layout.shapes)) == expected


def test_a_second_directory_is_read_where_the_first_is_damaged_or_full(disk, layout):
  other = disk.parent / 'other'
  file = written(disk, layout, 6, others=[other])[6]
  file.write_bytes(file.read_bytes()[:-1])
  copy, note = opened(disk, layout, other).newest(0)
  assert copy.step == 6 and 'is damaged' in note
  assert bits(copy.restore(layout.shapes)) == bits(random_state(layout, 6, 6))


@pytest.mark.parametrize(
  'change, why',
  [
    ({'checkpoint': 6}, ''),
    ({'checkpoint': 3}, 'the copy of step 6 was made after the checkpoint of step 4, which is gone'),
    ({'devices': 2}, "the copy of step 6 has other mesh, {'data': 3}"),
    ({'rows': 11}, 'the copy of step 6 has other variables'),
    ({'forget': True}, ''),
  ],
)
def test_what_is_older_or_of_another_run_mesh_or_model_is_not_used(disk, layout, change, why):
  written(disk, layout, 6, checkpoint=4)
  if 'forget' in change:
    forget_copies(disk.parent / 'run')
  other = layout_on(change.get('devices', 3), with_key=True, with_ema=True, rows=change.get('rows', 10))
  copy, note = opened(disk, other).newest(change.get('checkpoint', 4))
  assert copy is None and note == (f'emergency copies that are not used: {why}' if why else '')
  assert not [path for path in disk.rglob('*') if path.is_file()]


def test_a_full_disk_is_told_once_and_the_copy_before_stays(disk, layout):
  copies, told = opened(disk, layout), []
  limits = resource.getrlimit(resource.RLIMIT_FSIZE)
  previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

  def write(step):
    told.append(copies.write(step, random_state(layout, step, step), None, 0))
    copies._writing.join()

  try:
    write(2)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, limits[1]))
    for step in (4, 6, 8):
      write(step)
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    signal.signal(signal.SIGXFSZ, previous)
  assert opened(disk, layout).newest(0)[0].step == 2
  write(10)
  copies.settle()
  folder = next(disk.rglob('*.0')).parent
  why = f'the emergency copy failed: {folder}: File too large; training goes on, and the previous copy is kept'
  assert told == ['', '', f'step 4: {why}', '', ''] and [file.name for file in folder.iterdir()] == ['10.0']


def test_a_directory_that_cannot_be_used_is_a_mistake(disk, layout, monkeypatch):
  where = 'task.train.emergency_copies.directories'
  with pytest.raises(UserError, match=f'{where}: {disk}/none cannot be used on this host: No such file'):
    opened(disk / 'none', layout)
  with monkeypatch.context() as small:
    small.setattr(emergency, '_num_bytes', lambda shapes: 10**18)
    with pytest.raises(UserError, match=f'{where}: {disk} has .* GB on this host, and two copies take 2e\\+09 GB'):
      opened(disk, layout)
  (disk / emergency._user_folder()).rename(disk / 'somewhere')
  (disk / emergency._user_folder()).symlink_to(disk / 'somewhere')
  with pytest.raises(UserError, match='is of another user'):
    opened(disk, layout)


def test_without_directories_nothing_happens_and_after_the_run_nothing_is_left(disk, layout):
  none = EmergencyCopies(disk.parent / 'run', (), *layout)
  assert none.newest(0) == (None, '') and none.write(2, random_state(layout), None, 0) == ''
  none.remove()
  copies = opened(disk, layout)
  copies.write(2, random_state(layout), None, 0)
  copies.remove()
  assert os.listdir(disk / emergency._user_folder()) == []


# ---- copies on peers


def test_peers_are_in_other_failure_domains_and_the_parts_are_dealt_out_evenly():
  assert [peers_of(i, 6, 2, 1) for i in range(6)] == [[2], [3], [4], [5], [0], [1]]
  assert peers_of(0, 8, 2, 3) == [2, 4, 6] and peers_of(0, 4, 4, 1) == [] and peers_of(0, 1, 1, 1) == []
  for processes in range(1, 14):
    for size in range(1, 6):
      domains = -(-processes // size)
      for i in range(processes):
        found = peers_of(i, processes, size, 2)
        others = {peer // size for peer in found} - {i // size}
        assert len(found) == len(others) == min(2, domains - 1)
      if processes % size == 0 and domains > 1:
        assert sorted(peers_of(i, processes, size, 1)[0] for i in range(processes)) == list(range(processes))


def test_a_peer_keeps_whole_parts_gives_them_back_and_refuses_everything_else(tmp_path):
  peers = Peers(tmp_path, 7)  # Its only peer is itself.
  try:
    peers.put(0, '4.1', [b'head\n', memoryview(b'x' * 3_000_000)])
    assert (tmp_path / '4.1').read_bytes() == b'head\n' + b'x' * 3_000_000
    peers.get(0, '4.1', tmp_path / 'got')
    assert (tmp_path / 'got').read_bytes() == (tmp_path / '4.1').read_bytes()
    with pytest.raises(PeerError, match=r'process 0: .*No such file'):
      peers.get(0, '5.1', tmp_path / 'none')
    for name in ('../4.1', '4.1.incomplete', '/etc/passwd', ''):
      with pytest.raises(PeerError):
        peers.put(0, name, [b'x'])
    with pytest.raises(PeerError, match='no copy'):
      Peers.put(_changed(peers, lineage=8), 0, '6.1', [b'x'])
    with pytest.raises(PeerError, match='without an answer'):
      Peers.put(_changed(peers, token='0' * 32), 0, '6.1', [b'x'])
    with socket.create_connection(('localhost', peers._addresses[0].port)) as torn:
      torn.sendall(json.dumps({'token': peers._token, 'lineage': 7, 'put': '6.1', 'size': 10}).encode() + b'\nhalf')
      torn.shutdown(socket.SHUT_WR)
      assert b'ended 6 bytes early' in torn.recv(1000)
    assert sorted(file.name for file in tmp_path.iterdir()) == ['4.1', 'got']
  finally:
    peers.close()
  with pytest.raises(PeerError, match=r'process 0 at .* does not answer'):
    peers.put(0, '6.1', [b'x'])


def _changed(peers, lineage=7, token=None):
  other = Peers.__new__(Peers)
  other.__dict__ |= {**vars(peers), '_lineage': lineage, '_token': token or peers._token}
  return other
