"""Steps, examples and tokens a second, and MFU."""

from __future__ import annotations

import types

import numpy as np
import pytest

from praxis_lite.runs.throughput import Throughput, peak_flops


class Clock:
  now = 0.0

  def __call__(self) -> float:
    return self.now


def device(kind, platform='gpu'):
  return types.SimpleNamespace(device_kind=kind, platform=platform)


LM_BATCH = {'ids': np.zeros((12, 256), np.int32), 'weights': np.zeros((12, 256), np.float32)}


def test_speeds_of_the_steps_between_two_calls():
  clock = Clock()
  throughput = Throughput(LM_BATCH, flops_per_step=989e9, devices=[device('NVIDIA H100 80GB HBM3')] * 2, clock=clock)
  throughput.restart(10)
  clock.now = 4.0
  rates = throughput.rates(50)
  assert rates.steps_per_second == 10
  assert rates.examples_per_second == 120
  assert rates.tokens_per_second == 10 * 12 * 256
  assert rates.mfu == pytest.approx(10 * 989e9 / (2 * 989e12))
  clock.now = 5.0
  assert throughput.rates(70).steps_per_second == 20


def test_an_evaluation_between_does_not_count():
  clock = Clock()
  throughput = Throughput(LM_BATCH, clock=clock)
  throughput.restart(0)
  clock.now = 1.0
  throughput.rates(5)
  clock.now = 100.0
  throughput.restart(5)
  clock.now = 101.0
  assert throughput.rates(10).steps_per_second == 5


def test_no_speed_before_the_first_step_after_a_start():
  throughput = Throughput(LM_BATCH, clock=Clock())
  assert throughput.rates(1) is None


def test_images_have_examples_and_no_tokens_and_a_cpu_no_mfu():
  clock = Clock()
  batch = {'image': np.zeros((8, 28, 28, 1)), 'label': np.zeros(8)}
  throughput = Throughput(batch, flops_per_step=1e9, devices=[device('cpu', 'cpu')], clock=clock)
  throughput.restart(0)
  clock.now = 1.0
  rates = throughput.rates(1)
  assert rates.tokens_per_second is None and rates.mfu is None
  assert set(rates.to_metrics()) == {'speed/steps_per_second', 'speed/examples_per_second'}


@pytest.mark.parametrize(
  ('kind', 'platform', 'peak'),
  [
    ('TPU v2', 'tpu', 22.5e12),
    ('TPU v3', 'tpu', 61.5e12),
    ('TPU v4', 'tpu', 275e12),
    ('TPU v5 lite', 'tpu', 197e12),
    ('TPU v5p', 'tpu', 459e12),
    ('TPU v6 lite', 'tpu', 918e12),
    ('NVIDIA A100-SXM4-80GB', 'gpu', 312e12),
    ('NVIDIA H100 80GB HBM3', 'gpu', 989e12),
    ('NVIDIA H100 PCIe', 'gpu', 756e12),
    ('NVIDIA H200', 'gpu', 989e12),
    ('NVIDIA GH200 480GB', 'gpu', 989e12),
    ('NVIDIA B200', 'gpu', 2250e12),
    ('NVIDIA L4', 'gpu', 121e12),
    ('NVIDIA L40', 'gpu', 181e12),
    ('NVIDIA L40S', 'gpu', 362e12),
    ('NVIDIA A10G', 'gpu', 70e12),
    ('Tesla V100-SXM2-16GB', 'gpu', 125e12),
    ('cpu', 'cpu', None),
    ('NVIDIA GeForce RTX 4090', 'gpu', 165.2e12),
    ('NVIDIA GeForce RTX 2080', 'gpu', None),
  ],
)
def test_peaks_by_device_kind(kind, platform, peak):
  assert peak_flops(device(kind, platform)) == peak


def test_tokens_of_parts_of_a_batch_add_up():
  clock = Clock()
  parts = {'chosen': LM_BATCH, 'rejected': LM_BATCH, 'weights': np.zeros(12)}
  throughput = Throughput(parts, clock=clock)
  throughput.restart(0)
  clock.now += 4
  assert throughput.rates(2).tokens_per_second == 12 * 256
