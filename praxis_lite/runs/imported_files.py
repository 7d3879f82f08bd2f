"""The files that a run keeps of the Hugging Face checkpoint from which it was imported.

    job_log_dir/hugging_face/      config.json and the files of the tokenizer, for chats and exports

A run that is initialized from such a run copies these files.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from praxis_lite.common.config import Config
from praxis_lite.common.files import user_path
from praxis_lite.inputs import HfTokenizer, SentencePieceTokenizer
from praxis_lite.inputs.hf_tokenizer import TOKENIZER_FILE
from praxis_lite.runs.records.moved_files import FOLDER

SENTENCEPIECE_FILES = ('tokenizer.model', 'spiece.model')  # T5 and mT5 have `spiece.model`.
HOW_TO_SET_TOKENIZER = (
  "to decode and train on text, set the one in a folder by --set 'datasets[*].tokenizer_tpl.path=DIR', or bytes by "
  "--set 'datasets[*].tokenizer_tpl=praxis_lite.inputs.ByteTokenizer'"
)


def tokenizer_in(folder: str | os.PathLike[str], path: str | os.PathLike[str] | None = None) -> Config | None:
  """Returns the config of the tokenizer whose files are in a folder; None if there is none.

  Args:
    path: the folder that the config names; None means `folder`. Use it if the files will be copied from `folder` to
      another folder.
  """
  named = os.fspath(folder if path is None else path)
  if os.path.isfile(os.path.join(folder, TOKENIZER_FILE)):
    return Config(HfTokenizer, path=named)
  model = next((name for name in SENTENCEPIECE_FILES if os.path.isfile(os.path.join(folder, name))), None)
  return None if model is None else Config(SentencePieceTokenizer, model_path=os.path.join(named, model))


def keep_files_of(source: str | os.PathLike[str], directory: Path) -> None:
  """Copies the Hugging Face files of the run in `source` to a new run, unless the new run has some already."""
  kept, target = user_path(source) / FOLDER, directory / FOLDER
  if not kept.is_dir() or target.exists():
    return
  with tempfile.TemporaryDirectory(prefix=f'.{FOLDER}-', dir=directory) as folder:
    shutil.copytree(kept, Path(folder) / FOLDER).rename(target)
