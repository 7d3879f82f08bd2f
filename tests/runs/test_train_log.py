"""What the training loop looks at, and when."""

from __future__ import annotations

import types

import jax.numpy as jnp
import numpy as np
import pytest
from tiny_runs import TinyModel

from praxis_lite.common.config import Config
from praxis_lite.layers import Mlp
from praxis_lite.models import ClassificationModel
from praxis_lite.runs.loop.train_log import MAX_STEPS_IN_FLIGHT, TrainLog
from praxis_lite.runs.nonfinite import SKIPPED, Hints, NonFiniteError, hints_in
from praxis_lite.runs.throughput import StartupTimes
from praxis_lite.training.steps import TrainStepOutput


class Value:
  """A metric on a device: records when the host waits for it."""

  def __init__(self, step: int, value: float, waited: list[int]):
    self._step, self._value, self._waited = step, value, waited

  def __float__(self) -> float:
    self._waited.append(self._step)
    return self._value

  def __array__(self, dtype=None, copy=None):
    self._waited.append(self._step)
    return np.asarray(self._value, dtype)

  def block_until_ready(self):
    self._waited.append(self._step)
    return self


class Lines:
  """Stands for the console and the writer."""

  def __init__(self) -> None:
    self.lines: list[str] = []
    self.steps: list[int] = []
    self.written: list[int] = []

  def line(self, text):
    self.lines.append(text)

  def progress(self, step):
    pass

  def train_step(self, step, metrics, rates):
    self.steps.append(step)

  def write(self, step, split, metrics, summaries):
    self.written.append(step)


def make_log(lines, *, interval=1, first_step=0, on_nonfinite='skip', total=100, limit=100, clip=0.0):
  settings = types.SimpleNamespace(log_interval_steps=interval, num_train_steps=total, max_skipped_steps=limit)
  learner = types.SimpleNamespace(
    on_nonfinite=on_nonfinite, clip_gradient_norm_to_value=clip, rate_field='learning_rate'
  )
  task = types.SimpleNamespace(train=settings, learner=learner)
  mesh = types.SimpleNamespace(
    devices=np.array([types.SimpleNamespace(device_kind='cpu', platform='cpu')], dtype=object)
  )
  partitioned = types.SimpleNamespace(jax_task=task, mesh=mesh)
  batch = {'x': np.zeros((4, 2))}
  return TrainLog(partitioned, batch, lines, lines, StartupTimes(), first_step=first_step)


def output(step, waited, skipped=0.0, loss=1.0):
  metrics = {name: (Value(step, value, waited), 1.0) for name, value in (('loss', loss), (SKIPPED, skipped))}
  return TrainStepOutput(None, Value(step, 1.0, waited), metrics, None, {})


@pytest.mark.parametrize('interval', [1, 10])
def test_the_host_never_waits_for_the_steps_it_has_just_dispatched(interval):
  lines, waited = Lines(), []
  log = make_log(lines, interval=interval)
  log.add(1, output(1, waited))  # the first step is waited for, to say how long starting took
  for step in range(2, 40):
    log.add(step, output(step, waited))
    assert max(waited) <= max(step - MAX_STEPS_IN_FLIGHT, 1)
    assert step - max(waited) <= MAX_STEPS_IN_FLIGHT  # nor does it run ahead without bound


def test_lines_come_at_the_interval_and_for_the_first_and_the_last_step_of_each_launch():
  lines = Lines()
  log = make_log(lines, interval=10, first_step=13, total=37)
  for step in range(14, 38):
    log.add(step, output(step, []))
  log.drain()
  assert lines.steps == lines.written == [14, 20, 30, 37]
  assert lines.lines[0].startswith('first step after ')


@pytest.mark.parametrize(('last', 'more'), [(17, [17]), (20, []), (14, []), (13, [])])
def test_a_launch_that_ends_early_logs_its_last_step_once(last, more):
  lines = Lines()
  log = make_log(lines, interval=10, first_step=13, total=37)
  for step in range(14, last + 1):
    log.add(step, output(step, []))
  run = types.SimpleNamespace(is_over=False)
  log.on_pause(run, 'save')
  expected = [step for step in (14, 20) if step <= last]
  assert lines.written == expected
  run.is_over = True
  for reason in ('save', 'evaluate'):
    log.on_pause(run, reason)
  assert lines.steps == lines.written == expected + more


def test_skipped_steps_are_reported_between_the_lines_too():
  lines = Lines()
  log = make_log(lines, interval=10)
  for step in range(1, 6):
    log.add(step, output(step, [], skipped=float(step == 3)))
  log.drain()
  assert lines.lines[1:] == ['step 3: the loss or a gradient is not finite; the update was skipped']


def test_steps_skipped_in_a_row_are_a_few_lines_and_end_the_run():
  lines = Lines()
  log = make_log(lines, interval=1, total=1000)
  for step in range(1, 105):
    log.add(step, output(step, [], skipped=float(step not in (1, 2)), loss=np.nan if step > 2 else 1.0))
    assert log.skipped.too_many == (step == 104)  # It looks at a step two steps later.
  log.drain()
  assert lines.steps == [1, 2] and len(lines.written) == 104
  assert lines.lines[1:] == [
    'step 3: the loss or a gradient is not finite (loss nan); the update was skipped',
    'steps 3 to 12: 10 updates in a row were skipped',
    'steps 3 to 102: 100 updates in a row were skipped',
  ]
  message = str(log.skipped.error(Hints()))
  assert message.startswith(
    'from step 3 on, the loss or a gradient was not finite (loss nan), so all 102 updates up to '
  )
  for part in ('a learning rate that is too high', 'Step 104 is saved', 'those of step 2', 'max_skipped_steps = 100'):
    assert part in message
  rate, limit = 'lower task.train.learner.learning_rate', 'task.train.learner.clip_gradient_norm_to_value'
  assert 'labels' not in message and f'{rate}, or set {limit}; to begin anew' in message
  assert "too high, labels out of range of the classes (the last batch has 'y' from 0 to 9), or" in str(
    log.skipped.error(Hints(integers="'y' from 0 to 9"))
  )


@pytest.mark.parametrize('on_nonfinite', ['skip', 'raise'])
def test_gradients_that_are_clipped_already_are_to_be_clipped_more(on_nonfinite):
  log = make_log(Lines(), on_nonfinite=on_nonfinite, clip=0.5)
  with pytest.raises(NonFiniteError) as told:
    for step in range(1, 5):
      log.add(step, output(step, [], skipped=float(step > 1)))
    log.drain()
    raise log.skipped.error(Hints())
  rate, limit = 'lower task.train.learner.learning_rate', 'task.train.learner.clip_gradient_norm_to_value'
  assert f'{rate}, or lower {limit}, which is 0.5' in str(told.value)


def test_a_step_that_is_finite_again_ends_the_count_and_the_limit_may_be_off():
  for limit in (0, None, 3):
    lines = Lines()
    log = make_log(lines, limit=limit)
    for step in range(1, 6):
      log.add(step, output(step, [], skipped=float(step in (1, 2, 4, 5))))
    log.drain()
    assert 'step 3: finite again, after 2 updates in a row were skipped' in lines.lines
    assert not log.skipped.too_many and not log.skipped.most_steps
  for limit, ends in ((0, False), (None, False), (100, True)):
    log = make_log(Lines(), limit=limit)
    log.add(1, output(1, [], skipped=1.0))
    assert log.skipped.most_steps == ends
    log.add(2, output(2, [], skipped=0.0))
    log.add(3, output(3, [], skipped=1.0))
    log.add(4, output(4, [], skipped=1.0))
    log.drain()
    assert not log.skipped.most_steps  # The last two of four.
    log.add(5, output(5, [], skipped=1.0))
    log.drain()
    assert log.skipped.most_steps == ends  # The last three of five.


def test_what_may_be_wrong_with_a_batch():
  model = Config(TinyModel).instantiate()
  ok, labels = np.ones(3, np.float32), np.array([0, 3, 9], np.int32)
  assert hints_in({'x': ok}, None, model) == Hints()
  bad = hints_in({'x': ok, 'z': ok * np.nan}, None, model)
  assert bad.found == "The last batch has values in 'z' that are not finite"
  assert hints_in({'x': ok, 'label': labels}, None, model).integers == "'label' from 0 to 9"
  network = Config(Mlp, input_dims=2, hidden_dims=(2,))
  classifier = Config(ClassificationModel, num_classes=5, network_tpl=network).instantiate()
  found = hints_in({'label': labels}, types.SimpleNamespace(label='train'), classifier).found
  assert "does not fit the model: train: found 9 in 'label', but task.model.num_classes is 5" in found
  found = hints_in({'target': labels}, None, classifier)
  assert found.found == "The last batch has 'target' from 0 to 9, and ClassificationModel has 5 classes, 0 to 4"
  assert hints_in({'target': labels % 5}, None, classifier) == Hints()  # Labels are not to blame.


def test_a_learner_that_raises_does_so_before_a_save_of_that_step():
  log = make_log(Lines(), on_nonfinite='raise')
  for step in range(1, 6):
    log.add(step, output(step, [], skipped=float(step == 5)))
  with pytest.raises(NonFiniteError, match=r'step 5: .*not finite'):
    log.drain()


def test_summaries_of_steps_that_are_not_logged_are_let_go():
  log = make_log(Lines(), interval=10)
  summaries = {'big': jnp.zeros(3)}
  log.add(1, output(1, [])._replace(summaries=summaries))
  for step in (2, 3):
    log.add(step, output(step, [])._replace(summaries=summaries))
  assert all(not step.summaries for step in log._in_flight)
