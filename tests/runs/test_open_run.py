"""Runs from Python: what a run directory says, and its model on one device or on a mesh."""

import json
import re
import subprocess
import sys

import jax
import numpy as np
import optax
import pytest
from tiny_runs import INPUTS, examples, expected_loss, tiny_run

import praxis_lite
from praxis_lite.cli.command import _read_recorded
from praxis_lite.cli.main import main
from praxis_lite.common.config import Config
from praxis_lite.common.errors import CheckpointError, ConfigError, DataError, ShardingError, UserError
from praxis_lite.experiments.lm import StdlibLmTiny
from praxis_lite.inputs import ArrayInput, TextInput
from praxis_lite.models import BaseModel
from praxis_lite.runs import DraftStatistics, run_eval, run_train
from praxis_lite.runs.evaluated_dataset import find_dataset
from praxis_lite.runs.inference import decode_prompts
from praxis_lite.runs.predict_files import predict_files
from praxis_lite.runs.prompts import check_ids
from praxis_lite.runs.run import _mesh_for
from praxis_lite.training.experiment import configure
from praxis_lite.training.task import SingleTask

pytestmark = pytest.mark.usefixtures('shared_programs')


@pytest.fixture(scope='module')
def tiny(shared_programs, tmp_path_factory):
  """A run of a regression task on 8 devices, with moving averages, and its config."""
  directory = tmp_path_factory.mktemp('tiny')
  config = tiny_run(8, learner={'ema_decay': 0.5}, log_interval_steps=5, save_interval_steps=10, eval_interval_steps=10)
  result = run_train(config, directory)
  return directory, config, result


@pytest.fixture(scope='module')
def run(tiny):
  directory, config, _ = tiny
  return praxis_lite.open_run(directory, config)


@pytest.fixture(scope='module')
def model(run):
  return run.load()


@pytest.fixture(scope='module')
def lm(shared_programs, tmp_path_factory):
  """A run of a language model, which its directory describes."""
  directory = tmp_path_factory.mktemp('lm')
  (directory / 'text.txt').write_text('def main():\n  return 1\n' * 200)
  config = configure(StdlibLmTiny)
  for dataset in config.datasets:
    dataset.path = str(directory / 'text.txt')
  config.task.train.set(num_train_steps=40, log_interval_steps=40)
  run_train(config, directory / 'run')
  return praxis_lite.open_run(directory / 'run')


@pytest.mark.slow
def test_importing_and_finding_open_run_loads_neither_orbax_nor_tensorflow():
  code = """
import sys, praxis_lite
assert 'jax' not in sys.modules
praxis_lite.open_run
assert not {m.partition('.')[0] for m in sys.modules} & {'orbax', 'tensorflow'}
"""
  subprocess.run([sys.executable, '-c', code], check=True)


# -------------------------------------------------------------------- the run


def test_a_run_says_its_checkpoints_and_metrics(tiny, run):
  directory, _, result = tiny
  assert run.checkpoints.steps == [10, 20] and run.checkpoints.latest == 20 and run.checkpoints.best is None
  assert repr(run) == f'<run {directory}, checkpoints of steps [10, 20]>'
  table = run.metrics
  assert list(table.steps) == [1, 5, 10, 15, 20]
  curve = table.curve('eval/valid/loss')
  assert list(curve.steps) == [10, 20] and curve.values[-1] == result.metrics['eval/valid']['loss']
  column = table['eval/valid/loss']
  assert list(np.isnan(column)) == [True, True, False, True, False] and column[-1] == table.last()['eval/valid/loss']
  assert list(table.curve('train/loss').steps) == [1, 5, 10, 15, 20]
  assert 'eval/valid/loss' in repr(table) and '2 values' in repr(table)
  with pytest.raises(KeyError, match=r"there is no metric 'eval/valid/los'\. Did you mean 'eval/valid/loss'"):
    table['eval/valid/los']


def test_a_table_keeps_what_was_not_finite_and_skips_a_line_that_is_being_written(tmp_path):
  lines = [{'step': 1, 'split': 'train', 'metrics': {'loss': None}}, {'step': 2, 'split': 'train', 'metrics': {'a': 1}}]
  (tmp_path / 'metrics.jsonl').write_text(''.join(f'{json.dumps(line)}\n' for line in lines) + '{"step": 3, "spl')
  table = praxis_lite.open_run(tmp_path).metrics
  assert list(table.steps) == [1, 2] and list(table) == ['train/a', 'train/loss']
  assert table.curve('train/loss').steps == [1] and np.isnan(table.curve('train/loss').values[0])
  (tmp_path / 'empty').mkdir()
  assert len(praxis_lite.open_run(tmp_path / 'empty').metrics) == 0


@pytest.mark.slow
def test_a_run_that_records_its_config_needs_no_experiment(lm):
  assert lm.config.task.train.num_train_steps == 40
  assert lm.record.launches[-1].step == 0
  assert lm.load().step == 40


# -------------------------------------------------------------------- its model


def test_variables_have_true_shapes_whatever_the_mesh(tiny, run, model):
  _, _, result = tiny
  expected = np.asarray(result.state.ema_vars['w'])[:INPUTS]
  for loaded in (model, run.load(mesh=(8,)), run.load(mesh=jax.make_mesh((3,), ('data',), devices=jax.devices()[:3]))):
    assert jax.tree.map(np.shape, loaded.variables) == {'w': (10, 7), 'v': (7,)}
    np.testing.assert_array_equal(loaded.variables['w'], expected)
  trained = run.load(ema=False).variables['w']
  np.testing.assert_array_equal(trained, np.asarray(result.state.mdl_vars['w'])[:INPUTS])
  assert not np.array_equal(run.load(step=10).variables['w'], expected)


def test_evaluate_is_what_eval_prints(tiny, run, model):
  directory, config, result = tiny
  expected = expected_loss(model.variables, 33, 1)
  data = config.datasets[1]
  for dataset in ('valid', 1, -1, data, data.instantiate(), examples(33, 1)):
    np.testing.assert_allclose(model.evaluate(dataset)['loss'], expected, rtol=1e-5)
  np.testing.assert_allclose(run.load(mesh=(3,)).evaluate('valid')['loss'], expected, rtol=1e-5)
  printed = run_eval(config, directory)['eval/valid']['loss']
  np.testing.assert_allclose([printed, result.metrics['eval/valid']['loss']], expected, rtol=1e-5)
  # Training data is read once, in order, and without the noise of training.
  np.testing.assert_allclose(model.evaluate('train')['loss'], expected_loss(model.variables, 50, 0), rtol=1e-5)


def test_predict_takes_batches_of_any_size_and_needs_no_labels(run, model):
  x = examples(33, 1)['x']
  w, v = model.variables['w'], model.variables['v']
  for loaded in (model, run.load(mesh=(8,)), run.load(mesh=(3,))):
    for count in (7, 3, 1, 33):
      expected = np.tanh(x[:count] @ w) @ v
      predicted = loaded.predict({'x': x[:count].astype(np.float64)})
      assert isinstance(predicted, np.ndarray) and predicted.shape == (count,)
      np.testing.assert_allclose(predicted, expected, rtol=1e-4, atol=1e-6)
  (compiled,) = (sizes for kind, sizes in model.tasks.batch_sizes.items() if "'x'" in kind and "'y'" not in kind)
  assert compiled == [7, 33]  # 3 and 1 ran in the program for 7.


@pytest.mark.parametrize('mesh', [(1,), (3,)])
def test_shapes_that_the_model_cannot_compute_are_compared_with_the_data(run, mesh, monkeypatch):
  model, batch = run.load(mesh=mesh), examples(4, 1)
  for shape in ((5,), (2, INPUTS + 1)):
    expected = rf"^batch\['x'\] has the shape {re.escape(str([*shape]))}; the data of the run has \[rows, {INPUTS}\]$"
    with pytest.raises(DataError, match=expected):
      model.predict({'x': np.ones(shape)})
  told = rf"\[4, {INPUTS}, 1\]; .* \[rows, {INPUTS}\]\. batch\['y'\] has the shape \[4, 3\]; .* \[rows\]$"
  with pytest.raises(DataError, match=told):
    model.evaluate_examples({'x': batch['x'][..., None], 'y': np.ones((4, 3))})
  assert model.predict({'x': np.ones((2, 3, INPUTS))}).shape == (2, 3)  # Other shapes may be fine.
  with pytest.raises(ConfigError, match="the batch has no entry 'x'"):
    model.predict({'y': np.ones((4, 3))})

  def fail(*_):
    raise DataError('no file')

  monkeypatch.setattr(type(model), 'batch_struct', fail)
  with pytest.raises(DataError, match='contracting dimensions'):
    model.predict({'x': np.ones(5)})


def test_per_example_outputs_decoding_a_batch_and_the_pure_call_agree(model):
  batch = examples(5, 1)
  predicted = model.predict(batch)
  np.testing.assert_allclose(
    model.evaluate_examples(batch)['errors'], (predicted - batch['y']) ** 2, rtol=1e-4, atol=1e-6
  )
  np.testing.assert_allclose(model.decode(batch)['y'], predicted, rtol=1e-5)
  alone, _ = model.layer.apply(model.variables, batch, method='predict', do_eval=True)
  np.testing.assert_allclose(alone, predicted, rtol=1e-5)


def test_any_model_that_declares_its_ids_has_them_checked(model, monkeypatch):
  monkeypatch.setattr(type(model.layer), 'num_ids', 5)
  with pytest.raises(DataError, match=r'^ids: 7, at position 1 of row 0, is not in .* ids are 0 to 4;'):
    model.predict(examples(1, 1) | {'ids': np.array([[4, 7]])})


def test_ids_that_are_not_in_the_vocabulary_are_told_before_anything_is_compiled(lm):
  model = lm.load()
  size = model.layer.lm.vocab_size
  with pytest.raises(DataError, match=rf'^ids: {size}, at position 1 of row 1, is not in .* ids are 0 to {size - 1};'):
    model.decode([[1], [2, size]])
  with pytest.raises(DataError, match=r'^ids: -1, at position 0 of row 0, is not'):
    model.predict({'ids': np.array([[-1, 2]])})
  with pytest.raises(DataError, match=r'^ids: \d+, at position 0 of row 0, is not'):
    model.evaluate_examples({'ids': np.array([[size, 2]]), 'labels': np.array([[1, 2]])})
  prompts = {'ids': np.array([[1, -7]]), 'prompt_lengths': np.array([1]), 'weights': np.ones(1)}
  check_ids(prompts, size)
  check_ids({'ids': np.array([[-1, 2]]), 'weights': np.array([[0, 1]])}, size)


@pytest.mark.slow
@pytest.mark.parametrize('settings', [{}, {'beam_size': 2, 'num_best': 2}, {'mesh': (3,)}], ids=str)
def test_texts_match_an_expression_or_a_schema(lm, settings):
  pytest.importorskip('llguidance', reason='needs llguidance: pip install praxis_lite[constrain]')
  settings = dict(settings)
  model, pieces = lm.load(mesh=settings.pop('mesh', None)), ['', '']
  texts = model.decode(['def ', 'class A'], regex='[a-f]{2,4}[(](x|yy)[)]:', max_tokens=12, **settings)
  assert len(texts) == 2 * settings.get('num_best', 1)
  assert all(re.fullmatch('[a-f]{2,4}[(](x|yy)[)]:', text) for text in texts), texts
  if settings:
    return
  schema = {'type': 'array', 'items': {'enum': [1, 2]}, 'minItems': 3, 'maxItems': 3}
  stream = lambda i, new: pieces.__setitem__(i, pieces[i] + new)  # noqa: E731
  texts = model.decode(['def ', 'x'], json_schema=schema, max_tokens=20, temperature=1.5, stream=stream)
  assert pieces == texts and all(len(json.loads(text)) == 3 for text in texts), texts
  (decoded,) = model.decode({'ids': np.array([list(b'def ')]), 'prompt_lengths': np.array([4])}, regex='[xy]{3}')['ids']
  assert re.fullmatch(b'[xy]{3}', bytes(decoded[:3].tolist())) and not decoded[3:].any()
  with pytest.raises(ConfigError, match=r'^decode: regex and json_schema cannot be combined'):
    model.decode(['a'], regex='a', json_schema={})
  with pytest.raises(ConfigError, match=r"^decode: regex='\(': "):
    model.decode(['a'], regex='(')


@pytest.mark.slow
def test_the_command_decodes_texts_that_match(lm, tmp_path, capsys):
  pytest.importorskip('llguidance', reason='needs llguidance: pip install praxis_lite[constrain]')
  field = {'type': 'integer', 'minimum': 0, 'maximum': 9}
  schema = {'type': 'object', 'properties': {'a': field}, 'required': ['a'], 'additionalProperties': False}
  (tmp_path / 'schema.json').write_text(json.dumps(schema))
  command = ['decode', f'--job_log_dir={lm.directory}', '--nocompilation_cache', '--max_tokens=12']
  assert main([*command, '--prompt=x', f'--json_schema={tmp_path / "schema.json"}', '--nostream']) == 0
  assert 0 <= json.loads(capsys.readouterr().out[1:])['a'] <= 9
  assert main([*command, '--prompt=x', '--regex=[0-9]{20}']) == 0
  assert 'note: the sample ended before it was complete; --max_tokens allows more' in capsys.readouterr().err
  assert main([*command, '--prompt=x', '--regex=[0-9']) == 2
  assert "--regex='[0-9': " in capsys.readouterr().err


@pytest.mark.slow
def test_texts_in_and_texts_out(lm):
  model = lm.load()
  texts = model.decode(['def ', 'class A'], temperature=0.7, max_tokens=6)
  assert len(texts) == 2 and all(isinstance(text, str) for text in texts)
  assert model.decode(['def ', 'class A'], temperature=0.7, max_tokens=6) == texts
  assert model.decode(['def ', 'class A'], temperature=0.7, max_tokens=6, seed=1) != texts
  ids = [list(b'def '), list(b'class A')]
  tokens = model.decode(ids, temperature=0, max_tokens=6)
  assert [len(row) for row in tokens] == [6, 6]
  # Greedy decoding is the likeliest token after each prefix; what is after it makes no difference.
  whole = [prompt + row for prompt, row in zip(ids, tokens)]
  logits = model.predict({'ids': np.array([row + [0] * (13 - len(row)) for row in whole])})['logits']
  for prompt, row, after in zip(ids, tokens, np.argmax(logits, -1)):
    assert row == after[len(prompt) - 1 :][:6].tolist()
  first = bytes(tokens[0][:1]).decode()
  assert model.decode(ids, temperature=0, max_tokens=6, stop=[first])[0] == tokens[0][:1]
  # Other lengths take the same program, and change nothing.
  programs = len(model._prompts._tasks_by_sampler)
  assert model.decode(ids, temperature=0, max_tokens=3) == [row[:3] for row in tokens]
  longer = model.decode([ids[0] + tokens[0][:5]], temperature=0, max_tokens=1)
  assert longer == [tokens[0][5:6]]
  assert len(model._prompts._tasks_by_sampler) == programs
  # The command line does the same.
  config = lm.config
  config.task.model.decoder_tpl.set(temperature=0, max_decode_steps=6)
  assert decode_prompts(config, lm.directory, ids) == tokens


@pytest.mark.parametrize('context', [None, 8])
def test_more_tokens_than_memory_has_room_for_are_refused_before_anything_is_allocated(lm, context, monkeypatch):
  monkeypatch.setattr('praxis_lite.common.devices.machine_memory', lambda: 2**30)
  run = praxis_lite.open_run(lm.directory)
  run.config.task.model.decoder_tpl.max_context = context
  model, prompts = run.load(), np.array([[100, 101], [102, 103]])
  field = r'^max_tokens \(task.model.decoder_tpl.max_decode_steps\)'
  for given in (prompts, {'ids': prompts, 'prompt_lengths': np.array([2, 2])}):
    with pytest.raises(
      ConfigError, match=rf'{field} = 1,000,000,000: .* of 2 need .*iB, .* 1 GiB .*; up to \d\S* fit$'
    ):
      model.decode(given, max_tokens=10**9)


@pytest.mark.slow_cases
@pytest.mark.parametrize('mesh', [None, (3,)])
def test_continuations_are_scored_by_their_log_probabilities(lm, mesh):
  model = lm.load(mesh=mesh)
  pairs = [('def ', 'main'), ('', 'def main():'), ('x' * 50, 'y'), ('def main', ''), ('de', 'f'), ('return', ' 1\n')]
  scores = model.score(*zip(*pairs), batch_size=4)
  for (context, continuation), score in zip(pairs, scores):
    whole = (context.encode() or b'\0') + continuation.encode()  # A document begins with byte 0.
    logits = model.predict({'ids': np.frombuffer(whole, np.uint8)[None]})['logits'][0].astype(np.float64)
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    at = range(len(whole) - len(continuation), len(whole))
    np.testing.assert_allclose(score.log_probs, [log_probs[i - 1, whole[i]] for i in at], atol=1e-5)
    assert score.ids == list(continuation.encode()) and score.log_probs.dtype == np.float32
    assert score.is_greedy == all(log_probs[i - 1].argmax() == whole[i] for i in at)
    assert score.log_prob == pytest.approx(score.log_probs.sum(), abs=1e-5)
  assert scores[3].log_prob == 0 and len({score.is_greedy for score in scores}) == 2
  ids = [[list(text.encode()) for text in texts] for texts in zip(pairs[0], pairs[4])]
  for one, expected in zip(model.score(*ids), (scores[0], scores[4])):
    np.testing.assert_allclose(one.log_probs, expected.log_probs, atol=1e-5)
  (alone,) = model.score(['def '], ['main'])
  np.testing.assert_allclose(alone.log_probs, scores[0].log_probs, atol=1e-5)
  assert model.score([], []) == []


@pytest.mark.slow_cases
@pytest.mark.parametrize('temperature', [0, 0.8])
@pytest.mark.parametrize('mesh', [None, (3,)])
def test_segments_and_batches_change_no_token(lm, temperature, mesh):
  """The pieces of a stream, joined, are what is returned, and that is what a single call returns."""
  model = lm.load(mesh=mesh)
  prompts, settings = ['def ', 'class A', 'de', 'x'], {'temperature': temperature, 'max_tokens': 30, 'seed': 3}
  settings |= {'repetition_penalty': 1.2, 'no_repeat_ngram_size': 4}
  texts = model.decode(prompts, **settings)
  pieces, counts = [''] * 4, [0] * 4

  def stream(row, piece):
    pieces[row] += piece
    counts[row] += 1

  assert model.decode(prompts, **settings, stream=stream) == pieces == texts and min(counts) > 2
  assert model.decode(prompts, **settings, batch_size=3) == texts
  tokens, ids = [[] for _ in prompts], [list(prompt.encode()) for prompt in prompts]
  assert model.decode(ids, **settings, stream=lambda row, new: tokens[row].extend(new)) == tokens
  assert [bytes(row).decode(errors='replace') for row in tokens] == texts
  stop = texts[0][9:12]
  assert model.decode(prompts, **settings, stop=[stop])[0] == texts[0][: texts[0].index(stop) + 3]


@pytest.mark.slow
def test_beam_search_returns_the_best_of_each_prompt(lm):
  model, prompts = lm.load(), ['def ', 'class A', 'x']
  settings = {'beam_size': 3, 'max_tokens': 6, 'length_penalty': 0.0}
  texts = model.decode(prompts, num_best=2, **settings)
  assert len(texts) == 6 and model.decode(prompts, **settings) == texts[::2]
  assert model.decode(prompts, num_best=2, batch_size=2, **settings) == texts
  assert lm.load(mesh=(3,)).decode(prompts, num_best=2, **settings) == texts
  ids = model.decode([list(prompt.encode()) for prompt in prompts], num_best=2, **settings)
  assert [bytes(row).decode(errors='replace') for row in ids] == texts
  scores = model.score([list(prompt.encode()) for prompt in prompts for _ in range(2)], ids)
  batch = {'ids': np.frombuffer(b'def ', np.uint8)[None].astype(np.int32), 'prompt_lengths': np.array([4], np.int32)}
  arrays = model.decode(batch, num_best=2, **settings)
  np.testing.assert_allclose(arrays['beam_scores'][0], [score.log_prob for score in scores[:2]], atol=1e-4)
  assert all(a.log_prob >= b.log_prob for a, b in zip(scores[::2], scores[1::2]))
  one = {'beam_size': 1, 'length_penalty': 0.0, 'max_tokens': 6, 'repetition_penalty': 1.2}
  greedy = model.decode(prompts, temperature=0, max_tokens=6, repetition_penalty=1.2)
  assert model.decode(prompts, **one) == greedy


@pytest.mark.slow
def test_guesses_change_no_text_and_are_counted(lm):
  model, prompts = lm.load(), ['def ', 'class A']
  settings = {'temperature': 0.7, 'max_tokens': 20, 'seed': 3}
  texts, greedy, counts = model.decode(prompts, **settings), {**settings, 'temperature': 0}, DraftStatistics()
  assert model.decode(prompts, **greedy, lookup=3, statistics=counts) == model.decode(prompts, **greedy)
  assert counts.tokens == 40 and 0 < counts.accepted < counts.drafted and counts.passes < 40
  assert re.fullmatch(
    r'[1-5]\.\d\d tokens in each pass of the model; \d+% of \d+ guessed tokens were right', str(counts)
  )
  pieces = ['', '']

  def stream(row, piece):
    pieces[row] += piece

  assert model.decode(prompts, **settings, lookup=3, stream=stream, stop=['\0\0']) == texts == pieces
  counts = DraftStatistics()
  mesh = lm.load(mesh=(3,))
  assert mesh.decode(prompts, **greedy, draft=model, draft_tokens=3, statistics=counts) == model.decode(
    prompts, **greedy
  )
  assert counts.acceptance_rate == 1 and counts.tokens_per_pass > 2  # The draft model is the model.
  counts = DraftStatistics()
  model.decode(prompts, **greedy, statistics=counts)
  assert (counts.tokens_per_pass, counts.drafted) == (1.0, 0)


@pytest.mark.slow
def test_processors_of_a_call_change_its_tokens(lm):
  model, banned = lm.load(), ord('n')
  plain = model.decode(['def '], temperature=0, max_tokens=30)

  def ban(logits, ids, lengths):
    return logits.at[:, banned].set(-np.inf)

  assert 'n' in plain[0] and 'n' not in model.decode(['def '], temperature=0, max_tokens=30, logit_processors=(ban,))[0]


@pytest.mark.slow_cases
@pytest.mark.parametrize(
  'settings, message',
  [
    ({'num_best': 2}, r'^num_best = 2: this is a setting of beam search; give beam_size too'),
    ({'beam_size': 2, 'temperature': 1.0}, r'^temperature = 1\.0: beam search draws no tokens'),
    ({'beam_size': 2, 'num_best': 3}, r'decoder_tpl.num_best: expected from 1 to beam_size, which is 2, got 3'),
    ({'beam_size': 2, 'stream': print}, r'^decode: stream: the continuations are known only when a beam search ends'),
    ({'beam_size': 2, 'stop': ['ab']}, r"^decode: stop=\['ab'\]: texts are known only when a beam search ends"),
    ({'beam_size': 'two'}, r'^decode: beam_size: expected '),
    ({'stream': lambda piece: None}, r'^decode: stream: expected .*<lambda> \(function\); it must take 2 arguments$'),
    ({'logit_processors': (3,)}, r'logit_processors'),
    ({'beam_size': 2, 'lookup': 3}, r'^lookup = 3: beam search takes no guesses; leave out one of them'),
    ({'draft_tokens': 3}, r'SpeculativeSampler.lookup: got None; expected a number, such as 3, or a draft model'),
    ({'lookup': 0}, r'decoder_tpl.lookup: expected at least 1'),
    (
      {'lookup': 2, 'max_tokens': 99},
      r'speculative decoding needs all tokens at each step, but the model sees only 32',
    ),
    (
      {'draft': 'runs/small'},
      r"^decode: draft: expected a model, as open_run\(...\).load\(\) returns, got 'runs/small'",
    ),
  ],
)
def test_settings_of_decoding_that_do_not_go_together_are_told(lm, settings, message):
  with pytest.raises(UserError, match=message):
    lm.load().decode(['a'], **{'max_tokens': 2, **settings})


@pytest.mark.parametrize('settings', [{'lookup': 2}, {'beam_size': 2}], ids=str)
def test_a_draft_model_guesses_alone(lm, settings):
  model = lm.load()
  with pytest.raises(ConfigError, match=f'^decode: {next(iter(settings))} = 2: .*; leave out one of them'):
    model.decode(['a'], max_tokens=2, draft=model, **settings)


def test_a_draft_model_is_a_language_model(lm, model):
  with pytest.raises(
    ConfigError, match=r'^draft: speculative decoding needs language models, and the draft model is not one'
  ):
    lm.load().decode(['a'], max_tokens=2, draft=model)


@pytest.mark.parametrize(
  'contexts, continuations, message',
  [
    ('def', ['main'], r"^score: contexts is one text; expected a list, as in \['def'\]"),
    (['def'], [], r'^score: 1 context and 0 continuations; expected pairs'),
    (['def'], [None], r"^score: pair 0 has None; expected a text, such as '', or a list of tokens$"),
    (['def'], [[1]], r'^score: pair 0 has a text and a list of tokens; expected two texts, or two lists'),
    ([[1]], [[0.5]], r'^score: pair 0 has \[0.5\]; expected a text, or a list of tokens'),
    ([[1]], 3, r'^score: continuations is 3; expected a list$'),
    ([[1]], [[2, 999]], r'^ids: 999, at position 1 of row 0, is not in the vocabulary of the model'),
  ],
)
def test_pairs_that_cannot_be_scored_are_told(lm, contexts, continuations, message):
  with pytest.raises(UserError, match=message):
    lm.load().score(contexts, continuations)


# -------------------------------------------------------------------- mistakes


def open_beside(run, name):
  return praxis_lite.open_run(run.directory / name)


@pytest.mark.parametrize('names, fits', [(None, '(8,)'), (('data',), '(8,)'), (('data', 'mdl'), '(8, 1)')])
def test_a_number_in_place_of_a_mesh_comes_with_one_that_fits(names, fits):
  task = Config(SingleTask, model=Config(BaseModel), mesh_axis_names=names).instantiate()
  with pytest.raises(ShardingError, match=re.escape(f'such as {fits}') + '$'):
    _mesh_for(task, 8)


def mistakes():
  yield lambda run, model: run.load(step=7), CheckpointError, r'there is no checkpoint of step 7 in .*; there are \[10'
  told = r"^step = 'bset': expected a number, 'best', or None for the newest; there are \[10"
  yield lambda run, model: run.load(step='bset'), CheckpointError, told
  yield lambda run, model: run.load(mesh=(2, 2)), ShardingError, r'has 2 sizes, but mesh_axis_names'
  told = (
    r'^load: mesh = \(16,\) needs 16 devices, .* has 8; pass .*, such as mesh=\(8,\), or call simulate_cpu_devices\(16'
  )
  yield lambda run, model: run.load(mesh=(16,)), ShardingError, told
  yield lambda run, model: run.load(mesh=2), ShardingError, r'^load: mesh = 2: expected the size .*, such as \(2,\)'
  wrong = jax.make_mesh((2,), ('mdl',), devices=jax.devices()[:2])
  told = r"^load: the mesh has the axes \('mdl',\); the axes of the task are \('data',\)"
  yield lambda run, model: run.load(mesh=wrong), ShardingError, told
  told = r"^evaluate: there is no dataset 'val'. Did you mean 'valid'\? There are: 'train', 'valid'"
  yield lambda run, model: model.evaluate('val'), ConfigError, told
  yield lambda run, model: model.evaluate(2), ConfigError, r'^evaluate: there is no dataset 2'
  unset = [Config(TextInput, name='text', seq_len=4, batch_size=1)]
  told = r"^datasets\[0\]\.path: a value is required but not set \(a field of TextInput\), as in .*--set 'datasets\[0\]"
  yield lambda run, model: find_dataset(unset, 'text'), ConfigError, told
  endless = Config(ArrayInput, name='own', arrays=examples(9, 0), batch_size=3, is_training=True)
  yield lambda run, model: model.evaluate(endless.instantiate()), ConfigError, r'^evaluate: own is endless'
  yield lambda run, model: model.evaluate(None), ConfigError, r'^evaluate: expected a dataset, got NoneType'
  yield lambda run, model: model.decode('def'), UserError, r"expected a list of prompts, got one text; pass \['def'\]"
  yield lambda run, model: model.decode(['def']), UserError, r'texts need a dataset with a tokenizer, but there is none'
  yield lambda run, model: model.decode([[1]], top_k=1), ConfigError, r'^a prompt needs a language model'
  yield (
    lambda run, model: model.decode([[1]], batch_size=0),
    ConfigError,
    r'^decode: batch_size = 0; expected at least 1',
  )
  yield lambda run, model: model.decode({'ids': [[1]]}, batch_size=1), ConfigError, r'^decode: .* is a batch of arrays'
  yield lambda run, model: model.decode([[1]], stop=['a']), UserError, r"^stop='a' needs a dataset with a tokenizer"
  yield (
    lambda run, model: model.score([[1]], [[2]]),
    ConfigError,
    r'^score: needs a language model; this model is a Tiny',
  )
  for name, bad in (('stream', True), ('seed', 'a'), ('seed', 1.5), ('batch_size', True), ('max_tokens', 2.5)):
    told = rf'^decode: {name}: expected .* \| None, got {bad!r}'
    yield lambda run, model, given={name: bad}: model.decode([[1]], **given), ConfigError, told
  for bad in (3, None, True):
    told = rf'^stop: expected a list of texts, got {bad}'
    yield lambda run, model, bad=bad: model.decode([[1]], stop=bad), UserError, told
  yield lambda run, model: run.load(seed=2**70).key, ConfigError, r'^seed = \d+: expected an integer of 64 bits'
  yield lambda run, model: model.decode(['a', [1]]), UserError, r'prompts\[0\] is a text, and prompts\[1\] is not; pass'
  yield lambda run, model: model.decode(3), UserError, r'^decode: expected a list of prompts, got 3'
  yield lambda run, model: model.decode([]), ConfigError, r'^there are no prompts'
  yield lambda run, model: model.decode([b'def']), DataError, r"^a prompt is bytes; expected a text, such as 'def', or"
  yield lambda run, model: model.decode([[0.5, 1.7]]), DataError, r'^a prompt is \[0.5, 1.7\]; expected a list of'
  yield lambda run, model: model.decode([[[1, 2]]]), DataError, r'^a prompt is \[\[1, 2\]\]; expected a list of'
  yield lambda run, model: model.export('x', formats='stablehlo'), ConfigError, r"^format: expected a tuple, .*lo',\)"
  yield lambda run, model: open_beside(run, '..'), UserError, 'is not a run; the runs below it are '
  yield lambda run, model: open_beside(run, 'checkpoints'), UserError, 'is not a run; it is a part of the run '
  yield lambda run, model: model.predict({'x': np.zeros((0, 10))}), DataError, r'^batch: there are no examples'
  yield lambda run, model: model.predict(np.zeros((2, 10))), DataError, r'^batch: expected a dict of arrays, got ndarr'


@pytest.mark.parametrize('call, error, message', mistakes())
def test_a_mistake_is_one_clear_line(run, model, call, error, message):
  with pytest.raises(error, match=message):
    call(run, model)


def test_a_directory_that_is_no_run_is_told(tmp_path):
  with pytest.raises(UserError, match=r'there is no run in .*/none: it is not a directory'):
    praxis_lite.open_run(tmp_path / 'none')
  with pytest.raises(UserError, match=r'does not record its config; name its experiment: open_run\(directory, exp='):
    praxis_lite.open_run(tmp_path).load()
  with pytest.raises(CheckpointError, match='there is no checkpoint in'):
    praxis_lite.open_run(tmp_path, StdlibLmTiny).load()
  with pytest.raises(UserError, match='no experiment'):
    praxis_lite.open_run(tmp_path, 'lm.Nope')
  for name in ('config.json', 'model-00001-of-00002.safetensors'):
    (tmp_path / name).touch()
  with pytest.raises(UserError, match=rf'it is a checkpoint .* `praxis-lite import-hf {tmp_path} --job_log_dir=runs/'):
    praxis_lite.open_run(tmp_path)
  with pytest.raises(UserError, match=r'records no run; it is a checkpoint .* `praxis-lite import-hf '):
    _read_recorded(str(tmp_path), (), restores=False)


@pytest.mark.parametrize(
  ('x', 'got'),
  [('0.5', 'a number'), ('[[0.5]]', r'an array of shape \[1, 1\]'), ('[0.5, 1]', r'an array of shape \[2\]')],
)
def test_files_whose_examples_have_another_shape_than_the_data_are_refused(model, tmp_path, x, got):
  file = tmp_path / 'a.jsonl'
  file.write_text(f'{{"x": {x}}}\n')
  expected = (
    rf"a\.jsonl: 'x': expected an array of shape \[{INPUTS}\] in each example, as in the data of the run, got {got}$"
  )
  with pytest.raises(DataError, match=expected):
    list(predict_files(model, [str(file)]))


def test_the_average_of_a_schedule_free_optimizer_can_be_asked_for(shared_programs, tmp_path):
  free = {'optimizer': Config(optax.contrib.schedule_free_sgd), 'learning_rate': 0.05}
  config = tiny_run(1, num_train_steps=3, learner=free)
  run_train(config, tmp_path)
  run = praxis_lite.open_run(tmp_path, config)
  average, last = (run.load(ema=ema).variables['w'] for ema in (True, False))
  np.testing.assert_array_equal(average, run.load().variables['w'])
  assert np.abs(np.asarray(average) - np.asarray(last)).max() > 1e-6
