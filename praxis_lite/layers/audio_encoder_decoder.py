"""The transformer that reads sound and writes text: two convolutions before an encoder, and a decoder (Whisper).

    features = log-mel of a window, scaled to its loudest band (Radford et al., 2022)
    encoder    source = norm(blocks(gelu(conv(gelu(conv(features)))) + positions)), half as many frames as features
    decoder    as in `encoder_decoder.py`

B batch, N samples, S frames of features, M mel bands, C input dims of a convolution, D model dims, T length of targets.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from praxis_lite.common.config import REQUIRED, Config, child, template
from praxis_lite.common.errors import ConfigError
from praxis_lite.layers.activations import get_activation
from praxis_lite.layers.base import Layer
from praxis_lite.layers.encoder_decoder import TransformerEncoderDecoder
from praxis_lite.layers.images import Conv2D
from praxis_lite.layers.log_mel import LogMel
from praxis_lite.layers.position_limit import check_length


class WindowLogMel(LogMel):
  """Features of windows of a fixed length: y = max(x, largest x - 8) / 4 + 1, with x = log10 of the mel features.

  Shorter recordings are filled with silence, which is not marked as padding. A `LogMel`, by contrast, takes recordings
  of any length, and its logarithms are natural.

  Attributes: the same as for `LogMel`, with other defaults, and
    window_length: samples of a window, 30 s at 16 kHz.
  """

  fft_length: int | None = 400
  mel_scale: str = 'slaney'
  unit_area: bool = True
  centered: bool = True
  window_length: int = 480_000

  def setup(self) -> None:
    super().setup()
    self._check_range('window_length', least=self.frame_step)
    if not self.centered or self.normalize or self.window_length % self.frame_step:
      raise ConfigError(
        f'{self.path_name}: expected centered=True, normalize=False, and a window_length that frame_step = '
        f'{self.frame_step} divides, got {self.centered}, {self.normalize} and {self.window_length}'
      )

  def __call__(self, x_BN: jax.Array, paddings: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    """Returns the features, [B, S, M], S = window_length / frame_step, and paddings [B, S], which are all 0.

    Args:
      x_BN: samples, at most `window_length`.
      paddings: [B, N], nonzero for padding after the samples, which may hold any values; None means no padding.

    Raises:
      ConfigError: there are more than `window_length` samples.
    """
    N = x_BN.shape[1]
    if self.window_length < N:
      raise ConfigError(
        f'{self.path_name}.window_length: a row has {N} samples, and a window {self.window_length}; cut the recording'
      )
    if paddings is not None:
      x_BN = jnp.where(paddings != 0, 0, x_BN)
    y_BSM, paddings_BS = super().__call__(jnp.pad(x_BN, ((0, 0), (0, self.window_length - N))))
    y_BSM = y_BSM[:, :-1] / math.log(10)  # Drops the last frame, whose center is the end of the window.
    loudest_B11 = jnp.max(y_BSM, axis=(1, 2), keepdims=True)
    return self.shard(jnp.maximum(y_BSM, loudest_B11 - 8) / 4 + 1), paddings_BS[:, :-1]


class AudioStem(Layer):
  """Two convolutions over time, of width 3; the second one halves the number of frames.

  Attributes:
    input_dims: M.
    output_dims: D.
    activation: name of the activation after each convolution.
    conv_tpl: template of the children `conv_0` and `conv_1`.
    activation_split_dims_mapping: `out`, [B, ceil(S / 2), D].
  """

  input_dims: int = REQUIRED
  output_dims: int = REQUIRED
  activation: str = 'gelu'
  conv_tpl: Config = template(Conv2D)

  conv: list[Conv2D] = child()

  def setup(self) -> None:
    get_activation(self.activation, f'{self.path_name}.activation')
    D = self.output_dims
    sizes = [{'filter_shape': (3, 1, C, D), 'strides': (stride, 1)} for C, stride in ((self.input_dims, 1), (D, 2))]
    self.create_children('conv', templates=[self.conv_tpl.clone(padding='VALID', **size) for size in sizes])

  def __call__(self, x_BSM: jax.Array) -> jax.Array:
    """Returns [B, ceil(S / 2), D]."""
    x_BS1C = x_BSM.astype(self.fprop_dtype)[:, :, None]
    for conv in self.conv:
      x_BS1C = get_activation(self.activation)(conv(jnp.pad(x_BS1C, ((0, 0), (1, 1), (0, 0), (0, 0)))))
    return self.shard(x_BS1C[:, :, 0])


class AudioEncoderDecoder(TransformerEncoderDecoder):
  """An encoder that reads features of sound, and a decoder that writes text.

  Sources are features, [B, S, M] floats, instead of tokens. The encoder reads all frames, including silence.

  Attributes: the same as for `TransformerEncoderDecoder`, and
    num_mels: M.
    stem_tpl: template of the child `stem`, which turns features into inputs of the encoder's blocks.
  """

  num_mels: int = REQUIRED
  stem_tpl: Config = template(AudioStem)

  stem: AudioStem = child()

  def setup(self) -> None:
    super().setup()
    self.create_child('stem', self.stem_tpl.clone(input_dims=self.num_mels, output_dims=self.model_dims))

  def encode(
    self, ids_BS: jax.Array, segment_ids: jax.Array | None = None, segment_pos: jax.Array | None = None
  ) -> jax.Array:
    """Returns the encoder's result, [B, ceil(S / 2), D], for features, [B, S, M].

    Raises:
      ConfigError: segments are given, or there are more frames than positions.
    """
    if segment_ids is not None or segment_pos is not None:
      raise ConfigError(f'{self.path_name}: a row is one window of sound; it has no segments')
    x_BSD = self.stem(ids_BS)
    check_length(self.source_position_limit, x_BSD.shape[1])
    x_BSD = self._embed(lambda x: x, 'encoder', x_BSD, None)
    return self.shard(self._finish(self.encoder(x_BSD, **self._bias('encoder', x_BSD.shape[1])), 'encoder_norm'))

  def init_decode_state(self, source_ids_BS: jax.Array, source_segment_ids: jax.Array | None, max_len: int) -> None:
    """Reads features, [B, S, M], and allocates caches of `max_len` slots. Ignores the segments: all frames are read."""
    super().init_decode_state(source_ids_BS, None, max_len)
