"""The picture of losses over learning rates: what `tools/draw_mup.py` draws, without training."""

from __future__ import annotations

import math
from xml.etree import ElementTree

from tools.draw_mup import KINDS, draw

SVG = '{http://www.w3.org/2000/svg}'


def test_a_curve_for_each_width_and_a_circle_at_the_best_rate_of_each_seed():
  rates = [2.0**k for k in (-8, -6, -4)]
  losses = {
    f'{kind} {width} {rate}': loss
    for kind in KINDS
    for width in (16, 128)
    for rate, loss in zip(rates, (3.0, 2.5, math.nan))
  }
  root = ElementTree.fromstring(draw({0: losses, 1: losses}))
  circles = root.findall(f'.//{SVG}circle')
  curves = [p for p in root.iter(f'{SVG}path') if p.find(f'{SVG}title') is not None]
  assert len(circles) == 8 and len(curves) == 4
  assert {c.get('cx') for c in circles} == {f'{(52 + (330 - 52 - 12) / 2):.1f}'}
  assert all(len(p.get('d').split()) == len(rates) for p in curves)
