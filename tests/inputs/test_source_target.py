"""Pairs of texts: what a batch holds, how pairs are packed, and what is wrong with bad ones."""

from __future__ import annotations

import json

import numpy as np
import pytest

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError, DataError
from praxis_lite.inputs import ByteTokenizer, CharTokenizer, SourceTargetInput
from praxis_lite.inputs.source_target import pack_pairs

TOKENIZER = Config(ByteTokenizer, bos_id=256, eos_id=257, pad_id=258)
PAIRS = [('ab', 'xyz'), ('cde', 'x'), ('f', 'yz')]


def pairs_input(**fields):
  given = {'name': 'pairs', 'pairs': PAIRS, 'source_len': 4, 'target_len': 5, 'batch_size': 3, **fields}
  return Config(SourceTargetInput, tokenizer_tpl=TOKENIZER).set(**given).instantiate()


def text(ids):
  return ''.join({256: '^', 257: '$', 258: '.'}.get(i, chr(i) if i < 256 else '?') for i in ids)


def test_a_row_holds_a_pair():
  batch = pairs_input(start_id=256).get_next()
  assert [text(row) for row in batch['source_ids']] == ['ab..', 'cde.', 'f...']
  assert [text(row) for row in batch['ids']] == ['^xyz.', '^x...', '^yz..']
  assert [text(row) for row in batch['labels']] == ['xyz$.', 'x$...', 'yz$..']
  assert batch['weights'].tolist() == [[1, 1, 1, 1, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0]]
  np.testing.assert_array_equal(batch['segment_ids'], batch['weights'])
  assert batch['source_segment_ids'].tolist() == [[1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 0]]
  assert batch['segment_pos'][0].tolist() == [0, 1, 2, 3, 0]
  assert batch['source_segment_pos'][1].tolist() == [0, 1, 2, 0]


def test_targets_start_with_padding_unless_another_token_is_given():
  assert pairs_input().first_id == 258 and pairs_input().get_next()['ids'][0, 0] == 258
  assert pairs_input(start_id=0).first_id == 0


def test_sources_may_end_with_the_end_token():
  source = pairs_input(end_sources=True)
  assert [text(row) for row in source.get_next()['source_ids']] == ['ab$.', 'cde$', 'f$..']
  assert source.source_end_id == 257 and pairs_input().source_end_id is None
  cut = pairs_input(pairs=[('abcdef', 'x')], end_sources=True, truncate=True)
  assert text(cut.get_next()['source_ids'][0]) == 'abc$'


def test_packed_rows_hold_the_pairs_that_fit_on_both_sides():
  source = pairs_input(packed=True, source_len=5, target_len=7)
  batch = source.get_next()
  assert (source.num_pairs, source.num_examples) == (3, 2)
  assert [text(row) for row in batch['source_ids'][:2]] == ['abcde', 'f....']
  assert [text(row) for row in batch['labels'][:2]] == ['xyz$x$.', 'yz$....']
  assert [text(row) for row in batch['ids'][:2]] == ['.xyz.x.', '.yz....']
  assert batch['source_segment_ids'][0].tolist() == [1, 1, 2, 2, 2]
  assert batch['segment_ids'][0].tolist() == [1, 1, 1, 1, 2, 2, 0]
  assert batch['segment_pos'][0].tolist() == [0, 1, 2, 3, 0, 1, 0]
  assert batch['source_segment_pos'][0].tolist() == [0, 1, 0, 1, 2]


def test_packing_keeps_each_pair_once_and_wastes_little():
  rng = np.random.default_rng(0)
  sizes = [(int(a), int(b)) for a, b in zip(rng.integers(1, 40, 3000), rng.integers(1, 20, 3000))]
  rows = pack_pairs(sizes, (64, 32))
  assert sorted(n for row in rows for n in row) == list(range(3000))
  used = np.array([np.sum([sizes[n] for n in row], axis=0) for row in rows])
  assert (used <= (64, 32)).all()
  assert len(rows) < 1.1 * max(np.sum(sizes, axis=0) / (64, 32))
  assert pack_pairs([], (4, 4)) == [] and pack_pairs([(4, 4), (4, 4)], (4, 4)) == [[0], [1]]


@pytest.mark.parametrize('end', ['\n', '\r\n', ''])
def test_files_of_both_kinds_and_functions_give_the_same_pairs(end, tmp_path):
  (tmp_path / 'a.tsv').write_text('ab\txyz\ncde\tx\n\nf\tyz' + end)
  lines = [json.dumps({'en': source, 'xx': target, 'more': 1}) for source, target in PAIRS]
  (tmp_path / 'a.jsonl').write_text('\n'.join(lines) + end)
  expected = pairs_input().get_next()
  tsv = pairs_input(pairs=None, path=str(tmp_path / 'a.tsv'))
  others = [
    tsv,
    pairs_input(pairs=None, path=str(tmp_path / '*.jsonl'), fields=('en', 'xx')),
    pairs_input(pairs=lambda: PAIRS),
  ]
  for other in others:
    for name, array in other.get_next().items():
      np.testing.assert_array_equal(array, expected[name])
  assert tsv.data_files() == [str(tmp_path / 'a.tsv')] and pairs_input().data_files() == []


BAD = {
  'a\tb\tc': 'has 3 columns; expected a source and a target, separated by a tab',
  'ab': 'has 1 column',
  '\tb': 'the source has no tokens',
  'a\t': 'the target has no tokens',
  'abcde\tb': 'the source has 5 tokens, and source_len = 4 has room for 4; set a larger one, or truncate=True',
  'a\tabcde': 'the target has 5 tokens, and target_len = 5 has room for 4',
}


@pytest.mark.parametrize('line', BAD)
def test_a_bad_line_is_an_error_that_names_it_or_is_left_out(line, tmp_path):
  file = tmp_path / 'a.tsv'
  file.write_text(f'a\tb\n{line}\nc\td\n')
  fields = {'pairs': None, 'path': str(file)}
  with pytest.raises(DataError) as error:
    pairs_input(**fields).get_next()
  assert f'pairs.path: line 2 of {file}: {BAD[line]}' in str(error.value)
  skipping = pairs_input(**fields, on_bad_record='skip')
  assert [text(row) for row in skipping.get_next()['source_ids'][:2]] == ['a...', 'c...']
  assert [bad.place for bad in skipping.bad_records] == ['line 2']


@pytest.mark.parametrize(
  'line, says',
  [
    (b'{"source": "a"}', "has no text 'target'; its fields: source"),
    (b'{"source": "a", "target": 3}', "has no text 'target'"),
    (b'[1]', 'is no JSON object'),
    (b'{', r'line 1 of .*: is not JSON: expecting property name .* at character 2'),
    (b'{"source": "\xff", "target": "a"}', "can't decode byte"),
  ],
)
def test_bad_json_is_an_error_that_names_its_line(line, says, tmp_path):
  (tmp_path / 'a.jsonl').write_bytes(line)
  with pytest.raises(DataError, match=says):
    pairs_input(pairs=None, path=str(tmp_path)).get_next()


def test_long_texts_are_cut_on_request():
  batch = pairs_input(pairs=[('abcdef', 'uvwxyz')], truncate=True).get_next()
  assert text(batch['source_ids'][0]) == 'abcd' and text(batch['labels'][0]) == 'uvwx$'


def test_mistakes_are_named(tmp_path):
  for fields, remedy in (
    ({'path': 'a.tsv'}, r"; both are set: .* --set 'datasets\[\*\]\.pairs=None'$"),
    ({'pairs': None}, '$'),
  ):
    message = r'pairs\.path: expected either path, files with pairs, or pairs, a function'
    with pytest.raises(ConfigError, match=message + remedy):
      pairs_input(**fields)
  (tmp_path / 'empty.tsv').touch()
  with pytest.raises(DataError, match=r'pairs\.path: .*empty\.tsv is empty$'):
    pairs_input(path=str(tmp_path / 'empty.tsv'), pairs=None).get_next()
  with pytest.raises(ConfigError, match=r'pairs\.target_len: expected an integer of at least 2'):
    pairs_input(target_len=1)
  with pytest.raises(ConfigError, match=r'SourceTargetInput\.fields: expected tuple\[str, str\]'):
    pairs_input(fields=('a',))
  with pytest.raises(DataError, match=r'pairs\.pairs: there are no pairs'):
    pairs_input(pairs=[]).get_next()
  with pytest.raises(DataError, match=r"pairs\.pairs: pair 0 is 'ab'; expected two texts"):
    pairs_input(pairs=['ab']).get_next()
  with pytest.raises(ConfigError, match=r'pairs\.pairs: expected pairs'):
    pairs_input(pairs=lambda: None).get_next()
  (tmp_path / 'a.csv').write_text('a,b')
  with pytest.raises(DataError, match=r'a\.csv is neither \*\.tsv nor \*\.jsonl'):
    pairs_input(pairs=None, path=str(tmp_path)).get_next()
  unknown = Config(CharTokenizer, vocabulary='abxyz')
  with pytest.raises(DataError, match=r"pairs\.pairs: pair 1 of pairs: 'c' .* is not among the 5 characters"):
    pairs_input(tokenizer_tpl=unknown).get_next()
