"""The flag --adapters: several adapters on one base, from runs and from folders of peft."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from praxis_lite.cli.command_flags import CommandFlags
from praxis_lite.common.errors import ConfigError, UserError, prefix_errors

if TYPE_CHECKING:
  from praxis_lite.common.config import Config
  from praxis_lite.common.trees import NestedDict
  from praxis_lite.runs.trained import TrainedModel

_STEPS = 'steps_of_adapters.'


def add_adapters_flag(values: CommandFlags, use: str) -> None:
  """Adds the flag --adapters; `use` is a sentence that says how an adapter is used."""
  adapter = f'Name and folder of an adapter: a run with LoRA, or what peft has written. {use}'
  values.add_texts('adapters', adapter, 'poems=runs/poems')


def folders_of_adapters(given: Sequence[str]) -> dict[str, str]:
  """Returns the folder of each adapter by its name, from texts 'name=folder'; raises UserError for other texts."""
  found: dict[str, str] = {}
  for text in given:
    name, _, folder = text.partition('=')
    if not (name and folder):
      raise UserError(f'--adapters={text}: expected a name and a folder, such as --adapters=poems=runs/poems')
    if name in found:
      raise UserError(f'--adapters={text}: there is an adapter {name} already')
    found[name] = folder
  return found


def read_adapters(
  folders: Mapping[str, str], model: TrainedModel, trusted: Sequence[str], identities: Mapping[str, Any] | None = None
) -> dict[str, tuple[Config, NestedDict]]:
  """Returns (model config, variables) of each adapter for `model`, by name. A folder is a run, or was written by peft.

  `identities`, a result of `identities_of_adapters`, has the step of the checkpoint to read from each run; None reads
  the newest checkpoints.
  """
  from praxis_lite.bridges.hf import read_adapter
  from praxis_lite.bridges.hf.adapter_config import CONFIG_FILE, kind_in_folder
  from praxis_lite.layers import Lora
  from praxis_lite.runs import open_run
  from praxis_lite.runs.serving.run_adapters import read_run_adapter

  found: dict[str, tuple[Config, NestedDict]] = {}
  for name, folder in folders.items():
    with prefix_errors(f'--adapters={name}={folder}'):
      if not os.path.isfile(os.path.join(folder, CONFIG_FILE)):
        step = (identities or {}).get(_STEPS + name)
        found[name] = read_run_adapter(open_run(folder, trusted=trusted), model, step)
      elif (kind := kind_in_folder(folder)) is Lora:
        found[name] = read_adapter(folder, model.config.task.model)
      else:
        raise ConfigError(
          f'it is an adapter of {kind.__name__}; DoRA and IA3 cannot be combined on one base, only LoRA; serve a run '
          'that has merged it'
        )
  return found


def identities_of_adapters(folders: Mapping[str, str]) -> dict[str, Any]:
  """Returns a dict whose entry `adapters.NAME` identifies the content of a folder.

  It is the identity of a run's newest checkpoint (see `checkpoint_identity`), or a hash of a folder of peft. For a run,
  there is also the entry `steps_of_adapters.NAME`, the step of this checkpoint.

  Raises:
    UserError: a folder is neither a run with a checkpoint nor one of peft.
  """
  from praxis_lite.bridges.hf.adapter_config import CONFIG_FILE
  from praxis_lite.checkpoints.identity import checkpoint_identity

  found: dict[str, Any] = {}
  for name, folder in folders.items():
    with prefix_errors(f'--adapters={name}={folder}'):
      if os.path.isfile(os.path.join(folder, CONFIG_FILE)):
        digest = hashlib.sha256()
        for file in sorted(Path(folder).glob('adapter_*')):
          digest.update(file.read_bytes())
        found[f'adapters.{name}'] = digest.hexdigest()
      else:
        found[_STEPS + name], found[f'adapters.{name}'] = checkpoint_identity(folder)
  return found
