"""What is wrong with a checkpoint is said in one line, before anything is written."""

from __future__ import annotations

import json
import re

import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import CASES, golden, make, write

from praxis_lite.bridges.hf import import_run, read_model
from praxis_lite.bridges.hf.files import INDEX_FILE, Declared, read_header, write_folder
from praxis_lite.bridges.hf.reader import checked_pieces, open_checkpoint
from praxis_lite.cli.main import main
from praxis_lite.common.errors import CheckpointError, ConfigError, DataError, UserError
from praxis_lite.inputs import HfTokenizer, SentencePieceTokenizer, TextInput


def opened(folder):
  """Opens a checkpoint and looks at its headers, as an import does first."""
  checkpoint = open_checkpoint(folder)
  model = checkpoint.family.model(checkpoint.config).instantiate()
  return checked_pieces(checkpoint, model.abstract_init()['lm'])


def shapes_of(case):
  return {name: tuple(shape) for name, shape in golden(case)['tensors'].items()}


def one_file(tmp_path, case='llama'):
  write(tmp_path, golden(case)['config'], shapes_of(case), max_file_bytes=10**9)
  return tmp_path / 'model.safetensors'


@pytest.mark.parametrize(
  'changes, message',
  [
    (
      {'model_type': 'gemma4'},
      r"config.json: model_type 'gemma4' is not supported; supported: .*, resnet, bit, convnext, clip, siglip$",
    ),
    (
      {'model_type': 'mamba'},
      r"model_type 'mamba' is not supported; supported: llama, .*, vit, vit_mae, resnet, bit, convnext, clip, siglip$",
    ),
    (
      {'architectures': ['LlamaForSequenceClassification']},
      r'architectures = \["LlamaForSequenceClassification"\]: a head .* such as a classification head, is not',
    ),
    ({'hidden_act': 'mish'}, r"config.json: hidden_act = 'mish' is not supported; known: silu, "),
    ({'hidden_size': 'x'}, r"config.json: hidden_size = 'x'; expected an integer of at least 1"),
    (
      {'rope_parameters': {'rope_type': 'dynamic'}},
      r"rope_parameters of type 'dynamic' is not supported; only default",
    ),
    ({'rope_parameters': {'rope_type': 'linear'}}, r"rope_parameters of type 'linear' lacks 'factor'"),
    ({'quantization_config': {'quant_method': 'mxfp4'}}, r'quantization_config = .* is not supported; only null is'),
    ({'quantization_config': {'bits': 4}}, r'quantization_config = {"bits": 4} is not supported; only null is'),
    ({'partial_rotary_factor': 0.5}, r'partial_rotary_factor other than 1 is not supported'),
  ],
)
def test_a_config_that_the_layers_cannot_be_is_refused(changes, message, tmp_path):
  with pytest.raises(UserError, match=message):
    opened(make(tmp_path, 'llama', **changes))


def test_sizes_that_the_layers_refuse_are_said_to_be_those_of_the_file(tmp_path):
  folder = make(tmp_path, 'llama', num_key_value_heads=5)
  with pytest.raises(ConfigError, match=r'config\.json: task\.model\.lm\..*num_kv_heads: 5 does not divide num_heads'):
    import_run(folder, tmp_path / 'run')
  assert not (tmp_path / 'run').exists()


def test_experts_in_some_layers_are_refused(tmp_path):
  with pytest.raises(UserError, match=r'mlp_only_layers = \[0\] is not supported; only \[\] or null is'):
    opened(make(tmp_path, 'qwen3_moe', mlp_only_layers=[0]))


@pytest.mark.parametrize(
  'case, changes, message',
  [
    ('deepseek_v3', {'first_k_dense_replace': 3}, 'first_k_dense_replace = 3; expected a number from 0, and less than'),
    ('deepseek_v3', {'first_k_dense_replace': None}, 'first_k_dense_replace = None; expected a number from 0'),
    ('deepseek_v3', {'topk_method': 'greedy'}, 'topk_method = "greedy" is not supported; only "noaux_tc" is'),
    ('deepseek_v3', {'n_group': 4}, 'num_groups: 4 does not divide num_experts, 6'),
    ('deepseek_v3', {'topk_group': 1}, 'num_experts_per_token: 3, and the groups that a token may use have 2 experts'),
    ('deepseek_v3', {'v_head_dim': 0}, 'v_head_dim = 0; expected an integer of at least 1'),
    (
      'qwen3_next',
      {'layer_types': ['linear_attention'] * 3},
      'layer_types must have 4 times linear_attention or full_',
    ),
    (
      'qwen3_next',
      {'layer_types': None, 'full_attention_interval': 0},
      'full_attention_interval = 0; expected an integer',
    ),
    (
      'qwen3_next',
      {'linear_num_value_heads': 4},
      'linear_num_key_heads = 3 does not divide linear_num_value_heads = 4',
    ),
    ('qwen3_next', {'linear_value_head_dim': 5}, 'linear_value_head_dim = 5 is not supported; only divisors of 2 x'),
    (
      'qwen3_next',
      {'shared_expert_intermediate_size': 15},
      'intermediate_size = 15 is not supported; only multiples of',
    ),
    ('smollm3', {'no_rope_layers': [1, 0]}, 'no_rope_layers must have 3 times 0 or 1'),
    ('smollm3', {'no_rope_layers': [1, 0, 2]}, 'no_rope_layers must have 3 times 0 or 1'),
    (
      'smollm3',
      {'no_rope_layers': None, 'no_rope_layer_interval': 0},
      'no_rope_layer_interval = 0; expected an integer',
    ),
    ('gemma3', {'rope_parameters': {'sliding_attention': 3}}, 'rope_parameters.sliding_attention = 3; expected a JSON'),
    (
      'llama',
      {'rope_parameters': {'partial_rotary_factor': 0.5}},
      'partial_rotary_factor other than 1 is not supported',
    ),
    (
      'phi4_mini',
      {'rope_parameters': {**CASES['phi4_mini']['rope_parameters'], 'short_factor': [1.0]}},
      'short_factors: 1 factor for 2 pairs of dims',
    ),
    (
      'phi4_mini',
      {'rope_parameters': {**CASES['phi4_mini']['rope_parameters'], 'long_factor': 3}},
      'long_factor = 3; expected a list of numbers',
    ),
    ('phi4_mini', {'rope_parameters': {'rope_type': 'longrope'}}, "type 'longrope' lacks 'short_factor'"),
  ],
)
def test_what_a_family_cannot_be_is_told(case, changes, message, tmp_path):
  with pytest.raises(UserError, match=re.escape(message)):
    opened(make(tmp_path, case, **changes))


def test_a_value_that_is_missing_is_named(tmp_path):
  config = golden('llama')['config']
  del config['num_hidden_layers']
  write(tmp_path, config, shapes_of('llama'))
  with pytest.raises(UserError, match=r'config.json: num_hidden_layers is missing'):
    opened(tmp_path)


def test_missing_extra_and_misshapen_tensors_are_named(tmp_path):
  shapes, config = shapes_of('llama'), golden('llama')['config']
  name = 'model.layers.1.self_attn.q_proj.weight'
  write(tmp_path / '1', config, {n: s for n, s in shapes.items() if n != name})
  with pytest.raises(CheckpointError, match=f'1 lacks {name}$'):
    opened(tmp_path / '1')
  write(tmp_path / '2', config, shapes | {'model.extra': (2,), 'other': (1,)})
  with pytest.raises(CheckpointError, match=r'2 has tensors that its config.json does not account for: model.extra, o'):
    opened(tmp_path / '2')
  write(tmp_path / '3', config, shapes | {name: (18, 16)})
  with pytest.raises(CheckpointError, match=rf'{name} has shape \[18, 16\], and config.json makes it \[18, 18\]'):
    opened(tmp_path / '3')


def test_truncated_and_damaged_files_are_named(tmp_path):
  file = one_file(tmp_path)
  data = file.read_bytes()
  file.write_bytes(data[:-7])
  with pytest.raises(CheckpointError, match=rf'is truncated: its header describes {len(data)} bytes, and there are'):
    opened(tmp_path)
  for beginning in (data[:100], data[:5], b'PK\x03\x04' + data[4:]):
    file.write_bytes(beginning)
    with pytest.raises(CheckpointError, match='is truncated, or not a safetensors file'):
      opened(tmp_path)
  file.write_bytes(data[:8] + b'x' + data[9:])
  with pytest.raises(CheckpointError, match='is not a safetensors file: its header cannot be read'):
    opened(tmp_path)
  header = {'x': {'dtype': 'F32', 'shape': [100, 100], 'data_offsets': [0, 8]}}
  encoded = json.dumps(header).encode()
  file.write_bytes(len(encoded).to_bytes(8, 'little') + encoded + b'12345678')
  with pytest.raises(CheckpointError, match=r'is damaged: x of shape \[100, 100\] goes beyond its end'):
    read_header(str(file))


def test_shards_that_are_missing_and_an_index_that_is_wrong_are_named(tmp_path):
  make(tmp_path, 'llama')
  index = json.loads((tmp_path / INDEX_FILE).read_text())
  first = sorted(set(index['weight_map'].values()))[0]
  (tmp_path / first).rename(tmp_path / 'moved')
  with pytest.raises(CheckpointError, match=f'names the file {first}, and there is no such file'):
    opened(tmp_path)
  (tmp_path / 'moved').rename(tmp_path / first)
  (tmp_path / INDEX_FILE).rename(tmp_path / 'moved')
  with pytest.raises(CheckpointError, match=f'; {first} is a part of a checkpoint: download the index too$'):
    opened(tmp_path)
  (tmp_path / 'moved').rename(tmp_path / INDEX_FILE)
  index['weight_map']['lost'] = first
  (tmp_path / INDEX_FILE).write_text(json.dumps(index))
  with pytest.raises(CheckpointError, match=f'says that lost is in {first}, which does not have it'):
    opened(tmp_path)
  index['weight_map']['lost'] = '../elsewhere.safetensors'
  (tmp_path / INDEX_FILE).write_text(json.dumps(index))
  with pytest.raises(CheckpointError, match=r'names the file \.\./elsewhere'):
    opened(tmp_path)
  (tmp_path / INDEX_FILE).write_text('{}')
  with pytest.raises(CheckpointError, match='is not an index of safetensors'):
    opened(tmp_path)


@pytest.mark.parametrize('has_config', [True, False])
@pytest.mark.parametrize(
  'name, message',
  [
    ('pytorch_model.bin', 'is in an older format: load and save it with transformers'),
    (
      'model-Q4_K_M.gguf',
      r'is in the format of llama.cpp; download the model from which it was made, as \*.safetensors',
    ),
    (
      'consolidated.safetensors',
      r'names of tensors of its authors; download model\*.safetensors and config.json of the',
    ),
    (
      'consolidated.00.pth',
      r'is in the format of its authors; download model\*.safetensors and config.json of the same',
    ),
    (
      'adapter_model.safetensors',
      'is an adapter, such as LoRA, without the model; import that, then call read_adapter',
    ),
  ],
)
def test_other_formats_are_named(name, message, has_config, tmp_path):
  one_file(tmp_path).rename(tmp_path / name)
  if not has_config:
    (tmp_path / 'config.json').unlink()
  for path in (tmp_path, tmp_path / name):
    with pytest.raises(UserError, match=f'; {name} .*{message}'):
      opened(path)


def test_a_head_of_another_kind_is_named_by_its_tensors(tmp_path):
  write(tmp_path, golden('llama')['config'], shapes_of('llama') | {'score.weight': (2, 18)})
  with pytest.raises(CheckpointError, match=r'score.weight belongs to a head that does not predict the next token'):
    opened(tmp_path)


POINTER = 'version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 4976698672\n'


def test_git_lfs_pointers_are_named(tmp_path):
  file = one_file(tmp_path)
  file.write_text(POINTER)
  with pytest.raises(
    CheckpointError, match=r'model.safetensors is a Git LFS pointer, not the file itself; run `git lfs'
  ):
    opened(tmp_path)
  for tokenizer in (HfTokenizer(path=str(file)), SentencePieceTokenizer(model_path=str(file))):
    with pytest.raises(DataError, match=r'path: .*model.safetensors is a Git LFS pointer'):
      _ = tokenizer.vocab_size
  with pytest.raises(DataError, match=r'text.path: .*model.safetensors is a Git LFS pointer'):
    TextInput(name='text', path=str(file), seq_len=4, batch_size=1).get_next()


@pytest.mark.parametrize(
  'dtype, value, what',
  [('float32', np.nan, 'NaN'), ('bfloat16', np.nan, 'NaN'), ('float16', -np.inf, 'infinite values')],
)
def test_a_weight_that_is_not_finite_is_named_and_nothing_is_left(dtype, value, what, tmp_path):
  def tensor(name):
    weights = np.ones(tuple(shapes[name]), jnp.dtype(dtype))
    weights[..., -1] = value if name == bad else 1
    return weights

  shapes, bad = shapes_of('llama'), 'model.layers.1.mlp.down_proj.weight'
  make(tmp_path / 'hf', 'llama')
  for file in (tmp_path / 'hf').glob('*.safetensors*'):
    file.unlink()
  declared = {name: Declared(np.dtype(jnp.dtype(dtype)), shape) for name, shape in shapes.items()}
  write_folder(tmp_path / 'hf', declared, tensor, 10**9)
  with pytest.raises(
    CheckpointError, match=rf'model.safetensors: {bad} has {what}; its training diverged, or the file'
  ):
    read_model(tmp_path / 'hf')
  with pytest.raises(CheckpointError, match=rf'^{tmp_path}/hf/model.safetensors: {bad} has {what}'):
    import_run(tmp_path / 'hf', tmp_path / 'runs' / 'llama')
  assert not (tmp_path / 'runs' / 'llama').exists()


def test_quantized_tensors_are_refused_when_they_are_read(tmp_path):
  write_folder(tmp_path, {'x': Declared(np.dtype(np.float32), (2,))}, lambda _: np.zeros(2, np.float32), 10**9)
  file = tmp_path / 'model.safetensors'
  file.write_bytes(file.read_bytes().replace(b'"F32"', b'"F8X"'))
  with pytest.raises(CheckpointError, match=r'x has dtype F8X; a checkpoint to import has F64, F32, F16, BF16'):
    _ = read_header(str(file))['x'].dtype


@pytest.mark.parametrize(
  'arguments, message',
  [
    (['import-hf'], 'the folder of the checkpoint is missing, as in praxis-lite import-hf llama/ --job_log_dir=runs/1'),
    (['import-hf', 'x'], '--job_log_dir is missing: name a directory, as in --job_log_dir=runs/1'),
    (['import-hf', 'nowhere', '--job_log_dir=run'], 'nowhere is not a folder; expected that of a checkpoint, as'),
    (['import-hf', '.', '--job_log_dir=run'], '. has no config.json; expected the folder of a Hugging Face checkpoint'),
    (['export-hf', '--job_log_dir=run'], '--out is missing: name the folder to write, as in --out=exported/llama'),
    (['export-hf', '--job_log_dir=run', '--out=o', '--dtype=int8'], 'flag --dtype=int8'),
  ],
)
def test_commands_say_what_is_missing(arguments, message, tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(tmp_path)
  assert main(arguments) == 2
  err = capsys.readouterr().err
  assert message in err and err.count('\n') == 1
  assert list(tmp_path.iterdir()) == []


def test_a_tokenizer_that_is_broken_is_named_by_the_import(tmp_path):
  pytest.importorskip('tokenizers', reason='needs the package tokenizers: pip install praxis_lite[hf]')
  make(tmp_path / 'hf', 'llama')
  (tmp_path / 'hf' / 'tokenizer.json').write_text('{"model": ')
  with pytest.raises(DataError, match=r'hf/tokenizer\.json is not a tokenizer'):
    import_run(tmp_path / 'hf', tmp_path / 'run')
  assert not (tmp_path / 'run').exists()
  import_run(
    tmp_path / 'hf', tmp_path / 'run', overrides=['datasets[*].tokenizer_tpl=praxis_lite.inputs.ByteTokenizer']
  )
  from tokenizers import Tokenizer, models

  Tokenizer(models.WordLevel({'</s>': 0}, '</s>')).save(str(tmp_path / 'hf' / 'tokenizer.json'))
  (tmp_path / 'hf' / 'tokenizer_config.json').write_text('{"eos_token": ')
  with pytest.raises(DataError, match=r'hf/tokenizer_config\.json is not a JSON object'):
    import_run(tmp_path / 'hf', tmp_path / 'cut')
  assert not (tmp_path / 'cut').exists()


def test_a_model_without_a_tokenizer_is_told_of(tmp_path, capsys):
  make(tmp_path / 'hf', 'llama')
  run = f'--job_log_dir={tmp_path / "run"}'
  assert main(['import-hf', str(tmp_path / 'hf'), run]) == 0
  assert main(['decode', run, '--prompt=a']) == 2
  assert "no tokenizer; to decode and train on text, set the one in a folder by --set 'd" in capsys.readouterr().err
  assert main(['export-hf', run, f'--out={tmp_path / "out"}']) == 0
  assert capsys.readouterr().err == 'no files of a tokenizer: the run has none in the format of transformers\n'


def test_nothing_is_written_where_an_import_fails(tmp_path, capsys):
  write(tmp_path / 'hf', golden('llama')['config'], {'model.norm.weight': (18,)})
  assert main(['import-hf', str(tmp_path / 'hf'), f'--job_log_dir={tmp_path / "run"}']) == 2
  assert 'lacks model.embed_tokens.weight, ' in capsys.readouterr().err
  assert not (tmp_path / 'run').exists()
