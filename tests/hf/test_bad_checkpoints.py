"""What is wrong with a checkpoint is said in one line, before anything is written."""

from __future__ import annotations

import json

import numpy as np
import pytest
from checkpoints import golden, make, write

from praxis_lite.bridges.hf.files import INDEX_FILE, Declared, read_header, write_folder
from praxis_lite.bridges.hf.reader import checked_pieces, open_checkpoint
from praxis_lite.cli.main import main
from praxis_lite.common.errors import CheckpointError, UserError


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
    ({'model_type': 'qwen'}, r"model_type 'qwen' is not supported. Did you mean 'qwen[23]'\? Known: llama, mistral, "),
    ({'hidden_act': 'mish'}, r"config.json: hidden_act = 'mish' is not supported; known: silu, "),
    ({'hidden_size': 'x'}, r"config.json: hidden_size = 'x'; expected an integer of at least 1"),
    (
      {'rope_parameters': {'rope_type': 'longrope'}},
      r"rope_parameters of type 'longrope' is not supported; only default",
    ),
    ({'rope_parameters': {'rope_type': 'linear'}}, r"rope_parameters of type 'linear' lacks 'factor'"),
    ({'quantization_config': {'bits': 4}}, r'quantization_config = {"bits": 4} is not supported; only null is'),
    ({'partial_rotary_factor': 0.5}, r'partial_rotary_factor other than 1 is not supported'),
  ],
)
def test_a_config_that_the_layers_cannot_be_is_refused(changes, message, tmp_path):
  with pytest.raises(UserError, match=message):
    opened(make(tmp_path, 'llama', **changes))


def test_experts_in_some_layers_are_refused(tmp_path):
  with pytest.raises(UserError, match=r'mlp_only_layers = \[0\] is not supported; only \[\] or null is'):
    opened(make(tmp_path, 'qwen3_moe', mlp_only_layers=[0]))


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
  for beginning in (data[:100], b'', b'PK\x03\x04' + data[4:]):
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


def test_other_formats_are_named(tmp_path):
  file = one_file(tmp_path)
  file.rename(tmp_path / 'pytorch_model.bin')
  with pytest.raises(CheckpointError, match=r'pytorch_model.bin is in an older format: load and save it with transfor'):
    opened(tmp_path)


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


def test_nothing_is_written_where_an_import_fails(tmp_path, capsys):
  write(tmp_path / 'hf', golden('llama')['config'], {'model.norm.weight': (18,)})
  assert main(['import-hf', str(tmp_path / 'hf'), f'--job_log_dir={tmp_path / "run"}']) == 2
  assert 'lacks model.embed_tokens.weight, ' in capsys.readouterr().err
  assert not (tmp_path / 'run').exists()
