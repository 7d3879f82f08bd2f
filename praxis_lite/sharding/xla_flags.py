"""XLA flags for compiling the steps of a task.

The flags are options of each program, not of the process, so a plan for other chips compiles with the flags of these
chips. An unknown flag is then an error that can be handled, whereas in XLA_FLAGS it would end the process. If several
of the following set a flag, the first one counts:

    XLA_FLAGS                          the environment variable
    task.xla_flags                     the field; None leaves a flag to XLA
    DEFAULTS[platform]                 on several devices, unless task.default_xla_flags is False; flags that XLA does
                                       not know are ignored

Optimizations that XLA does by default need no flag here. In jaxlib 0.10.2 these are latency hiding (the schedule is the
same with xla_gpu_enable_latency_hiding_scheduler), the choice between Triton and cuBLAS, and command buffers.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import NamedTuple

import jax

from praxis_lite.common.errors import ConfigError, first_line
from praxis_lite.common.jax_internals.flags import flag_names, split_flags

Flag = bool | int | str

# For steps on several devices.
DEFAULTS: Mapping[str, Mapping[str, Flag]] = {
  'gpu': {
    # In older versions of XLA, the flags below have no effect without this one.
    'xla_gpu_enable_latency_hiding_scheduler': True,
    # The collectives of a layer in a loop begin in the iteration before, or end in the next one.
    'xla_gpu_enable_pipelined_all_gather': True,
    'xla_gpu_enable_pipelined_all_reduce': True,
    'xla_gpu_enable_pipelined_reduce_scatter': True,
    # Merges two iterations of a loop into one, so no copies are needed between them.
    'xla_gpu_enable_while_loop_double_buffering': True,
  }
}


class XlaFlags(NamedTuple):
  """Flags of a program: those of the platform, and those of the config, which override them."""

  defaults: Mapping[str, Flag] = {}
  given: Mapping[str, Flag] = {}

  @property
  def all(self) -> dict[str, Flag]:
    return {**self.defaults, **self.given}

  def compile(self, lowered: jax.stages.Lowered, **more: Flag) -> jax.stages.Compiled:
    """Compiles with these flags and `more`.

    Raises:
      ConfigError: XLA rejects a flag of the config. Unknown flags of the defaults are left out.
    """
    options = {name: x if isinstance(x, bool) else str(x) for name, x in {**self.all, **more}.items()}
    while True:
      try:
        return lowered.compile(compiler_options=options or None)
      except RuntimeError as error:
        refused = _REFUSED.search(str(error))
        name = refused[1] if refused else ''
        if name in self.given:
          raise ConfigError(f'task.xla_flags: {first_line(error).removeprefix("INVALID_ARGUMENT: ")}') from error
        if name not in self.defaults:
          raise
        del options[name]


NO_FLAGS = XlaFlags()
# XLA's messages about a flag that it does not know, and about a value that it rejects.
_REFUSED = re.compile(r"INVALID_ARGUMENT: (?:No such compile option: '|While setting option )(\w+)")


def xla_flags(
  platform: str, num_devices: int, given: Mapping[str, Flag | None] | None = None, *, use_defaults: bool = True
) -> XlaFlags:
  """Returns the flags of programs for a mesh of `num_devices` on a platform: 'cpu', 'gpu' or 'tpu'.

  `given` are the flags that a config sets; None leaves a flag to XLA. On a mesh of several devices, `use_defaults` adds
  the flags in `DEFAULTS`.
  """
  given = given or {}
  own = flag_names(' '.join(split_flags(os.environ.get('XLA_FLAGS', ''))))
  defaults = DEFAULTS.get(platform, {}) if use_defaults and num_devices > 1 else {}
  return XlaFlags(
    {name: value for name, value in defaults.items() if name not in own and name not in given},
    {name: value for name, value in given.items() if value is not None and name not in own},
  )


def describe_flags(num_devices: int, given: Mapping[str, Flag | None] | None, *, use_defaults: bool) -> list[str]:
  """Returns a line for each platform that has flags; the arguments are the same as for `xla_flags`."""
  lines = []
  for platform in ('gpu', 'tpu', 'cpu'):
    flags = xla_flags(platform, num_devices, given, use_defaults=use_defaults).all
    texts = [f'{name}={str(x).lower() if isinstance(x, bool) else x}' for name, x in flags.items()]
    lines += [f'{platform}: {", ".join(texts)}'] if texts else []
  return lines


def check_xla_flags(path: str, given: object) -> None:
  """Raises ConfigError, which names the field at `path`, unless `given` is None or a dict of values by flag name."""
  if given is None:
    return
  if not isinstance(given, Mapping):
    raise ConfigError(f"{path}: expected a dict, such as {{'xla_gpu_enable_triton_gemm': False}}, got {given!r}")
  for name, value in given.items():
    if not isinstance(name, str) or not name.startswith('xla_'):
      raise ConfigError(f"{path}: expected names that begin with 'xla_', without '--', got {name!r}")
    if value is not None and not isinstance(value, bool | int | str):
      raise ConfigError(f'{path}: the value of {name} is a bool, an int or a text, or None, got {value!r}')
