"""XLA flags that the steps of a task are compiled with.

They are options of each program, not of the process: a plan for other chips compiles with the flags of these chips, and
a flag that an XLA does not know is an error that can be handled, where one in XLA_FLAGS ends the process. Of several
that say the value of a flag, the first counts:

    XLA_FLAGS                          the environment variable
    task.xla_flags                     the field; None leaves a flag to XLA
    DEFAULTS[platform]                 unless task.default_xla_flags is False; left out where XLA does not know it

What XLA does by itself already has no flag here: of jaxlib 0.10.2, hiding latencies (its schedule is the same with
xla_gpu_enable_latency_hiding_scheduler), products by the faster of Triton and cuBLAS, and command buffers.
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
    # Older versions need it for the others to have an effect.
    'xla_gpu_enable_latency_hiding_scheduler': True,
    # What a layer of a loop exchanges begins in the iteration before, or ends in the next one.
    'xla_gpu_enable_pipelined_all_gather': True,
    'xla_gpu_enable_pipelined_all_reduce': True,
    'xla_gpu_enable_pipelined_reduce_scatter': True,
    # Two iterations of a loop are one, which spares the copies between them.
    'xla_gpu_enable_while_loop_double_buffering': True,
  }
}


class XlaFlags(NamedTuple):
  """Flags of a program.

  Attributes:
    defaults: those of the platform.
    given: those of the config; they count before the defaults.
  """

  defaults: Mapping[str, Flag] = {}
  given: Mapping[str, Flag] = {}

  @property
  def all(self) -> dict[str, Flag]:
    return {**self.defaults, **self.given}

  def compile(self, lowered: jax.stages.Lowered, **more: Flag) -> jax.stages.Compiled:
    """Compiles with these flags and `more`.

    Raises:
      ConfigError: XLA refuses a flag of the config; of the defaults, those that it does not know are left out.
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
# How XLA says that it does not know a flag, or that its value is not one.
_REFUSED = re.compile(r"INVALID_ARGUMENT: (?:No such compile option: '|While setting option )(\w+)")


def xla_flags(
  platform: str,
  num_devices: int,
  given: Mapping[str, Flag | None] | None = None,
  *,
  use_defaults: bool = True,
) -> XlaFlags:
  """Returns the flags of programs for a mesh.

  Args:
    platform: 'cpu', 'gpu' or 'tpu'.
    num_devices: of the mesh.
    given: flags of a config; None as a value leaves one to XLA.
    use_defaults: whether those of `DEFAULTS` are among them.
  """
  given = given or {}
  own = flag_names(' '.join(split_flags(os.environ.get('XLA_FLAGS', ''))))
  defaults = DEFAULTS.get(platform, {}) if use_defaults and num_devices > 1 else {}
  return XlaFlags(
    {name: value for name, value in defaults.items() if name not in own and name not in given},
    {name: value for name, value in given.items() if value is not None and name not in own},
  )


def describe_flags(num_devices: int, given: Mapping[str, Flag | None] | None, *, use_defaults: bool) -> list[str]:
  """Returns a line with the flags of each platform that has any; arguments as of `xla_flags`."""
  platforms = ('gpu', 'tpu', 'cpu')
  found = {name: xla_flags(name, num_devices, given, use_defaults=use_defaults).all for name in platforms}
  return [f'{name}: {", ".join(f"{k}={_text(v)}" for k, v in flags.items())}' for name, flags in found.items() if flags]


def _text(value: Flag) -> str:
  return str(value).lower() if isinstance(value, bool) else str(value)


def check_xla_flags(path: str, given: object) -> None:
  """Raises ConfigError, naming the field at `path`, unless it is a dict of values by the names of flags, or None."""
  if given is None:
    return
  if not isinstance(given, Mapping):
    raise ConfigError(f"{path}: expected a dict, such as {{'xla_gpu_enable_triton_gemm': False}}, got {given!r}")
  for name, value in given.items():
    if not isinstance(name, str) or not name.startswith('xla_'):
      raise ConfigError(f"{path}: expected names that begin with 'xla_', without '--', got {name!r}")
    if value is not None and not isinstance(value, bool | int | str):
      raise ConfigError(f'{path}: the value of {name} is a bool, an int or a text, or None, got {value!r}')
