"""Task files: questions with right answers, on which a language model is evaluated while it trains.

    {"prompt": "2 + 2 =", "target": " 4"}                          the model writes a text; metrics compare it
    {"prompt": "2 + 2 =", "target": [" 4", " four"]}               several right answers
    {"prompt": "2 + 2 =", "choices": [" 4", " 5"], "answer": 0}    the model's most probable choice: accuracy

    task.evaluate.task_files = (Config(TaskFile, path='sums.jsonl', metrics=('exact_match', 'f1')),)

Results appear like other evaluations, as `eval/<name>/<metric>`: in the log, in `metrics.jsonl`, and for `best_metric`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from praxis_lite.common.config import REQUIRED, Config, Configurable, build_at
from praxis_lite.common.errors import ConfigError, UserError, prefix_errors
from praxis_lite.common.figures import number_of
from praxis_lite.common.files import parse_json_line, read_plain
from praxis_lite.common.processes import note_progress
from praxis_lite.common.trees import NestedDict
from praxis_lite.inputs.files import check_utf8
from praxis_lite.inputs.rows import Rows
from praxis_lite.models.decoding import Sampler
from praxis_lite.runs.continuations import check_stops
from praxis_lite.runs.programs import InputProgram, ProgramResult, TaskOnMesh
from praxis_lite.runs.prompts import tokenizer_of
from praxis_lite.runs.records.metrics import HostMetrics
from praxis_lite.runs.records.run_config import check_count
from praxis_lite.runs.scoring import score_rows
from praxis_lite.runs.text_metrics import TextMetric, find_metrics
from praxis_lite.runs.trained import TrainedModel
from praxis_lite.training.experiment import ExperimentConfig


class TaskFile(Configurable):
  """A file of questions as JSON lines; the top of `task_files.py` describes them.

  Attributes:
    path: the path of the file.
    name: the name of its results; None uses the name of the file.
    metrics: the metrics of questions with a target: names in `text_metrics.py`, or functions like the ones there.
      Answers are decoded greedily: of the model's decoder, only `stop_ids` and `max_context` have an effect.
    max_tokens: the largest number of tokens in an answer.
    stop: texts that end an answer, and are not part of it.
    batch_size: how many questions are computed at a time.
    max_examples: only this many questions, from the first on, are computed; None computes all.
  """

  path: str = REQUIRED
  name: str | None = None
  metrics: tuple[str | Callable[..., float], ...] = ('exact_match', 'f1')
  max_tokens: int = 64
  stop: tuple[str, ...] = ('\n',)
  batch_size: int = 32
  max_examples: int | None = None

  @property
  def label(self) -> str:
    """The name of its results."""
    return self.name or Path(self.path).stem


class Question(NamedTuple):
  """A line of a task file, with its number: either with targets, or with choices and the index of the right one."""

  prompt: str
  targets: list[str]
  choices: list[str]
  answer: int = -1
  line: int = 0


def read_questions(path: str, where: str) -> list[Question]:
  """Returns the questions of a file; raises UserError, which begins with `where`, for a wrong line."""
  try:
    data = read_plain(path)
  except OSError as error:
    raise UserError(f'{where}: {path} cannot be read: {error.strerror}') from None
  check_utf8(data, path, where)
  lines = data.decode().split('\n')
  questions = [
    _parse(f'{where}: {path}, line {i}', line)._replace(line=i) for i, line in enumerate(lines, 1) if line.strip()
  ]
  if not questions:
    raise UserError(f'{where}: {path} has no questions; expected one in each line')
  if len({bool(question.choices) for question in questions}) > 1:
    raise UserError(f'{where}: {path} has questions with choices and others without; put them in two files')
  return questions


def _parse(where: str, line: str) -> Question:
  form = '{"prompt": "...", "target": "..."} or {"prompt": "...", "choices": ["...", "..."], "answer": 0}'
  try:
    value = parse_json_line(line)
  except ValueError as error:
    raise UserError(f'{where}: no JSON: {error}; expected {form}') from None
  if not isinstance(value, dict) or not isinstance(value.get('prompt'), str):
    raise UserError(f'{where}: expected {form}')
  targets, choices = value.get('target'), value.get('choices')
  targets = [targets] if isinstance(targets, str) else targets
  if (targets is None) == (choices is None):
    raise UserError(f'{where}: expected a target, or choices and an answer, as in {form}')
  texts = targets if choices is None else choices
  if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
    raise UserError(f'{where}: expected a list of texts with at least one, got {texts!r}')
  if choices is None:
    return Question(value['prompt'], texts, [])
  answer = value.get('answer')
  if not isinstance(answer, int) or isinstance(answer, bool) or not 0 <= answer < len(texts) or not all(texts):
    raise UserError(f'{where}: answer is {answer!r}; expected the number of a choice that is no empty text, from 0')
  return Question(value['prompt'], [], texts, answer)


def evaluate_questions(
  model: TrainedModel,
  questions: Sequence[Question],
  file: TaskFile,
  metrics: Mapping[str, TextMetric],
  interrupts: Callable[[int], bool] = lambda done: False,
) -> dict[str, float] | None:
  """Returns the metrics of a model on questions; None if `interrupts` ends the evaluation.

  Questions with targets give `metrics` of greedy answers. Questions with choices give `accuracy`, the fraction of
  questions whose most probable choice is right, and `accuracy_per_byte`, the same for log-probabilities divided by the
  bytes of the choice. Both are NaN if the model computes NaN for a choice.

  Args:
    interrupts: called before each batch with the number of questions done; True ends the evaluation.
  """
  answers: list[str] = []
  right: list[tuple[float, float]] = []
  for first in range(0, len(questions), file.batch_size):
    if interrupts(first):
      return None
    group = questions[first : first + file.batch_size]
    if group[0].choices:
      right += _choose(model, group, file.batch_size)
    else:
      settings: Any = {'max_tokens': file.max_tokens, 'temperature': 0.0, 'stop': file.stop}
      texts = model.decode([question.prompt for question in group], **settings)
      answers += [cut_at(text, file.stop) for text in texts]
  if right:
    return {name: float(mean) for name, mean in zip(('accuracy', 'accuracy_per_byte'), np.mean(right, axis=0))}
  references = [question.targets for question in questions]
  return {name: float(metric(answers, references)) for name, metric in metrics.items()}


def _choose(model: TrainedModel, questions: Sequence[Question], batch_size: int) -> Iterator[tuple[float, float]]:
  """Yields a pair for each question: whether the most probable choice is right, and the same for a second ranking.

  The second ranking divides each log-probability by the bytes of the choice. Both values are 1 or 0, or NaN if a
  log-probability is NaN.
  """
  pairs = [(question.prompt, choice) for question in questions for choice in question.choices]
  scores = iter(model.score([prompt for prompt, _ in pairs], [choice for _, choice in pairs], batch_size=batch_size))
  for question in questions:
    log_probs = np.array([next(scores).log_prob for _ in question.choices])
    sizes = np.array([len(choice.encode()) for choice in question.choices])
    if np.isnan(log_probs).any():
      yield np.nan, np.nan
    else:
      yield float(np.argmax(log_probs) == question.answer), float(np.argmax(log_probs / sizes) == question.answer)


def _check_question(model: TrainedModel, question: Question, max_tokens: int) -> None:
  """Raises UserError if a model cannot read a question."""
  if not question.choices:
    model._prompts.check([question.prompt], max_tokens)
    return
  limits, choices = model.layer.score_limits(), question.choices
  assert limits is not None

  def score_nothing(batch: Rows) -> dict[str, np.ndarray]:
    return {name: np.zeros(batch['ids'].shape) for name in ('log_probs', 'is_greedy')}

  score_rows(limits, lambda: model.tokenizer, [question.prompt] * len(choices), choices, len(choices), score_nothing)


def _answers_greedily(config: ExperimentConfig, tasks: TaskOnMesh) -> tuple[ExperimentConfig, TaskOnMesh]:
  """Returns the config and the task with a greedy `Sampler` in place of the model's decoder.

  Both are returned unchanged if the model has no decoder.
  """
  decoder = getattr(config.task.model, 'decoder_tpl', None)
  if not isinstance(decoder, Config):
    return config, tasks
  task = config.task.clone()
  kept = {name: getattr(decoder, name) for name in ('stop_ids', 'max_context') if hasattr(decoder, name)}
  task.model.decoder_tpl = Config(Sampler, temperature=0.0, **kept)
  greedy = TaskOnMesh(task.instantiate(), tasks.mesh, tasks.layout)
  return ExperimentConfig(task, config.datasets, config.decode_datasets), greedy


def cut_at(text: str, stops: Sequence[str]) -> str:
  """Returns the text before the first stop text in it."""
  return text[: min((at for stop in stops if (at := text.find(stop)) >= 0), default=len(text))]


class TaskFileProgram(InputProgram[Any]):
  """Evaluates variables on the questions of a task file, like an `EvalProgram` on an input.

  Args:
    directory: the run's directory; None if it has none.

  Raises:
    UserError: the file cannot be used, the model is not a language model or cannot read a question, or a metric is not
      available.
  """

  def __init__(
    self, tasks: TaskOnMesh, config: ExperimentConfig, directory: Path | None, file: TaskFile, number: int
  ):  # The program has no step itself: methods of `TrainedModel` run the steps.
    where = f'task.evaluate.task_files[{number}]'
    check_count(f'{where}.max_tokens', file.max_tokens)
    check_count(f'{where}.batch_size', file.batch_size)
    check_count(f'{where}.max_examples', file.max_examples, kind=int | None)
    self._file, self._questions = file, read_questions(file.path, f'{where}.path')[: file.max_examples]
    self._metrics = find_metrics(f'{where}.metrics', file.metrics)
    model = tasks.jax_task.model
    if model.score_limits() is None:
      raise ConfigError(f'{where}: needs a language model; this model is a {type(model).__name__}')
    if tokenizer_of(config, directory) is None:
      raise ConfigError(f'{where}: its texts need a dataset with a tokenizer, and none of the datasets has one')
    settings = tasks.jax_task.evaluate
    self.split = f'eval/{file.label}'
    self.use_ema = settings.use_ema
    self.is_of_average = settings.use_ema and tasks.jax_task.learner.keeps_averages
    shapes, greedy = tasks.layout.padded_shapes, (config, tasks.untapped)
    if not self._questions[0].choices:
      greedy = _answers_greedily(*greedy)
    self._model = TrainedModel(*greedy, shapes.mdl_vars, shapes.step, directory=directory)
    with prefix_errors(f'{where}.stop'):
      check_stops(file.stop, 'stop')
    for question in self._questions:
      with prefix_errors(f'{where}.path: {file.path}, line {question.line}'):
        _check_question(self._model, question, file.max_tokens)

  def run(
    self, mdl_vars: NestedDict, global_step: jax.Array, interrupts: Callable[[], bool] = lambda: False
  ) -> ProgramResult | None:
    start = time.perf_counter()

    def is_interrupted(done: int) -> bool:
      if interrupts():
        return True
      note_progress(f'{self.split}, {number_of(done, "question")}')
      return False

    self._model.stored_variables, self._model.global_step = mdl_vars, global_step
    try:
      found = evaluate_questions(self._model, self._questions, self._file, self._metrics, is_interrupted)
    finally:  # The next training step overwrites these arrays.
      shapes = self._model.tasks.layout.padded_shapes
      self._model.stored_variables, self._model.global_step = shapes.mdl_vars, shapes.step
    if found is None:
      return None
    metrics: HostMetrics = {**found}
    count, note = len(self._questions), f', {number_of(len(self._questions), "question")}'
    return ProgramResult(metrics, -(-count // self._file.batch_size), time.perf_counter() - start, {}, note)

  def metric_names(self) -> list[str]:
    return ['accuracy', 'accuracy_per_byte'] if self._questions[0].choices else sorted(self._metrics)


def task_file_programs(
  tasks: TaskOnMesh, config: ExperimentConfig, directory: Path | None, taken: Sequence[str]
) -> Iterator[TaskFileProgram]:
  """Yields the programs of `task.evaluate.task_files`.

  Args:
    taken: the names of the other evaluations, 'eval/<input>'.

  Raises:
    UserError: a file cannot be used, or two evaluations have the same name.
  """
  names = list(taken)
  entries = tasks.jax_task.evaluate.task_files
  for number, entry in enumerate(entries if isinstance(entries, tuple | list) else (entries,)):
    where = f'task.evaluate.task_files[{number}]'
    file = build_at(where, entry) if isinstance(entry, Config) else entry
    if not isinstance(file, TaskFile):
      raise ConfigError(f'{where}: expected the config of a TaskFile, got {entry!r}')
    program = TaskFileProgram(tasks, config, directory, file, number)
    if program.split in names:
      raise ConfigError(f'{where}.name: there is already an evaluation {program.split!r}; set another name')
    names.append(program.split)
    yield program
