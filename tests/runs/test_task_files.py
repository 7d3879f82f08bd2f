"""Questions in a file: metrics of texts, choices, evaluation while a run trains, and messages about bad files."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tiny_language_model import tiny_language_model

from praxis_lite.common.config import Config
from praxis_lite.common.config.overrides import apply_overrides
from praxis_lite.common.errors import ConfigError, UserError
from praxis_lite.experiments.lm import StdlibLmTiny
from praxis_lite.inputs import ByteTokenizer, TextInput
from praxis_lite.models.decoding import BeamSearch
from praxis_lite.runs import run_eval, run_train, task_files
from praxis_lite.runs.programs import TaskOnMesh
from praxis_lite.runs.scoring import Score
from praxis_lite.runs.task_files import (
  TaskFile,
  TaskFileProgram,
  cut_at,
  evaluate_questions,
  read_questions,
  task_file_programs,
)
from praxis_lite.runs.text_metrics import METRICS, exact_match, f1, find_metrics
from praxis_lite.training.experiment import ExperimentConfig, configure

WRITTEN = [{'prompt': 'one', 'target': 'two'}, {'prompt': 'to be', 'target': [' or', ' not']}]
CHOICES = [
  {'prompt': 'one', 'choices': ['two', 'six'], 'answer': 1},
  {'prompt': 'x', 'choices': ['y', 'zz'], 'answer': 0},
]


def write(path, questions):
  path.write_text(''.join(json.dumps(question) + '\n' for question in questions))
  return str(path)


def first_letters(predictions, references):
  """A metric of the test: how many texts begin like their first reference."""
  return float(np.mean([text[:1] == others[0][:1] for text, others in zip(predictions, references)]))


# ---------------------------------------------------------------- metrics


def test_exact_match_and_f1():
  assert exact_match([' two ', 'one', ''], [['two'], ['two', 'six'], ['x']]) == pytest.approx(1 / 3)
  assert f1(['The cat sat.'], [['a cat sat down']]) == pytest.approx(2 * 2 / (2 + 3))
  assert f1(['', 'x'], [[''], ['y', 'x']]) == 1.0
  assert exact_match([], []) == f1([], []) == 0.0


@pytest.mark.parametrize('name', [name for name in METRICS if name not in ('exact_match', 'f1')])
def test_metrics_of_libraries(name):
  package = 'sacrebleu' if name in ('bleu', 'chrf') else 'rouge_score'
  pytest.importorskip(package, reason=f"needs {package}: pip install 'praxis_lite[eval]'")
  texts = ['the cat sat on the mat today', 'a dog']
  same = METRICS[name](texts, [[text] for text in texts])
  other = METRICS[name](texts, [['no words in common here', texts[0]], ['birds fly']])
  assert same == pytest.approx(100.0 if package == 'sacrebleu' else 1.0)
  assert 0 < other < same
  if package == 'rouge_score':
    assert other == pytest.approx(0.5)  # The first text equals its second reference.


def test_a_metric_that_is_missing_is_named(monkeypatch):
  monkeypatch.setattr('importlib.util.find_spec', lambda name: None)
  with pytest.raises(ConfigError, match=r"^here: 'bleu' needs praxis_lite\[eval\]: pip install"):
    find_metrics('here', ['bleu'])
  with pytest.raises(ConfigError, match=r"^here.*exact.* or, in Python, a function, .*Did you mean 'exact_match'"):
    find_metrics('here', ['exact'])
  with pytest.raises(ConfigError, match='expected names or functions, got 3'):
    find_metrics('here', [3])
  assert list(find_metrics('here', ['f1', first_letters])) == ['f1', 'first_letters']


# ---------------------------------------------------------------- questions


def test_bad_files_are_one_message(tmp_path):
  for line, message in (
    ('{"prompt": 3}', 'line 1: expected {"prompt"'),
    ('{"prompt": "x"}', 'line 1: expected a target, or choices'),
    ('{"prompt": "x", "target": "y", "choices": ["y"]}', 'expected a target, or choices'),
    ('{"prompt": "x", "target": []}', 'expected a list of texts with at least one'),
    ('{"prompt": "x", "choices": ["a"], "answer": 1}', 'answer is 1; expected the number of a choice'),
    ('{"prompt": "x", "choices": ["a"], "answer": true}', 'answer is True'),
    ('{"prompt": ', 'no JSON'),
    ('', 'has no questions'),
    ('{"prompt": "x", "target": "y"}\n{"prompt": "x", "choices": ["a"], "answer": 0}', 'put them in two files'),
  ):
    (tmp_path / 'bad.jsonl').write_text(line + '\n')
    with pytest.raises(UserError, match=r'^here: ') as error:
      read_questions(str(tmp_path / 'bad.jsonl'), 'here')
    assert message in str(error.value)
  with pytest.raises(UserError, match='cannot be read: No such file'):
    read_questions(str(tmp_path / 'none.jsonl'), 'here')


def test_a_text_is_cut_at_the_first_stop():
  assert [cut_at('a b\nc', stops) for stops in ((), ('\n',), ('\n', 'b'), ('z',))] == ['a b\nc', 'a b', 'a ', 'a b\nc']


def byte_model(**fields):
  model = tiny_language_model(vocab_size=257, **fields)
  data = Config(TextInput, path='not-read', seq_len=8, batch_size=1, tokenizer_tpl=Config(ByteTokenizer, bos_id=256))
  model.config.datasets.append(data)
  return model


def test_answers_and_choices_of_a_model(tmp_path):
  model, file = byte_model(), TaskFile(path='', max_tokens=3, stop=('e',))
  answers = model.decode([q['prompt'] for q in WRITTEN], temperature=0.0, max_tokens=3)
  questions = read_questions(write(tmp_path / 'written.jsonl', WRITTEN), 'here')
  right = [question._replace(targets=['no', text.partition('e')[0]]) for question, text in zip(questions, answers)]
  metrics = find_metrics('here', ('exact_match', first_letters))
  assert evaluate_questions(model, right, file, metrics)['exact_match'] == 1.0
  assert evaluate_questions(model, [right[0], questions[1]], file, metrics)['exact_match'] == 0.5

  questions = read_questions(write(tmp_path / 'choices.jsonl', CHOICES), 'here')
  found = []
  for question in questions:
    scores = model.score([question.prompt] * 2, question.choices)
    found.append([s.log_prob for s in scores])
  found, sizes = np.array(found), np.array([[3, 3], [1, 2]])
  answers = np.array([1, 0])
  assert evaluate_questions(model, questions, file, {}) == {
    'accuracy': np.mean(found.argmax(1) == answers),
    'accuracy_per_byte': np.mean((found / sizes).argmax(1) == answers),
  }


def test_settings_are_checked(tmp_path):
  model, path = byte_model(), write(tmp_path / 'written.jsonl', WRITTEN)
  for fields, message in (
    ({'max_tokens': 0}, r'task_files\[1\]\.max_tokens = 0; expected at least 1'),
    ({'max_examples': 0}, r'task_files\[1\]\.max_examples = 0'),
    ({'metrics': ('exact',)}, r'task_files\[1\]\.metrics'),
  ):
    with pytest.raises(ConfigError, match=message):
      TaskFileProgram(model.tasks, model.config, None, TaskFile(path=path, **fields), 1)
  bare = ExperimentConfig(model.config.task, [], [])
  choices, small = tmp_path / 'choices.jsonl', byte_model(style='gpt2', max_len=16)
  for file, question, fields, message in (
    (path, None, {'max_examples': -1}, r'task_files\[1\]\.max_examples = -1; expected at least 1, or None'),
    (path, None, {'stop': ('',)}, r"^task\.evaluate\.task_files\[1\]\.stop: stop='': expected a text"),
    (tmp_path / 'empty.jsonl', {'prompt': '', 'target': 'x'}, {}, r'\.path: .*empty\.jsonl, line 2: .*is empty'),
    (choices, {'prompt': 'x', 'choices': ['y' * 60], 'answer': 0}, {}, r'choices\.jsonl, line 2: .*60 tokens'),
  ):
    if question is not None:
      write(file, [CHOICES[0] if 'choices' in question else WRITTEN[0], question])
    with pytest.raises(UserError, match=message):
      TaskFileProgram(small.tasks, small.config, None, TaskFile(path=str(file), **fields), 1)
  with pytest.raises(ConfigError, match='its texts need a dataset with a tokenizer'):
    TaskFileProgram(model.tasks, bare, None, TaskFile(path=path), 1)


def test_one_file_is_set_by_overrides_and_several_by_any_sequence(tmp_path):
  model, path = byte_model(), write(tmp_path / 'written.jsonl', WRITTEN)
  kind = 'task.evaluate.task_files=praxis_lite.runs.task_files.TaskFile'
  apply_overrides(model.config, [kind, f'task.evaluate.task_files.path={path}'])
  tasks = TaskOnMesh(model.config.task.instantiate(), model.tasks.mesh, model.tasks.layout)
  assert [program.split for program in task_file_programs(tasks, model.config, None, ())] == ['eval/written']
  for entries in ([Config(TaskFile, path=path)], (TaskFile(path=path),)):
    tasks.jax_task.evaluate.task_files = entries
    assert [program.split for program in task_file_programs(tasks, model.config, None, ())] == ['eval/written']
  tasks.jax_task.evaluate.task_files = 5
  with pytest.raises(ConfigError, match=r'task_files\[0\]: expected the config of a TaskFile, got 5'):
    next(task_file_programs(tasks, model.config, None, ()))


@pytest.mark.slow
def test_answers_are_greedy_whatever_the_decoder_and_a_long_file_makes_progress(tmp_path, monkeypatch):
  model = byte_model()
  expected = model.decode([WRITTEN[0]['prompt']] * 5, temperature=0.0, max_tokens=3)
  path = write(tmp_path / 'five.jsonl', [{'prompt': WRITTEN[0]['prompt'], 'target': expected[0]}] * 5)
  model.config.task.model.decoder_tpl = Config(BeamSearch, beam_size=2, max_decode_steps=3)
  built = TaskOnMesh(model.config.task.instantiate(), model.tasks.mesh, model.tasks.layout)
  file = TaskFile(path=path, max_tokens=3, batch_size=2, stop=())
  program = TaskFileProgram(built, model.config, None, file, 0)
  noted = []
  monkeypatch.setattr(task_files, 'note_progress', noted.append)
  result = program.run(model.stored_variables, model.global_step)
  assert result.metrics['exact_match'] == 1.0
  assert noted == [f'eval/five, {done} questions' for done in (0, 2, 4)]
  asked = []
  assert program.run(model.stored_variables, model.global_step, lambda: asked.append(0) or len(asked) > 1) is None
  assert len(asked) == 2


def test_choices_that_are_nan_are_no_answers(tmp_path):
  class Scores:
    def score(self, contexts, continuations, batch_size):
      nan = np.full(1, np.nan, np.float32)
      return [Score([1], nan if context == 'x' else np.zeros(1), True) for context in contexts]

  questions = read_questions(write(tmp_path / 'choices.jsonl', CHOICES), 'here')
  found = evaluate_questions(Scores(), questions, TaskFile(path='', batch_size=1), {})
  assert np.isnan(list(found.values())).all() and set(found) == {'accuracy', 'accuracy_per_byte'}
  assert evaluate_questions(Scores(), questions[:1], TaskFile(path=''), {})['accuracy'] == 0.0
  assert [question.line for question in questions] == [1, 2]


@pytest.mark.slow
def test_a_run_is_evaluated_on_files_while_it_trains(tmp_path, capsys):
  (tmp_path / 'lines.txt').write_text('to be, or not to be\n' * 60)
  config = configure(StdlibLmTiny)
  for dataset in config.datasets:
    dataset.path = str(tmp_path / 'lines.txt')
  written = Config(
    TaskFile, path=write(tmp_path / 'written.jsonl', WRITTEN), metrics=('f1', first_letters), max_tokens=4
  )
  choices = Config(TaskFile, path=write(tmp_path / 'choices.jsonl', CHOICES), name='chosen')
  config.task.evaluate.set(max_batches=1, task_files=(written, choices))
  config.task.train.set(
    num_train_steps=4, eval_interval_steps=2, save_interval_steps=2, best_metric='eval/chosen/accuracy'
  )
  result = run_train(config, tmp_path / 'run')
  assert set(result.metrics['eval/written']) == {'f1', 'first_letters'}
  assert set(result.metrics['eval/chosen']) == {'accuracy', 'accuracy_per_byte'}
  out = capsys.readouterr().out
  assert out.count('eval/chosen accuracy') == 2 and '2 questions' in out
  again = run_eval(config, tmp_path / 'run')
  assert again['eval/chosen'] == result.metrics['eval/chosen']
  config.task.evaluate.task_files = (written, written)
  with pytest.raises(ConfigError, match=r"task_files\[1\]\.name: there is already an evaluation 'eval/written'"):
    run_eval(config, tmp_path / 'run')
