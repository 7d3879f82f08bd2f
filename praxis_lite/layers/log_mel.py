"""LogMel: spectral features of sound, as models of speech read them.

    spectrum = |DFT(window * frame)|^power;  mel = spectrum . filters;  y = log(max(mel, floor))

The transform is a product with a matrix of cosines and sines, so that rows may be split over a mesh, and accelerators
compute it as they do other products.

B batch, N samples, T frames, L samples of a frame, F frequencies, M mel bands.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from praxis_lite.common.errors import ConfigError, check_choice
from praxis_lite.common.figures import number_of
from praxis_lite.layers.base import Layer
from praxis_lite.layers.precision import to_sum_dtype

MEL_SCALES = ('htk', 'slaney')
WINDOWS = ('hann', 'hamming', 'povey', 'rectangular')
# Slaney's scale is linear up to 1 kHz, 3 / 200 mels for each hertz, and then has 27 mels for each factor of 6.4.
_KNEE_HZ, _KNEE_MEL, _MELS_PER_E = 1000.0, 15.0, 27.0 / np.log(6.4)


class LogMel(Layer):
  """Log-mel features [B, T, M] of samples [B, N]; it has no weights.

  Attributes:
    sample_rate: samples in a second.
    frame_length, frame_step: L, and the distance between frames, in samples; 25 ms and 10 ms at 16 kHz.
    fft_length: length of the transform, to which frames are padded with zeros; None means the next power of 2.
    window: 'hann', 'hamming', 'povey' (Hann's to the power of 0.85, as in Kaldi) or 'rectangular'. Hann's and
      Hamming's are periodic, as in most front ends; Povey's is symmetric.
    power: exponent of the absolute values of the spectrum: 2 for power, 1 for magnitude.
    preemphasis: the share of the previous sample that is subtracted from each sample of a frame; 0 disables it.
    num_mels: M.
    low_hz, high_hz: where the first band begins and the last one ends; `high_hz` None means half of the sample rate.
    mel_scale: 'htk' is 2595 log10(1 + f / 700); 'slaney' is linear up to 1 kHz and logarithmic above.
    unit_area: whether all bands have the same area (Slaney's norm) instead of the same height, 1.
    centered: whether frame t is around sample t * frame_step, with the sound reflected at both of its ends, as in
      librosa; otherwise the frame begins there, and lies inside the sound.
    floor: the smallest energy; smaller ones are raised to it before the logarithm.
    normalize: whether each band has mean 0 and variance 1 over the frames of its row.
    activation_split_dims_mapping: `out`, [B, T, M].
  """

  sample_rate: int = 16_000
  frame_length: int = 400
  frame_step: int = 160
  fft_length: int | None = None
  window: str = 'hann'
  power: float = 2.0
  preemphasis: float = 0.0
  num_mels: int = 80
  low_hz: float = 0.0
  high_hz: float | None = None
  mel_scale: str = 'htk'
  unit_area: bool = False
  centered: bool = False
  floor: float = 1e-10
  normalize: bool = False

  def setup(self) -> None:
    self._check_range('sample_rate', 'frame_length', 'frame_step', 'num_mels', least=1)
    self._check_range('preemphasis', 'low_hz', least=0)
    self._check_range('floor', 'power', above=0)
    check_choice(f'{self.path_name}.window', self.window, WINDOWS)
    check_choice(f'{self.path_name}.mel_scale', self.mel_scale, MEL_SCALES)
    self._fft_length = 2 ** (self.frame_length - 1).bit_length() if self.fft_length is None else self.fft_length
    if self._fft_length < self.frame_length:
      raise ConfigError(
        f'{self.path_name}.fft_length: {self.fft_length} is less than frame_length, {self.frame_length}'
      )
    self._high_hz = self.sample_rate / 2 if self.high_hz is None else self.high_hz
    if not self.low_hz < self._high_hz <= self.sample_rate / 2:
      raise ConfigError(
        f'{self.path_name}.high_hz: {self._high_hz} must be above low_hz, {self.low_hz}, and at most half of the '
        f'sample rate, {self.sample_rate / 2}'
      )

  def __call__(self, x_BN: jax.Array, paddings: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    """Returns the features, [B, T, M], 0 in frames of padding, and their paddings, [B, T] int32, 0 or 1.

    T is 1 + (N - L) // frame_step, or 1 + N // frame_step if `centered`. A frame is padding if it contains a sample of
    padding; if `centered`, only if its center is after the end of the sound.

    Args:
      x_BN: samples.
      paddings: [B, N], nonzero for padding after the samples, which may hold any values; None means no padding.

    Raises:
      ConfigError: there are fewer than L samples, and frames are not `centered`.
    """
    B, N = x_BN.shape
    if not self.centered and self.frame_length > N:
      raise ConfigError(
        f'{self.path_name}.frame_length: {number_of(self.frame_length, "sample")}, but rows have {N}; use longer rows'
      )
    is_sample_BN = jnp.ones((B, N), bool) if paddings is None else paddings == 0
    length_B1 = jnp.sum(is_sample_BN, axis=1, dtype=jnp.int32)[:, None]
    samples_BN = jnp.where(is_sample_BN, to_sum_dtype(x_BN), 0)
    if self.centered:
      frames_BTL = self._centered_frames(samples_BN, length_B1)
      is_frame_BT = (jnp.arange(frames_BTL.shape[1]) * self.frame_step <= length_B1) & (length_B1 > 0)
    else:
      starts_T = np.arange(1 + (N - self.frame_length) // self.frame_step) * self.frame_step
      frames_BTL = samples_BN[:, starts_T[:, None] + np.arange(self.frame_length)]
      is_frame_BT = jnp.asarray(starts_T + self.frame_length) <= length_B1
    y_BTM = self._log_mel(frames_BTL)
    if self.normalize:
      y_BTM = _standardize(y_BTM, is_frame_BT)
    y_BTM = jnp.where(is_frame_BT[..., None], y_BTM, 0).astype(self.fprop_dtype)
    return self.shard(y_BTM), 1 - is_frame_BT.astype(jnp.int32)

  def _centered_frames(self, samples_BN: jax.Array, length_B1: jax.Array) -> jax.Array:
    """Returns frames [B, T, L], frame t centered at sample t * frame_step; the sound is reflected at both ends."""
    N = samples_BN.shape[1]
    starts_T = np.arange(1 + N // self.frame_step) * self.frame_step - self.frame_length // 2
    at_K = np.abs(starts_T[:, None] + np.arange(self.frame_length)).reshape(-1)
    reflected_BK = jnp.where(at_K < length_B1, at_K, 2 * (length_B1 - 1) - at_K)
    inside_BK = jnp.clip(reflected_BK, 0, max(N - 1, 0))
    return jnp.take_along_axis(samples_BN, inside_BK, axis=1).reshape(-1, len(starts_T), self.frame_length)

  def _log_mel(self, frames_BTL: jax.Array) -> jax.Array:
    if self.preemphasis:
      before_BTL = jnp.concatenate([frames_BTL[..., :1], frames_BTL[..., :-1]], axis=-1)
      frames_BTL = frames_BTL - self.preemphasis * before_BTL
    dtype = frames_BTL.dtype
    product = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
    parts_BTX = product(frames_BTL, fourier_matrix(self.window, self.frame_length, self._fft_length).astype(dtype))
    real_BTF, imaginary_BTF = jnp.split(parts_BTX, 2, axis=-1)
    spectrum_BTF = jnp.square(real_BTF) + jnp.square(imaginary_BTF)
    if self.power != 2:
      # The derivative of the square root is infinite at 0.
      is_zero_BTF = spectrum_BTF == 0
      spectrum_BTF = jnp.where(is_zero_BTF, 0, jnp.where(is_zero_BTF, 1, spectrum_BTF) ** (self.power / 2))
    filters_FM = mel_filters(
      self.num_mels, self._fft_length, self.sample_rate, self.low_hz, self._high_hz, self.mel_scale, self.unit_area
    )
    return jnp.log(jnp.maximum(product(spectrum_BTF, filters_FM.astype(dtype)), self.floor))


@functools.lru_cache
def fourier_matrix(window: str, frame_length: int, fft_length: int) -> np.ndarray:
  """Returns [L, 2 F], float64: F cosines, and then F sines, each times the window; F is fft_length / 2 + 1."""
  at_L = np.arange(frame_length)
  periods = {'hann': frame_length, 'hamming': frame_length, 'povey': max(frame_length - 1, 1)}
  cosine_L = np.cos(2 * np.pi * at_L / periods.get(window, 1))
  window_L = {
    'hann': lambda: 0.5 - 0.5 * cosine_L,
    'hamming': lambda: 0.54 - 0.46 * cosine_L,
    'povey': lambda: np.maximum(0.5 - 0.5 * cosine_L, 0) ** 0.85,
    'rectangular': lambda: np.ones(frame_length),
  }[window]()
  turns_LF = at_L[:, None] * np.arange(fft_length // 2 + 1) % fft_length / fft_length
  return window_L[:, None] * np.concatenate([np.cos(2 * np.pi * turns_LF), np.sin(2 * np.pi * turns_LF)], axis=1)


@functools.lru_cache
def mel_filters(
  num_mels: int,
  fft_length: int,
  sample_rate: float,
  low_hz: float = 0.0,
  high_hz: float | None = None,
  mel_scale: str = 'htk',
  unit_area: bool = False,
) -> np.ndarray:
  """Returns triangles over the frequencies of a transform, [F, M] float64, whose corners are equidistant in mels.

  The arguments are fields of `LogMel`. Raises ConfigError if there is no such scale.
  """
  check_choice('mel_scale', mel_scale, MEL_SCALES)
  to_mel, to_hz = _SCALES[mel_scale]
  high_hz = sample_rate / 2 if high_hz is None else high_hz
  corners = to_hz(np.linspace(to_mel(np.asarray(low_hz)), to_mel(np.asarray(high_hz)), num_mels + 2))
  hz_F1 = np.linspace(0, sample_rate / 2, fft_length // 2 + 1)[:, None]
  left, middle, right = corners[:-2], corners[1:-1], corners[2:]
  filters_FM = np.maximum(np.minimum((hz_F1 - left) / (middle - left), (right - hz_F1) / (right - middle)), 0)
  return filters_FM * (2 / (right - left)) if unit_area else filters_FM


def _slaney_mel(hz: np.ndarray) -> np.ndarray:
  above = _KNEE_MEL + np.log(np.maximum(hz, _KNEE_HZ) / _KNEE_HZ) * _MELS_PER_E
  return np.where(hz < _KNEE_HZ, hz * _KNEE_MEL / _KNEE_HZ, above)


def _slaney_hz(mel: np.ndarray) -> np.ndarray:
  above = _KNEE_HZ * np.exp((np.maximum(mel, _KNEE_MEL) - _KNEE_MEL) / _MELS_PER_E)
  return np.where(mel < _KNEE_MEL, mel * _KNEE_HZ / _KNEE_MEL, above)


# Functions from hertz to mels, and back.
_SCALES = {
  'htk': (lambda hz: 2595 * np.log10(1 + hz / 700), lambda mel: 700 * (10 ** (mel / 2595) - 1)),
  'slaney': (_slaney_mel, _slaney_hz),
}


def _standardize(x_BTM: jax.Array, is_frame_BT: jax.Array) -> jax.Array:
  """Returns x with mean 0 and variance 1 over the frames of each row."""
  is_frame_BT1 = is_frame_BT[..., None]
  count_B11 = jnp.maximum(jnp.sum(is_frame_BT1, axis=1, keepdims=True), 1)
  mean_B1M = jnp.sum(jnp.where(is_frame_BT1, x_BTM, 0), axis=1, keepdims=True) / count_B11
  centered_BTM = jnp.where(is_frame_BT1, x_BTM - mean_B1M, 0)
  variance_B1M = jnp.sum(jnp.square(centered_BTM), axis=1, keepdims=True) / count_B11
  return centered_BTM * jax.lax.rsqrt(variance_B1M + 1e-5)
