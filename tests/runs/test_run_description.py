"""The lines that a run prints first: warnings about schedules and data."""

from __future__ import annotations

from typing import Any

from tiny_runs import tiny_run

from praxis_lite.common.config import Config
from praxis_lite.inputs import TextInput
from praxis_lite.runs.loop.run_description import describe_long_warmups, describe_raw_lines, describe_seen_examples
from praxis_lite.training.learning import Learner, LearnerRule, LinearWarmupCosine, MultiLearner

RULES = (('first', 'w'), ('rest', None))


def test_a_warmup_that_the_run_does_not_finish_is_warned_of() -> None:
  def told(config: Any) -> list[str]:
    return list(describe_long_warmups(config.task.instantiate()))

  config = tiny_run(1, num_train_steps=4)
  assert not told(config)
  warm = Config(LinearWarmupCosine, warmup_steps=5)
  config.task.train.learner.schedule = warm
  (line,) = told(config)
  assert line.startswith('warning: task.train.learner.schedule.warmup_steps = 5: the run ends at step 4, before')
  config.task.train.num_train_steps = 5
  assert not told(config)
  config.task.train.learner.schedule = lambda step: 1.0
  assert not told(config)
  several = tiny_run(1, num_train_steps=4)
  rules = [Config(LearnerRule, name=name, regex=regex, learner=Config(Learner)) for name, regex in RULES]
  several.task.train.learner = Config(MultiLearner, rules=tuple(rules))
  assert not told(several)
  several.task.train.learner.rules[1].learner.schedule = warm
  (line,) = told(several)
  assert line.startswith('warning: task.train.learner.rules[1].learner.schedule.warmup_steps = 5: ')


def test_json_lines_that_are_read_as_plain_text_are_warned_of() -> None:
  config = tiny_run(1)
  assert not list(describe_raw_lines(config))
  for path, told in (('a.txt', 0), ('a.jsonl', 1), (['a.txt', 'b/*.jsonl'], 1), (Config(open), 0)):
    config.datasets = [Config(TextInput, path=path, seq_len=4, batch_size=2)]
    assert len(list(describe_raw_lines(config))) == told


def test_an_evaluation_on_the_examples_of_training_is_warned_of() -> None:
  train = Config(TextInput, name='train', path='a.txt', seq_len=4, batch_size=2, is_training=True)
  config = tiny_run(1)
  for other, told in (
    ({}, 1),
    ({'batch_size': 3, 'shuffle': False}, 1),
    ({'path': 'b.txt'}, 0),
    ({'split': 'validation'}, 0),
  ):
    config.datasets = [train, train.clone(name='valid', is_training=False, **other)]
    lines = list(describe_seen_examples(config))
    assert len(lines) == told and all('datasets[1].path: evaluation reads the same examples' in x for x in lines)
