"""An empty file is called empty, in place of what its reader makes of nothing."""

from __future__ import annotations

import pytest

from praxis_lite.bridges.hf.files import read_header
from praxis_lite.bridges.hf.hf_config import read_json
from praxis_lite.common.config import Config
from praxis_lite.common.errors import UserError
from praxis_lite.inputs import (
  ArrayRecordInput,
  ByteTokenizer,
  Feature,
  HfTokenizer,
  SentencePieceTokenizer,
  TableInput,
  TextInput,
  TFRecordInput,
)
from praxis_lite.inputs.tables import Column
from praxis_lite.training import registry


def batch_of(cls, **fields):
  Config(cls, name='data', batch_size=2, **fields).instantiate().get_next()


FEATURES = {'x': Config(Feature, shape=(1,), dtype='int64')}
READERS = {
  'text.txt': lambda file: batch_of(TextInput, path=file, seq_len=4, tokenizer_tpl=Config(ByteTokenizer)),
  'table.parquet': lambda file: batch_of(TableInput, path=file, features={'x': Config(Column, dtype='int32')}),
  'table.csv': lambda file: batch_of(TableInput, path=file, features={'x': Config(Column, dtype='int32')}),
  'records.array_record': lambda file: batch_of(ArrayRecordInput, path=file, features=FEATURES),
  'records.tfrecord': lambda file: batch_of(TFRecordInput, file_pattern=file, features=FEATURES),
  'pieces.model': lambda file: Config(SentencePieceTokenizer, model_path=file).instantiate().encode('a'),
  'tokenizer.json': lambda file: Config(HfTokenizer, path=file).instantiate().encode('a'),
  'config.json': read_json,
  'model.safetensors': read_header,
  'experiment.py': lambda file: registry.get(f'{file}:Mine'),
}


@pytest.mark.parametrize('name', READERS)
def test_an_empty_file_is_called_empty(name, tmp_path):
  for package in {'pieces.model': ['sentencepiece'], 'records.array_record': ['grain', 'array_record']}.get(name, []):
    pytest.importorskip(package)
  file = tmp_path / name
  file.touch()
  with pytest.raises(UserError, match=f'{file} is empty$'):
    READERS[name](str(file))
