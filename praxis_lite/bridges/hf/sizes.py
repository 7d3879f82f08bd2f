"""An experiment for the model of a config.json, without its weights: to plan it, or to train it from scratch."""

from __future__ import annotations

import itertools
import os
import pprint
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from praxis_lite.bridges.hf.families import family_of
from praxis_lite.bridges.hf.hf_config import HfConfig, read_config, read_json
from praxis_lite.bridges.hf.reader import HfCheckpoint
from praxis_lite.bridges.hf.runs import imported_config
from praxis_lite.bridges.hf.text_part import text_part
from praxis_lite.common.config import target
from praxis_lite.common.errors import ConfigError, UserError
from praxis_lite.inputs import TextInput
from praxis_lite.training.experiment import ExperimentConfig

_LONGEST = 8192
_NETWORKS = ('lm_tpl', 'encoder_tpl', 'network_tpl', 'patch_decoder_tpl', 'image_tpl', 'text_tpl')


def read_sizes_of(path: str | os.PathLike[str]) -> HfConfig:
  """Returns the config.json at a path, or in the folder at a path. Raises ConfigError if there is none."""
  if not os.fspath(path).endswith('.json'):
    return read_config(path)
  if not os.path.isfile(path):
    raise ConfigError(f'there is no file {path}')
  return HfConfig(read_json(path), os.fspath(path))


def training_experiment(config: HfConfig | Mapping[str, Any]) -> ExperimentConfig:
  """Returns the configs of an experiment that trains a model of the sizes in a config.json.

  The model computes in bfloat16, recomputes activations in the backward pass, and splits weights over all devices, on
  the mesh (1, -1, 1). Rows of text have at most 8,192 tokens. The datasets lack a path and a tokenizer. The learner and
  the batch size are those for fine-tuning.

  Args:
    config: the content of config.json.

  Raises:
    ConfigError: the model is of no supported family.
  """
  hf = text_part(config if isinstance(config, HfConfig) else HfConfig(config))
  found = imported_config(HfCheckpoint('', hf, family_of(hf), {}), '')
  model = found.task.model
  model.fprop_dtype = 'bfloat16'
  networks = [getattr(model, name) for name in _NETWORKS if hasattr(model, name)]
  for network, name in itertools.product(networks, ('transformer_tpl', 'encoder_tpl', 'decoder_tpl')):
    if hasattr(network, name):
      getattr(network, name).remat = 'full'
  found.task.ici_mesh_shape = (1, -1, 1)
  length = hf.values.get('max_position_embeddings') or hf.values.get('n_positions') or _LONGEST
  for dataset in found.datasets:
    if target(dataset) is TextInput:  # Datasets of other models have other fields for the length.
      dataset.seq_len = min(length, _LONGEST)
  return found


_FILE = '''"""{name} with the sizes of its config.json, as planned for {chips}.

  praxis-lite train --exp={file} --job_log_dir=runs/1 --set 'datasets[*].path=texts/*.txt' \\
    --set 'datasets[*].tokenizer_tpl.path=FOLDER_OF_ITS_TOKENIZER'
"""

from praxis_lite.bridges.hf.sizes import training_experiment
from praxis_lite.common.config.overrides import apply_overrides
from praxis_lite.training import registry
from praxis_lite.training.experiment import BaseExperiment, ExperimentConfig

# The content of config.json.
CONFIG = {config}

# What the plan had set; --set changes it for a run.
PLANNED = {overrides}


@registry.register
class {name}(BaseExperiment):
  def config(self) -> ExperimentConfig:
    config = training_experiment(CONFIG)
    apply_overrides(config.roots(), PLANNED)
    return config

  def task(self):
    return self.config().task

  def datasets(self):
    return self.config().datasets
'''


def write_experiment(path: str | os.PathLike[str], config: HfConfig, overrides: Sequence[str], chips: str) -> None:
  """Writes a Python file with an experiment to start from, as planned for the topology `chips`.

  `overrides` are changes of `training_experiment`, such as 'task.ici_mesh_shape=(1, 64, 1)'.

  Raises:
    UserError: the file exists, or cannot be written.
  """
  name = ''.join(part.capitalize() for part in str(config['model_type']).replace('-', '_').split('_'))
  text = _FILE.format(
    name=name,
    file=os.fspath(path),
    chips=chips,
    config=pprint.pformat(dict(config.values), width=100, sort_dicts=False),
    overrides=pprint.pformat(list(overrides), width=100),
  )
  try:
    with Path(path).open('x') as file:
      file.write(text)
  except FileExistsError:
    raise UserError(f'{path} exists; name another file for the experiment') from None
  except OSError as error:
    raise UserError(f'{path} cannot be written: {error.strerror}') from None
