"""What is recorded of a git work tree, and that nothing of it is run for that."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

from praxis_lite.runs.records.work_tree import read_work_tree

pytestmark = pytest.mark.skipif(shutil.which('git') is None, reason='there is no git here')


def git(folder, *arguments):
  config = ['-c', 'user.name=a', '-c', 'user.email=a@b', '-c', 'protocol.file.allow=always']
  subprocess.run(['git', '-C', str(folder), *config, *arguments], check=True, capture_output=True)


@pytest.fixture
def tree(tmp_path):
  folder = tmp_path / 'tree'
  folder.mkdir()
  git(folder, 'init', '-q')
  (folder / 'model.py').write_text('x = 1\n')
  git(folder, 'add', '.')
  git(folder, 'commit', '-qm', 'first')
  return folder


def test_a_commit_and_whether_files_differ(tree, tmp_path):
  commit = subprocess.check_output(['git', '-C', str(tree), 'rev-parse', 'HEAD'], text=True).strip()
  (tree / 'notes.txt').write_text('of no interest')
  (tree / 'below').mkdir()
  assert read_work_tree(str(tree / 'below')) == {'path': str(tree), 'commit': commit, 'clean': True}
  (tree / 'model.py').write_text('x = 2\n')
  assert read_work_tree(str(tree)) == {'path': str(tree), 'commit': commit, 'clean': False}
  assert read_work_tree(str(tmp_path)) is None
  git(tmp_path, 'init', '-q')  # Without a commit.
  assert read_work_tree(str(tmp_path)) is None


def test_nothing_that_a_repository_has_configured_is_run(tree, tmp_path):
  program, ran = tmp_path / 'program', tmp_path / 'ran'
  program.write_text(f'#!/bin/sh\necho "$0 $*" >> {ran}\ncat\n')
  program.chmod(0o755)
  inner = tree / 'inner'
  inner.mkdir()
  git(inner, 'init', '-q')
  (inner / 'a').write_text('a')
  git(inner, 'add', '.')
  git(inner, 'commit', '-qm', 'inner')
  git(tree, 'submodule', '--quiet', 'add', str(inner), 'sub')
  (tree / '.gitattributes').write_text('*.py filter=theirs\n*.txt filter=process diff=theirs\n')
  (tree / 'data.txt').write_text('data\n')
  git(tree, 'add', '.gitattributes', 'data.txt')
  git(tree, 'commit', '-qam', 'second')
  for folder in (tree, tree / 'sub'):
    git(folder, 'config', 'core.fsmonitor', str(program))
  hooks = tree / '.git' / 'hooks'
  hooks.mkdir(exist_ok=True)
  for name in ('post-index-change', 'fsmonitor-watchman', 'pre-auto-gc', 'post-checkout'):
    os.symlink(program, hooks / name)
  for name, value in {
    **{'filter.theirs.clean': program, 'filter.theirs.smudge': program, 'filter.theirs.required': 'true'},
    **{'filter.process.process': program, 'filter.process.required': 'true', 'diff.theirs.textconv': program},
    **{'core.pager': program, 'pager.status': program, 'core.editor': program, 'diff.external': program},
    **{'alias.status': f'!{program}', 'core.sshCommand': program, 'gpg.program': program, 'core.askPass': program},
    **{'remote.origin.url': f'ext::{program} %S', 'remote.origin.promisor': 'true', 'protocol.ext.allow': 'always'},
    **{'extensions.partialClone': 'origin', 'core.repositoryFormatVersion': '1', 'core.alternateRefsCommand': program},
  }.items():
    git(tree, 'config', name, str(value))
  for path in ('model.py', 'data.txt'):  # Touched, so that what is in them has to be compared.
    os.utime(tree / path, (1, 1))
  (tree / 'sub' / 'a').write_text('b')
  found = read_work_tree(str(tree))
  assert found is not None and found['path'] == str(tree) and found['clean'] is True
  assert not ran.exists(), ran.read_text()
  (tree / 'data.txt').write_text('other\n')
  assert read_work_tree(str(tree))['clean'] is False
  # An object that is missing is not fetched.
  for file in (tree / '.git' / 'objects').rglob('*'):
    if file.is_file() and file.stat().st_mode & 0o222 == 0:
      file.chmod(0o644)
      file.write_bytes(b'')
  read_work_tree(str(tree))
  assert not ran.exists(), ran.read_text()
