"""The text part of a checkpoint of a model of texts and images computes what it computes alone."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from checkpoints import IDS, golden, tensors_of, weight, write
from on_meshes import load

from praxis_lite.bridges.hf import export_run, import_run
from praxis_lite.bridges.hf.hf_config import HfConfig
from praxis_lite.bridges.hf.reader import open_checkpoint
from praxis_lite.bridges.hf.sizes import training_experiment
from praxis_lite.bridges.hf.text_part import text_part
from praxis_lite.common.errors import CheckpointError, ConfigError
from praxis_lite.common.trees import leaves_by_path
from praxis_lite.runs.records.record import read_record

ALONE = golden('gemma3')
# How names of tensors begin in published files, and in those of newer releases of transformers.
PUBLISHED = {'model.': 'language_model.model.', 'lm_head.': 'language_model.lm_head.'}
NEWER = {'model.': 'model.language_model.', 'lm_head.': 'lm_head.'}
FOR_IMAGES = ('vision_tower.vision_model.embeddings.position_embedding.weight', 'multi_modal_projector.norm.weight')


def config(**changes):
  text = {name: value for name, value in ALONE['config'].items() if name not in ('architectures', 'eos_token_id')}
  whole = {'model_type': 'gemma3', 'architectures': ['Gemma3ForConditionalGeneration'], 'eos_token_id': [2, 5]}
  return {**whole, 'text_config': text, 'vision_config': {'hidden_size': 4}, **changes}


def make(folder, prefixes=PUBLISHED, images=FOR_IMAGES, **changes):
  own = {name: weight(name, tuple(shape), 'gemma3_text') for name, shape in ALONE['tensors'].items()}
  named = {
    next((new + name.removeprefix(old) for old, new in prefixes.items() if name.startswith(old)), name): tensor
    for name, tensor in own.items()
  }
  named |= {'model.' * (prefixes is NEWER) + name: np.ones((3, 4), np.float32) for name in images}
  return write(folder, config(**changes), {}, **named)


@pytest.mark.parametrize('prefixes', [PUBLISHED, pytest.param(NEWER, marks=pytest.mark.slow)], ids=['old', 'new'])
def test_it_computes_what_it_computes_alone(prefixes, tmp_path):
  there = load(make(tmp_path, prefixes))
  np.testing.assert_allclose(there.logits(IDS), ALONE['logits'], rtol=1e-5, atol=1e-5)
  assert there.checkpoint.notes == (f'{tmp_path}: only the text part is imported; left out 2 tensors for images',)


def test_a_run_has_its_stop_tokens_and_is_exported_as_a_text_model(tmp_path):
  lines = import_run(make(tmp_path / 'source'), tmp_path / 'run')
  assert lines[0].startswith(f'{tmp_path / "source"}: gemma3_text, ') and 'for images' in lines[1]
  run = read_record(tmp_path / 'run').config
  assert run.task.model.decoder_tpl.stop_ids == (2, 5)
  export_run(run, tmp_path / 'run', tmp_path / 'out')
  written = json.loads((tmp_path / 'out' / 'config.json').read_text())
  assert (written['model_type'], written['architectures']) == ('gemma3_text', ['Gemma3ForCausalLM'])
  assert written['eos_token_id'] == [2, 5] and 'vision_config' not in written
  for name, tensor in tensors_of(tmp_path / 'out').items():
    np.testing.assert_array_equal(tensor, weight(name, tensor.shape, 'gemma3_text'), err_msg=name)


def test_files_without_tensors_for_images_need_no_note(tmp_path):
  assert open_checkpoint(make(tmp_path, images=())).notes == ()


def test_it_is_planned_by_its_config():
  """That of Gemma 3 4B, which leaves out the fields that have their default values."""
  sizes = {'hidden_size': 2560, 'intermediate_size': 10_240, 'model_type': 'gemma3_text', 'num_hidden_layers': 34}
  more = {'rope_scaling': {'factor': 8.0, 'rope_type': 'linear'}, 'sliding_window': 1024}
  model = training_experiment({'model_type': 'gemma3', 'text_config': {**sizes, **more}}).task.model
  weights = leaves_by_path(model.instantiate(name='model').abstract_init()).values()
  assert sum(math.prod(weight.full_shape) for weight in weights) == 3_880_263_168


def test_mistakes_are_named(tmp_path):
  with pytest.raises(ConfigError, match='text_config is missing'):
    text_part(HfConfig({'model_type': 'gemma3'}))
  with pytest.raises(ConfigError, match=r'text_config = 3; expected a JSON object'):
    text_part(HfConfig({'model_type': 'gemma3', 'text_config': 3}))
  with pytest.raises(CheckpointError, match=r'does not account for: model\.other\.w'):
    load(make(tmp_path, images=('other.w',), prefixes=NEWER))
  windows = {**config()['text_config'], 'layer_types': None, 'sliding_window_pattern': 3}
  with pytest.raises(ConfigError, match=r'sliding_window_pattern = 3 is not supported; only 6 is'):
    training_experiment(config(text_config=windows))
