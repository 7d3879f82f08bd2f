"""Draws digits that a run of `generative.DigitsDiffusion` or `DigitsGan` makes; docs/assets/made-digits.png is by it.

python tools/draw_digits.py runs/made-digits docs/assets/made-digits.png
"""

from __future__ import annotations

import argparse
import pathlib
import struct
import zlib

import numpy as np

import praxis_lite

_ROWS, _SCALE = 6, 5


def to_png(pixels: np.ndarray) -> bytes:
  """Returns a PNG file of grey values, uint8 [height, width]."""

  def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack('>I', len(data)) + kind + data + struct.pack('>I', zlib.crc32(kind + data))

  height, width = pixels.shape
  rows = b''.join(b'\0' + row.tobytes() for row in pixels)
  header = struct.pack('>IIBBBBB', width, height, 8, 0, 0, 0, 0)
  chunks = (chunk(b'IHDR', header), chunk(b'IDAT', zlib.compress(rows, 9)), chunk(b'IEND', b''))
  return b'\x89PNG\r\n\x1a\n' + b''.join(chunks)


def main(run: str, out: str) -> None:
  label = np.tile(np.arange(10, dtype=np.int32), _ROWS)
  # The first needs labels, which the second does not read.
  rows = {'label': label, 'seed': np.arange(len(label), dtype=np.int32)}
  images = praxis_lite.open_run(run).load().predict(rows)['image'][..., 0].clip(0, 1)
  framed = np.pad(images, ((0, 0), (1, 1), (1, 1))).reshape(_ROWS, 10, 10, 10)
  page = framed.transpose(0, 2, 1, 3).reshape(_ROWS * 10, 100)
  grey = np.uint8(np.round(255 * (1 - page))).repeat(_SCALE, 0).repeat(_SCALE, 1)
  pathlib.Path(out).write_bytes(to_png(grey))


if __name__ == '__main__':
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('run', help='directory of such a run')
  parser.add_argument('out', help='file for the picture, a PNG')
  main(**vars(parser.parse_args()))
