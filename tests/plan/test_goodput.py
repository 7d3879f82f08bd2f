"""The expected time of a run with failures, against a simulation and against the best interval by search."""

from __future__ import annotations

import math
import random
import types

import pytest

from praxis_lite.cli.main import main
from praxis_lite.instruments.plan.copies import format_copies
from praxis_lite.instruments.plan.goodput import Interruptions, advise_interval, best_interval, goodput, useful_share
from praxis_lite.instruments.plan.topology import parse_topology
from praxis_lite.runs.records.certificate import read_prediction
from praxis_lite.training.task import EmergencyCopiesParams

DAY = 86400.0


def simulated_share(interval, save, mean, restart, pieces, seed):
  """Runs for `pieces` intervals of work that are saved; returns the share of the time that was useful."""
  random_ = random.Random(seed)
  time, left = 0.0, random_.expovariate(1 / mean)
  for _ in range(pieces):
    needed = interval + save
    while left < needed:  # A failure: what was not saved is lost, and a restart may fail too.
      time += left
      left = random_.expovariate(1 / mean)
      needed = restart + interval + save
    time += needed
    left -= needed
  return pieces * interval / time


@pytest.mark.parametrize(
  ('interval', 'save', 'mean', 'restart'),
  [(600, 5, 4 * 3600, 300), (3600, 60, 6 * 3600, 600), (100, 0, 1000, 10), (1800, 900, 1800, 0), (60, 1, 1e7, 300)],
)
def test_the_useful_share_is_that_of_simulated_failures(interval, save, mean, restart):
  simulated = simulated_share(interval, save, mean, restart, 40_000, seed=1)
  assert useful_share(interval, save, mean, restart) == pytest.approx(simulated, rel=0.02)


@pytest.mark.parametrize(('save', 'mean'), [(1, 1e6), (5, 3600), (60, 3600), (600, 3600), (0.01, 100)])
def test_no_other_interval_is_much_better_than_that_of_young_and_daly(save, mean):
  best = best_interval(save, mean)
  assert best == pytest.approx(math.sqrt(2 * save * mean), rel=0.5)  # Young's.
  shares = [useful_share(best * factor, save, mean, 300) for factor in (0.25, 0.5, 0.8, 1, 1.25, 2, 4)]
  assert max(shares) <= 1.002 * shares[3] and shares[0] < shares[3] > shares[-1]


def test_more_chips_fail_more_often_and_no_failures_lose_nothing():
  few, many = goodput(64, 10e9), goodput(16384, 10e9)
  assert many.seconds_to_failure == pytest.approx(54 * DAY / 419)  # That of Llama 3 405B: 419 failures in 54 days.
  assert few.share > many.share > 0.9 and few.save_interval > many.save_interval
  none = goodput(16384, 10e9, Interruptions(failures_per_chip_day=0))
  assert (none.share, none.save_interval, none.seconds_to_failure) == (1.0, math.inf, math.inf)


def test_a_run_that_fails_before_it_saves_makes_no_progress():
  assert goodput(1_000_000, 80e9, Interruptions(100, 3600)).share == 0.0
  assert best_interval(10.0, 1.0) == 1.0


def test_a_run_waits_for_inputs_and_for_saves_of_a_given_length():
  assert goodput(8, 0, Interruptions(failures_per_chip_day=0, input_wait_share=0.25)).share == 0.8
  long, short = (goodput(1024, 1e9, Interruptions(save_seconds=seconds)) for seconds in (60, 0))
  assert (long.save_seconds, short.save_seconds) == (60, 0) and long.share < short.share <= 1


def test_an_interval_far_from_the_best_is_told():
  found = goodput(16384, 8e9)  # Some chip fails every 3 hours; the best interval is about 3 minutes.
  assert advise_interval(found, found.save_interval, 300.0) == ''
  assert advise_interval(found, 1.5 * found.save_interval, 300.0) == ''
  rare, frequent = (advise_interval(found, factor * found.save_interval, 300.0) for factor in (20, 0.05))
  assert rare.startswith('too rare: a failure loses more work than needed; ') and 'with the best interval' in rare
  assert frequent.startswith('too frequent: saves stall the run more than needed; ')
  never = goodput(8, 8e9, Interruptions(failures_per_chip_day=0))
  assert advise_interval(never, 60.0, 300.0) == ''
  hopeless = goodput(10**9, 8e9)
  assert advise_interval(hopeless, 60.0, 300.0) == ''


def test_a_plan_tells_what_emergency_copies_take_of_a_host():
  def line(topology, is_time_known=True, **settings):
    state = types.SimpleNamespace(total=3 * 2**30 + 512, inputs=512)
    memory = types.SimpleNamespace(state=state)
    known = {'is_time_known': is_time_known, 'step_seconds': 2.0}
    plan = types.SimpleNamespace(topology=parse_topology(topology), memory=memory, **known)
    return format_copies(plan, EmergencyCopiesParams(every_n_steps=10, **settings))

  # 3 GiB of each chip, which its host receives at 12 GB/s; two copies of the eight parts of a host.
  one = line('h100:8x8')
  assert one == (
    'emergency copies every 10 steps, 20 s: each stalls the run for about 268 ms, 1.3% of the time; a host keeps up to '
    '48 GiB in its folders'
  )
  assert '96 GiB' in line('h100:8x8', directories=('/dev/shm', '/disk'))
  # Three copies of the own part and of that of each sender; eight adapters of 50 GB/s send two times 24 GiB.
  peers = line('h100:8x8', peers=2)
  assert 'up to 216 GiB' in peers and peers.endswith('sends 48 GiB to its peers at each copy, for at least 129 ms')
  assert line('v5e:4x4', peers=40).endswith('; this is longer than the time between copies, so the run waits')
  assert line('h100:1x8', peers=1).endswith('peers need more hosts than these 8 chips have')
  assert line('h100:1x2').endswith('12 GiB in its folders')  # A host with fewer chips than it has room for.
  assert line('h100:8x8', is_time_known=False) == format_copies(None, EmergencyCopiesParams()) == ''


@pytest.mark.slow
def test_the_figures_and_the_page_of_a_plan_have_the_best_interval(tmp_path, capsys):
  figures, page = tmp_path / 'figures.json', tmp_path / 'page.html'
  command = ['plan', '--exp=lm_sizes.Llama8B', '--topology=h100:8x8', '--nocompile', '--tokens=1e13']
  command += ['--set=task.train.save_interval_steps=200000', '--set=task.train.emergency_copies.every_n_steps=10']
  assert main([*command, f'--figures={figures}', f'--html={page}']) == 0
  found = read_prediction(figures)
  assert found.failure_seconds == pytest.approx(54 * DAY / 419 * 16384 / 64)
  assert found.best_save_seconds == pytest.approx(best_interval(found.save_stall_seconds, found.failure_seconds))
  told = [
    line
    for line in capsys.readouterr().out.splitlines()
    if 'save_interval_steps' in line or line.startswith('emergency copies')
  ]
  assert len(told) == 2 and all(line.replace('"', '\\"') in page.read_text() for line in told)
  assert main([*command, f'--figures={figures}', '--failures_per_chip_day=0']) == 0
  assert read_prediction(figures).best_save_seconds is None
