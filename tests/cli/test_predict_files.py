"""`praxis-lite predict` prints a line of JSON for each example of some files."""

from __future__ import annotations

import json
import os
from types import SimpleNamespace

import numpy as np
import pytest

from praxis_lite.cli.main import main
from praxis_lite.common.config import Config
from praxis_lite.common.config.overrides import apply_overrides
from praxis_lite.common.errors import DataError, UserError
from praxis_lite.experiments.lm import StdlibLmTiny
from praxis_lite.inputs import ArrayInput, ByteTokenizer, LabelledTextInput, MaskedTextInput, TokenizedInput
from praxis_lite.layers import Linear
from praxis_lite.models import ClassificationModel
from praxis_lite.runs import open_run, run_train
from praxis_lite.runs.predict_files import predict_files, read_images
from praxis_lite.runs.programs import examples_of
from praxis_lite.training.experiment import configure


@pytest.fixture(scope='module')
def run(tmp_path_factory):
  directory = tmp_path_factory.mktemp('run')
  config = configure(StdlibLmTiny)
  apply_overrides(config.roots(), ['task.train.num_train_steps=1', 'task.evaluate.max_batches=1'])
  run_train(config, directory)
  return directory


@pytest.fixture
def predicted(run, capsys):
  def predict(*arguments):
    code = main(['predict', f'--job_log_dir={run}', '--nocompilation_cache', *map(str, arguments)])
    out, err = capsys.readouterr()
    return code, [json.loads(line) for line in out.splitlines()], err

  return predict


@pytest.mark.slow
def test_files_of_arrays_and_of_lines_give_what_the_model_predicts(run, predicted, tmp_path):
  ids = np.random.default_rng(0).integers(0, 256, (5, 8))
  np.savez(tmp_path / 'new.npz', ids=ids[:3])
  (tmp_path / 'new.npz').rename(tmp_path / 'NEW.NPZ')
  (tmp_path / 'new.jsonl').write_text(''.join(f'{json.dumps({"ids": row.tolist()})}\n' for row in ids[3:]))
  code, examples, told = predicted(tmp_path / 'NEW.NPZ', tmp_path / 'new.jsonl', '--batch_size=2')
  assert code == 0
  assert told.splitlines() == [
    "'logits' of each example has [8, 256] = 2,048 numbers; --what=evaluate prints the loss of each example",
    '5 examples after step 1',
  ]
  wanted = open_run(run).load().predict({'ids': ids})['logits']
  np.testing.assert_allclose([example['logits'] for example in examples], wanted, rtol=1e-4, atol=1e-5)


def masked_model(folder, tokenizer=None, **fields):
  """A model whose most probable token is `a + place in the row`, and nearly its most probable one the mask."""
  (folder / 'data.txt').write_text('text')
  tokenizer = tokenizer or Config(ByteTokenizer, bos_id=256, eos_id=257, pad_id=258)
  data = Config(MaskedTextInput, name='data', path=str(folder / 'data.txt'), tokenizer_tpl=tokenizer)
  data.set(**{'seq_len': 10, 'batch_size': 1, **fields})

  def predict(batch):
    logits = np.zeros((*batch['ids'].shape, data.instantiate().vocab_size), np.float32)
    assert (batch['segment_pos'] <= np.arange(logits.shape[1])).all()
    np.put_along_axis(logits, 97 + np.arange(logits.shape[1])[None, :, None], 8, axis=2)
    logits[..., 256:] = 99
    return {'logits': logits}

  return SimpleNamespace(config=SimpleNamespace(datasets=[data]), predict=predict, layer=1)


def test_a_masked_language_model_fills_in_the_masks_of_each_line(tmp_path):
  (tmp_path / 'gaps.txt').write_text('[MASK]b[MASK]\n\nno\n[MASK]\n')
  found = list(predict_files(masked_model(tmp_path), [str(tmp_path / 'gaps.txt')], batch_size=2))
  assert [line['text'] for line in found] == ['bbd', 'no', 'b']
  best = [[choices[0]['token'] for choices in line['tokens']] for line in found]
  assert best == [['b', 'd'], [], ['b']]
  probable = np.exp(8) / (np.exp(8) + 255)
  assert found[0]['tokens'][0][0]['probability'] == pytest.approx(probable) and len(found[0]['tokens'][0]) == 5


@pytest.mark.parametrize(
  'text, message',
  [
    (b'no gap\n', r'gaps.txt: no line has a \[MASK\], .*; --what=evaluate prints'),
    (b'', 'gaps.txt: no line has a'),
    (b'a\n[MASK]' + b'b' * 10, 'gaps.txt: line 2 has 13 tokens, and rows of the run 12'),
    (b'\xff[MASK]', 'data.path: .*gaps.txt is not UTF-8 text'),
  ],
)
def test_a_text_that_cannot_be_filled_in_is_named(tmp_path, text, message):
  (tmp_path / 'gaps.txt').write_bytes(text)
  with pytest.raises(UserError, match=message):
    list(predict_files(masked_model(tmp_path), [str(tmp_path / 'gaps.txt')]))


def test_texts_of_each_kind_of_file_are_classified_as_the_run_reads_them(tmp_path):
  tokenizer = Config(ByteTokenizer, bos_id=256, eos_id=257, pad_id=258)
  data = Config(LabelledTextInput, name='data', examples=(('a', 'bad'),), classes=('bad', 'good'))
  data.set(seq_len=6, batch_size=2, tokenizer_tpl=tokenizer)
  run = SimpleNamespace(config=SimpleNamespace(datasets=[data]), batch_struct=data.instantiate().batch_struct, layer=1)
  run.predict = lambda batch: {'count': batch['segment_ids'].sum(1)}
  run.evaluate_examples = lambda batch: {'label': batch['label']}
  (tmp_path / 'a.jsonl').write_text('\n{"text": "ab"}\n{"text": "c"}\n{"text": "d"}\n')
  (tmp_path / 'b.txt').write_text('abc\n')
  (tmp_path / 'c.tsv').write_text('abcd\tgood\n')
  files = [str(tmp_path / name) for name in ('a.jsonl', 'b.txt', 'c.tsv')]
  assert [example['count'] for example in predict_files(run, files)] == [4, 3, 3, 5, 6]
  assert list(predict_files(run, files[2:], what='evaluate')) == [{'label': 1}]
  with pytest.raises(UserError, match=r"line 2 of .*a\.jsonl: has no 'label'"):
    list(predict_files(run, files[:1], what='evaluate'))
  ids = np.full((1, 6), 7)
  (tmp_path / 'd.jsonl').write_text(json.dumps({'ids': ids[0].tolist(), 'segment_ids': [1] * 6}))
  assert list(predict_files(run, [str(tmp_path / 'd.jsonl')])) == [{'count': 6}]


LABELS = {
  'checkpoint': {'id2label': {'0': 'bad', '2': 'good', '1': 'so so'}},
  'unnamed': {'id2label': {'0': 'LABEL_0', '1': 'LABEL_1', '2': 'LABEL_2'}},
  'a gap': {'id2label': {'0': 'bad', '1': 'so so', '3': 'good'}},
  'from one': {'id2label': {'1': 'bad', '2': 'so so', '3': 'good'}},
  'no texts': {'id2label': {'0': 'bad', '1': None, '2': 'good'}},
  'no labels': {'id2label': None},
  'no object': [],
  'too deep': '[' * 100_000,
}


@pytest.mark.parametrize('source', ['data', 'too few', *LABELS])
def test_classes_whose_names_are_known_are_named(tmp_path, source):
  layer = Config(ClassificationModel, num_classes=3, network_tpl=Config(Linear, input_dims=2, output_dims=2))
  classes = None if source in LABELS else ('bad', 'so so', 'good')[: 2 if source == 'too few' else 3]
  data = Config(ArrayInput) if source == 'checkpoint' else Config(LabelledTextInput, classes=classes)
  run = SimpleNamespace(config=SimpleNamespace(datasets=[data]))
  run.layer, run.directory, run.batch_struct = layer.instantiate(), tmp_path, dict
  run.predict = lambda batch: {'prediction': np.array([2, 0])}
  if source in LABELS:
    (tmp_path / 'hugging_face').mkdir()
    text = LABELS[source] if source == 'too deep' else json.dumps(LABELS[source])
    (tmp_path / 'hugging_face' / 'config.json').write_text(text)
  np.savez(tmp_path / 'a.npz', x=np.ones((2, 2), np.float32))
  named = {'class': 'good'} if source in ('data', 'checkpoint') else {}
  found = list(predict_files(run, [str(tmp_path / 'a.npz')]))
  assert found[0] == {'prediction': 2} | named and len(found) == 2
  for others in ({'loss': np.zeros(2)}, {'prediction': np.array([3, -1])}, {'prediction': np.ones((2, 2))}):
    run.evaluate_examples = lambda batch, others=others: others  # A classifier of one's own may report other values.
    assert list(predict_files(run, [str(tmp_path / 'a.npz')], what='evaluate')) == list(examples_of(others, np.ones(2)))


def test_a_model_that_reports_nothing_for_an_example_is_told(tmp_path):
  np.savez(tmp_path / 'new.npz', x=np.ones((3, 2)))
  model = SimpleNamespace(layer=1, batch_struct=dict, predict=None, evaluate_examples=lambda batch: {})
  with pytest.raises(
    UserError, match=r'new\.npz: int\.compute_loss reports no values of single examples; those are its'
  ):
    list(predict_files(model, [str(tmp_path / 'new.npz')], what='evaluate'))


def test_numbers_that_json_does_not_have_are_null():
  found = examples_of({'a': np.array([[1.5, np.nan], [np.inf, 2]]), 'b': np.array([np.nan, 1])}, np.ones(2))
  assert json.dumps(list(found), allow_nan=False) == '[{"a": [1.5, null], "b": null}, {"a": [null, 2.0], "b": 1.0}]'


def test_other_files_are_read_by_a_dataset_of_the_run(predicted, tmp_path):
  (tmp_path / 'new.txt').write_text('to be, or not to be\n' * 40)
  code, examples, _ = predicted(tmp_path / 'new.txt', '--what=evaluate')
  assert code == 0 and len(examples) > 3  # No row that fills up the last batch.
  assert all(np.isfinite(example['loss']) for example in examples)


def test_the_dataset_that_cannot_read_a_file_is_named(tmp_path):
  (tmp_path / 'note.txt').write_text('some words\n')
  run = SimpleNamespace(
    config=SimpleNamespace(datasets=[Config(TokenizedInput, path='rows', batch_size=2)]), batch_struct=dict, layer=1
  )
  run.predict, run.directory = None, tmp_path
  with pytest.raises(UserError, match=r"note\.txt: .* \(the run's TokenizedInput reads files of this kind; \.npz and"):
    list(predict_files(run, [str(tmp_path / 'note.txt')]))


WRONG = {
  'no file': (['nothing.npz'], None, 'there is no file nothing.npz'),
  'no JSON': (['a.jsonl'], b'{"ids": [1]}\n{"ids": [', 'a.jsonl: line 2 is not JSON: expecting value at character 10'),
  'no JSON before the end': (
    ['a.jsonl'],
    b'{"ids": [\n',
    'a.jsonl: line 1 is not JSON: expecting value at character 10',
  ),
  'one array': (
    ['a.npy'],
    b'x',
    'a.npy: an array in a .npy has no name; save the arrays by name in a .npz, as np.savez(',
  ),
  'no object': (
    ['a.jsonl'],
    b'[1]\n',
    'a.jsonl: line 1: expected an object, with the values of an example by name',
  ),
  'other names': (['a.jsonl'], b'{"ids": [1]}\n{"id": [1]}\n', 'a.jsonl: line 2: expected the names of line 1, ids'),
  'other lengths': (
    ['a.jsonl'],
    b'{"ids": [1]}\n{"ids": [1, 2]}\n',
    "a.jsonl: line 2: 'ids' has the shape [2], and [1] in line 1",
  ),
  'unequal lengths': (['a.jsonl'], b'{"ids": [[1], [1, 2]]}\n', "a.jsonl: line 1: 'ids' has lists of unequal lengths"),
  'no numbers': (['a.jsonl'], b'{"ids": ["a"]}\n', "a.jsonl: line 1['ids']: arrays of "),
  'empty lines': (['a.jsonl'], b'', 'a.jsonl: is empty'),
  'empty arrays': (['a.npz'], b'', 'a.npz: is empty'),
  'no arrays': (['a.npz'], b'PK', 'a.npz: is not a file of NumPy arrays: '),
  'an array is missing': (['a.jsonl'], b'{"x": [1]}\n', 'a.jsonl: '),
  'a number for a list': (
    ['a.jsonl'],
    b'{"ids": 1}\n',
    "a.jsonl: 'ids': expected an array of shape [32] in each example, as in the data of the run, got a number",
  ),
  'an id is too large': (['a.jsonl'], b'{"ids": [999]}\n', 'a.jsonl: ids: 999, at position 0 of row 0'),
  'no files': ([], None, 'name the files to predict, as in praxis-lite predict --job_log_dir=runs/1 new.jsonl'),
}


def test_lines_of_other_lengths_are_predicted_one_by_one_and_no_arrays_are_an_error(predicted, tmp_path):
  (tmp_path / 'a.jsonl').write_text('{"ids": [1]}\n{"ids": [1, 2]}\n')
  code, examples, _ = predicted(tmp_path / 'a.jsonl', '--batch_size=1')
  assert code == 0 and [len(example['logits']) for example in examples] == [1, 2]
  np.savez(tmp_path / 'a.npz', ids=np.zeros((0, 8), np.int32))
  code, _, told = predicted(tmp_path / 'a.npz')
  assert code == 2 and told.endswith('a.npz: has no examples\n')


@pytest.mark.slow_cases
@pytest.mark.parametrize(('files', 'content', 'message'), WRONG.values(), ids=WRONG)
def test_files_that_cannot_be_predicted_are_one_line(predicted, tmp_path, monkeypatch, files, content, message):
  monkeypatch.chdir(tmp_path)
  if content is not None:
    (tmp_path / files[0]).write_bytes(content)
  code, _, told = predicted(*files)
  assert code == 2
  assert told.startswith(f'praxis-lite predict: error: {message}'), told
  assert len(told.splitlines()) == 1


def test_an_image_that_is_a_named_pipe_is_refused_and_does_not_block(tmp_path):
  os.mkfifo(tmp_path / 'a.png')
  with pytest.raises(DataError, match=r'a\.png: it is a named pipe, not a file$'):
    read_images(SimpleNamespace(), [str(tmp_path / 'a.png')])
