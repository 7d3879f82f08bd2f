"""Devices that change bits silently: what is found, which device is blamed, and what the run does then."""

from __future__ import annotations

import collections
import socket

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from planted_faults import Flip, build_faulty_steps, flip_in_state
from tiny_runs import tiny_run

from praxis_lite.checkpoints import saved_steps
from praxis_lite.cli.main import main
from praxis_lite.common.errors import ConfigError, UserError
from praxis_lite.common.trees import leaves_by_path
from praxis_lite.runs import Hook, TrainOptions, run_train
from praxis_lite.runs.corruption import Corruption, CorruptionError, CorruptionPolicy
from praxis_lite.runs.determinism import DeterminismError, bit_differences, rotate_devices
from praxis_lite.runs.records.faulty_devices import FaultyDevice, read_faulty_devices, record_faulty_devices
from praxis_lite.runs.replay import compare_with_checkpoint
from praxis_lite.runs.replicas import ReplicaDifference, ReplicaSums, _sum_bits, find_suspects
from praxis_lite.runs.trouble import GoBack, read_troubles
from praxis_lite.training.partitioned_step import PartitionedStep
from praxis_lite.training.partitioned_task import PartitionedTask
from praxis_lite.training.steps import TrainStepOutput

pytestmark = pytest.mark.usefixtures('shared_programs')
W, V = ('mdl_vars', 'w'), ('mdl_vars', 'v')
A_BIT = Flip(W, 1, 5, 3)


def on_mesh(config, **sizes):
  config.task.set(mesh_axis_names=tuple(sizes), ici_mesh_shape=tuple(sizes.values()))
  return config


def replicated_run(devices=3, **train):
  """The configs of a run whose state is whole on each device."""
  return on_mesh(tiny_run(**{'num_train_steps': 9, **train}), data=1, mdl=devices)


class FlipAfter(Hook):
  """Flips a bit after some steps, each time that the run comes there, or only the first time."""

  def __init__(self, *steps, always=False):
    self._steps, self._always = list(steps), always

  def on_step(self, run, metrics):
    if run.step in self._steps:
      if not self._always:
        self._steps.remove(run.step)
      run.state = flip_in_state(run.state, A_BIT)


def same(a, b):
  return not bit_differences(a.state, b.state)


# ---------------------------------------------------------------- checksums


@pytest.mark.parametrize(
  'dtype', ['bool', 'int4', 'int8', 'uint16', 'int32', 'bfloat16', 'float8_e4m3fn', 'float32', 'complex64']
)
def test_each_bit_of_each_number_is_in_the_checksum(dtype):
  rng, bits = np.random.default_rng(0), {'bool': 1, 'int4': 3}.get(dtype, 8 * jnp.dtype(dtype).itemsize)
  x, one = rng.integers(0, 2, (3, 5)).astype(jnp.dtype(dtype)), np.ones((), jnp.dtype(dtype))
  sums = jax.jit(lambda x, one: (_sum_bits(x), _sum_bits(one)))
  before, of_one = map(int, sums(x, one))
  for place in range(x.size):
    for bit in range(bits):
      flipped = np.array(x), np.array(one)
      flipped[0].reshape(-1).view(np.uint8)[place * x.itemsize + bit // 8] ^= 1 << bit % 8
      flipped[1].reshape(-1).view(np.uint8)[bit // 8] ^= 1 << bit % 8
      found = sums(*flipped)
      assert int(found[0]) != before and int(found[1]) != of_one, (place, bit)


def test_equal_numbers_in_another_order_have_another_checksum_and_no_numbers_have_one():
  assert int(_sum_bits(jnp.array([1.0, 2.0]))) != int(_sum_bits(jnp.array([2.0, 1.0])))
  assert int(_sum_bits(jnp.zeros((0, 3)))) == 0 and int(_sum_bits(jax.random.key(3))) != int(
    _sum_bits(jax.random.key(4))
  )


@pytest.mark.parametrize('size', [2, 24, 25])
def test_other_signs_and_the_same_bit_of_two_numbers_are_in_the_checksum(size):
  x = np.random.default_rng(0).standard_normal(size).astype(np.float32)
  sums = jax.jit(jax.vmap(_sum_bits))
  pairs = [(i, j) for i in range(size) for j in range(i)]
  changed = [x, -x, np.zeros_like(x), -np.zeros_like(x)]
  for bit in (0, 23, 30, 31):
    for pair in pairs:
      changed.append(x.copy())
      changed[-1].view(np.uint32)[list(pair)] ^= np.uint32(1 << bit)
  found = np.asarray(sums(np.stack(changed)))
  assert found[1] != found[0] and found[2] != found[3]
  assert (found[4:] != found[0]).all()


@pytest.fixture(scope='module')
def state_of():
  """Returns the sums and the first state of a tiny run on a mesh."""
  made = {}

  def build(**sizes):
    key = tuple(sizes.items())
    if key not in made:
      config = on_mesh(tiny_run(), **sizes)
      task = PartitionedTask(config.task.instantiate(), config.datasets[0].instantiate().batch_struct())
      sums = ReplicaSums(task.layout)
      sums.compile()
      made[key] = sums, task.init_state(jax.random.key(0))
    return made[key]

  return build


@pytest.mark.parametrize(
  'sizes', [{'data': 2, 'mdl': 3}, {'mdl': 3, 'unused': 1, 'data': 2}, {'data': 1, 'mdl': 5}], ids=str
)
def test_the_device_whose_replica_differs_is_blamed(state_of, sizes):
  sums, state = state_of(**sizes)
  assert sums.compare(np.asarray(sums(state))) == []
  for device in range(int(np.prod(list(sizes.values())))):
    for path in (W, ('step',)):
      flipped = flip_in_state(state, Flip(path, device, 4, 30))
      (found,) = sums.compare(np.asarray(sums(flipped)))
      assert (found.path, found.odd) == (path, (device,)) and device in found.replicas
      assert len(found.replicas) == sums.replicated[path]
      assert find_suspects([found]) == ((device,), True)


def test_with_two_replicas_both_are_suspects_and_whole_parts_have_none(state_of):
  sums, state = state_of(data=2, mdl=2)
  assert sums.replicated[W] == 2 and sums.replicated[('step',)] == 4
  (found,) = sums.compare(np.asarray(sums(flip_in_state(state, Flip(W, 3, 0, 0)))))
  assert found == ReplicaDifference(W, (2, 3), ()) and find_suspects([found]) == ((2, 3), False)
  split, state = state_of(data=3)
  assert split.replicated[W] == 1 and split.replicated[('step',)] == 3
  assert split.compare(np.asarray(split(flip_in_state(state, Flip(W, 1, 0, 0))))) == []


def test_the_device_that_differs_most_often_is_blamed():
  many = [
    ReplicaDifference(W, (0, 1, 2), (1,)),
    ReplicaDifference(V, (0, 1, 2), (1,)),
    ReplicaDifference(V, (3, 4, 5), (4,)),
  ]
  assert find_suspects(many) == ((1,), True)
  assert find_suspects([ReplicaDifference(W, (0, 1, 2, 3), ()), *many]) == ((1,), True)


# ---------------------------------------------------------------- runs


@pytest.fixture(scope='module')
def clean(tmp_path_factory):
  return run_train(replicated_run(), tmp_path_factory.mktemp('clean'), check_replicas=2)


def test_a_run_ends_before_it_saves_a_changed_bit(tmp_path, capsys):
  device = jax.devices()[1]
  with pytest.raises(CorruptionError) as error:
    run_train(replicated_run(), tmp_path, hooks=[FlipAfter(4)], check_replicas=100)
  message = str(error.value)
  assert message.startswith('step 6: replicas of the state differ in 1 array: mdl_vars.w; device 1 ')
  assert f'device 1 ({device.device_kind}, host ' in message and 'differs from most of the other replicas' in message
  assert 'after step 3 all were equal' in message and CorruptionError.exit_code == 76
  assert saved_steps(tmp_path) == [3]  # The checkpoint of step 6 would have had the changed bit.
  (known,) = read_faulty_devices(tmp_path)
  assert (known.step, known.place, known.is_voted, known.is_quarantined) == (6, 1, True, True)
  out = capsys.readouterr().out
  assert 'replicas of 8 of 8 arrays of the state, 100% of its bytes, are compared every 100 steps and before' in out


def test_the_steps_are_repeated_and_end_with_the_same_bits(tmp_path, clean, capsys):
  options = {'check_replicas': 2, 'on_corruption': 'repeat'}
  result = run_train(replicated_run(), tmp_path, hooks=[FlipAfter(4)], **options)
  assert result.step == 9 and same(result, clean)
  out = capsys.readouterr().out
  assert 'going back to step 3, and repeating the steps since' in out
  (trouble,) = read_troubles(tmp_path)
  assert (trouble.first, trouble.last, trouble.action, trouble.back_to) == (5, 6, 'repeat', 3)
  assert [k.is_quarantined for k in read_faulty_devices(tmp_path)] == [False]
  assert main(['replay', str(tmp_path), '--step=5', '--compare']) == 2
  assert '--step=5: there is no checkpoint of this step to compare with; there are: 3, 6, 9' in capsys.readouterr().err


@pytest.mark.slow
def test_a_device_that_is_wrong_twice_ends_the_run_or_is_left_out(tmp_path, capsys):
  options = {'check_replicas': 2, 'on_corruption': 'repeat'}
  with pytest.raises(CorruptionError, match=r'step 6: .* device 1 '):
    run_train(replicated_run(), tmp_path / 'a', hooks=[FlipAfter(4, always=True)], **options)
  assert [k.is_quarantined for k in read_faulty_devices(tmp_path / 'a')] == [False, True]
  capsys.readouterr()

  config = on_mesh(tiny_run(num_train_steps=9), data=1, replica=4)
  hook = FlipAfter(4, always=True)
  flip = FlipAfter.on_step
  hook.on_step = lambda run, metrics: flip(hook, run, metrics) if len(run.state.step.sharding.device_set) == 4 else None
  result = run_train(config, tmp_path / 'b', hooks=[hook], elastic=True, devices=jax.devices()[:4], **options)
  assert result.step == 9
  assert {d.id for d in result.state.step.sharding.device_set} == {0, 2, 3}
  out = capsys.readouterr().out
  assert out.count('going back to step 3, and repeating') == 2
  assert 'quarantined, and not used: device 1 of ' in out and 'faulty_devices.jsonl' in out


def test_a_fault_that_stays_is_not_repeated_for_ever(tmp_path):
  policy = CorruptionPolicy(tmp_path, 'repeat', elastic=False, most=2)
  fault = Corruption(3, 5, 'step 5: replicas differ', jax.devices()[:2], False)
  assert [type(policy.answer(fault)) for _ in range(3)] == [GoBack, GoBack, CorruptionError]
  unknown = CorruptionPolicy(tmp_path / 'b', 'repeat', elastic=True, most=1)
  (tmp_path / 'b').mkdir()
  assert [type(unknown.answer(fault._replace(devices=()))) for _ in range(2)] == [GoBack, CorruptionError]
  assert [(k.step, k.event) for k in read_faulty_devices(tmp_path)] == [(5, n) for n in (1, 1, 2, 2, 3, 3)]
  file = tmp_path / 'faulty_devices.jsonl'  # A record of an earlier version has no events: its steps count.
  file.write_text(''.join(line.replace(', "event": 1', '') + '\n' for line in file.read_text().splitlines()[:2]))
  assert [type(policy.answer(fault)) for _ in range(2)] == [GoBack, CorruptionError]


@pytest.mark.slow
def test_an_unvoted_fault_that_stays_ends_the_run(tmp_path):
  config = replicated_run(2, max_rollbacks=2)
  with pytest.raises(CorruptionError, match='there is no majority'):
    run_train(config, tmp_path, hooks=[FlipAfter(4, always=True)], check_replicas=1, on_corruption='repeat')
  assert {(k.step, k.event) for k in read_faulty_devices(tmp_path)} == {(5, 1), (5, 2), (5, 3)}


@pytest.mark.slow
def test_wrong_values_that_nothing_can_blame_do_not_repeat_for_ever(tmp_path):
  config = replicated_run(2, max_rollbacks=2)
  with pytest.raises(CorruptionError, match='there is no majority that would say which of them is wrong'):
    run_train(config, tmp_path, hooks=[FlipAfter(1, 4, 7)], check_replicas=1, on_corruption='repeat')
  known = read_faulty_devices(tmp_path)
  assert {k.step for k in known} == {2, 5, 8} and not any(k.is_voted or k.is_quarantined for k in known)


@pytest.mark.slow
def test_a_step_that_was_run_twice_with_different_bits_is_repeated(tmp_path, monkeypatch, capsys):
  from praxis_lite.runs import determinism

  found = iter([['device 1 (cpu), 1 of 70 values of mdl_vars.w'], []])
  monkeypatch.setattr(determinism, 'bit_differences', lambda a, b: next(found))
  config = replicated_run(1, num_train_steps=4)
  assert run_train(config, tmp_path, check_determinism=4, on_corruption='repeat').step == 4
  assert 'step 4 was run twice and gave different bits' in capsys.readouterr().out
  assert [k.device for k in read_faulty_devices(tmp_path)] == ['not known']


def test_options_and_records_that_are_wrong(tmp_path):
  with pytest.raises(ConfigError, match='check_replicas = 0: expected a number of steps, at least 1'):
    TrainOptions(check_replicas=0)
  with pytest.raises(ConfigError, match='on_corruption'):
    TrainOptions(on_corruption='ignore')
  with pytest.raises(ConfigError, match=r'check_replicas: no array has replicas on the mesh .*check_determinism'):
    run_train(replicated_run(1), tmp_path / 'one', check_replicas=2)
  assert not (tmp_path / 'one' / 'checkpoints').exists()
  record_faulty_devices(tmp_path, [FaultyDevice(3, 'n1', 0, 'device 0', 'x')])
  file = tmp_path / 'faulty_devices.jsonl'
  file.write_text(f'{file.read_text()}{{"step": 4}}\nnot json\n')
  assert [k.step for k in read_faulty_devices(tmp_path)] == [3]
  record_faulty_devices(tmp_path, [FaultyDevice(5, 'n1', 0, 'device 0', 'y')])
  assert [k.step for k in read_faulty_devices(tmp_path)] == [3, 5]


@pytest.mark.slow
def test_repeating_the_steps_between_checkpoints_finds_what_all_replicas_share(tmp_path):
  class FlipEverywhere(Hook):
    def on_step(self, run, metrics):
      if run.step == 5:
        for device in range(3):
          run.state = flip_in_state(run.state, Flip(W, device, 5, 20))

  config = replicated_run()
  run_train(config, tmp_path, hooks=[FlipEverywhere()], check_replicas=1)
  lines = []
  devices = [*jax.devices()[1:], jax.devices()[0]]
  for step, is_changed in ((3, False), (6, True), (9, False)):
    assert bool(compare_with_checkpoint(config, tmp_path, step, 0, lines.append, devices)) == is_changed
  assert 'steps 4 to 6 repeated: the checkpoint of step 6 has other bits: device 1 (cpu), ' in ' '.join(lines)
  assert 'steps 7 to 9 repeated: the checkpoint of step 9 has the same bits' in lines
  with pytest.raises(UserError, match='--step=7: there is no checkpoint'):
    compare_with_checkpoint(config, tmp_path, 7, 0)


@pytest.mark.slow
def test_replay_compares_on_other_devices(tmp_path, capsys):
  run = ['train', '--exp=lm.SyntheticLmTiny', f'--job_log_dir={tmp_path}', '--set', 'task.train.num_train_steps=4']
  assert (
    main(
      [*run, '--set', 'task.train.save_interval_steps=2', '--check_replicas=2', '--set', 'task.ici_mesh_shape=(1,1,3)']
    )
    == 0
  )
  capsys.readouterr()
  assert main(['replay', str(tmp_path), '--step=4', '--compare', '--other_devices']) == 0
  assert 'steps 3 to 4 repeated: the checkpoint of step 4 has the same bits' in capsys.readouterr().out
  assert main(['replay', str(tmp_path), '--step=4', '--other_devices']) == 2
  assert '--other_devices needs --compare' in capsys.readouterr().err


class AlwaysWrong:
  """Makes the device 1 flip the same bit of the weights in each train step, whichever part of the work it does."""

  def __init__(self, monkeypatch):
    self.steps, call = 0, PartitionedStep.__call__

    def wrong(step, *args):
      out = call(step, *args)
      if not isinstance(out, TrainStepOutput):
        return out
      self.steps += 1
      place = [device.id for device in step.mesh.devices.flat].index(1)
      return out._replace(state=flip_in_state(out.state, A_BIT._replace(device=place)))

    monkeypatch.setattr(PartitionedStep, '__call__', wrong)


@pytest.mark.parametrize(
  'sizes',
  [
    pytest.param({'data': 3, 'mdl': 1}, marks=pytest.mark.slow),
    {'data': 1, 'mdl': 3},
    pytest.param({'data': 2, 'mdl': 2}, marks=pytest.mark.slow),
  ],
)
def test_a_device_that_is_always_wrong_is_found_on_other_devices(tmp_path, monkeypatch, sizes):
  config = on_mesh(tiny_run(num_train_steps=4, save_interval_steps=2), **sizes)
  clean = run_train(config, tmp_path / 'clean', check_determinism=2, other_devices=True)
  assert same(clean, run_train(config, tmp_path / 'plain'))
  faulty = AlwaysWrong(monkeypatch)
  run_train(config, tmp_path / 'unseen', check_determinism=2)  # Both times, the same bit is wrong.
  assert faulty.steps == 6
  with pytest.raises(DeterminismError, match='step 2 was run twice, on two orders of devices, and gave different bits'):
    run_train(config, tmp_path / 'found', check_determinism=2, other_devices=True)
  assert saved_steps(tmp_path / 'found') == []


def test_other_devices_are_all_of_the_mesh_in_another_order_or_one_outside_of_it():
  one, *others = jax.devices()[:4]
  mesh = Mesh(np.array([[one, others[0]], [others[1], others[2]]]), ('data', 'mdl'))
  rotated = rotate_devices(mesh)
  assert rotated.devices.tolist() == [[others[0], others[1]], [others[2], one]]
  assert (rotated.axis_names, rotated.axis_types) == (mesh.axis_names, mesh.axis_types)
  assert rotate_devices(Mesh(np.array([others[0]]), 'data')).devices.item() == one
  with pytest.raises(ConfigError, match='other_devices needs check_determinism'):
    TrainOptions(other_devices=True)


def test_a_process_with_one_device_has_no_other(monkeypatch):
  first = jax.devices()[0]
  monkeypatch.setattr(jax, 'devices', lambda: [first])
  with pytest.raises(UserError, match='other_devices: process 0 has only one device'):
    rotate_devices(Mesh(np.array([first]), 'data'))


# ---------------------------------------------------------------- the campaign

KINDS = {
  'weights': 'a bit of a weight on one device, in its memory',
  'optimizer': "a bit of the optimizer's state on one device, in its memory",
  'gradient': 'a bit of a gradient on one device, after the sum over devices; also one that it receives wrongly',
  'sum': 'a bit of a gradient on one device, before the sum over devices; also a bit that changes on its way there',
}


@pytest.mark.slow
@pytest.mark.parametrize('sizes', [{'data': 1, 'mdl': 3}, {'mdl': 3, 'data': 2}, {'data': 2, 'mdl': 2}], ids=str)
def test_twenty_flips_of_each_kind(sizes):
  """Each flip happens up to ten steps before the replicas are compared.

  It is found, or without effect: no bit of the state differs from a run without it. Or it is of the kind that is not
  findable: all replicas have the same wrong values, and only a repetition of the step shows it. With three replicas,
  the device is blamed.
  """
  config = on_mesh(tiny_run(), **sizes)
  config.task.partitioning = 'shard_map'
  data = config.datasets[0].instantiate()
  key, rng = jax.random.key(1), np.random.default_rng(0)
  with build_faulty_steps(tuple(sizes)) as faults:
    task = PartitionedTask(config.task.instantiate(), data.batch_struct())
    task.train_step.compile()
  sums, batch = ReplicaSums(task.layout), task.train_step.put_inputs(next(iter(data)))
  start = task.init_state(jax.random.key(0))
  for _ in range(3):  # At first, the optimizer's state is zero, in which a small bit makes no difference.
    start = task.train_step(start, key, batch).state
  clean = [jax.tree.map(jnp.copy, start)]
  for _ in range(10):
    clean.append(task.train_step(jax.tree.map(jnp.copy, clean[-1]), key, batch).state)
  counts = collections.Counter()
  for kind in KINDS:
    for _ in range(20):
      group = 'opt_states' if kind == 'optimizer' else 'mdl_vars'
      paths = [path for path in leaves_by_path(start) if path[0] == group]
      flip = Flip(paths[rng.integers(len(paths))], int(rng.integers(task.mesh.size)), *map(int, rng.integers((70, 32))))
      state, steps = jax.tree.map(jnp.copy, start), int(rng.integers(1, 11))
      if kind in ('weights', 'optimizer'):
        state = flip_in_state(state, flip)
      for step in range(steps):
        now = flip._replace(path=flip.path[1:]) if step == 0 else None
        faults.before, faults.after = (now if kind == 'sum' else None), (now if kind == 'gradient' else None)
        state = jax.block_until_ready(task.train_step(state, key, batch).state)
      found = sums.compare(np.asarray(sums(state)))
      suspects = find_suspects(found)
      if found:
        blame = 'blamed' if suspects == ((flip.device,), True) else 'suspected'
        assert flip.device in suspects.devices, (kind, flip, suspects)
      else:
        blame = 'shared' if bit_differences(state, clean[steps]) else 'without effect'
      counts[kind, blame] += 1
  print(sizes, dict(counts))
  assert not any(counts['sum', blame] for blame in ('blamed', 'suspected')) and counts['sum', 'shared'] >= 15
  for kind in ('weights', 'optimizer', 'gradient'):
    assert counts[kind, 'blamed'] + counts[kind, 'suspected'] >= 16, counts
    assert counts[kind, 'shared'] <= 2, counts  # A difference so small that rounding has removed it.
    if 3 in sizes.values():
      assert counts[kind, 'blamed'] >= 16, counts


TWO = """
import sys
from praxis_lite.runs import Hook, initialize_distributed, run_train
initialize_distributed(sys.argv[1], 2, int(sys.argv[2]))
from planted_faults import Flip, flip_in_state
from test_corruption import FlipAfter, W, replicated_run
from praxis_lite.runs.corruption import CorruptionError

class FlipThere(FlipAfter):
  def on_step(self, run, metrics):
    if run.step in self._steps:
      self._steps.remove(run.step)
      run.state = flip_in_state(run.state, Flip(W, 2, 5, 3))

try:
  result = run_train(replicated_run(4, save_interval_steps=3), sys.argv[3], hooks=[FlipThere(4)],
                     check_replicas=2, on_corruption=sys.argv[4])
  print('ended by', result.ended_by, result.step, flush=True)
except CorruptionError as error:
  print('blamed', error, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize('answer', ['repeat', 'fail'])
def test_of_two_processes_both_name_the_device_and_both_repeat_or_end(tmp_path, run_python, answer):
  with socket.socket() as probe:
    probe.bind(('localhost', 0))
    address = f'localhost:{probe.getsockname()[1]}'
  processes = [run_python(TWO, address, str(i), str(tmp_path / 'run'), answer, devices=2) for i in range(2)]
  outs = [process.communicate(timeout=300) for process in processes]
  for out, err in outs:
    last = out.splitlines()[-1] if out else err
    if answer == 'repeat':
      assert last == 'ended by done 9', err
    else:
      assert last.startswith('blamed step 6: replicas of the state differ in 1 array: mdl_vars.w; device '), err
      assert 'process 1) differs from most' in last and saved_steps(tmp_path / 'run') == [3]
  (known,) = read_faulty_devices(tmp_path / 'run')
  assert (known.place, known.is_voted, known.is_quarantined) == (0, True, answer == 'fail')
  if answer == 'repeat':
    assert 'going back to step 3, and repeating the steps since' in outs[0][0]


ELSEWHERE = """
import sys
from praxis_lite.runs import initialize_distributed, run_train
initialize_distributed(sys.argv[1], 2, int(sys.argv[2]))
from test_corruption import on_mesh, tiny_run

config = on_mesh(tiny_run(num_train_steps=4), data=2, mdl=2)
print('ended by', run_train(config, sys.argv[3], check_determinism=2, other_devices=True).ended_by, flush=True)
"""


@pytest.mark.slow
def test_two_processes_run_a_step_on_other_devices_of_their_own(tmp_path, run_python):
  with socket.socket() as probe:
    probe.bind(('localhost', 0))
    address = f'localhost:{probe.getsockname()[1]}'
  processes = [run_python(ELSEWHERE, address, str(i), str(tmp_path / 'run'), devices=2) for i in range(2)]
  for out, err in [process.communicate(timeout=300) for process in processes]:
    assert out.splitlines()[-1:] == ['ended by done'], err
