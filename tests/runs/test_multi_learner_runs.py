"""Runs with several learners: resumed, evaluated, started from another run, refused with other rules, and shown."""

from __future__ import annotations

import re
import signal
from typing import Any

import jax
import numpy as np
import optax
import pytest
from tiny_runs import expected_loss, tiny_run

import praxis_lite
from praxis_lite.common.config import Config
from praxis_lite.common.config.overrides import apply_overrides
from praxis_lite.common.errors import CheckpointError
from praxis_lite.instruments.explain import parameter_table, summarize
from praxis_lite.instruments.explain.report import explain_task
from praxis_lite.instruments.verification import verify
from praxis_lite.runs import run_train
from praxis_lite.runs.nonfinite import NonFiniteError
from praxis_lite.training.learning import Learner, LearnerRule, LinearWarmupCosine, MultiLearner

SELDOM = {'log_interval_steps': 100, 'save_interval_steps': 100}


def rule(name: str, regex: str | None, optimizer: Any, **fields: Any) -> Config:
  learner = Config(Learner, optimizer=Config(optimizer), learning_rate=0.05, ema_decay=fields.pop('ema_decay', 0.0))
  return Config(LearnerRule, name=name, regex=regex, learner=learner, **fields)


def two_rates(devices: int = 1, *rules: Config, **train: Any) -> Any:
  config = tiny_run(devices, **{**SELDOM, **train})
  given = rules or (rule('first', 'w', optax.adam, train_from_step=4, ema_decay=0.9), rule('rest', None, optax.lion))
  config.task.train.learner = Config(MultiLearner, rules=given, clip_gradient_norm_to_value=1.0)
  return config


def test_a_resumed_run_ends_with_the_same_bits_and_evaluates_its_averages(tmp_path: Any, capsys: Any) -> None:
  """It is interrupted before and after a rule begins to train; what has no average is evaluated as it is."""
  whole = run_train(two_rates(3, num_train_steps=8), tmp_path / 'whole')
  for steps in (2, 6, 8):
    resumed = run_train(two_rates(3, num_train_steps=steps), tmp_path / 'parts')
  assert resumed.step == 8
  for a, b in zip(jax.tree.leaves(whole.state), jax.tree.leaves(resumed.state), strict=True):
    np.testing.assert_array_equal(a, b)
  assert whole.state.ema_vars.keys() == {'w'}
  mixed = {'w': whole.state.ema_vars['w'], 'v': whole.state.mdl_vars['v']}
  assert whole.metrics['eval/valid']['loss'] == pytest.approx(expected_loss(mixed, 33, 1), rel=1e-5)
  assert 'of the average' in capsys.readouterr().out
  run = praxis_lite.open_run(tmp_path / 'whole')
  assert np.array_equal(run.load(ema=False).variables['v'], run.load(ema=True).variables['v'])
  assert not np.array_equal(run.load(ema=False).variables['w'], run.load(ema=True).variables['w'])


def test_other_rules_are_refused_before_anything_is_compiled(tmp_path: Any) -> None:
  run_train(two_rates(num_train_steps=1), tmp_path)
  others = [
    two_rates(1, rule('all', None, optax.adam)),
    two_rates(1, rule('first', 'w', optax.adam, ema_decay=0.9), rule('second', None, optax.lion)),
    two_rates(1, rule('first', 'v', optax.adam, ema_decay=0.9), rule('rest', None, optax.lion)),
    tiny_run(),
  ]
  for config in others:
    with pytest.raises(CheckpointError, match=r'another learner: .*What differs .* task\.train\.learner\.'):
      run_train(config, tmp_path)
  # When rules train, and how much, may change.
  changed = two_rates(num_train_steps=2)
  changed.task.train.learner.rules[0].set(train_from_step=0, update_factor=0.5)
  assert run_train(changed, tmp_path).step == 2


def test_a_run_with_rules_begins_with_the_variables_of_one_without(tmp_path: Any) -> None:
  first = run_train(tiny_run(num_train_steps=2, **SELDOM), tmp_path / 'first')
  config = two_rates(num_train_steps=2)
  config.task.train.init_from.path = str(tmp_path / 'first')
  second = run_train(config, tmp_path / 'second')
  np.testing.assert_array_equal(second.state.mdl_vars['w'], first.state.mdl_vars['w'])  # It trains from step 4 only.
  assert not np.array_equal(second.state.mdl_vars['v'], first.state.mdl_vars['v'])


@pytest.mark.slow
def test_fine_tuning_with_two_rates_moves_each_part_by_its_own(tmp_path: Any) -> None:
  """With SGD, a step of a rule with a tenth of the rate is a tenth of the step; the head moves as it does alone."""
  first = run_train(tiny_run(num_train_steps=3, **SELDOM), tmp_path / 'first').state.mdl_vars
  moved = {}
  for name, rules in {
    'plain': [rule('all', None, optax.sgd)],
    'two': [rule('body', 'w', optax.sgd, update_factor=0.1), rule('head', None, optax.sgd)],
  }.items():
    config = two_rates(1, *rules, num_train_steps=1)
    config.task.train.init_from.path = str(tmp_path / 'first')
    after = run_train(config, tmp_path / name).state.mdl_vars
    moved[name] = {part: np.asarray(after[part] - first[part]) for part in ('w', 'v')}
  assert np.abs(moved['plain']['w']).max() > 1e-3
  np.testing.assert_allclose(moved['two']['w'], 0.1 * moved['plain']['w'], rtol=1e-3, atol=1e-7)
  np.testing.assert_allclose(moved['two']['v'], moved['plain']['v'], rtol=1e-5, atol=1e-7)


def test_a_run_that_is_not_finite_names_the_rates_of_the_rules(tmp_path: Any) -> None:
  config = two_rates(num_train_steps=4)
  config.task.train.learner.on_nonfinite = 'raise'
  config.datasets[0].arrays['y'][:] = np.nan
  with pytest.raises(NonFiniteError, match=r'lower task\.train\.learner\.rules\[\*\]\.learner\.learning_rate'):
    run_train(config, tmp_path)


def test_schedules_of_rules_know_the_length_of_the_run_and_fields_are_set_by_path() -> None:
  config = two_rates(num_train_steps=50)
  config.task.train.learner.rules[0].learner.schedule = Config(LinearWarmupCosine, warmup_steps=5)
  apply_overrides(
    config.task, [f'train.learner.{x}' for x in ('rules[*].learner.learning_rate=0.25', 'num_microbatches=2')]
  )
  learner = config.task.instantiate().learner
  assert learner.num_microbatches == 2
  assert learner.describe() == 'first: optax.adam, learning rate 0.25; rest: optax.lion, learning rate 0.25'
  rate = learner._rules[0].built_learner.learning_rate_at
  assert float(rate(49)) == pytest.approx(0.025, rel=0.05) and float(rate(4)) == 0.25


def test_reports_name_the_rule_of_a_variable() -> None:
  config = two_rates(2)
  task = config.task.instantiate()
  rows = {row.path: row.remarks for row in parameter_table(task, task.mesh_sizes())}
  assert "trained by rule 'first' from step 4" in rows['w'] and "trained by rule 'rest'" in rows['v']
  summary = summarize(config)
  assert "trained by rule 'first' from step 4: 1 variable, 70 parameters" in summary
  assert 'first: optax.adam, learning rate 0.05; rest: optax.lion, learning rate 0.05' in summary
  slots = {e.path for e in explain_task(config.task).slots}
  assert {'opt_states.first.all.0.mu.w', 'opt_states.rest.all.0.mu.v'} <= slots


@pytest.mark.slow
def test_verify_compares_gradients_and_updates_of_all_rules() -> None:
  found = verify(two_rates(2, num_train_steps=2), search_seconds=0)
  assert not found.differences, found


def fine_tuning(start: Any, steps: int) -> Any:
  """A body with a tenth of the rate, that waits, and a head; each with moments of its own."""
  body = rule('body', 'w', optax.adam, train_from_step=3, update_factor=0.1, ema_decay=0.9)
  config = two_rates(1, body, rule('head', None, optax.lion), num_train_steps=steps, save_interval_steps=5)
  config.task.train.set(log_interval_steps=1)
  config.task.train.init_from.path = str(start)
  config.datasets = config.datasets[:1]
  return config


KILLED = """
import sys
from test_multi_learner_runs import fine_tuning, run_train
run_train(fine_tuning(sys.argv[1], 10**6), sys.argv[2])
"""


@pytest.mark.slow
def test_fine_tuning_with_two_rates_resumes_after_sigkill_with_the_same_bits(tmp_path: Any, run_python: Any) -> None:
  run_train(tiny_run(num_train_steps=3, **SELDOM), tmp_path / 'first')
  process = run_python(KILLED, str(tmp_path / 'first'), str(tmp_path / 'killed'), devices=1)
  next(line for line in process.stdout if re.match(r'step \d{3,}/', line))
  process.kill()
  assert process.wait() == -signal.SIGKILL
  process.communicate()
  saved = praxis_lite.open_run(tmp_path / 'killed').checkpoints.steps[-1]
  assert saved >= 5
  found, whole = (
    run_train(fine_tuning(tmp_path / 'first', saved + 4), tmp_path / name) for name in ('killed', 'whole')
  )
  assert found.step == whole.step == saved + 4
  for a, b in zip(jax.tree.leaves(found.state), jax.tree.leaves(whole.state), strict=True):
    np.testing.assert_array_equal(a, b)
