"""Reads and writes WAV files, with samples as numbers from -1 to 1.

    RIFF, size, WAVE, then chunks of (name, size, content):
    fmt    kind of numbers, channels, samples per second, ..., bits per number
    data   the numbers, with all channels of a sample next to one another

N samples, C channels.
"""

from __future__ import annotations

import math
import os
import struct
import wave
from collections.abc import Iterator

import numpy as np

_INTEGERS, _FLOATS, _EXTENSIBLE = 1, 3, 0xFFFE


def read_wav(content: bytes) -> tuple[np.ndarray, int]:
  """Returns the samples, [N] float32, averaged over channels, and the number of samples per second.

  Args:
    content: the content of a WAV file with integers of 8, 16, 24 or 32 bits, or floats of 32 or 64 bits.

  Raises:
    ValueError: the content is not such a file; the message says what it is.
  """
  if content[:4] != b'RIFF' or content[8:12] != b'WAVE':
    raise ValueError('is not a WAV file; convert it to one first')
  chunks = dict(_chunks(content))
  if len(chunks.get(b'fmt ', b'')) < 16 or b'data' not in chunks:
    raise ValueError('is a damaged WAV file: it lacks a chunk "fmt " or "data"')
  kind, channels, rate, _, _, bits = struct.unpack('<HHIIHH', chunks[b'fmt '][:16])
  if kind == _EXTENSIBLE and len(chunks[b'fmt ']) >= 26:
    kind = struct.unpack('<H', chunks[b'fmt '][24:26])[0]
  if not channels or not rate:
    raise ValueError(f'is a damaged WAV file: {channels} channels, {rate} samples in a second')
  samples_N = _to_numbers(chunks[b'data'], kind, bits)
  whole = len(samples_N) // channels * channels
  return samples_N[:whole].reshape(-1, channels).mean(axis=1).astype(np.float32), rate


def write_wav(path: str | os.PathLike[str], samples_N: np.ndarray, sample_rate: int) -> None:
  """Writes the samples of one channel as integers of 16 bits; samples outside of -1 to 1 are clipped."""
  with open(path, 'wb') as file, wave.open(file, 'wb') as writer:
    writer.setparams((1, 2, sample_rate, 0, 'NONE', ''))  # One channel of 2 bytes.
    writer.writeframes(np.round(np.clip(samples_N, -1, 1) * 32767).astype('<i2').tobytes())


def resample(samples_N: np.ndarray, rate: int, new_rate: int) -> np.ndarray:
  """Returns the samples at another rate, [ceil(N new_rate / rate)] float32, low-pass filtered against aliasing."""
  if rate == new_rate or not len(samples_N):
    return samples_N
  from scipy.signal import resample_poly  # Imported here because it is slow to import, and rarely needed.

  common = math.gcd(rate, new_rate)
  return resample_poly(samples_N, new_rate // common, rate // common).astype(np.float32)


def _chunks(content: bytes) -> Iterator[tuple[bytes, bytes]]:
  at = 12
  while at + 8 <= len(content):
    name, size = struct.unpack('<4sI', content[at : at + 8])
    yield name, content[at + 8 : at + 8 + size]
    at += 8 + size + size % 2  # A chunk of odd size has a byte of padding.


def _to_numbers(data: bytes, kind: int, bits: int) -> np.ndarray:
  """Returns the numbers in a WAV file's data, as float64 from -1 to 1."""
  size = bits // 8
  data = data[: len(data) // max(size, 1) * max(size, 1)]
  if kind == _FLOATS and bits in (32, 64):
    return np.frombuffer(data, f'<f{size}').astype(np.float64)
  if kind == _INTEGERS and bits == 8:
    return np.frombuffer(data, np.uint8) / 128.0 - 1
  if kind == _INTEGERS and bits in (16, 32):
    return np.frombuffer(data, f'<i{size}') / 2.0 ** (bits - 1)
  if kind == _INTEGERS and bits == 24:
    bytes_N3 = np.frombuffer(data, np.uint8).reshape(-1, 3)
    wide_N4 = np.concatenate([np.zeros((len(bytes_N3), 1), np.uint8), bytes_N3], axis=1)
    return np.ascontiguousarray(wide_N4).view('<i4')[:, 0] / 2.0**31
  raise ValueError(f'is a WAV file of kind {kind} with {bits} bits; convert it to integers of 16 bits first')
