"""Files and folders that a command may not read or write: one line that names the path, and what to do."""

from __future__ import annotations

import errno
import re
from unittest import mock

import pytest

from praxis_lite.bridges.hf import hf_config
from praxis_lite.checkpoints.stored import StoredCheckpoint
from praxis_lite.cli.main import COMMANDS, main
from praxis_lite.common.errors import CheckpointError, UserError
from praxis_lite.runs.records import record

FORBIDDEN = PermissionError(errno.EACCES, 'Permission denied', 'a b')
SHOWN = r"`ls -ld 'a b'` shows them"
ERRORS = {
  'forbidden': (FORBIDDEN, f'a b: Permission denied; ask .*{SHOWN}\\)'),
  'a folder': (IsADirectoryError(errno.EISDIR, 'Is a directory', 'x'), 'x: Is a directory; .* name a file'),
  'below a file': (NotADirectoryError(errno.ENOTDIR, 'Not a directory', b'x/y'), 'x/y: Not a directory; a part .*'),
  'a full disk': (OSError(errno.ENOSPC, 'No space left on device'), 'No space left on device; free some space, .*'),
  'to be replaced': (OSError(errno.EIO, 'Input/output error', 'x', None, 'y'), 'y: Input/output error'),
}


def run_raising(error, monkeypatch):
  """Runs a command in which code that is not the user's raises `error`."""
  monkeypatch.setitem(COMMANDS, 'list', COMMANDS['list']._replace(run=mock.Mock(side_effect=error)))
  return main(['list'])


@pytest.mark.parametrize('name', ERRORS)
def test_an_os_error_about_a_file_is_one_line(name, monkeypatch, capsys):
  error, expected = ERRORS[name]
  assert run_raising(error, monkeypatch) == 2
  assert re.fullmatch(f'praxis-lite list: error: {expected}\n', capsys.readouterr().err)


def test_an_os_error_about_no_file_is_not_hidden(monkeypatch):
  with pytest.raises(BrokenPipeError):
    run_raising(BrokenPipeError(errno.EPIPE, 'Broken pipe'), monkeypatch)


def test_records_that_may_not_be_read_are_not_called_damaged(tmp_path, monkeypatch, capsys):
  for module in (record, hf_config):
    monkeypatch.setattr(module, 'read_plain', mock.Mock(side_effect=FORBIDDEN))
  with pytest.raises(UserError, match=r'run\.json cannot be read: Permission denied; ask its owner'):
    record.read_record(tmp_path)
  with pytest.raises(UserError, match=r'config\.json cannot be read: Permission denied$'):
    hf_config.read_json(tmp_path / 'config.json')
  (tmp_path / 'checkpoints' / '3').mkdir(parents=True)
  (tmp_path / 'checkpoints' / '3' / '_CHECKPOINT_METADATA').touch()
  monkeypatch.setattr(StoredCheckpoint, 'about', mock.Mock(side_effect=CheckpointError('x')))
  assert main(['checkpoints', 'list', str(tmp_path)]) == 0
  assert capsys.readouterr().out.splitlines()[1].split()[-3:] == ['cannot', 'be', 'read']
