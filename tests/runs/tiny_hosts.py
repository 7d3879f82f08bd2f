"""An experiment for `launch`: `tiny_run` on the devices of all processes, without noise, behind the gate of GATE."""

from __future__ import annotations

import os

from tiny_runs import tiny_run

from praxis_lite.training.experiment import BaseExperiment


class TinyHosts(BaseExperiment):
  def task(self):
    return tiny_run(int(os.environ['TOTAL_DEVICES']), noise=0.0).task

  def datasets(self):
    return tiny_run(gate=os.environ.get('GATE', '')).datasets

  def decode_datasets(self):
    return tiny_run().decode_datasets
