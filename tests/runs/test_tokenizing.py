"""`praxis-lite tokenize`: the rows of a corpus are those of its text, each once, and nothing partial is trained on."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest

from praxis_lite.cli.main import main
from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError, DataError
from praxis_lite.inputs import ByteTokenizer, CharTokenizer, TextInput, TokenizedInput
from praxis_lite.inputs.tokenized import FORMAT, tokenizer_settings
from praxis_lite.runs.bulk.ledger import Ledger
from praxis_lite.runs.bulk.output_folder import LocalFolder
from praxis_lite.runs.bulk.tokenizing import TokenizingJob, check_token_files

TEXTS = ['to be, or not to be', 'that', '', 'is the question: whether it is nobler in the mind', 'x' * 40, 'to suffer']
BYTES = Config(ByteTokenizer, bos_id=256, eos_id=257, pad_id=258)
CHARACTERS = Config(CharTokenizer, vocabulary=' ,:abdehinmoqrstuwxlfé')


def write(path, texts, field='text'):
  path.write_text(''.join(f'{json.dumps({field: text})}\n' for text in texts))
  return str(path)


def job_of(out, *paths, tokenizer=BYTES, seq_len=8, packing='concat', shard_rows=100, field='text'):
  built = tokenizer.instantiate()
  settings = {'format': FORMAT, 'seq_len': seq_len, 'packing': packing, 'field': field, **tokenizer_settings(built)}
  ledger = Ledger.open(str(out), LocalFolder(str(out)), paths, settings, shard_rows)
  return ledger, TokenizingJob(ledger, built, field=field, seq_len=seq_len, packing=packing)


def tokenize(*arguments, **fields):
  ledger, job = job_of(*arguments, **fields)
  job.run(ledger.remaining_shards())
  return check_token_files(ledger)


def rows_of(source):
  return jax.tree.map(lambda *xs: np.concatenate(xs), *source)


@pytest.mark.parametrize('tokenizer', [BYTES, CHARACTERS], ids=['bytes', 'characters'])
@pytest.mark.parametrize('packing', ['concat', 'packed'])
def test_the_rows_are_those_of_the_text(tmp_path, packing, tokenizer):
  (tmp_path / 'a').write_text('\n'.join(TEXTS))
  text = TextInput(
    path=str(tmp_path / 'a'), seq_len=8, batch_size=1, tokenizer_tpl=tokenizer, packing=packing, document_separator='\n'
  )
  counts = tokenize(tmp_path / 'out', write(tmp_path / 'a.jsonl', TEXTS), packing=packing, tokenizer=tokenizer)
  found = TokenizedInput(path=str(tmp_path / 'out'), batch_size=1, tokenizer_tpl=tokenizer)
  assert counts == (len(TEXTS), text.num_examples) == (len(TEXTS), found.num_examples)
  assert found.vocab_size == text.vocab_size and found.batch_struct() == text.batch_struct()
  jax.tree.map(np.testing.assert_array_equal, rows_of(found), rows_of(text))


def test_each_label_is_there_once_whatever_the_shards(tmp_path):
  data = write(tmp_path / 'a.jsonl', TEXTS)
  for shard_rows in (1, 2, 6):
    out = tmp_path / f'out{shard_rows}'
    tokenize(out, data, shard_rows=shard_rows)
    rows = rows_of(TokenizedInput(path=str(out), batch_size=2))
    assert rows['labels'][rows['weights'] > 0].tolist() == [i for text in TEXTS if text for i in [*text.encode(), 257]]


def test_work_that_was_interrupted_is_continued_and_nothing_partial_is_read(tmp_path):
  data, out, seen = write(tmp_path / 'a.jsonl', TEXTS), tmp_path / 'out', []
  ledger, job = job_of(out, data, shard_rows=2)

  def check():
    seen.append(1)
    if len(seen) > 2:
      raise KeyboardInterrupt

  with pytest.raises(KeyboardInterrupt):
    job.run(ledger.remaining_shards(), check)
  with pytest.raises(DataError, match='2 of 3 shards are missing'):
    check_token_files(ledger)
  with pytest.raises(DataError, match=r'2 of 3 parts are missing, such as part-00001\.array_record; run'):
    TokenizedInput(path=str(out), batch_size=1).get_next()
  assert tokenize(out, data, shard_rows=2).documents == 6
  whole = (out / 'part-00001.array_record').read_bytes()
  (out / 'part-00001.array_record').write_bytes(whole[: len(whole) // 2])
  with pytest.raises(DataError, match=r'part-00001\.array_record is damaged'):
    check_token_files(ledger)
  with pytest.raises(DataError, match='begun with seq_len = 8, and now it is 9'):
    job_of(out, data, shard_rows=2, seq_len=9)


def test_what_cannot_be_read_is_named(tmp_path):
  def fails(texts, told, field='text', **fields):
    data = write(tmp_path / 'a.jsonl', texts, field)
    with pytest.raises(DataError, match=told):
      tokenize(tmp_path / f'out{len(list(tmp_path.iterdir()))}', data, **fields)

  fails(['a', 3], r"line 2: expected a text in 'text', which is int")
  fails(['a'], r"line 1: expected a text in 'text', which is missing: it has body; --field names", field='body')
  fails(['a', 'no Z'], r"line 2: .*'Z'", tokenizer=CHARACTERS)
  fails(['a\0b'], 'is not a file of text: byte 1 is 0', tokenizer=Config(ByteTokenizer))
  (tmp_path / 'b.jsonl').write_text('{"text": "a"}\nnonsense\n')
  with pytest.raises(DataError, match='line 2: is not JSON'):
    tokenize(tmp_path / 'b', str(tmp_path / 'b.jsonl'))


def test_another_tokenizer_or_folder_is_refused(tmp_path):
  tokenize(tmp_path / 'out', write(tmp_path / 'a.jsonl', TEXTS))
  with pytest.raises(DataError, match=r'tokenizer_tpl: the tokens in .* another tokenizer: its vocab_size is 259'):
    TokenizedInput(path=str(tmp_path / 'out'), batch_size=1, tokenizer_tpl=Config(ByteTokenizer, bos_id=257)).get_next()
  data = write(tmp_path / 'b.jsonl', ['abc'])
  tokenize(tmp_path / 'abc', data, tokenizer=Config(CharTokenizer, vocabulary='abc'))
  other = Config(CharTokenizer, vocabulary='cba')
  with pytest.raises(DataError, match=r'tokenizer_tpl: the tokens in .* another tokenizer: its sample is'):
    TokenizedInput(path=str(tmp_path / 'abc'), batch_size=1, tokenizer_tpl=other).get_next()
  with pytest.raises(DataError, match='was begun with sample = '):
    tokenize(tmp_path / 'abc', data, tokenizer=other)
  with pytest.raises(DataError, match=r'has no plan\.json; expected a folder that `praxis-lite tokenize'):
    TokenizedInput(path=str(tmp_path), batch_size=1).get_next()
  with pytest.raises(ConfigError, match='leave out features and parse_fn'):
    TokenizedInput(path=str(tmp_path), batch_size=1, parse_fn=json.loads)


def test_the_command_tokenizes_trains_and_refuses(tmp_path, capsys):
  data, out = write(tmp_path / 'a.jsonl', TEXTS * 5, field='body'), tmp_path / 'out'
  flags = ['tokenize', '--exp=lm.StdlibLmTiny', f'--input={data}', f'--output={out}', '--seq_len=16', '--shard_rows=7']
  flags.append('--field=body')
  assert main([*flags, '--processes=2', '--process_index=1']) == 0
  assert sorted(path.name for path in out.glob('part-*')) == ['part-00001.array_record', 'part-00003.array_record']
  assert main(flags) == 0
  told = capsys.readouterr()
  labels = [len(text) + 1 if text else 0 for text in TEXTS * 5]
  rows = sum(-(-sum(labels[first : first + 7]) // 16) for first in range(0, 30, 7))
  assert '2 of 5 shards are finished' in told.out
  assert f'30 documents, {rows} rows of 16 tokens: complete' in told.err
  for more, wrong in (
    (['--output='], '--input and --output belong together'),
    (['--seq_len=17'], 'was begun with seq_len = 16, and now it is 17'),
    (['--exp=vision.DigitsVit'], 'no dataset of the config has a tokenizer'),
  ):
    assert main([*flags, *more]) == 2
    assert wrong in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_trains_on_tokens_of_actors_of_ray(tmp_path):
  pytest.importorskip('ray.data', reason="needs Ray: pip install 'praxis_lite[ray]'")
  data, out, run = write(tmp_path / 'a.jsonl', TEXTS * 20), tmp_path / 'out', tmp_path / 'run'
  flags = [f'--input={data}', f'--output={out}', '--seq_len=16', '--shard_rows=30', '--ray', '--processes=2']
  assert main(['tokenize', '--exp=lm.StdlibLmTiny', *flags]) == 0
  sets = ['datasets[*]=praxis_lite.inputs.TokenizedInput', f'datasets[*].path={out}', 'task.train.num_train_steps=2']
  sets.append('datasets[*].batch_size=4')
  assert main(['train', '--exp=lm.StdlibLmTiny', f'--job_log_dir={run}', *(f'--set={each}' for each in sets)]) == 0
