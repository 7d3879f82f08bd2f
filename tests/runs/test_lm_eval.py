"""`lm_eval` on a run: a local task, whose results equal a loop by hand; batched and on a mesh."""

from __future__ import annotations

import json
import math
import sys

import jax
import numpy as np
import pytest
from tiny_language_model import tiny_language_model

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.inputs import ByteTokenizer, TextInput

lm_eval = pytest.importorskip('lm_eval', reason="needs lm_eval: pip install 'praxis_lite[eval]'")
from praxis_lite.bridges.lm_eval import RunLM, _read_step, register_with_lm_eval  # noqa: E402

QUESTIONS = [
  {'question': 'one and two', 'options': ['three', 'six'], 'gold': 0, 'text': 'three'},
  {'question': 'to be', 'options': ['or not', 'a', 'be'], 'gold': 2, 'text': 'be'},
  {'question': 'x', 'options': ['y', 'zz'], 'gold': 1, 'text': 'zz'},
]
CHOICE = """
task: tiny_choice
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}:"
doc_to_choice: "{{options}}"
doc_to_target: gold
metric_list: [{metric: acc}]
"""
WRITTEN = """
task: tiny_written
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}:"
doc_to_target: text
generation_kwargs: {until: ["\\n", "e"], max_gen_toks: 6, do_sample: false}
metric_list: [{metric: exact_match}]
"""
ROLLING = """
task: tiny_rolling
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}"
metric_list: [{metric: byte_perplexity}]
"""


def byte_model(mesh=(1, 1, 1)):
  model = tiny_language_model(mesh, vocab_size=257)
  data = Config(TextInput, path='not-read', seq_len=8, batch_size=1, tokenizer_tpl=Config(ByteTokenizer, bos_id=256))
  model.config.datasets.append(data)
  return model


@pytest.fixture(scope='module')
def model():
  return byte_model()


@pytest.fixture(scope='module')
def tasks(tmp_path_factory):
  """A task manager that knows the three tasks, and nothing else."""
  from lm_eval.tasks import TaskManager

  folder = tmp_path_factory.mktemp('tasks')
  (folder / 'questions.jsonl').write_text(''.join(json.dumps(question) + '\n' for question in QUESTIONS))
  for name, text in (('choice', CHOICE), ('written', WRITTEN), ('rolling', ROLLING)):
    (folder / f'{name}.yaml').write_text(text.replace('FILE', str(folder / 'questions.jsonl')))
  return TaskManager(include_path=str(folder), include_defaults=False)


def results(model, tasks, *names):
  found = lm_eval.simple_evaluate(model=model, tasks=list(names), task_manager=tasks, bootstrap_iters=0)
  return {name: found['results'][name] for name in names}, found['samples']


def log_probs_by_hand(model, ids):
  """The log-probability of each token of a row after the first, by the pure call."""
  batch = {'ids': np.array([ids[:-1]]), 'weights': np.ones((1, len(ids) - 1), np.float32)}
  logits = model.layer.apply(model.variables, batch, do_eval=True, method='predict')[0]['logits']
  return np.asarray(jax.nn.log_softmax(logits[0]))[np.arange(len(ids) - 1), ids[1:]]


def test_a_local_task_gives_the_results_of_a_loop_by_hand(model, tasks):
  found, samples = results(RunLM(model, batch_size=2), tasks, 'tiny_choice', 'tiny_rolling')
  right, total, size = 0, 0.0, 0
  for question, sample in zip(QUESTIONS, samples['tiny_choice']):
    context = f'{question["question"]}:'.encode()
    scores = []
    for option in question['options']:
      more = f' {option}'.encode()
      scores.append(log_probs_by_hand(model, list(context + more))[-len(more) :].sum())
    np.testing.assert_allclose([response[0][0] for response in sample['resps']], scores, rtol=1e-4)
    right += int(np.argmax(scores) == question['gold'])
    total += log_probs_by_hand(model, [256, *question['question'].encode()]).sum()
    size += len(question['question'])
  assert found['tiny_choice']['acc,none'] == pytest.approx(right / len(QUESTIONS))
  assert found['tiny_rolling']['byte_perplexity,none'] == pytest.approx(math.exp(-total / size), rel=1e-4)


def test_generated_texts_end_before_a_stop(model, tasks):
  _, samples = results(RunLM(model), tasks, 'tiny_written')
  for question, sample in zip(QUESTIONS, samples['tiny_written']):
    (text,) = model.decode([f'{question["question"]}:'], temperature=0.0, max_tokens=6)
    for stop in ('\n', 'e'):
      text = text.partition(stop)[0]
    assert sample['resps'] == [[text]]


def test_a_cut_context_keeps_its_last_tokens(model):
  lm = RunLM(model)
  lm._context = 6  # Of bytes, some of which are parts of a character.
  cut = lm._fit('ab\u00e9\u00e9\u00e9', 4)
  assert cut == list('\u00e9\u00e9'.encode())[1:] and len(cut) == 3
  assert lm._fit('ab', 4) == [97, 98] and _read_step('newest') is _read_step(None) is None
  assert _read_step('best') == 'best' and _read_step('7') == _read_step(7) == 7


@pytest.mark.slow
def test_a_mesh_and_windows_change_nothing(model, tasks):
  one = results(RunLM(model), tasks, 'tiny_choice', 'tiny_rolling')[0]
  split = results(RunLM(byte_model((1, 2, 3)), batch_size=3), tasks, 'tiny_choice', 'tiny_rolling')[0]
  for name, values in one.items():
    for metric, value in values.items():
      if isinstance(value, float):
        assert split[name][metric] == pytest.approx(value, rel=1e-4), metric
  text = 'a text of some length'
  windows = RunLM(model, max_length=5)
  request = lm_eval.api.instance.Instance('loglikelihood_rolling', {}, (text,), 0)
  ids = [256, *text.encode()]
  expected = sum(log_probs_by_hand(model, ids[i : i + 6]).sum() for i in range(0, 20, 5))
  expected += log_probs_by_hand(model, ids[16:22])[-1]
  assert windows.loglikelihood_rolling([request])[0] == pytest.approx(expected, rel=1e-4)


def test_settings_of_requests(model):
  lm = RunLM(model)
  assert lm._settings({}) == ([], {'max_tokens': 256, 'temperature': 0.0})
  assert lm._settings({'until': 'a', 'max_gen_toks': 5, 'temperature': 0.7, 'do_sample': True}) == (
    ['a'],
    {'max_tokens': 5, 'temperature': 0.7},
  )
  assert lm._settings({'do_sample': True, 'top_p': 0.5})[1] == {'max_tokens': 256, 'top_p': 0.5, 'temperature': 1.0}
  assert lm._settings({'temperature': 1.0, 'do_sample': False})[1]['temperature'] == 0.0
  assert lm.loglikelihood([]) == lm.loglikelihood_rolling([]) == lm.generate_until([]) == []


@pytest.mark.parametrize(
  ('arguments', 'message'),
  [
    ({'batch_size': 0}, 'batch_size=0; expected an integer of at least 1'),
    ({'mesh': '2,2'}, 'mesh=2,2; expected the size of each axis'),
    ({'max_length': 0}, 'max_length=0; expected an integer of at least 1'),
    ({'step': 'last'}, "step=last; expected the step of a checkpoint, 'best' or 'newest'"),
    ({'stepp': 3}, 'there is no stepp; a run has path, mesh, step'),
  ],
)
def test_bad_arguments_are_one_message(model, arguments, message):
  path = 'runs/none' if {'mesh', 'step'} & set(arguments) else model
  with pytest.raises(ConfigError, match=message):
    RunLM(path, **arguments)


def test_the_command_knows_the_model_by_name():
  register_with_lm_eval()
  register_with_lm_eval()
  from lm_eval.api.registry import get_model

  assert get_model('praxis_lite') is RunLM
  assert 'praxis_lite.bridges.lm_eval' in sys.modules
