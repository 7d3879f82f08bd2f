"""Faults of one or several hosts of a job of `launch`: killed, stopped, slow, or killed again while they restart."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable

from tools.faults.experiment import NUM_STEPS, SAVE_INTERVAL
from tools.faults.lab import Lab, SurvivalError
from tools.faults.processes import Training, host_processes, process_state


def kill_one_host(lab: Lab) -> None:
  """one host of two killed"""
  _signal_hosts(lab, signal.SIGKILL)


def kill_one_of_four_hosts(lab: Lab) -> None:
  """one host of four killed"""
  _signal_hosts(lab, signal.SIGKILL, of=4)


def kill_two_of_four_hosts(lab: Lab) -> None:
  """two hosts of four killed at once"""
  _signal_hosts(lab, signal.SIGKILL, 2, of=4)


def stop_one_host(lab: Lab) -> None:
  """one host of two stopped"""
  _signal_hosts(lab, signal.SIGSTOP)


def kill_host_while_restarting(lab: Lab) -> None:
  """one host of two killed, and one again while they restart"""
  delay = float(lab.rng.random() ** 2) * 8

  def kill_again(run: Training) -> None:
    run.wait_for(lambda: 'restart 1 of' in run.text and len(host_processes(run.process.pid)) == 2)
    time.sleep(delay)
    _signal(host_processes(run.process.pid), [int(lab.rng.integers(2))], signal.SIGKILL)

  _signal_hosts(lab, signal.SIGKILL, then=kill_again)
  lab.seen.where += f', and {delay:.1f} s after the restart'


def slow_one_host(lab: Lab) -> None:
  """one host of two slow: stopped several times for less than the timeout"""
  seconds = [float(each) for each in 1 + 7 * lab.rng.random(3)]

  def go_on(run: Training) -> None:
    hosts = host_processes(run.process.pid)
    stopped = [i for i, pid in enumerate(hosts) if process_state(pid) == 'T']
    for each in seconds:
      time.sleep(each)
      _signal(hosts, stopped, signal.SIGCONT)
      time.sleep(0.3)
      _signal(hosts, stopped, signal.SIGSTOP)
    _signal(hosts, stopped, signal.SIGCONT)

  _signal_hosts(lab, signal.SIGSTOP, then=go_on, restarts=False)
  lab.seen.where += f', for {", ".join(f"{each:.1f}" for each in seconds)} s'


def _signal_hosts(
  lab: Lab,
  number: int,
  count: int = 1,
  *,
  of: int = 2,
  then: Callable[[Training], None] = lambda run: None,
  restarts: bool = True,
) -> None:
  """Sends a signal to some hosts in the middle of a job, waits for its end, and compares.

  Args:
    lab: where to train.
    number: the signal.
    count: how many hosts get it.
    of: how many hosts there are.
    then: called after the signal.
    restarts: whether the job is to be restarted, if the signal did not come too late; otherwise it must not be.
  """
  if of > 2:
    lab.experiment = 'FaultsOnFour'
  lab.hosts = of
  chosen, step = [int(i) for i in lab.rng.choice(of, count, replace=False)], int(lab.rng.integers(0, NUM_STEPS))
  lab.seen.where = f'host {" and ".join(map(str, chosen))}, step {step}'
  run = lab.start()
  run.wait_for(lambda: run.last_step >= step and len(host_processes(run.process.pid)) == of)
  processes = host_processes(run.process.pid)
  if len(processes) == of:
    _signal(processes, chosen, number)
    time.sleep(0.05)  # Until the signal has arrived.
    then(run)
  before, lab.seen.bound = run.last_step, SAVE_INTERVAL * (1 if lab.seen.copies else 2)
  if run.wait(600) != 0:
    raise SurvivalError(f'the job ended with {run.process.returncode}: {run.lines[-4:]}')
  is_restarted = 'restart 1 of' in run.text
  lab.seen.too_late = restarts and not is_restarted
  if is_restarted and not restarts:
    raise SurvivalError(f'it was restarted: {[line for line in run.lines if "launch: " in line][:2]}')
  if run.restored_step is not None:
    lab.seen.lost = max(before - run.restored_step, 0)
    if lab.seen.lost > lab.seen.bound:
      raise SurvivalError(f'{lab.seen.lost} steps were lost, of {before}')
  lab.compare()


def _signal(processes: list[int], which: list[int], number: int) -> None:
  for i in which:
    with contextlib.suppress(ProcessLookupError, IndexError):
      os.kill(processes[i], number)


# As in `faults.py`.
FAULTS_OF_HOSTS = {
  kill_one_host: 3,
  kill_one_of_four_hosts: 1,
  kill_two_of_four_hosts: 1,
  stop_one_host: 1,
  kill_host_while_restarting: 3,
  slow_one_host: 2,
}
