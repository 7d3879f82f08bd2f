"""TextInput: the text comes out again, whatever the packing, tokenizer, files and split."""

import io

import numpy as np
import pytest

from praxis_lite.common.config import Config
from praxis_lite.common.errors import CheckpointError, ConfigError, DataError
from praxis_lite.inputs import ByteTokenizer, CharTokenizer, SentencePieceTokenizer, TextInput

FIELDS = {'seq_len': 8, 'batch_size': 2}


def _labels(source):
  return np.concatenate([b['labels'][b['weights'] > 0] for b in source])


def _text(source):
  return bytes(_labels(source).tolist())


def _write(root, **texts):
  for name, text in texts.items():
    (root / f'{name}.txt').write_text(text)
  return root


def test_concat_labels_are_the_files_in_order_each_with_an_end(tmp_path):
  _write(tmp_path, b='second file\n', a='first\n')
  for path in (tmp_path, str(tmp_path / '*.txt'), [tmp_path / 'a.txt', tmp_path / 'b.txt'], lambda: str(tmp_path)):
    source = TextInput(path=path, **FIELDS)
    assert _text(source) == b'first\n\0second file\n\0'
    assert source.num_bytes == 18
    assert source.num_documents == 2
    assert source.num_tokens == 20


def test_config_of_a_function_gives_the_paths(tmp_path):
  _write(tmp_path, a='one', b='two')

  def one(name):
    return str(tmp_path / name)

  assert _text(Config(TextInput, path=Config(one, name='b.txt'), **FIELDS).instantiate()) == b'two\0'


def test_directories_are_read_recursively_without_hidden_files(tmp_path):
  (tmp_path / 'sub').mkdir()
  (tmp_path / 'sub' / 'x').write_text('in')
  (tmp_path / '.git').mkdir()
  (tmp_path / '.git' / 'y').write_text('out')
  (tmp_path / '.hidden').write_text('out')
  (tmp_path / 'empty').write_text('')
  assert _text(TextInput(path=tmp_path, **FIELDS)) == b'in\0'


def test_document_separator_makes_documents_of_parts_of_files(tmp_path):
  _write(tmp_path, a='one\n\ntwo\n\n\n\n', b='three')
  source = TextInput(path=tmp_path, document_separator='\n\n', **FIELDS)
  assert _text(source) == b'one\0two\0three\0'
  packed = TextInput(path=tmp_path, document_separator='\n\n', packing='packed', **FIELDS)
  batch = packed.get_next()
  assert sorted(_text(packed.reset())) == sorted(b'one\0two\0three\0')
  np.testing.assert_array_equal(batch['segment_ids'], [[1, 1, 1, 1, 2, 2, 2, 2], [1, 1, 1, 1, 1, 1, 0, 0]])


def test_position_splits_cut_a_file_at_line_ends_and_lose_nothing(tmp_path):
  text = ''.join(f'line {i}\n' for i in range(100))
  _write(tmp_path, a=text)
  parts = {
    s: _text(TextInput(path=tmp_path, split=s, heldout_fraction=0.1, **FIELDS))[:-1]
    for s in ('train', 'validation', 'test')
  }
  assert b''.join(parts.values()) == text.encode()
  _write(tmp_path, a='short')
  with pytest.raises(DataError, match='is too short to have text in split'):
    TextInput(path=tmp_path, split='validation', heldout_fraction=0.1, **FIELDS).get_next()
  assert all(p.endswith(b'\n') for p in parts.values())
  assert len(parts['train']) == pytest.approx(0.8 * len(text), abs=10)
  assert len(parts['test']) == pytest.approx(0.1 * len(text), abs=10)


def test_position_splits_of_one_long_line_keep_characters_whole(tmp_path):
  (tmp_path / 'a').write_text('漢字' * 7)  # cuts at 0.9 and 0.95 of 42 bytes fall within characters
  parts = [_text(TextInput(path=tmp_path, split=s, **FIELDS))[:-1].decode() for s in ('train', 'validation', 'test')]
  assert parts == ['漢字' * 6, '漢', '字']


@pytest.mark.parametrize('text', ['A title\n' + 'word ' * 2000, ('word ' * 200 + '\n') * 10])
def test_position_splits_of_lines_longer_than_a_part_are_still_of_their_size(tmp_path, text):
  (tmp_path / 'a').write_text(text)
  sizes = [TextInput(path=tmp_path, split=s, **FIELDS).num_bytes for s in ('train', 'validation', 'test')]
  assert sum(sizes) == len(text)
  np.testing.assert_allclose(sizes, np.array([0.9, 0.05, 0.05]) * len(text), atol=5)


def test_file_splits_are_disjoint_complete_and_the_same_elsewhere(tmp_path):
  names = [f'f{i}' for i in range(40)]
  splits = {}
  for place in ('here', 'there'):
    (tmp_path / place).mkdir()
    _write(tmp_path / place, **{n: f'<{n}>' for n in names})
    for split in ('train', 'validation', 'test'):
      source = TextInput(path=tmp_path / place, split=split, heldout_fraction=0.2, **FIELDS)
      splits[place, split] = set(_text(source).decode().split('\0')[:-1])
  for split in ('train', 'validation', 'test'):
    assert splits['here', split] == splits['there', split]
  all_parts = [splits['here', s] for s in ('train', 'validation', 'test')]
  assert sum(map(len, all_parts)) == 40
  assert set().union(*all_parts) == {f'<{n}>' for n in names}
  assert len(splits['here', 'train']) > 15


def test_byte_zero_in_data_is_kept_apart_by_special_ids_above_255(tmp_path):
  (tmp_path / 'a.bin').write_bytes(b'\0\xff\0')
  tokenizer = Config(ByteTokenizer, bos_id=256, eos_id=257, pad_id=258)
  assert _labels(TextInput(path=tmp_path, tokenizer_tpl=tokenizer, **FIELDS)).tolist() == [0, 255, 0, 257]


@pytest.mark.parametrize('separator', [None, '\n'])
def test_a_file_with_byte_zero_is_no_text_if_that_byte_is_a_special_token(tmp_path, separator):
  (tmp_path / 'a.bin').write_bytes(b'abc\nd\0\xff')
  (tmp_path / 'b.txt').write_bytes(b'e')
  made = Config(TextInput, path=str(tmp_path), document_separator=separator, **FIELDS)
  with pytest.raises(
    DataError, match=r'a\.bin is not a file of text: byte 5 is 0, .* of tokenizer_tpl to 256, 257 and 258'
  ):
    _labels(made.instantiate())
  kept = made.clone(on_bad_record='skip').instantiate()
  assert _text(kept).strip(b'\0') == (b'e' if separator is None else b'abc\0e')
  assert [bad.place for bad in kept.bad_records] == ['all' if separator is None else 'document 1']


WINDOWS = {'packing': 'windows', 'is_training': True, 'seq_len': 5, 'batch_size': 4}


def test_windows_are_random_places_of_the_stream_and_resume(tmp_path):
  text = ''.join(chr(33 + i) for i in range(90))
  _write(tmp_path, a=text)
  source = TextInput(path=tmp_path, **WINDOWS)
  stream, starts, states = '\0' + text + '\0', [], []
  for _ in range(200):
    states.append(source.get_state())
    batch = next(source)
    for ids, labels in zip(batch['ids'], batch['labels']):
      starts.append(stream.index(bytes(ids.tolist()).decode()) if ids[0] else 0)
      assert bytes(ids.tolist()).decode() == stream[starts[-1] :][:5]
      assert bytes(labels.tolist()).decode() == stream[starts[-1] + 1 :][:5]
  assert set(starts) == set(range(len(stream) - 5))  # Every place, the last one too, and no other.
  assert max(np.bincount(starts)) < 30
  assert sorted(batch) == sorted(TextInput(path=tmp_path, packing='concat', **FIELDS).get_next())
  for i in (0, 7, 150):
    fresh = TextInput(path=tmp_path, **WINDOWS)
    fresh.set_state(states[i])
    hosts = [TextInput(path=tmp_path, **WINDOWS, num_hosts=2, host_index=h) for h in range(2)]
    for host in hosts:
      host.set_state(states[i])
    np.testing.assert_array_equal(np.concatenate([next(h)['ids'] for h in hosts]), next(fresh)['ids'])
  epochs = list(TextInput(path=tmp_path, num_epochs=2, **WINDOWS))
  assert [int(b['weights'].sum()) // 5 for b in epochs] == [4, 4, 4, 4, 3] * 2
  assert epochs[0]['ids'].tolist() != epochs[5]['ids'].tolist()
  assert next(TextInput(path=tmp_path, seed=1, **WINDOWS))['ids'].tolist() != next(source.reset())['ids'].tolist()


def test_windows_that_are_not_shuffled_are_the_rows_of_concat(tmp_path):
  _write(tmp_path, a='some text to be read', b='and more')
  rows, windows = (TextInput(path=tmp_path, packing=p, **FIELDS) for p in ('concat', 'windows'))
  assert _text(windows) == _text(rows)


@pytest.mark.parametrize('packing', ['concat', 'packed', 'windows'])
def test_rows_far_longer_than_the_text_are_refused_before_any_memory_is_taken(tmp_path, packing):
  _write(tmp_path, a='some text to be read', b='and more')
  source = TextInput(path=tmp_path, packing=packing, is_training=True, **FIELDS | {'seq_len': 10**12})
  with pytest.raises(DataError, match=r'seq_len = 10{12}: all of the data has 30 tokens.*; set at most 30$'):
    source.num_examples  # noqa: B018
  assert TextInput(path=tmp_path, is_training=True, **FIELDS | {'seq_len': 8192}).num_examples == 1
  if packing != 'windows':  # These need a longer text.
    heldout = TextInput(path=tmp_path, packing=packing, **FIELDS | {'seq_len': 131_072})
    assert heldout.num_examples == 1 and next(heldout)['weights'].sum() == 30


def test_windows_need_a_longer_text(tmp_path):
  _write(tmp_path, a='abc')
  with pytest.raises(DataError, match=r'seq_len: windows of 5 tokens need a longer text than this one of 5'):
    next(TextInput(path=tmp_path, **WINDOWS))


def test_a_state_of_another_packing_is_refused(tmp_path):
  _write(tmp_path, a='some text to be read')
  state = TextInput(path=tmp_path, packing='concat', **FIELDS).get_state()
  with pytest.raises(CheckpointError, match="packing = 'concat', but this input has 'windows'"):
    TextInput(path=tmp_path, packing='windows', **FIELDS).set_state(state)


@pytest.mark.parametrize('split_by', ['position', 'file'])
def test_a_share_may_be_held_out_for_validation_alone(tmp_path, split_by):
  lines = [f'line {i:03d}\n' for i in range(200)]
  texts = {'one': ''.join(lines)} if split_by == 'position' else {f'f{i}': line for i, line in enumerate(lines)}
  _write(tmp_path, **texts)
  shares = {'split_by': split_by, 'heldout_fraction': 0.1, 'test_fraction': 0.0}
  parts = [
    _text(TextInput(path=tmp_path, split=s, **shares, **FIELDS)).replace(b'\0', b'').splitlines()
    for s in ('train', 'validation')
  ]
  assert sorted(parts[0] + parts[1]) == [line.strip().encode() for line in lines]
  assert len(parts[1]) == (20 if split_by == 'position' else pytest.approx(20, abs=12))
  if split_by == 'position':
    assert parts[0][-1] < parts[1][0]  # Validation is the last part.
  with pytest.raises(ConfigError, match="there is no 'test' text, since test_fraction is 0"):
    TextInput(path=tmp_path, split='test', **shares, **FIELDS)


def test_parts_of_a_text_that_would_overlap_are_refused(tmp_path):
  _write(tmp_path, a='some text to be read')
  text = Config(TextInput, name='v', path=str(tmp_path), heldout_fraction=0.1, **FIELDS)
  train = text.clone(name='t', split='train', is_training=True).instantiate()
  train.check_beside(text.clone(split='validation').instantiate())
  with pytest.raises(ConfigError, match=r'v: its split_by, heldout_fraction or test_fraction differs from t'):
    train.check_beside(text.clone(split='validation', heldout_fraction=0.2).instantiate())


def test_character_tokenizers_of_two_texts_are_refused(tmp_path):
  _write(tmp_path, a='abc', b='abd')
  inputs = [
    TextInput(
      name=n, path=str(tmp_path / f'{n}.txt'), tokenizer_tpl=Config(CharTokenizer, path=str(tmp_path / f)), **FIELDS
    )
    for n, f in (('a', 'a.txt'), ('b', 'b.txt'))
  ]
  with pytest.raises(ConfigError, match=r'b\.tokenizer_tpl: its 3 characters differ from the 3 of a'):
    inputs[0].check_beside(inputs[1])


def test_characters_are_counted_in_bytes_and_unknown_ones_name_the_input(tmp_path):
  _write(tmp_path, a='é漢!\n', b='x')
  tokenizer = Config(CharTokenizer, path=str(tmp_path / 'a.txt'))
  source = TextInput(path=str(tmp_path / 'a.txt'), tokenizer_tpl=tokenizer, **FIELDS)
  assert sum(b['bytes'].sum() for b in source) == source.num_bytes == 7
  with pytest.raises(DataError, match=r"^other\.path: 'x' \(U\+0078\) is not among the 4 characters"):
    next(TextInput(name='other', path=str(tmp_path / 'b.txt'), tokenizer_tpl=tokenizer, **FIELDS))


@pytest.fixture(scope='module')
def model_path(tmp_path_factory):
  sentencepiece = pytest.importorskip('sentencepiece')
  model = io.BytesIO()
  sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(['the cat  sat on the mat', 'a hat'] * 20),
    model_writer=model,
    vocab_size=40,
    model_type='bpe',
    hard_vocab_limit=False,
    minloglevel=2,
  )
  path = tmp_path_factory.mktemp('spm') / 'tiny.model'
  path.write_bytes(model.getvalue())
  return str(path)


@pytest.mark.parametrize('packing', ['concat', 'packed'])
def test_sentencepiece_batches_count_the_bytes_of_the_text(tmp_path, model_path, packing):
  _write(tmp_path, a='the cat  sat\non the mat  ', b='a hat', c='the  mat' * 9)
  tokenizer = Config(SentencePieceTokenizer, model_path=model_path)
  source = TextInput(path=tmp_path, tokenizer_tpl=tokenizer, packing=packing, **FIELDS)
  assert source.batch_struct()['bytes'].shape == (2, 8)
  batches = list(source)
  assert sum(b['bytes'].sum() for b in batches) == source.num_bytes == 25 + 5 + 72
  assert sum(b['weights'].sum() for b in batches) == source.num_tokens
  for b in batches:
    assert not b['bytes'][b['weights'] == 0].any()
    assert not b['bytes'][b['labels'] == 2].any()  # the end stands for no text


def test_byte_batches_have_no_byte_counts(tmp_path):
  _write(tmp_path, a='text')
  assert 'bytes' not in TextInput(path=tmp_path, **FIELDS).get_next()


@pytest.mark.parametrize(
  'path, message',
  [
    ('absent.txt', r'books\.path: there is no file or directory .*absent\.txt'),
    ('absent/*.txt', r'books\.path: no file matches .*absent/\*\.txt'),
    ('empty.txt', r'books\.path: .*empty\.txt is empty'),
    ('hollow', r'books\.path: there are no files in the directory .*hollow'),
    ('latin.txt', r'books\.path: .*latin\.txt is not UTF-8 text: byte 3 is 0xe9'),
  ],
)
def test_bad_paths_are_one_clear_line(tmp_path, model_path, path, message):
  (tmp_path / 'empty.txt').write_text('')
  (tmp_path / 'hollow').mkdir()
  (tmp_path / 'latin.txt').write_bytes(b'caf\xe9')
  tokenizer = Config(SentencePieceTokenizer, model_path=model_path)
  source = TextInput(name='books', path=str(tmp_path / path), tokenizer_tpl=tokenizer, **FIELDS)
  with pytest.raises(DataError, match=message) as error:
    source.get_next()
  assert '\n' not in str(error.value)


@pytest.mark.parametrize('path', [3, [3]], ids=str)
def test_what_is_no_path_is_told(path):
  source = TextInput(name='books', path=path, **FIELDS)
  with pytest.raises(ConfigError) as error:
    source.get_next()
  assert str(error.value) == f'books.path: expected a path, or a list of paths, got {path}'


def test_unreadable_file_is_named(tmp_path, monkeypatch):
  _write(tmp_path, a='text')

  def refuse(*args, **kwargs):
    raise PermissionError(13, 'Permission denied')

  monkeypatch.setattr('builtins.open', refuse)
  with pytest.raises(DataError, match=r'cannot read .*a\.txt: Permission denied'):
    TextInput(path=str(tmp_path), **FIELDS).get_next()


@pytest.mark.parametrize(
  'fields, message',
  [
    ({'packing': 'pack'}, "packing: expected 'concat', 'packed' or 'windows', got 'pack'"),
    ({'seq_len': 0}, 'seq_len: expected an integer of at least 1'),
    ({'split': 'valid'}, r"split: 'valid' is not one of train, validation, test\. Did you mean 'validation'\?"),
    ({'split_by': 'line'}, 'split_by'),
    ({'heldout_fraction': 0.5}, 'heldout_fraction'),
    ({'test_fraction': -0.1}, 'test_fraction: expected at least 0 and less than 0.5, or None'),
    ({'document_separator': ''}, 'document_separator'),
  ],
)
def test_bad_fields_are_named(fields, message):
  with pytest.raises(ConfigError, match=message):
    TextInput(**{'path': 'x', **FIELDS, **fields})


def test_empty_split_of_few_files_says_what_to_do(tmp_path):
  _write(tmp_path, a='text')
  with pytest.raises(DataError, match="none of 1 file is in split 'test'; set split_by to 'position'"):
    TextInput(path=tmp_path, split='test', split_by='file', **FIELDS).get_next()
