"""The notebooks of the documentation run, cell by cell, and are stored without outputs."""

import pathlib

import nbformat
import pytest
from nbclient import NotebookClient
from quick_xla import xla_flags

NOTEBOOKS = sorted((pathlib.Path(__file__).parent.parent / 'docs' / 'notebooks').glob('*.ipynb'))


def test_there_are_notebooks():
  assert NOTEBOOKS


@pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook_has_no_outputs(path):
  cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == 'code']
  assert not any(cell.outputs or cell.execution_count for cell in cells)


@pytest.mark.slow
@pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook_runs(path, tmp_path, monkeypatch):
  monkeypatch.setenv('XLA_FLAGS', xla_flags())  # One device, as a reader's machine has; a notebook may simulate more.
  notebook = nbformat.read(path, as_version=4)
  client = NotebookClient(notebook, timeout=300, kernel_name='python3', resources={'metadata': {'path': str(tmp_path)}})
  client.execute()  # Raises with the cell and its traceback.
