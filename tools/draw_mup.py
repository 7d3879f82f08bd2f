"""Trains a small character model at several widths and learning rates, and draws the losses: docs/assets/mup.svg.

python tools/draw_mup.py losses.json docs/assets/mup.svg --seeds 3                    # the picture of the guide
python tools/draw_mup.py losses.json mup.svg --widths 16,32 --steps 20                # a short one

The first file keeps the losses of finished runs, and files next to it those of further seeds, so a stopped sweep
continues where it was. One seed takes a few minutes on two CPU cores.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from praxis_lite.common.config import Config
from praxis_lite.common.jax_internals.flags import known_flags
from praxis_lite.common.trees import NestedDict
from praxis_lite.inputs import TextInput, stdlib_files
from praxis_lite.models import Mup, transformer_lm
from praxis_lite.sharding.weights import WeightInit
from praxis_lite.tasks.language_modelling import LanguageModelTask
from praxis_lite.training.learning import Learner, LinearWarmupCosine
from praxis_lite.training.steps import loss_and_gradients

BASE = 16
WIDTHS = (16, 32, 64, 128)
RATES = tuple(2.0**k for k in range(-10, -2))
QUICK_TO_COMPILE = known_flags({'xla_backend_optimization_level': 0, 'xla_cpu_use_fusion_emitters': False})
KINDS = {'standard': 'standard: the best rate depends on the width', 'mup': 'with Mup: one rate is good for all widths'}
WIDTH, HEIGHT, LEFT, TOP = 330, 230, 52, 34
STYLE = """<style>
text { font: 12px system-ui, sans-serif; fill: #24292f; text-anchor: middle }
text.title { font-weight: 600 } text.left { text-anchor: end } text.start { text-anchor: start }
path { fill: none; stroke-width: 1.8 } .frame { stroke: #d0d7de; stroke-width: 1 }
.w0 { stroke: #9ecae1 } .w1 { stroke: #4f9ccf } .w2 { stroke: #1f6fb0 } .w3 { stroke: #0b3a6e }
circle { fill: #cf5c1a; stroke: none }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .frame { stroke: #30363d }
  .w0 { stroke: #24486b } .w1 { stroke: #3775ad } .w2 { stroke: #6ab0e8 } .w3 { stroke: #cfe6fb }
}
</style>"""


def make_task(width: int, rate: float, steps: int, mup: bool) -> Config:
  """Returns the config of a task: a model of two layers, whose heads, hidden dims and embeddings grow with `width`."""
  model = transformer_lm(vocab_size=256, model_dims=width, hidden_dims=4 * width, num_layers=2, num_heads=2)
  fan_in, block = WeightInit.GaussianFanIn(), model.lm_tpl.transformer_tpl.layers_tpl
  model.lm_tpl.params_init = block.attention_tpl.out_tpl.params_init = block.ff_tpl.out_init = fan_in
  model.lm_tpl.transformer_tpl.unroll = 2
  model.set(tokens_are_bytes=True, packed=False)
  if mup:
    model.mup = Config(Mup, base={'model_dims': BASE, 'hidden_dims': 4 * BASE})
  task = Config(LanguageModelTask, model=model)
  task.train.num_train_steps = steps
  task.train.learner = Config(
    Learner,
    optimizer=Config(optax.adam, b2=0.98),
    learning_rate=rate,
    schedule=Config(LinearWarmupCosine, warmup_steps=max(1, steps // 10)),
  )
  return task


def train(width: int, steps: int, mup: bool, seed: int = 0) -> list[float]:
  """Returns the mean loss of the last fifth of the steps, in nats, for each of the learning rates.

  `seed` determines the initial values and the order of the data. All rates are trained at once: Adam's updates are
  proportional to the rate, so the learner has the rate 1 and its updates are multiplied.
  """
  data = Config(TextInput, name='train', path=Config(stdlib_files, split='train'), is_training=True)
  batches = data.set(seq_len=64, batch_size=8, seed=seed).instantiate()
  task = make_task(width, 1.0, steps, mup).instantiate()
  learner = task.bind_learner()

  @functools.partial(jax.vmap, in_axes=(0, 0, 0, None, None))
  def step(rate: jax.Array, variables: NestedDict, states: Any, number: jax.Array, batch: NestedDict) -> Any:
    loss, gradients = loss_and_gradients(task, variables, number, jax.random.key(1), batch)
    update = learner.update(gradients, loss, variables, states, None, number)
    return jax.tree.map(lambda v, new: v + rate * (new - v), variables, update.mdl_vars), update.opt_states, loss

  rates, losses = jnp.asarray(RATES), []
  one = jax.jit(task.model.init, compiler_options=QUICK_TO_COMPILE)(jax.random.key(seed))
  variables, states = jax.tree.map(lambda x: jnp.stack([x] * len(RATES)), (one, learner.init(one)))
  compiled = jax.jit(step, donate_argnums=(1, 2))
  for number in range(steps):
    variables, states, loss = compiled(rates, variables, states, jnp.int32(number), batches.get_next())
    losses.append(np.asarray(loss))
  return np.mean(losses[-max(1, steps // 5) :], axis=0).tolist()


def _power(rate: float) -> str:
  return f'2<tspan dy="-5" font-size="9">{round(math.log2(rate))}</tspan>'


def draw(by_seed: dict[int, dict[str, float]]) -> str:
  """Returns an SVG with the loss over the learning rate for both parametrisations, given the losses of each seed.

  Each width has a curve, the mean over seeds, and for each seed a circle at its best rate.
  """
  keys = {tuple(key.split()) for key in by_seed[0]}
  widths = sorted({int(w) for _, w, _ in keys})
  rates = sorted({float(r) for _, _, r in keys})
  found = {key: float(np.mean([losses[' '.join(key)] for losses in by_seed.values()])) for key in keys}
  finite = [loss for losses in by_seed.values() for loss in losses.values() if math.isfinite(loss)]
  low, high = min(finite), min(max(finite), min(finite) + 1.6)
  x_of = lambda rate: LEFT + (WIDTH - LEFT - 12) * math.log(rate / rates[0]) / math.log(rates[-1] / rates[0])  # noqa: E731
  y_of = lambda loss: TOP + (HEIGHT - TOP - 44) * (high - min(loss, high)) / (high - low)  # noqa: E731
  lines = []
  for i, (kind, title) in enumerate(KINDS.items()):
    lines.append(
      f'<g transform="translate({i * WIDTH} 0)"><text class="title" x="{WIDTH / 2 + 20}" y="18">{title}</text>'
    )
    bottom = HEIGHT - 44
    lines.append(f'<path class="frame" d="M{LEFT} {TOP}V{bottom}H{WIDTH - 12}"/>')
    for rate in rates[::2]:
      lines.append(f'<text x="{x_of(rate):.1f}" y="{bottom + 16}">{_power(rate)}</text>')
    for loss in np.linspace(low, high, 4):
      lines.append(f'<text class="left" x="{LEFT - 6}" y="{y_of(loss) + 4:.1f}">{loss:.2f}</text>')
    lines.append(f'<text x="{WIDTH / 2 + 20}" y="{bottom + 34}">loss by learning rate</text>')
    for n, width in enumerate(widths):
      curve = [(r, found[kind, str(width), str(r)]) for r in rates if (kind, str(width), str(r)) in found]
      curve = [(r, loss if math.isfinite(loss) else high) for r, loss in curve]
      points = ' '.join(f'{x_of(r):.1f},{y_of(loss):.1f}' for r, loss in curve)
      lines.append(f'<path class="w{n}" d="M{points}"><title>width {width}</title></path>')
      for losses in by_seed.values():
        best, loss = best_rate(losses, kind, width)
        lines.append(f'<circle cx="{x_of(best):.1f}" cy="{y_of(loss):.1f}" r="3"/>')
    lines.append('</g>')
  for n, width in enumerate(widths):
    x = 2 * WIDTH + 8
    lines.append(f'<path class="w{n}" d="M{x} {TOP + 14 + 20 * n}h18"/>')
    lines.append(f'<text class="start" x="{x + 24}" y="{TOP + 18 + 20 * n}">width {width}</text>')
  size = f'width="{2 * WIDTH + 100}" height="{HEIGHT}" viewBox="0 0 {2 * WIDTH + 100} {HEIGHT}"'
  return '\n'.join([f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', STYLE, *lines, '</svg>', ''])


def best_rate(losses: dict[str, float], kind: str, width: int) -> tuple[float, float]:
  """Returns the rate with the lowest loss, and this loss."""
  curve = [(float(key.split()[2]), loss) for key, loss in losses.items() if key.startswith(f'{kind} {width} ')]
  return min(curve, key=lambda point: point[1] if math.isfinite(point[1]) else math.inf)


def describe_best(by_seed: dict[int, dict[str, float]]) -> str:
  """Returns, for each parametrisation and width, the best rate of each seed as its power of 2."""
  widths = sorted({int(key.split()[1]) for key in by_seed[0]})
  return '\n'.join(
    f'{kind:<9} {width:>4}  best rate of each seed: '
    + ' '.join(f'2^{math.log2(best_rate(losses, kind, width)[0]):.0f}' for losses in by_seed.values())
    for kind in KINDS
    for width in widths
  )


def main(losses: str, out: str, widths: str, steps: int, seeds: int) -> None:
  kept = pathlib.Path(losses)
  by_seed = {seed: kept if not seed else kept.with_suffix(f'.{seed}{kept.suffix}') for seed in range(seeds)}
  found = {seed: json.loads(file.read_text()) if file.exists() else {} for seed, file in by_seed.items()}
  for width in map(int, widths.split(',')):
    for kind in KINDS:
      for seed, file in by_seed.items():
        if f'{kind} {width} {RATES[0]}' not in found[seed]:
          trained = train(width, steps, kind == 'mup', seed)
          found[seed] |= {f'{kind} {width} {rate}': loss for rate, loss in zip(RATES, trained)}
          print(kind, width, *(f'{loss:.3f}' for loss in trained), flush=True)
          file.write_text(json.dumps(found[seed], indent=1))
  print(describe_best(found))
  pathlib.Path(out).write_text(draw(found))


if __name__ == '__main__':
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('losses', help='file of the losses of finished runs, JSON')
  parser.add_argument('out', help='file for the picture, an SVG')
  parser.add_argument('--widths', default=','.join(map(str, WIDTHS)), help='model dims of the models')
  parser.add_argument('--steps', type=int, default=100, help='steps of each run')
  parser.add_argument('--seeds', type=int, default=1, help='number of seeds, each with runs of its own')
  main(**vars(parser.parse_args()))
