"""Communication between the processes of a run (texts, decisions, barriers), and the progress of this process."""

from __future__ import annotations

import itertools
import time
from collections import deque

import jax
import numpy as np
from jax.experimental import multihost_utils

from praxis_lite.common.jax_internals import unless_unknown
from praxis_lite.common.jax_internals.processes import service_client

# The most bytes of a text that each process sends to the others, by default.
_TEXT_BYTES = 400
# The longest wait that JAX's service allows: 24 days.
_LONGEST_WAIT_MS = 2**31 - 1

_meetings = itertools.count(1)
# What the main thread is doing, and since when.
_progress = deque([('start-up', time.monotonic())], maxlen=1)


def is_primary_process() -> bool:
  """Whether this process is the one that writes logs and summaries."""
  return jax.process_index() == 0


def broadcast_decision(value: bool) -> bool:
  """Returns the value of process 0 in every process; all of them must call this."""
  return bool(multihost_utils.broadcast_one_to_all(np.asarray(value)))


def gather_texts(text: str, most: int = _TEXT_BYTES) -> list[str]:
  """Returns the texts of all processes, by their index, in every process; all of them must call this.

  At most `most` bytes of each text are sent; all processes call this with the same number.
  """
  if jax.process_count() == 1:
    return [text]
  sent = np.frombuffer(text.encode()[:most].ljust(most, b'\0'), np.uint8)
  received = np.asarray(multihost_utils.process_allgather(sent))
  return [bytes(row).rstrip(b'\0').decode(errors='ignore') for row in received]


def join_by_host(texts: list[str]) -> str:
  """Joins the non-empty texts of `gather_texts` in one line; with several hosts, the hosts' numbers precede a text."""
  if len(texts) == 1:
    return texts[0]
  hosts: dict[str, list[str]] = {}
  for i, text in enumerate(texts):
    if text:
      hosts.setdefault(text, []).append(str(i))
  return '; '.join(f'host {", ".join(indices)}: {text}' for text, indices in hosts.items())


def meet_others() -> None:
  """Waits until all processes have called this as often as this process has; with one process, returns immediately.

  The first collective of a program connects the processes, and XLA waits only some seconds for it. Processes may need
  different times to compile or read, so they meet before that collective. A watchdog notices a process that is missing.
  """
  client = unless_unknown('processes do not wait for each other before they communicate', service_client, None)
  if client is not None:
    client.wait_at_barrier(f'praxis_lite/meeting/{next(_meetings)}', timeout_in_ms=_LONGEST_WAIT_MS)


def note_progress(doing: str) -> None:
  """Records what the main thread begins, such as 'step 12', for watchdogs of this process."""
  _progress.append((doing, time.monotonic()))


def last_progress() -> tuple[str, float]:
  """Returns what the main thread noted last, and when: seconds of `time.monotonic`."""
  return _progress[-1]
