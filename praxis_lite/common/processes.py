"""Communication between the processes of a run: short texts and decisions."""

from __future__ import annotations

import jax
import numpy as np
from jax.experimental import multihost_utils

# How many bytes of a text each process sends to the others, by default.
_TEXT_BYTES = 400


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
  """Joins the texts from `gather_texts` that are not empty into one line; with several hosts, adds their numbers."""
  if len(texts) == 1:
    return texts[0]
  hosts: dict[str, list[str]] = {}
  for i, text in enumerate(texts):
    if text:
      hosts.setdefault(text, []).append(str(i))
  return '; '.join(f'host {", ".join(indices)}: {text}' for text, indices in hosts.items())
