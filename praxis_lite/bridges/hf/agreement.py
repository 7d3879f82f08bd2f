"""Compares a model with its export, which both praxis_lite and transformers read and compute.

PyTorch may be installed for another Python, so transformers runs in a separate process, whose script
(`transformers_process.py`) does not import this package. Everything is computed in float32; transformers runs on the
CPU.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from praxis_lite.bridges.hf import transformers_process
from praxis_lite.bridges.hf.models import read_model, write_model
from praxis_lite.bridges.hf.runs import export_run
from praxis_lite.common.errors import UserError, first_line
from praxis_lite.common.trees import NestedDict
from praxis_lite.models import BaseModel
from praxis_lite.runs.agreement import Agreement, LogProbs, Way, WayResult, format_result, largest_difference
from praxis_lite.runs.forced_tokens import KnownTexts
from praxis_lite.runs.layer_values import PointValues, values_in_one_pass
from praxis_lite.runs.trained import TrainedModel

_MOST_SECONDS = 900.0  # The time limit of the process of transformers.


def agree(
  model: TrainedModel,
  texts: KnownTexts,
  *,
  cache_dtype: str | None = None,
  python: str = sys.executable,
  progress: Callable[[str], object] = lambda line: None,
) -> list[WayResult]:
  """Compares the log-probabilities of known texts: in training, in evaluation, in decoding, and after an export.

  Args:
    model: a language model, on any mesh.
    texts: the texts to compare, as `texts_of_batch`, `texts_of_tokens` and `random_texts` return them.
    cache_dtype: decodes once more, with caches of this dtype, such as 'int8'; None leaves this out.
    python: path of a Python in which transformers is installed.
    progress: called with each line of the table.

  Raises:
    UserError: the model is no language model, or a text is too long for it.
  """
  compared: list[WayResult] = []

  def note(result: WayResult) -> None:
    compared.append(result)
    progress(format_result(agreement, result))

  with jax.default_matmul_precision('highest'), tempfile.TemporaryDirectory(prefix='agree-') as temporary:
    agreement = Agreement(model, texts)
    progress(format_result(agreement))
    for way in agreement.list_ways(cache_dtype):
      note(agreement.compare(way))
    folder = Path(temporary) / 'exported'
    try:
      export(model, folder)
    except UserError as error:
      why = first_line(error)
      is_unknown = 'none of the families' in why  # The message lists all families, so it is long.
      short = 'no model of transformers computes the same; export-hf names the differences'
      note(WayResult('exported', problem=short if is_unknown else why))
    else:
      note(agreement.compare(read_again(agreement, folder)))
      note(agreement.compare(transformers_way(agreement, folder, python)))
    if agreement.drops_tokens:
      dropping = largest_difference(agreement.reference, agreement.score_training(model))
      note(WayResult('training with the capacity of its experts', texts.num_tokens, dropping))
  if agreement.dtype != 'float32':
    note(WayResult(f'float32 beside {agreement.dtype}', texts.num_tokens, agreement.rounding_of_dtype))
  return compared


def export(model: TrainedModel, folder: Path) -> None:
  """Writes a model as `export-hf` does; raises UserError if it belongs to no family."""
  if model.directory is None:
    write_model(folder, model.layer, model.variables)
  else:
    export_run(model.config, model.directory, folder, step=model.step)


def read_again(agreement: Agreement, folder: Path) -> Way:
  """Returns the `Way` that reads the exported model with praxis_lite, and computes it on one device."""

  @functools.cache
  def read() -> tuple[BaseModel, NestedDict]:
    return read_model(folder)

  def compute() -> LogProbs:
    model, variables = read()
    score = jax.jit(lambda variables, batch: model.apply(variables, batch, do_eval=True, method='score')[0])
    return agreement.score_with(lambda batch: jax.device_get(score(variables, batch)))

  def values() -> dict[str, PointValues]:
    return values_in_one_pass(*read(), agreement.batch())

  return Way('exported, and read again', compute, values, is_exact=True)


def transformers_way(agreement: Agreement, folder: Path, python: str) -> Way:
  """Returns the `Way` that computes the exported model with transformers, in `python`."""

  @functools.cache
  def outputs() -> Mapping[str, np.ndarray]:
    return run_transformers(folder, agreement.texts, agreement.limits.start_id, agreement.limits.source_end_id, python)

  def compute() -> LogProbs:
    return [outputs()[f'log_probs_{i}'] for i in range(len(agreement.texts.contexts))]

  def values() -> dict[str, PointValues]:
    expected = agreement.values_in_one_pass(agreement.exact)
    stacked = [name for name, point in expected.items() if point.is_stacked and not name.endswith('.in')]
    blocks = min(stacked, key=lambda name: name.count('.'), default='')
    hidden = [outputs()[f'hidden_{i}'] for i in range(len(agreement.texts.contexts))]
    if not blocks or len(hidden[0]) - 1 != len(expected[blocks].values):
      raise UserError('the blocks of the two models are not the same')
    found = np.ma.masked_all_like(expected[blocks].values)
    for row, states in enumerate(hidden):  # Leaves out the embedding and the result of the final norm.
      found[:-1, row, : states.shape[1]] = states[1:-1]
    return {blocks: PointValues(found, True)}

  return Way('exported, in transformers', compute, values, is_exact=True)


def run_transformers(
  folder: Path, texts: KnownTexts, start_id: int | None, source_end_id: int | None, python: str
) -> dict[str, np.ndarray]:
  """Returns the log-probabilities and the hidden states of each text, float32, as transformers computes them.

  Raises:
    UserError: transformers or PyTorch is not installed for that Python, or the process fails.
  """
  end = [] if source_end_id is None else [source_end_id]
  request: dict[str, Any] = {'folder': str(folder), 'start_id': start_id, 'continuations': texts.continuations}
  request['contexts'] = texts.contexts if start_id is None else [[*context, *end] for context in texts.contexts]
  with tempfile.TemporaryDirectory(prefix='agree-') as temporary:
    question, answer = Path(temporary) / 'request.json', Path(temporary) / 'answer.npz'
    question.write_text(json.dumps(request))
    command = [python, transformers_process.__file__, str(question), str(answer)]
    offline = {'HF_HUB_OFFLINE': '1', 'TRANSFORMERS_OFFLINE': '1', 'CUDA_VISIBLE_DEVICES': ''}
    try:
      ended = subprocess.run(
        command,
        env=os.environ | offline,
        capture_output=True,
        text=True,
        errors='replace',  # Messages of transformers may not be valid text.
        timeout=_MOST_SECONDS,
        check=False,
      )
    except OSError as error:
      raise UserError(f'{python} cannot be run: {error.strerror}') from None
    except subprocess.TimeoutExpired:
      raise UserError(f'transformers did not end within {_MOST_SECONDS:.0f} s') from None
    if ended.returncode:
      last = (ended.stderr.strip().splitlines() or ['it printed nothing'])[-1]
      if missing := transformers_process.missing_package(last):
        raise UserError(f'{missing} is not installed for {python}; another Python may have it: --python=...')
      raise UserError(f'transformers failed: {last}')
    with np.load(answer) as arrays:
      return dict(arrays)
