"""Finds the files of a tokenizer that a run keeps in its directory, after the directory was moved.

The config of an import names these files by the paths that they had at the time, in the run's folder `hugging_face`.
"""

from __future__ import annotations

import os
from pathlib import Path

from praxis_lite.common.config import nested_configs, target
from praxis_lite.inputs import HfTokenizer, SentencePieceTokenizer
from praxis_lite.training.experiment import ExperimentConfig

FOLDER = 'hugging_face'
_PATH_FIELDS: dict[object, str] = {HfTokenizer: 'path', SentencePieceTokenizer: 'model_path'}


def find_moved_files(config: ExperimentConfig, directory: Path) -> None:
  """In a recorded config, sets paths of tokenizer files that no longer exist to those of the files in `directory`."""
  for top in (*config.datasets, *config.decode_datasets):
    for tokenizer in nested_configs(top):
      field = _PATH_FIELDS.get(target(tokenizer), '')
      path = getattr(tokenizer, field, None)
      if not isinstance(path, str) or FOLDER not in Path(path).parts or os.path.exists(path):
        continue
      parts = Path(path).parts
      below = parts[len(parts) - parts[::-1].index(FOLDER) :]
      kept = directory.joinpath(FOLDER, *below)
      if kept.exists():
        setattr(tokenizer, field, str(kept.absolute()))
