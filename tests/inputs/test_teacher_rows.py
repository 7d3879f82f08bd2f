"""Rows with the probabilities of a teacher: files that are damaged, or whose rows are not alike."""

from __future__ import annotations

import json

import pytest

from praxis_lite.common.errors import ConfigError, DataError
from praxis_lite.inputs.teacher_rows import read_teacher_rows

ROW = {'ids': [1, 2, 3], 'teacher_ids': [[1, 2], [2, 3]], 'teacher_log_probs': [[-0.1, -3], [-0.1, -3]]}


def read(folder, *rows, plan='{"shards": [0]}', seq_len=4):
  (folder / 'plan.json').write_text(plan)
  (folder / 'part-00000.jsonl').write_text('\n'.join(row if isinstance(row, str) else json.dumps(row) for row in rows))
  return read_teacher_rows(str(folder), seq_len)


def test_rows_without_a_label_or_a_result_are_left_out(tmp_path):
  one = {'ids': [5], 'teacher_ids': [], 'teacher_log_probs': []}
  rows = read(tmp_path, {'error': 'too long'}, one, ROW)
  assert rows['labels'].tolist() == [[2, 3, 0, 0]] and rows['teacher_ids'][0, :2].tolist() == ROW['teacher_ids']


@pytest.mark.parametrize(
  ('row', 'message'),
  [
    (json.dumps(ROW)[:-9], r'part-00000.jsonl, line 2: .* at character'),
    ('5', 'line 2: expected ids, teacher_ids, teacher_log_probs'),
    ({**ROW, 'teacher_ids': [[1, 2]]}, r'line 2: .* of shapes \[\[3\], \[1, 2\], \[2, 2\]\]; expected'),
    (
      {**ROW, 'teacher_ids': [[1], [2]], 'teacher_log_probs': [[-1], [-1]]},
      'expected 2 tokens of the teacher .* got 1',
    ),
    ({**ROW, 'teacher_ids': [[1], [2, 3]]}, 'line 2: .*inhomogeneous'),
    ({**ROW, 'ids': [1, 2, 'c']}, 'line 2: invalid literal'),
    ({**ROW, 'teacher_log_probs': [[-0.1, None], [-1, -3]]}, 'line 2: teacher_log_probs has NaN'),
  ],
)
def test_a_damaged_row_is_named(tmp_path, row, message):
  with pytest.raises(DataError, match=message):
    read(tmp_path, ROW, row)


def test_a_damaged_plan_and_no_room_are_named(tmp_path):
  for plan in ('[', '{}', '5'):
    with pytest.raises(DataError, match=r'plan.json is damaged'):
      read(tmp_path, ROW, plan=plan)
  with pytest.raises(ConfigError, match='seq_len: expected at least 1, got 0'):
    read(tmp_path, ROW, seq_len=0)
