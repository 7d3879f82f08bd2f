"""read_teacher_rows: texts with the probabilities of a teacher, as `praxis-lite predict --what=teach` writes them.

    {"ids": [t0, t1, ...], "teacher_ids": [[...], ...], "teacher_log_probs": [[...], ...]}

Entry i of `teacher_ids` has the teacher's K most probable tokens after `ids[: i + 1]`, best first; the label there is
`ids[i + 1]`.

    Config(ArrayInput, arrays=Config(read_teacher_rows, path='taught', seq_len=256), batch_size=32, is_training=True)

N examples, T length, K tokens of the teacher.
"""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np

from praxis_lite.common.errors import DataError, check_range, first_line
from praxis_lite.common.files import parse_json_line, user_path
from praxis_lite.inputs.files import read_file
from praxis_lite.inputs.rows import Rows, pad_rows, token_struct
from praxis_lite.inputs.shard_folders import read_shard_folder

_FIELDS = {'ids': np.int32, 'teacher_ids': np.int32, 'teacher_log_probs': np.float32}


def read_teacher_rows(path: str, seq_len: int) -> Rows:
  """Returns the rows of a folder, cut or padded to one length, all in memory.

  Args:
    path: the folder that `predict --output` has written.
    seq_len: T.

  Returns:
    `ids`, `labels`, `segment_ids` and `segment_pos`, [N, T] int32; `weights`, [N, T] float32; `teacher_ids`, [N, T, K]
    int32, and `teacher_log_probs`, [N, T, K] float32.

  Raises:
    DataError: the folder is incomplete or damaged, has results of another kind, or rows have different K.
    ConfigError: `seq_len` is less than 1.
  """
  check_range('seq_len', seq_len, least=1)
  parts = read_shard_folder(user_path(path), 'predict', 'jsonl').parts
  examples = [example for file in parts for example in _read_part(file)]
  if not examples:
    raise DataError(f'{path} has no rows that could be taught')
  K = examples[0]['teacher_ids'].shape[1]
  teacher = {name: jax.ShapeDtypeStruct((seq_len, K), _FIELDS[name]) for name in ('teacher_ids', 'teacher_log_probs')}
  rows = pad_rows(None, len(examples), token_struct(seq_len) | teacher)
  rows['segment_pos'][:] = np.arange(seq_len)
  for n, example in enumerate(examples):
    if example['teacher_ids'].shape[1] != K:
      raise DataError(
        f'{path}: expected {K} tokens of the teacher in each row, as in the first, got '
        f'{example["teacher_ids"].shape[1]} in row {n + 1}'
      )
    size = min(len(example['ids']) - 1, seq_len)
    rows['ids'][n, :size], rows['labels'][n, :size] = example['ids'][:size], example['ids'][1 : size + 1]
    rows['weights'][n, :size] = rows['segment_ids'][n, :size] = 1
    for name in teacher:
      rows[name][n, :size] = example[name][:size]
  return rows


def _read_part(file: Path) -> list[dict[str, np.ndarray]]:
  """Returns the arrays of each example in a file; leaves out failed examples, and those of fewer than 2 tokens."""
  found = []
  for number, line in enumerate(read_file(str(file), str(file.parent)).splitlines(), 1):
    where = f'{file}, line {number}'
    try:
      example = parse_json_line(line)
    except ValueError as error:
      raise DataError(f'{where}: {error}') from None
    if isinstance(example, dict) and 'error' in example:
      continue
    if not isinstance(example, dict) or any(name not in example for name in _FIELDS):
      raise DataError(f'{where}: expected {", ".join(_FIELDS)}, as --what=teach writes them')
    if np.size(example['ids']) < 2:
      continue
    try:
      arrays = {name: np.asarray(example[name], kind) for name, kind in _FIELDS.items()}
    except (ValueError, TypeError, OverflowError) as error:
      raise DataError(f'{where}: {first_line(error)}') from None
    shapes = [list(x.shape) for x in arrays.values()]
    if [len(shape) for shape in shapes] != [1, 2, 2] or shapes[1] != shapes[2] or shapes[1][0] != shapes[0][0] - 1:
      raise DataError(f'{where}: {", ".join(_FIELDS)} of shapes {shapes}; expected [N], [N - 1, K] and [N - 1, K]')
    if not np.isfinite(arrays['teacher_log_probs']).all():
      raise DataError(f'{where}: teacher_log_probs has NaN or infinities; the teacher has diverged, or K is too large')
    found.append(arrays)
  return found
