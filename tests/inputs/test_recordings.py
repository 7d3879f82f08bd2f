"""Recordings: WAV files of every kind, tables of them, rows for CTC and for decoders, and what cannot be read."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError, DataError
from praxis_lite.inputs import ByteTokenizer, RecordingInput, read_wav, write_wav
from praxis_lite.inputs.wav_files import resample

SOUND = np.array([0, 0.5, -1, 0.25, -0.125])


def wav(data, kind, bits, channels=1, rate=8000, extra=b'', tail=b''):
  form = struct.pack('<HHIIHH', kind, channels, rate, rate * channels * bits // 8, channels * bits // 8, bits) + extra
  body = b'WAVEfmt ' + struct.pack('<I', len(form)) + form
  body += b'note' + struct.pack('<I', 3) + b'abc\0'  # A chunk of odd size, which has a byte of padding.
  body += b'data' + struct.pack('<I', len(data)) + data + tail
  return b'RIFF' + struct.pack('<I', len(body)) + body


def as_24_bits(sound):
  return b''.join(int(x * 2**23).to_bytes(4, 'little', signed=True)[:3] for x in sound)


KINDS = {
  '8 bits': wav((SOUND * 128 + 128).astype(np.uint8).tobytes(), 1, 8),
  '16 bits': wav((SOUND * 2**15).astype('<i2').tobytes(), 1, 16),
  '24 bits': wav(as_24_bits(SOUND), 1, 24),
  '32 bits': wav((SOUND * 2**31).astype('<i4').tobytes(), 1, 32),
  'floats': wav(SOUND.astype('<f4').tobytes(), 3, 32),
  'doubles': wav(SOUND.astype('<f8').tobytes(), 3, 64),
  'extensible': wav((SOUND * 2**15).astype('<i2').tobytes(), 0xFFFE, 16, extra=struct.pack('<HHIH14x', 22, 16, 4, 1)),
  'two channels': wav(np.stack([SOUND, -SOUND / 2], 1).astype('<f4').tobytes(), 3, 32, channels=2),
  'cut in a sample': wav((SOUND * 2**15).astype('<i2').tobytes() + b'x', 1, 16),
}


@pytest.mark.parametrize('kind', KINDS)
def test_samples_are_read(kind):
  samples, rate = read_wav(KINDS[kind])
  assert rate == 8000 and samples.dtype == np.float32
  np.testing.assert_allclose(samples, SOUND / 4 if kind == 'two channels' else SOUND, atol=1e-6)


@pytest.mark.parametrize(
  'content, message',
  [
    (b'', 'is not a WAV file'),
    (b'fLaC' + bytes(40), 'is not a WAV file'),
    (KINDS['16 bits'][:20], 'lacks a chunk'),
    (wav(b'', 6, 8), 'of kind 6 with 8 bits'),
    (wav(b'', 1, 16, channels=0), '0 channels'),
  ],
)
def test_other_files_are_named(content, message):
  with pytest.raises(ValueError, match=message):
    read_wav(content)


def test_what_is_written_is_read_and_loud_samples_are_clipped(tmp_path):
  write_wav(tmp_path / 'a.wav', 1.5 * SOUND, 4000)
  samples, rate = read_wav((tmp_path / 'a.wav').read_bytes())
  assert rate == 4000
  np.testing.assert_allclose(samples, np.clip(1.5 * SOUND, -1, 1), atol=1 / 32767)


def test_resampling_keeps_a_tone_and_removes_what_the_new_rate_cannot_hold():
  at = np.arange(4410) / 44100
  low, high = np.sin(2 * np.pi * 1000 * at), np.sin(2 * np.pi * 12000 * at)
  found = resample((low + high).astype(np.float32), 44100, 16000)
  assert found.shape == (1600,)
  expected = np.sin(2 * np.pi * 1000 * np.arange(1600) / 16000)
  np.testing.assert_allclose(found[100:-100], expected[100:-100], atol=0.01)


def make(folder, lines, name='table.tsv', **fields):
  (folder / name).write_text(''.join(f'{line}\n' for line in lines))
  config = Config(RecordingInput, name='speech', path=str(folder / name), num_samples=8, label_len=4, batch_size=2)
  return config.set(sample_rate=8000, **fields).instantiate()


@pytest.fixture
def folder(tmp_path):
  write_wav(tmp_path / 'a.wav', SOUND, 8000)
  write_wav(tmp_path / 'b.wav', SOUND[:3], 4000)
  return tmp_path


LINES = {
  'table.tsv': ['a.wav\tno', 'b.wav\t'],
  'table.jsonl': [json.dumps({'audio': 'a.wav', 'text': 'no'}), json.dumps({'audio': 'b.wav', 'text': ''})],
}


@pytest.mark.parametrize('name', LINES)
def test_rows_have_sound_and_labels(name, folder):
  (batch,) = make(folder, LINES[name], name)
  assert batch['audio'].shape == (2, 8) and batch['audio_lengths'].tolist() == [5, 6]
  np.testing.assert_allclose(batch['audio'][0], [*SOUND, 0, 0, 0], atol=1e-4)
  assert batch['labels'].tolist() == [[*b'no', 0, 0], [0, 0, 0, 0]]
  assert batch['weights'].tolist() == [1, 1]


def test_rows_of_a_decoder_begin_with_given_tokens(folder):
  tokenizer = Config(ByteTokenizer, eos_id=1)
  (batch,) = make(folder, LINES['table.tsv'], prefix_ids=(7, 8), tokenizer_tpl=tokenizer)
  assert batch['ids'].tolist() == [[7, 8, *b'no'], [7, 8, 0, 0]]
  assert batch['labels'].tolist() == [[8, *b'no', 1], [8, 1, 0, 0]]
  assert batch['weights'].tolist() == [[0, 1, 1, 1], [0, 1, 0, 0]]
  write_wav(folder / 'long.wav', np.zeros(9), 8000)
  with pytest.raises(DataError, match=r'lasts 0.00 s, .*; cut it$'):
    list(make(folder, ['long.wav\tno'], prefix_ids=(7, 8), tokenizer_tpl=tokenizer))


def test_bad_records_are_named_or_have_no_weight(folder):
  (folder / 'c.wav').write_bytes(b'abc')
  write_wav(folder / 'long.wav', np.zeros(9), 8000)
  write_wav(folder / 'empty.wav', np.zeros(0), 8000)
  cases = {
    'a.wav': 'line 1 .*has 1 column; expected a WAV file and its transcript',
    'a.wav\tabcde': 'the transcript has 5 tokens, and label_len = 4 has room for 4',
    'a.wav\ta\0b': 'has token 0, which is the padding of the tokenizer',
    'none.wav\tno': r'\.path: line 1 of .*table.tsv: .*none.wav cannot be read: No such file or directory$',
    'c.wav\tno': r'line 1 of .*table.tsv: .*c.wav is not a WAV file; convert it',
    'long.wav\tno': r"lasts 0.00 s, .* cut it, or allow longer ones, as by --set 'datasets\[\*\]\.num_samples=9'",
    'empty.wav\tno': 'lasts 0.00 s, and must be longer than 0 s',
  }
  for line, message in cases.items():
    with pytest.raises(DataError, match=message):
      list(make(folder, [line]))
  data = make(folder, [*cases, 'a.wav\tno'], on_bad_record='skip')
  batches = list(data)
  assert [w for batch in batches for w in batch['weights']] == [0, 0, 0, 0, 1, 0] and len(data.bad_records) == 7
  with pytest.raises(DataError, match='no recordings with a transcript'):
    list(make(folder, []))
  with pytest.raises(ConfigError, match='prefix_ids: expected the start token'):
    make(folder, [], prefix_ids=())
