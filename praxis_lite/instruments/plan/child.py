"""Compiles a step in a child process, so that a compiler that runs out of memory does not end this process."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from praxis_lite.instruments.plan.compilers import CompileError
from praxis_lite.instruments.plan.inference import InferencePlan
from praxis_lite.instruments.plan.planning import Plan

# The environment variable that tells a child the directory for its compiled program.
VARIABLE = 'PRAXIS_LITE_PLAN_CHILD'
_SECONDS = 3 * 3600.0  # Time limit of a compilation.
_POLL_SECONDS = 0.5  # How often a child checks that its parent still exists.


def compile_in_child(command: Sequence[str], cache: Path) -> None:
  """Runs `command` in a child process, where it makes the same plan and stores the compiled program in `cache`.

  Raises:
    CompileError: the compiler refused the step, the process ended early, or it exceeded the time limit.
  """
  environment = {**os.environ, VARIABLE: str(cache)}
  try:
    child = subprocess.run(
      command, check=False, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_SECONDS
    )
  except subprocess.TimeoutExpired:
    raise CompileError(f'the process of the compiler was killed after {_SECONDS:g} s') from None
  if child.returncode < 0:
    name = signal.Signals(-child.returncode).name
    memory = '; the machine has probably not enough memory for it' if name in ('SIGKILL', 'SIGABRT', 'SIGSEGV') else ''
    raise CompileError(f'the process of the compiler was ended by {name}{memory}')
  try:
    outcome: Mapping[str, object] = json.loads(child.stdout.splitlines()[-1])
  except (ValueError, IndexError):
    last = next((line.strip() for line in reversed(child.stderr.splitlines()) if line.strip()), 'it printed nothing')
    raise CompileError(f'the process of the compiler failed: {last[:400]}') from None
  if outcome['error']:
    refused = CompileError(str(outcome['error']))
    refused.does_not_fit = bool(outcome['does_not_fit'])
    raise refused


def outcome_of(plan: Plan | InferencePlan) -> str:
  """Returns the JSON line that a child prints: the compiler's error, and whether the step does not fit."""
  return json.dumps({'error': plan.failure, 'does_not_fit': plan.is_refused})


def end_with_parent() -> None:
  """Makes this process end soon after its parent ends, for whatever reason."""
  parent = os.getppid()

  def watch() -> None:
    while os.getppid() == parent:
      time.sleep(_POLL_SECONDS)
    os._exit(1)  # The compiler's code cannot be interrupted in another way.

  threading.Thread(target=watch, daemon=True).start()


def go_first_when_memory_is_short() -> None:
  """Makes Linux kill this process first when the machine runs out of memory."""
  with contextlib.suppress(OSError):
    Path('/proc/self/oom_score_adj').write_text('1000')
