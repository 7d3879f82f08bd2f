"""Finds the files of an imported checkpoint that a run keeps in its directory, after the directory was moved.

The config of an import names the tokenizer's files by their path at the time, in the folder `hugging_face` of the run.
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
  """Changes, in a recorded config, the paths of tokenizers whose files are gone to the files that the run keeps."""
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
