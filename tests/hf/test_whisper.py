"""Whisper: features, logits and tokens are those of a forward pass in NumPy, on meshes; checkpoints are as read."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest
import whisper_by_hand
from checkpoints import assert_same_tensors, write
from on_meshes import load

from praxis_lite.bridges.hf import read_model
from praxis_lite.bridges.hf.whisper import set_transcription
from praxis_lite.cli.main import main
from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.inputs import CharTokenizer, write_wav
from praxis_lite.layers import WindowLogMel
from praxis_lite.models import whisper
from praxis_lite.models.decoding import SpeculativeSampler
from praxis_lite.runs import open_run
from praxis_lite.runs.records.record import read_record, write_record
from praxis_lite.sharding import GuardedJit
from praxis_lite.sharding.mesh import bind_mesh

pytestmark = pytest.mark.usefixtures('shared_programs')

V, D, F, N, M, S, P = 37, 18, 20, 3, 5, 50, 14
START, END = 30, 31
CONFIG = {
  'model_type': 'whisper',
  'architectures': ['WhisperForConditionalGeneration'],
  'is_encoder_decoder': True,
  'vocab_size': V,
  'd_model': D,
  'num_mel_bins': M,
  'encoder_layers': 3,
  'decoder_layers': 2,
  **{f'{stack}_attention_heads': N for stack in ('encoder', 'decoder')},
  **{f'{stack}_ffn_dim': F for stack in ('encoder', 'decoder')},
  'activation_function': 'gelu',
  'max_source_positions': S,
  'max_target_positions': P,
  'tie_word_embeddings': True,
  'scale_embedding': False,
  **dict.fromkeys(('eos_token_id', 'bos_token_id', 'pad_token_id'), END),
  'decoder_start_token_id': START,
  'suppress_tokens': [4, 9],
  'begin_suppress_tokens': [7, END],
}
GENERATION = {
  'is_multilingual': True,
  'lang_to_id': {'<|de|>': 32, '<|en|>': 33},
  'task_to_id': {'transcribe': 34, 'translate': 35},
  'no_timestamps_token_id': 36,
  'suppress_tokens': [4, 9, 11],
  'begin_suppress_tokens': [7, END],
  'eos_token_id': END,
  'decoder_start_token_id': START,
  'max_length': P,
}
RNG = np.random.default_rng(0)
WINDOW = 320 * S
AUDIO = (RNG.standard_normal((2, 9000)) * np.array([[0.3], [0.01]])).astype(np.float32)
IDS = np.concatenate([np.full((2, 1), START), RNG.integers(0, 30, (2, 8))], axis=1).astype(np.int32)


def shapes_of(config=CONFIG):
  """The names and shapes of the tensors of a checkpoint, as transformers writes them."""
  shapes = {'model.decoder.embed_tokens.weight': (V, D)}

  def linear(name, outputs, inputs, bias=True):
    shapes.update({f'{name}.weight': (outputs, inputs), **({f'{name}.bias': (outputs,)} if bias else {})})

  def norm(name):
    shapes.update({f'{name}.weight': (D,), f'{name}.bias': (D,)})

  for number, inputs in ((1, M), (2, D)):
    shapes[f'model.encoder.conv{number}.weight'] = (D, inputs, 3)
    shapes[f'model.encoder.conv{number}.bias'] = (D,)
  for stack, length in (('encoder', S), ('decoder', P)):
    shapes[f'model.{stack}.embed_positions.weight'] = (length, D)
    norm(f'model.{stack}.layer_norm')
    for i in range(config[f'{stack}_layers']):
      layer = f'model.{stack}.layers.{i}.'
      for kind in ('self_attn', 'encoder_attn')[: 1 + (stack == 'decoder')]:
        for letter in ('q', 'k', 'v', 'out'):
          linear(f'{layer}{kind}.{letter}_proj', D, D, bias=letter != 'k')
        norm(f'{layer}{kind}_layer_norm')
      linear(f'{layer}fc1', F, D)
      linear(f'{layer}fc2', D, F)
      norm(f'{layer}final_layer_norm')
  return shapes


def make(folder, **changes):
  """Writes a checkpoint; returns its folder, its config and its tensors by name."""
  config, rng = {**CONFIG, **changes}, np.random.default_rng(1)
  tensors = {name: rng.normal(size=shape).astype(np.float32) * 0.3 for name, shape in shapes_of(config).items()}
  write(folder, config, shapes_of(config), **tensors)
  (folder / 'generation_config.json').write_text(json.dumps(GENERATION))
  return folder, config, tensors


def test_features_are_those_of_the_formula():
  layer = Config(WindowLogMel, num_mels=M, window_length=WINDOW).instantiate()
  expected = whisper_by_hand.features(AUDIO, M, WINDOW)
  found, paddings = layer.apply({}, AUDIO)[0]
  assert found.shape == (2, 2 * S, M) and not np.asarray(paddings).any()
  np.testing.assert_allclose(found, expected, atol=2e-5)
  noisy = np.concatenate([AUDIO, np.full((2, 3), np.nan, np.float32)], axis=1)
  padded, _ = layer.apply({}, noisy, np.broadcast_to(np.arange(9003) >= 9000, (2, 9003)))[0]
  np.testing.assert_allclose(padded, expected, atol=2e-5)
  with pytest.raises(ConfigError, match=r'window_length: a row has 16001 samples, and a window 16000; cut'):
    layer.apply({}, np.zeros((1, WINDOW + 1), np.float32))
  with pytest.raises(ConfigError, match='a window_length that frame_step = 160 divides'):
    Config(WindowLogMel, window_length=1000).instantiate()


@pytest.mark.slow_cases
@pytest.mark.parametrize('mesh', [(2, 2, 2), (1, 1, 1), (1, 3, 1)])
def test_logits_are_those_of_numpy_on_every_mesh_and_tensors_are_written_as_they_were(mesh, tmp_path):
  folder, config, tensors = make(tmp_path / 'source')
  there = load(folder, mesh)
  x = whisper_by_hand.features(AUDIO, M, WINDOW)
  expected = whisper_by_hand.logits(config, tensors, x, IDS)

  def logits(variables):
    return there.model.lm.apply(there.layout.unpad(variables), x.astype(np.float32), IDS, method='logits')[0]

  found = np.asarray(GuardedJit(bind_mesh(logits, there.layout.mesh))(there.variables))
  np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
  assert_same_tensors(there.write(tmp_path / 'out', max_file_bytes=5000), tensors)
  written = json.loads((tmp_path / 'out' / 'config.json').read_text())
  ends = ('eos_token_id', 'bos_token_id', 'pad_token_id')  # They come from the decoder of a run, which this has not.
  assert {name: written.get(name) for name in config if name not in ends} == {
    name: x for name, x in config.items() if name not in ends
  }


@pytest.mark.parametrize(
  'generation, steps',
  [
    (GENERATION, P - 4),
    ({**GENERATION, 'max_length': P - 2}, P - 6),
    ({**GENERATION, 'max_length': 1000}, P - 4),
    ({**GENERATION, 'max_length': None, 'is_multilingual': False}, P - 2),
    ({**GENERATION, 'max_length': 2}, 1),
    ({}, P - 1),
  ],
)
def test_a_transcript_may_be_as_long_as_the_checkpoint_says(generation, steps):
  model = whisper(vocab_size=V, model_dims=D, num_layers=2, num_encoder_layers=3, num_heads=N, max_len=P)
  set_transcription(model, generation)
  assert model.decoder_tpl.max_decode_steps == steps


@pytest.mark.slow
def test_an_imported_run_writes_down_wav_files_as_numpy_and_is_exported(tmp_path, capsys):
  folder, config, tensors = make(tmp_path / 'source')
  run = tmp_path / 'run'
  assert main(['import-hf', str(folder), f'--job_log_dir={run}', '--set', 'task.ici_mesh_shape=(1,2,1)']) == 0
  assert main(['export-hf', f'--job_log_dir={run}', f'--out={tmp_path / "out"}']) == 0
  assert_same_tensors(tmp_path / 'out', tensors)
  kept = json.loads((tmp_path / 'out' / 'generation_config.json').read_text())
  assert {name: kept[name] for name in GENERATION} == GENERATION
  written = json.loads((tmp_path / 'out' / 'config.json').read_text())
  assert {name: written.get(name) for name in CONFIG} == {**CONFIG, 'suppress_tokens': [4, 9, 11]}
  said = capsys.readouterr()
  assert 'no such settings' not in said.out + said.err
  recorded = read_record(run).config
  model = recorded.task.model
  assert (model.start_id, model.prefix_ids) == (START, (33, 34, 36)) and model.decoder_tpl.stop_ids == (END,)
  assert model.decoder_tpl.max_decode_steps == P - 4
  assert (model.suppressed_ids, model.first_suppressed_ids) == ((4, 9, 11), (7, END))
  data = recorded.datasets[0]
  assert (data.num_samples, data.label_len, data.prefix_ids) == (WINDOW, P, (START, 33, 34, 36))
  assert main(['decode', f'--job_log_dir={run}', '--prompt_ids=1,2']) != 0
  assert 'writes down recordings and continues no prompts' in capsys.readouterr().err
  letters = Config(CharTokenizer, vocabulary='abcdefghijklmnopqrstuvwxyz0123456789')
  for each in recorded.datasets:
    each.tokenizer_tpl = letters
  model.decoder_tpl.set(max_decode_steps=5, stop_ids=())
  write_record(run, recorded, mesh={'replica': 1, 'data': 2, 'mdl': 1})
  sound = np.round(np.clip(AUDIO, -1, 1) * 32767) / 32768
  x = whisper_by_hand.features(sound, M, WINDOW)
  given = np.tile([START, 33, 34, 36], (2, 1))
  expected = whisper_by_hand.greedy(config, tensors, x, given, 5, (4, 9, 11), (7, END))
  for row in range(2):
    write_wav(tmp_path / f'{row}.wav', AUDIO[row], 16_000)
  assert main(['predict', f'--job_log_dir={run}', *(str(tmp_path / f'{row}.wav') for row in range(2))]) == 0
  found = [json.loads(line)['text'] for line in capsys.readouterr().out.splitlines()]
  assert found == [letters.instantiate().decode(row) for row in expected]
  guesses = model.clone(decoder_tpl=Config(SpeculativeSampler, lookup=1, max_decode_steps=5, temperature=0.0))
  audio = np.pad(sound, ((0, 0), (0, WINDOW - sound.shape[1]))).astype(np.float32)
  heard = {'audio': audio, 'audio_lengths': np.full(2, sound.shape[1], np.int32)}
  (_, decoded), _ = guesses.instantiate().apply(open_run(run).load().variables, heard, method='decode', do_eval=True)
  np.testing.assert_array_equal(decoded['ids'], expected)
  (tmp_path / 'table.tsv').write_text('0.wav\tno\n1.wav\tyes\n')
  fields = {'datasets[*].path': tmp_path / 'table.tsv', 'datasets[*].batch_size': 2, 'task.train.num_train_steps': 1}
  edits = [f'--set={name}={value}' for name, value in fields.items()]
  assert main(['train', f'--job_log_dir={run}', *edits]) == 0
  assert 'step 1 eval/validation loss' in capsys.readouterr().out
  trained = open_run(run).load()
  new = jax.tree.map(np.asarray, trained.variables['lm'])
  np.testing.assert_array_equal(new['encoder_position']['w'], tensors['model.encoder.embed_positions.weight'])
  assert not np.array_equal(new['decoder_position']['w'], tensors['model.decoder.embed_positions.weight'])


@pytest.mark.parametrize(
  'changes, message',
  [
    ({'tie_word_embeddings': False}, 'tie_word_embeddings'),
    ({'decoder_ffn_dim': 8}, 'decoder_ffn_dim'),
    ({'scale_embedding': True}, 'scale_embedding'),
    ({'suppress_tokens': [V]}, 'suppress_tokens gives 37; expected an id below vocab_size = 37'),
    ({'architectures': ['WhisperForAudioClassification']}, 'a head that does not predict the next token'),
  ],
  ids=str,
)
def test_what_cannot_be_imported_is_named(changes, message, tmp_path):
  config = {**CONFIG, **changes}
  write(tmp_path, config, shapes_of(config))
  with pytest.raises(ConfigError, match=message):
    read_model(tmp_path)
