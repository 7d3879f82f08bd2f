"""Speech: a small Conformer that learns to transcribe spelled digits in minutes, Conformer L, and Whisper small.

praxis-lite train --exp=speech.SpelledDigits --job_log_dir=runs/digits
praxis-lite predict --job_log_dir=runs/digits my_recording.wav
praxis-lite plan --exp=speech.ConformerL --topology=h100:1x8 --nocompile
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from praxis_lite.common.config import Config
from praxis_lite.inputs import CharTokenizer, RandomFeature, RecordingInput, SyntheticInput, write_wav
from praxis_lite.layers import LogMel, SpectrumAugmenter
from praxis_lite.models import conformer_ctc, conformer_transducer, set_sharding, whisper
from praxis_lite.sharding.weights import WeightInit
from praxis_lite.tasks.learners import adamw_learner
from praxis_lite.tasks.speech_recognition import SpeechRecognitionTask
from praxis_lite.training import registry
from praxis_lite.training.experiment import BaseExperiment
from praxis_lite.training.task import SingleTask

_ROWS = ('replica', 'data')
_DIGITS = ('zero', 'one', 'two', 'three', 'four', 'five', 'six', 'seven', 'eight', 'nine')
_LETTERS = 'efghinorstuvwxz'
SYMBOLS = f' {_LETTERS}'  # The label of a symbol is its index; the blank comes last.
SAMPLE_RATE = 4000
MOST_WORDS = 3
_SYMBOLS: dict[str, Any] = {'vocab_size': len(SYMBOLS) + 1, 'blank_id': len(SYMBOLS), 'space_id': 0}
_SIZES = {'model_dims': 48, 'num_layers': 2, 'num_heads': 2, 'hidden_dims': 96, 'kernel_size': 5, 'channels': 8}
_LOW_TONES, _HIGH_TONES = (300.0, 430.0, 570.0, 720.0), (950.0, 1180.0, 1430.0, 1700.0)  # Hz; a chord has one of each.


def spell(words: list[str], draw: np.random.Generator) -> np.ndarray:
  """Returns the sound of words, at 4 kHz: a chord of two tones for each letter, like the keys of a telephone.

  A letter lasts 60 to 100 ms, followed by 10 to 30 ms of silence; 60 to 100 ms of silence precede a word. Tones are up
  to 2 % too high or too low, with random loudness and phase, and there is white noise.

  Args:
    words: words made of the letters of the English digits.
    draw: draws the random numbers.
  """
  parts = []
  for word in words:
    parts.append(np.zeros(int(SAMPLE_RATE * draw.uniform(0.06, 0.1))))
    for number in map(_LETTERS.index, word):
      seconds = np.arange(int(SAMPLE_RATE * draw.uniform(0.06, 0.1))) / SAMPLE_RATE
      chord = np.zeros(len(seconds))
      for tone in (_LOW_TONES[number % 4], _HIGH_TONES[number // 4]):
        turns = tone * draw.uniform(0.98, 1.02) * seconds + draw.uniform()
        chord += draw.uniform(0.15, 0.45) * np.sin(2 * np.pi * turns)
      parts += [chord, np.zeros(int(SAMPLE_RATE * draw.uniform(0.01, 0.03)))]
  sound = np.concatenate([*parts, np.zeros(int(SAMPLE_RATE * draw.uniform(0.02, 0.06)))])
  return sound + 0.03 * draw.standard_normal(len(sound))


def spelled_digits(split: str = 'train', count: int = 2048, folder: str | None = None) -> str:
  """Returns a table of WAV files in which digits are spelled, and their transcripts; writes the files at first use.

  Args:
    split: 'train' or 'validation', which have different recordings.
    count: the number of recordings, each of one to three digits.
    folder: where a folder for the files is created; None uses the system's folder for temporary files.
  """
  root = os.path.join(tempfile.gettempdir(), f'praxis_lite-{os.getuid()}') if folder is None else folder
  target = os.path.join(root, f'spelled_digits-{split}-{count}')
  if not os.path.isdir(target):
    os.makedirs(root, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root) as half_done:
      made = os.path.join(half_done, 'made')
      os.mkdir(made)
      with open(os.path.join(made, 'table.tsv'), 'w', encoding='utf-8') as table:
        for number, (sound, text) in enumerate(_recordings(split, count)):
          write_wav(os.path.join(made, f'{number:05}.wav'), sound, SAMPLE_RATE)
          table.write(f'{number:05}.wav\t{text}\n')
      try:
        os.rename(made, target)
      except OSError:  # Another process has written them.
        if not os.path.isdir(target):
          raise
  return os.path.join(target, 'table.tsv')


def _recordings(split: str, count: int) -> Iterator[tuple[np.ndarray, str]]:
  draw = np.random.Generator(np.random.PCG64([0, split == 'train']))
  for _ in range(count):
    words = [_DIGITS[i] for i in draw.integers(0, len(_DIGITS), draw.integers(1, MOST_WORDS + 1))]
    yield spell(words, draw), ' '.join(words)


@registry.register
class SpelledDigits(BaseExperiment):
  """Transcribes digits that are spelled by chords of tones in noise, with CTC; learns in minutes on two CPU cores."""

  batch_size = 32
  num_train_examples = 2048

  def datasets(self) -> list[Config]:
    train, validation = (Config(RecordingInput, name=name) for name in ('train', 'validation'))
    train.set(is_training=True, path=Config(spelled_digits, count=self.num_train_examples))
    validation.path = Config(spelled_digits, split='validation', count=128)
    sizes = {'num_samples': 9000, 'label_len': 17, 'sample_rate': SAMPLE_RATE, 'batch_size': self.batch_size}
    return [d.set(tokenizer_tpl=Config(CharTokenizer, vocabulary=SYMBOLS), **sizes) for d in (train, validation)]

  def decode_datasets(self) -> list[Config]:
    return [self.datasets()[1]]

  def frontend(self) -> Config:
    return Config(LogMel, sample_rate=SAMPLE_RATE, frame_length=100, frame_step=40, num_mels=24, normalize=True)

  def model(self) -> Config:
    model = self.network(**_SYMBOLS, **_SIZES, frontend=self.frontend())
    model.augmenter_tpl = Config(SpectrumAugmenter, freq_mask_max_bins=2, time_mask_max_frames=3)
    return model.set(params_init=WeightInit.GaussianFanIn())

  def network(self, **sizes: Any) -> Config:
    return conformer_ctc(**sizes)

  def task(self) -> Config:
    task = Config(SpeechRecognitionTask, model=self.model())
    task.train.learner = adamw_learner(learning_rate=4e-3, warmup_steps=50, weight_decay=0.01)
    task.train.set(num_train_steps=400, log_interval_steps=50, eval_interval_steps=200, save_interval_steps=200)
    task.train.inputs_split_mapping = {'map_1d': None, 'map_2d': None}
    return task


@registry.register
class SpelledDigitsTransducer(SpelledDigits):
  """`SpelledDigits` with a transducer instead of CTC; its label network learns how digits are spelled."""

  def network(self, **sizes: Any) -> Config:
    return conformer_transducer(label_dims=32, joint_dims=48, max_labels=24, **sizes)


@registry.register
class SpelledDigitsTiny(SpelledDigits):
  """For tests: 20 steps, and sizes that most meshes have to pad."""

  mesh_axis_names = ('replica', 'data', 'mdl')
  batch_size = 6
  num_train_examples = 60

  def model(self) -> Config:
    model = super().model()
    model.encoder_tpl.set(model_dims=18, num_heads=3, hidden_dims=21)
    model.encoder_tpl.subsampling_tpl.channels = (3, 5)
    return set_sharding(model)

  def task(self) -> Config:
    task = super().task()
    task.train.learner.schedule.warmup_steps = 5
    task.train.set(num_train_steps=20, log_interval_steps=5, eval_interval_steps=None, save_interval_steps=10)
    task.train.inputs_split_mapping = {'map_1d': (_ROWS,), 'map_2d': (_ROWS, None)}
    task.evaluate.max_batches = 4
    return task


@registry.register
class ConformerL(BaseExperiment):
  """The encoder of Conformer L (Gulati et al., 2020), 111M parameters, with CTC, on synthetic sound, over 8 devices."""

  mesh_axis_names = ('replica', 'data', 'mdl')
  ici_mesh_shape: tuple[int, ...] = (1, 8, 1)
  batch_size = 256

  def datasets(self) -> list[Config]:
    features = {
      'audio': Config(RandomFeature, shape=(256_000,), low=-1, high=1),
      'labels': Config(RandomFeature, shape=(80,), dtype='int32', low=1, high=1024),
    }
    return [Config(SyntheticInput, name='train', is_training=True, features=features, batch_size=self.batch_size)]

  def model(self) -> Config:
    return conformer_ctc(**self.sizes())

  def sizes(self) -> dict[str, Any]:
    return {
      'vocab_size': 1024,
      'model_dims': 512,
      'num_layers': 17,
      'num_heads': 8,
      'kernel_size': 32,
      'dropout': 0.1,
      'remat': 'full',
      'fprop_dtype': jnp.bfloat16,
    }

  def task(self) -> Config:
    task = Config(SpeechRecognitionTask, model=set_sharding(self.model()))
    task.train.learner = adamw_learner(learning_rate=1e-3, warmup_steps=10_000, weight_decay=0.01)
    task.train.set(num_train_steps=200_000, eval_interval_steps=None, save_interval_steps=5000)
    task.train.inputs_split_mapping = {'map_1d': (_ROWS,), 'map_2d': (_ROWS, None)}
    return task


@registry.register
class ConformerTransducerL(ConformerL):
  """Conformer L as a transducer, as in the paper (Gulati et al., 2020), 116M parameters, over 8 devices."""

  def model(self) -> Config:
    return conformer_transducer(label_dims=640, joint_dims=640, **self.sizes())


@registry.register
class WhisperSmall(BaseExperiment):
  """Whisper small, 242M parameters (Radford et al., 2022), on synthetic windows of 30 s, over 8 devices."""

  mesh_axis_names = ('replica', 'data', 'mdl')
  ici_mesh_shape: tuple[int, ...] = (1, 8, 1)
  batch_size = 256
  vocab_size, label_len = 51_865, 448

  def datasets(self) -> list[Config]:
    token = Config(RandomFeature, shape=(self.label_len,), dtype='int32', low=0, high=self.vocab_size)
    features = {'audio': Config(RandomFeature, shape=(480_000,), low=-1, high=1), 'ids': token, 'labels': token.clone()}
    return [Config(SyntheticInput, name='train', is_training=True, features=features, batch_size=self.batch_size)]

  def model(self) -> Config:
    return whisper(
      vocab_size=self.vocab_size,
      model_dims=768,
      num_layers=12,
      num_encoder_layers=12,
      num_heads=12,
      max_len=self.label_len,
      remat='full',
      fprop_dtype=jnp.bfloat16,
    )

  def task(self) -> Config:
    task = Config(SingleTask, name='speech', model=set_sharding(self.model()))
    learner = adamw_learner(learning_rate=5e-4, warmup_steps=2048, weight_decay=0.1)
    learner.clip_gradient_norm_to_value = 1.0
    task.train.set(learner=learner, num_train_steps=1_048_576, eval_interval_steps=None, save_interval_steps=5000)
    task.train.inputs_split_mapping = {'map_1d': (_ROWS,), 'map_2d': (_ROWS, None)}
    return task
