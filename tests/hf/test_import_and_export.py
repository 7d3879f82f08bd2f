"""From a checkpoint to a run and back: decoded, trained, exported."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from checkpoints import IDS, golden, make, write

from praxis_lite.bridges.hf import export_run, import_run, read_model, write_model
from praxis_lite.bridges.hf.files import read_folder
from praxis_lite.cli.main import main
from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError, UserError
from praxis_lite.inputs import SyntheticLMInput
from praxis_lite.models import set_pipeline, transformer_lm
from praxis_lite.runs.executor import run_train
from praxis_lite.runs.inference import decode_prompts
from praxis_lite.runs.records.record import read_record


def tensors_of(folder):
  return {name: t.read(tuple(slice(0, n) for n in t.shape)) for name, t in read_folder(folder).items()}


def assert_same_tensors(folder, expected):
  written = tensors_of(folder)
  assert written.keys() == expected.keys()
  for name, tensor in expected.items():
    np.testing.assert_array_equal(written[name], tensor, err_msg=name)


# As docs/hugging-face.md says.
_EXPERTS_OVER_DATA = ('expert_axis=data', "weight_split_dims_mapping.wt=('data',None,'mdl')")


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
  export_run(config, run, tmp_path / 'half', dtype='bfloat16')
  assert {str(tensor.dtype) for tensor in tensors_of(tmp_path / 'half').values()} == {'bfloat16'}

  train = Config(SyntheticLMInput, name='train', is_training=True, seq_len=8, vocab_size=37, batch_size=4)
  config = config._replace(datasets=[train])
  config.task.train.set(num_train_steps=2, save_interval_steps=1)
  capsys.readouterr()
  assert run_train(config, run).step == 2
  assert '13 variables from the checkpoint, 13 of them unchanged' in capsys.readouterr().out
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


def test_stages_in_rounds_are_written_in_the_order_of_their_layers(tmp_path):
  config = transformer_lm(vocab_size=16, model_dims=8, num_layers=4, num_heads=2, hidden_dims=12)
  staged = set_pipeline(config.clone(), num_stages=2, num_microbatches=2, circular_repeat=2).instantiate()
  variables = staged.init(jax.random.key(0))
  write_model(tmp_path, staged, variables)
  back = read_model(tmp_path)
  jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b.reshape(a.shape)), back.variables, variables)


def test_sampling_is_as_generation_config_says(tmp_path):
  source = make(tmp_path / 'source', 'llama')
  (source / 'generation_config.json').write_text(
    '{"do_sample": true, "temperature": 0.6, "top_k": 7, "eos_token_id": [2, 3]}'
  )
  import_run(source, tmp_path / 'run')
  decoder = read_record(tmp_path / 'run').config.task.model.decoder_tpl
  assert (decoder.temperature, decoder.top_k, decoder.top_p, decoder.stop_ids) == (0.6, 7, None, (2, 3))
  for says, told in (('"temperature": "warm"', "temperature = 'warm'"), ('"eos_token_id": ["2"]', 'eos_token_id =')):
    (source / 'generation_config.json').write_text(f'{{"do_sample": true, {says}}}')
    with pytest.raises(ConfigError, match=told):
      import_run(source, tmp_path / 'other')


def test_a_full_disk_leaves_no_export(tmp_path, monkeypatch, capsys):
  write_model(tmp_path / 'source', *_random_model())
  import_run(tmp_path / 'source', tmp_path / 'run')

  def full(*_):
    raise OSError(28, 'No space left on device')

  monkeypatch.setattr('praxis_lite.bridges.hf.files._write_file', full)
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
