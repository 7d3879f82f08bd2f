"""What stands for a hidden token in a text, from the logits of a model."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from praxis_lite.common.errors import DataError
from praxis_lite.inputs import ByteTokenizer
from praxis_lite.runs.fill_files import _encode, _fill


def test_logits_that_are_not_numbers_fill_in_nothing():
  tokenizer = ByteTokenizer()
  mask = tokenizer.vocab_size
  reader = SimpleNamespace(tokenizer=tokenizer, mask=mask, row_len=8)
  ids = _encode(reader, 1, 'a[MASK]b')
  logits_TV = np.zeros((8, mask + 1), np.float32)
  logits_TV[2, ord('x')], logits_TV[:, mask] = 9, 99
  assert _fill(reader, ids, logits_TV)['text'] == 'axb'
  logits_TV[0] = np.nan  # No token is hidden here.
  assert _fill(reader, ids, logits_TV)['tokens'][0][0]['token'] == 'x'
  logits_TV[2, 5] = np.nan
  with pytest.raises(DataError, match='NaN for a hidden token'):
    _fill(reader, ids, logits_TV)
