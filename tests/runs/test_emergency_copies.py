"""Emergency copies: what is read is what was written, and nothing else is ever used."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import socket
import time
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_states import layout_on, random_state

from praxis_lite.common.errors import UserError
from praxis_lite.runs.cluster import copies_on_peers, copy_file, emergency, peers as peers_module
from praxis_lite.runs.cluster.copies_on_peers import CopiesOnPeers, failure_domains, receivers_of
from praxis_lite.runs.cluster.copy_file import EmergencyCopy
from praxis_lite.runs.cluster.emergency import EmergencyCopies
from praxis_lite.runs.cluster.peers import PeerError, Peers
from praxis_lite.runs.observer import StateToCopy
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
    copies.write(
      StateToCopy(step, random_state(layout, step, step), {**POSITION, 'of': step}, checkpoint, [{'step': step}])
    )
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
  copies.write(StateToCopy(2, random_state(layout), None, 0))
  copies.close()
  with monkeypatch.context() as killed:
    killed.setattr(EmergencyCopies, '_write', lambda *args: None)
    copies.write(StateToCopy(4, random_state(layout), None, 0))
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
    with pytest.raises(copy_file.NO_COPY):
      EmergencyCopy(file)
  for size in (0, 1, 50, len(data) // 2, len(data) - 1):
    file.write_bytes(data[:size])
    with pytest.raises(copy_file.NO_COPY):
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
    told.append(copies.write(StateToCopy(step, random_state(layout, step, step), None, 0)))
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
    small.setattr(emergency, 'num_bytes', lambda shapes: 10**18)
    with pytest.raises(UserError, match=f'{where}: {disk} has .* GB on this host, and two copies take 2e\\+09 GB'):
      opened(disk, layout)
  (disk / emergency._user_folder()).rename(disk / 'somewhere')
  (disk / emergency._user_folder()).symlink_to(disk / 'somewhere')
  with pytest.raises(UserError, match='is of another user'):
    opened(disk, layout)


def test_after_the_run_nothing_is_left(disk, layout):
  copies = opened(disk, layout)
  copies.write(StateToCopy(2, random_state(layout), None, 0))
  copies.remove()
  assert os.listdir(disk / emergency._user_folder()) == []


# ---- copies on peers


def in_domains(processes, size):
  return failure_domains([str(process) for process in range(processes)], size)


def test_peers_are_in_other_failure_domains_and_the_parts_are_dealt_out_evenly():
  assert receivers_of(in_domains(6, 2), 1) == [[2], [3], [4], [5], [0], [1]]
  assert receivers_of(in_domains(8, 2), 3)[0] == [2, 4, 6] and receivers_of([0], 1) == [[]]
  assert receivers_of(in_domains(4, 4), 1) == [[]] * 4
  for processes in range(1, 14):
    for size in range(1, 6):
      domains = -(-processes // size)
      found = receivers_of(in_domains(processes, size), 2)
      for i, peers in enumerate(found):
        assert len(peers) == len({peer // size for peer in peers} - {i // size}) == min(2, domains - 1)
  # Unequal domains: of 8, 8 and 4, all receive one; of 8 and 4, two each of the 8; of 8 and 1, one receives all.
  for processes, size, received in [(20, 8, [1] * 20), (12, 8, [1, 1, 1, 1, 0, 0, 0, 0, 2, 2, 2, 2])]:
    counts = Counter(peer for peers in receivers_of(in_domains(processes, size), 1) for peer in peers)
    assert [counts[i] for i in range(processes)] == received


def test_processes_that_share_a_folder_are_in_one_failure_domain():
  """Two hosts with eight processes each send to each other, although `failure_domain` is 1."""
  hosts = ['a'] * 8 + ['b'] * 8
  assert failure_domains(hosts, 1) == [0] * 8 + [8] * 8
  assert all(peer // 8 != i // 8 for i, (peer,) in enumerate(receivers_of(failure_domains(hosts, 1), 1)))
  assert failure_domains('abab', 1) == [0, 1, 0, 1] and failure_domains('abbc', 2) == [0] * 4


@pytest.mark.parametrize(
  'folders, own, line, receivers',
  [
    (
      'aabb',
      1,
      'process 1 sends its part of the state, .*, to process 3 at each copy; a process keeps up to 6',
      [3],
    ),
    ('aaaa', 1, 'all processes have the same folder, so none sends its part to another', []),
    ('aaab', 3, 'process 3 sends its part of the state, .*, to process 0 at each copy; a process keeps up to 12', [0]),
  ],
)
def test_the_line_about_peers_names_those_that_a_process_sends_to(
  disk, layout, monkeypatch, folders, own, line, receivers
):
  rooms = []
  monkeypatch.setattr(emergency.jax, 'process_count', lambda: 4)
  monkeypatch.setattr(copies_on_peers, 'folders_of_all', lambda folder: list(folders))
  monkeypatch.setattr(emergency, 'gather_texts', lambda text: [text] * 4)
  monkeypatch.setattr(copies_on_peers, 'Peers', lambda folder, lineage: FakePeers())
  monkeypatch.setattr(emergency, '_lineage_in', lambda file: 1)
  monkeypatch.setattr(emergency, 'num_bytes', lambda shapes: 1090)
  monkeypatch.setattr(emergency, '_check_room', lambda folder, num_bytes, what: rooms.append(num_bytes))
  monkeypatch.setattr(emergency.jax, 'process_index', lambda: own)
  if folders == 'aaab':  # The room is that of all parts of the processes in this folder.
    with pytest.raises(UserError, match=r'peers = 2 needs 3 failure domains, .* have 2; processes that share a folder'):
      EmergencyCopies(disk.parent / 'run', [str(disk)], *layout, peers=2)
    rooms.clear()
  copies = EmergencyCopies(disk.parent / 'run', [str(disk)], *layout, peers=1)
  assert re.match(f'emergency copies: {line}', copies.costs) and getattr(copies._peers, '_receivers', []) == receivers
  assert rooms == [2180] + {'aabb': [2 * 6 * 1090], 'aaaa': [0], 'aaab': [3 * 4 * 1090]}[folders]


class FakePeers:
  def __init__(self):
    self.kept, self.is_there = [], True

  def put(self, peer, name, parts):
    if not self.is_there:
      raise PeerError('timed out')
    self.kept.append(name)

  def close(self):
    pass


def test_the_last_copy_that_is_on_all_peers_is_kept_until_a_newer_one_is(disk, layout):
  copies = opened(disk, layout)
  peers = FakePeers()
  copies._peers = CopiesOnPeers(copies._folders[0], peers, [0])
  names = lambda: sorted(file.name for file in disk.rglob('*.0'))  # noqa: E731
  for step, is_there, kept in [(2, True, '2'), (4, False, '2 4'), (6, False, '2 6'), (8, True, '8')]:
    peers.is_there = is_there
    copies.write(StateToCopy(step, random_state(layout, step, step), None, 0))
    assert bool(copies.settle()) == (step in (4, 8))
    assert names() == [f'{step}.0' for step in kept.split()]


def test_parts_of_two_starts_and_parts_of_another_step_are_not_taken_for_one_copy(disk, layout):
  """The same step and the same position in the data, with other values."""
  saves = []
  for seed in (1, 2):
    copies = opened(disk, layout)
    copies.write(StateToCopy(4, random_state(layout, seed, 4), POSITION, 0))
    copies.settle()
    saves.append(EmergencyCopy(next(disk.rglob('4.0'))))
  assert saves[0].save != saves[1].save and saves[1].save == copy_file.save_in(next(disk.rglob('4.0')))
  assert copy_file.save_of({'step': 4, 'input_state': None})  # A copy of an earlier version.
  data = next(disk.rglob('4.0')).read_bytes()

  class Gives(FakePeers):
    def get(self, peer, name, to):
      to.write_bytes(data)

  found = {}
  fetch = CopiesOnPeers(copies._folders[0], Gives(), [0])._fetch
  usable = found, lambda copy: copies._reason_against(copy, 0)
  told = fetch(0, 4, saves[0].save, *usable)
  assert told == 'process 0 has given a part of another copy than the one of step 4' and not found
  assert 'of another copy' in fetch(0, 6, saves[1].save, *usable) and not found
  assert fetch(0, 4, saves[1].save, *usable) == '' and found[4].step == 4


def test_of_many_parts_the_newest_are_told_whole():
  for count in range(90, 140):
    words = copies_on_peers._list_parts({(1000 + i // 100, i): 'a1b2c3d4' for i in range(count)}).split()
    assert all(re.fullmatch(r'100[01]\.\d+:a1b2c3d4', word) for word in words) and len(' '.join(words)) < 2000
    assert words[0].startswith('1001.' if count > 100 else '1000.')


@pytest.mark.slow
def test_a_transfer_that_goes_on_slowly_is_not_ended_and_every_name_of_a_peer_is_tried(tmp_path, monkeypatch):
  """40 MiB at 20 MiB/s, with a time limit of one second for each block."""
  monkeypatch.setattr(peers_module, '_TIMEOUT_S', 1.0)
  receive = peers_module._receive

  class Slow:
    def __init__(self, file):
      self._file = file

    def read(self, size):
      time.sleep(size / 2**20 / 20)
      return self._file.read(size)

  monkeypatch.setattr(peers_module, '_receive', lambda file, path, size: receive(Slow(file), path, size))
  peers = Peers(tmp_path, 7)
  try:
    peers.put(0, '4.1', [b'h\n', memoryview(bytes(40 << 20))])
    assert (tmp_path / '4.1').stat().st_size == 2 + (40 << 20)
    port = peers._addresses[0].port
    peers._addresses = [peers_module.Address(['no-such-host.invalid', 'a' * 70 + '.b', 'localhost'], port)]
    peers.put(0, '5.1', [b'x'])
    peers._addresses = [peers_module.Address(['no-such-host.invalid'], port)]
    with pytest.raises(PeerError, match=r'process 0 at no-such-host.invalid:.* does not answer'):
      peers.put(0, '5.1', [b'x'])
  finally:
    peers.close()


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
