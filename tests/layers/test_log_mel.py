"""Log-mel features against their formulas in NumPy and the numbers of another front end, also of padded rows."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.layers import LogMel, mel_filters

SOUND = np.sin(np.arange(50) ** 2 / 40.0)
SMALL = {'sample_rate': 8000, 'frame_length': 24, 'frame_step': 10, 'num_mels': 4, 'low_hz': 100.0}
# What `spectrogram` of `transformers.audio_utils` computes of SOUND in float64, with the fields below.
THEIRS = {
  'htk': [
    [3.29132, 3.62281, 1.69508, -3.16848],
    [-0.01452, 3.20744, 3.76884, 1.07207],
    [-4.34417, 0.15973, 3.67292, 3.44124],
  ],
  'slaney': [
    [-4.87939, -6.03361, -8.09578, -10.17049],
    [-4.00965, -4.40355, -6.19591, -8.79562],
    [-5.35311, -4.12767, -4.49047, -6.69587],
    [-7.62956, -5.64413, -4.2698, -5.01766],
    [-8.4762, -7.6142, -5.44635, -4.39169],
    [-6.55134, -6.33429, -5.82101, -4.55823],
  ],
}
FIELDS = {'htk': {}, 'slaney': {'mel_scale': 'slaney', 'unit_area': True, 'centered': True, 'power': 1.0}}


def features(sound, paddings=None, **fields):
  layer = Config(LogMel, **{**SMALL, **fields}).instantiate()
  return [np.asarray(x) for x in layer.apply({}, np.asarray(sound, np.float32), paddings)[0]]


@pytest.mark.parametrize('scale', ['htk', 'slaney'])
def test_the_numbers_are_those_of_another_front_end(scale):
  found, paddings = features(SOUND[None], **FIELDS[scale])
  np.testing.assert_allclose(found[0], THEIRS[scale], atol=2e-4)
  assert not paddings.any()


def triangle(hz, left, middle, right):
  return max(0.0, min((hz - left) / (middle - left), (right - hz) / (right - middle)))


@pytest.mark.parametrize('window', ['hann', 'hamming', 'povey', 'rectangular'])
def test_it_is_its_formula(window):
  """Frame by frame with NumPy's FFT of 64 points, preemphasis of 0.97, and triangles written out."""
  L, F, M = 24, 64, 4
  formulas = {
    'hann': lambda i: 0.5 - 0.5 * math.cos(2 * math.pi * i / L),
    'hamming': lambda i: 0.54 - 0.46 * math.cos(2 * math.pi * i / L),
    'povey': lambda i: (0.5 - 0.5 * math.cos(2 * math.pi * i / (L - 1))) ** 0.85,
    'rectangular': lambda i: 1.0,
  }
  mels = np.linspace(2595 * math.log10(1 + 100 / 700), 2595 * math.log10(1 + 3000 / 700), M + 2)
  corners = [700 * (10 ** (mel / 2595) - 1) for mel in mels]
  expected = []
  for start in range(0, 50 - L + 1, 10):
    frame = SOUND[start : start + L]
    frame = [(x - 0.97 * frame[max(i - 1, 0)]) * formulas[window](i) for i, x in enumerate(frame)]
    power = np.abs(np.fft.rfft(frame, F)) ** 2
    bands = [sum(p * triangle(i * 8000 / F, *corners[m : m + 3]) for i, p in enumerate(power)) for m in range(M)]
    expected.append(np.log(bands))
  found, _ = features(SOUND[None], window=window, fft_length=F, preemphasis=0.97, high_hz=3000.0)
  np.testing.assert_allclose(found[0], expected, atol=3e-4)


def test_filters_of_equal_area_and_of_equal_height():
  for scale in ('htk', 'slaney'):
    heights, areas = (mel_filters(20, 4096, 16_000, 50.0, 7000.0, scale, unit) for unit in (False, True))
    np.testing.assert_allclose(areas.sum(0) * 16_000 / 4096, 1, rtol=0.02)
    assert heights.shape == (2049, 20) and heights.max() <= 1 and (heights.max(0) > 0.9).all()
    assert heights[: int(50 * 4096 / 16_000)].max() < 1e-9 and heights[7000 * 4096 // 16_000 :].max() < 1e-9
  with pytest.raises(ConfigError, match=r"mel_scale: .*'mel'"):
    mel_filters(20, 4096, 16_000, mel_scale='mel')


@pytest.mark.parametrize('centered', [False, True])
def test_rows_with_padding_have_the_features_of_their_sound_alone(centered):
  """Padding that is NaN, a row that is too short for a frame, and one without a sample."""
  lengths = (50, 37, 24, 23, 0)
  paddings = np.arange(50) >= np.array(lengths)[:, None]
  sound = np.where(paddings, np.nan, SOUND)
  for normalize in (False, True):
    found, found_paddings = features(sound, paddings, centered=centered, normalize=normalize)
    for row, length in enumerate(lengths):
      count = (1 + length // 10) * (length > 0) if centered else max(0, 1 + (length - 24) // 10)
      assert found_paddings[row].tolist() == [0] * count + [1] * (found.shape[1] - count)
      assert not found[row, count:].any()
      if count:
        alone, _ = features(SOUND[None, :length], centered=centered, normalize=normalize)
        np.testing.assert_allclose(found[row, :count], alone[0], atol=2e-4)
        if normalize and count > 1:
          np.testing.assert_allclose(found[row, :count].mean(0), 0, atol=1e-3)
          np.testing.assert_allclose(found[row, :count].std(0), 1, atol=1e-2)


def test_silence_is_finite_with_finite_gradients():
  layer = Config(LogMel, **SMALL, power=1.0, normalize=True).instantiate()
  value, grad = jax.value_and_grad(lambda x: jnp.sum(layer.apply({}, x)[0][0] ** 2))(jnp.zeros((2, 50)))
  assert np.isfinite(value) and np.isfinite(grad).all()


@pytest.mark.parametrize(
  'fields, message',
  [
    ({'fft_length': 16}, r'fft_length: 16 is less than frame_length, 24'),
    ({'high_hz': 5000.0}, r'high_hz: 5000\.0 must be above low_hz, 100\.0, and at most .* 4000'),
    ({'low_hz': 4000.0}, 'must be above low_hz'),
    ({'window': 'han'}, "window.*'hann'"),
    ({'mel_scale': 'bark'}, 'mel_scale'),
    ({'floor': 0.0}, 'floor'),
    ({'frame_step': 0}, 'frame_step'),
    ({'frame_length': 51}, r'frame_length: 51 samples, but rows have 50'),
  ],
)
def test_mistakes_are_named(fields, message):
  with pytest.raises(ConfigError, match=message):
    features(SOUND[None], **fields)
