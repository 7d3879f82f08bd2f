"""From a checkpoint to a run and back: decoded, trained, exported."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest
from checkpoints import IDS, assert_same_tensors, golden, make, tensors_of, write

from praxis_lite.bridges.hf import export_run, import_run, read_model, write_model
from praxis_lite.cli.main import main
from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError, UserError
from praxis_lite.inputs import SyntheticLMInput
from praxis_lite.models import griffin_lm, set_pipeline, transformer_lm
from praxis_lite.models.decoding import BeamSearch, Sampler
from praxis_lite.runs import open_run
from praxis_lite.runs.executor import run_train
from praxis_lite.runs.exported import load_for_jax
from praxis_lite.runs.inference import decode_prompts
from praxis_lite.runs.records.record import read_record

# As docs/hugging-face.md says.
_EXPERTS_OVER_DATA = ('expert_axis=data', "weight_split_dims_mapping.wt=('data',None,'mdl')")


@pytest.mark.slow
@pytest.mark.parametrize('case', ['mistral', 'mixtral'])
def test_an_imported_run_is_exported_for_any_batch_size_without_data(tmp_path, case):
  """Windows, whose caches are rings, and experts."""
  assert main(['import-hf', str(make(tmp_path / 'source', case)), f'--job_log_dir={tmp_path / "run"}']) == 0
  model = open_run(tmp_path / 'run').load()
  model.export(tmp_path / 'out', 'decode', formats=('stablehlo',), platforms=('cpu',), prompt_length=8, max_tokens=2)
  model.export(tmp_path / 'forward', formats=('stablehlo',), platforms=('cpu',))
  forward = json.loads((tmp_path / 'forward' / 'signature.json').read_text())['programs']['forward']
  assert forward['inputs']['ids']['shape'][0] == 'batch'
  ids = np.asarray(IDS)[:, :8]
  lengths = np.full(len(ids), ids.shape[1], np.int32)
  padded = np.pad(ids, ((0, 0), (0, 8 - ids.shape[1]))).astype(np.int32)
  logits = load_for_jax(tmp_path / 'out')['prefill']({'ids': padded, 'lengths': lengths})['logits']
  np.testing.assert_allclose(logits, model.predict({'ids': ids})['logits'][:, -1], atol=1e-4)


@pytest.mark.slow
def test_an_imported_run_decodes_trains_and_is_exported(tmp_path, capsys):
  source, run = make(tmp_path / 'source', 'mixtral'), tmp_path / 'run'
  expected = tensors_of(source)
  overrides = ['ici_mesh_shape=(1,2,1)', *(f'model.lm.transformer.layers.ff.{field}' for field in _EXPERTS_OVER_DATA)]
  overrides = [argument for override in overrides for argument in ('--set', f'task.{override}')]
  assert main(['import-hf', str(source), f'--job_log_dir={run}', *overrides]) == 0
  out = capsys.readouterr().out
  assert 'mixtral, 9,738 parameters in float32' in out and 'there is no tokenizer beside it' in out

  config = read_record(run).config
  config.task.model.decoder_tpl.set(max_decode_steps=5, stop_ids=())
  np.testing.assert_array_equal(decode_prompts(config, run, IDS.tolist()), golden('mixtral')['greedy'])

  out = tmp_path / 'before'
  assert main(['export-hf', f'--job_log_dir={run}', f'--out={out}', '--max_file_gb=0.000008']) == 0
  assert_same_tensors(out, expected)
  assert main(['export-hf', f'--job_log_dir={run}', f'--out={tmp_path / "none"}', '--max_file_gb=0']) == 2
  assert '--max_file_gb=0: expected more than 0' in capsys.readouterr().err and not (tmp_path / 'none').exists()
  with pytest.raises(ConfigError, match=r'^max_file_bytes: expected at least 1, got 0'):
    export_run(config, run, tmp_path / 'none', max_file_bytes=0)
  assert not (tmp_path / 'none').exists()
  export_run(config, run, tmp_path / 'half', dtype='bfloat16')
  assert {str(tensor.dtype) for tensor in tensors_of(tmp_path / 'half').values()} == {'bfloat16'}

  train = Config(SyntheticLMInput, name='train', is_training=True, seq_len=8, vocab_size=37, batch_size=4)
  config = config._replace(datasets=[train])
  config.task.train.set(num_train_steps=2, save_interval_steps=1)
  capsys.readouterr()
  assert run_train(config, run).step == 2
  assert 'last values of 13 of 13 variables, 13 with the same name and shape' in capsys.readouterr().out
  config.task.train.num_train_steps = 3
  assert run_train(config, run).step == 3
  assert 'restored step 2 of 3' in capsys.readouterr().out
  export_run(config, run, tmp_path / 'after')
  after = tensors_of(tmp_path / 'after')
  assert 0 < max(np.abs(after[name] - tensor).max() for name, tensor in expected.items()) < 1e-3


def test_16_bits_stay_16_bits_and_files_are_not_replaced(tmp_path):
  write_model(tmp_path / 'source', *_random_model('bfloat16'))
  run = tmp_path / 'run'
  # Neither an import nor an export needs the devices of the mesh.
  import_run(tmp_path / 'source', run, overrides=['task.ici_mesh_shape=(1,64,1)'])
  config = read_record(run).config
  assert config.task.model.fprop_dtype == 'bfloat16' and config.task.model.dtype is None
  export_run(config, run, tmp_path / 'out')
  assert_same_tensors(tmp_path / 'out', tensors_of(tmp_path / 'source'))
  with pytest.raises(UserError, match=r'out exists and is not an empty folder; name another'):
    export_run(config, run, tmp_path / 'out')
  with pytest.raises(UserError, match=r'run has checkpoints already; name another directory'):
    import_run(tmp_path / 'source', run)
  assert sorted(path.name for path in tmp_path.iterdir()) == ['out', 'run', 'source']


def _random_model(dtype='float32'):
  model = transformer_lm(vocab_size=11, model_dims=8, num_layers=2, num_heads=2, hidden_dims=12).set(dtype=dtype)
  built = model.instantiate()
  return built, built.init(jax.random.key(0))


def test_a_model_in_python_there_and_back(tmp_path):
  model, variables = _random_model()
  assert write_model(tmp_path, model, variables) == ['config.json', 'model.safetensors']
  back = read_model(tmp_path)
  jax.tree.map(np.testing.assert_array_equal, back.variables, variables)
  ids = np.arange(5, dtype=np.int32)[None]
  expected, _ = model.lm.apply(variables['lm'], ids, method='logits')
  np.testing.assert_array_equal(back.model.lm.apply(back.variables['lm'], ids, method='logits')[0], expected)


@pytest.mark.parametrize(
  'config',
  [
    transformer_lm(vocab_size=16, model_dims=8, num_layers=4, num_heads=2, hidden_dims=12),
    pytest.param(
      griffin_lm(vocab_size=16, model_dims=8, num_layers=14, num_heads=2, hidden_dims=12), marks=pytest.mark.slow
    ),
  ],
  ids=['alike', 'pattern'],
)
def test_stages_in_rounds_are_written_in_the_order_of_their_layers(tmp_path, config):
  staged = set_pipeline(config.clone(), num_stages=2, num_microbatches=2, circular_repeat=2).instantiate()
  variables = staged.init(jax.random.key(0))
  write_model(tmp_path, staged, variables)
  back = read_model(tmp_path)
  jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b.reshape(a.shape)), back.variables, variables)


def decoder_of(source, run, **says):
  """Imports a checkpoint with this generation_config.json; returns the sampler and the lines about the import."""
  (source / 'generation_config.json').write_text(json.dumps(says))
  lines = import_run(source, run)
  return read_record(run).config.task.model.decoder_tpl.instantiate(), lines


def test_sampling_is_as_generation_config_says(tmp_path):
  source = make(tmp_path / 'source', 'llama')
  says = {'do_sample': True, 'temperature': 0.6, 'top_k': 7, 'min_p': 0.05, 'eos_token_id': [2, 3], 'bos_token_id': 1}
  says |= {
    'repetition_penalty': 1.05,
    'no_repeat_ngram_size': 3,
    'max_new_tokens': 64,
    'num_beams': 1,
    'use_cache': True,
  }
  decoder, lines = decoder_of(source, tmp_path / 'run', **says)
  assert (decoder.temperature, decoder.top_k, decoder.top_p, decoder.stop_ids) == (0.6, 7, None, (2, 3))
  assert (decoder.min_p, decoder.repetition_penalty, decoder.no_repeat_ngram_size) == (0.05, 1.05, 3)
  assert decoder.max_decode_steps == 64 and not any('generation_config' in line for line in lines)
  # What transformers assumes: the 50 most probable tokens; and greedy decoding without do_sample.
  decoder, _ = decoder_of(source, tmp_path / 'assumed', do_sample=True, top_p=1.0)
  assert (decoder.temperature, decoder.top_k, decoder.top_p, decoder.max_decode_steps) == (1.0, 50, None, 128)
  decoder, _ = decoder_of(source, tmp_path / 'all', do_sample=True, top_k=0)
  assert decoder.top_k is None
  for says, told in (({'temperature': 'warm'}, "temperature = 'warm'"), ({'eos_token_id': ['2']}, 'eos_token_id =')):
    with pytest.raises(ConfigError, match=told):
      decoder_of(source, tmp_path / 'other', do_sample=True, **says)


def test_settings_of_generation_config_that_are_not_used_are_told(tmp_path):
  source = make(tmp_path / 'source', 'llama')
  says = {'temperature': 0.6, 'repetition_penalty': 1.2, 'length_penalty': 2.0, 'stop_strings': ['END']}
  says |= {'token_healing': True, 'prefix': '', 'suffix': [], 'constraints': None}
  decoder, (_, ignored, unused, *_) = decoder_of(source, tmp_path / 'run', **says)
  assert (decoder.temperature, decoder.top_k, decoder.repetition_penalty) == (0.0, None, 1.2)
  assert ignored.endswith('without do_sample, decoding is greedy, so it ignores temperature = 0.6')
  assert unused.endswith("are not used: length_penalty = 2.0, stop_strings = ['END'], token_healing = True")
  for ids, kept, end in ((9999, (), '; no token ends a continuation'), ([-1, 2], (2,), '')):
    decoder, (_, line, *_) = decoder_of(source, tmp_path / str(kept), eos_token_id=ids)
    assert decoder.stop_ids == kept
    assert line.endswith(f'source: eos_token_id = {ids} is not in the vocabulary of 37 tokens{end}')


@pytest.mark.slow_cases
@pytest.mark.parametrize(
  'says',
  [
    {'do_sample': True, 'temperature': 0.6, 'top_k': 7, 'top_p': 0.9, 'min_p': 0.05, 'eos_token_id': [2, 3]},
    {'do_sample': True, 'temperature': 1.0, 'top_k': 0, 'top_p': 1.0, 'eos_token_id': 2, 'max_new_tokens': 9},
    {'do_sample': False, 'eos_token_id': 2, 'repetition_penalty': 1.2, 'no_repeat_ngram_size': 3, 'min_new_tokens': 4},
    {'do_sample': True, 'temperature': 0.9, 'top_k': 0, 'top_p': 1.0, 'typical_p': 0.8, 'eos_token_id': 2},
  ],
)
def test_an_export_has_the_settings_of_the_sampler(says, tmp_path):
  source = make(tmp_path / 'source', 'llama')
  decoder_of(source, tmp_path / 'run', **says)
  config = read_record(tmp_path / 'run').config
  assert 'generation_config.json' in export_run(config, tmp_path / 'run', tmp_path / 'out')
  written = json.loads((tmp_path / 'out' / 'generation_config.json').read_text())
  assert written == {'repetition_penalty': 1.0, 'no_repeat_ngram_size': 0, **says}
  config.task.model.decoder_tpl.set(temperature=0.3, max_decode_steps=77)
  export_run(config, tmp_path / 'run', tmp_path / 'warmer')
  written = json.loads((tmp_path / 'warmer' / 'generation_config.json').read_text())
  assert (written['temperature'], written['do_sample']) == (0.3, True)
  assert written.get('max_new_tokens') == (77 if 'max_new_tokens' in says else None)


@pytest.mark.slow
def test_beams_of_generation_config_are_searched_and_written_again(tmp_path):
  source = make(tmp_path / 'source', 'llama')
  says = {'num_beams': 4, 'length_penalty': 1.5, 'early_stopping': True, 'num_beam_groups': 2, 'diversity_penalty': 0.4}
  says |= {'eos_token_id': 2, 'min_new_tokens': 3, 'no_repeat_ngram_size': 2, 'repetition_penalty': 1.0}
  decoder, lines = decoder_of(source, tmp_path / 'run', do_sample=False, temperature=0.5, **says)
  assert isinstance(decoder, BeamSearch) and (decoder.beam_size, decoder.num_groups) == (4, 2)
  assert (decoder.length_norm, decoder.length_penalty, decoder.early_stopping) == ('length', 1.5, True)
  assert (decoder.diversity_penalty, decoder.min_decode_steps, decoder.no_repeat_ngram_size) == (0.4, 3, 2)
  assert any(line.endswith('beam search draws no tokens, so it ignores temperature = 0.5') for line in lines)
  export_run(read_record(tmp_path / 'run').config, tmp_path / 'run', tmp_path / 'out')
  assert json.loads((tmp_path / 'out' / 'generation_config.json').read_text()) == {'do_sample': False, **says}
  decoder, _ = decoder_of(source, tmp_path / 'never', num_beams=3, early_stopping='never')
  assert (decoder.early_stopping, decoder.length_penalty, decoder.num_groups) == (False, 1.0, 1)
  _, lines = decoder_of(source, tmp_path / 'short', num_beams=3, length_penalty=-1.0)
  assert any(line.endswith('length_penalty = -1.0 is less than 0; 0 is used') for line in lines)
  decoder, lines = decoder_of(source, tmp_path / 'sampled', num_beams=3, do_sample=True)
  assert isinstance(decoder, Sampler) and any('not used: num_beams = 3' in line for line in lines)
  with pytest.raises(ConfigError, match='num_beam_groups = 2 does not divide num_beams = 3'):
    decoder_of(source, tmp_path / 'odd', num_beams=3, num_beam_groups=2)


def test_a_full_disk_leaves_no_export(tmp_path, monkeypatch, capsys):
  write_model(tmp_path / 'source', *_random_model())
  import_run(tmp_path / 'source', tmp_path / 'run')

  def full(*_):
    raise OSError(28, 'No space left on device')

  monkeypatch.setattr('praxis_lite.bridges.hf.files.write_safetensors', full)
  out = tmp_path / 'out'
  assert main(['export-hf', f'--job_log_dir={tmp_path / "run"}', f'--out={out}']) == 2
  assert f'writing {out} failed: No space left on device' in capsys.readouterr().err
  assert sorted(path.name for path in tmp_path.iterdir()) == ['run', 'source']


def test_an_override_that_is_wrong_is_refused_before_anything_is_written(tmp_path, capsys):
  write(tmp_path / 'hf', golden('llama')['config'], {n: tuple(s) for n, s in golden('llama')['tensors'].items()})
  arguments = ['import-hf', str(tmp_path / 'hf'), f'--job_log_dir={tmp_path / "run"}', '--set']
  assert main([*arguments, 'task.model.vocab_size=40']) == 2
  assert 'and config.json makes it [40, 18]' in capsys.readouterr().err
  assert main([*arguments, 'task.model.modeldims=1']) == 2
  assert "Did you mean 'model_dims'?" in capsys.readouterr().err
  assert not (tmp_path / 'run').exists()
