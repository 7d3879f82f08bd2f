"""Emergency copies on other hosts: each process sends its part to peers in other failure domains.

    failure domains of 2 processes      0 1 | 2 3 | 4 5
    the peer of each process            2 3   4 5   0 1

A lost host takes its own part with it. After a restart, the host in its place gets the part from a peer.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import jax

from praxis_lite.common.errors import UserError, first_line
from praxis_lite.common.figures import format_bytes, number_of
from praxis_lite.common.processes import gather_texts
from praxis_lite.runs.cluster.copy_file import NO_COPY, EmergencyCopy, files_in, save_in
from praxis_lite.runs.cluster.peers import PeerError, Peers
from praxis_lite.training.task import copies_kept

Judge = Callable[[EmergencyCopy], str]  # Returns why a run cannot use a copy; '' if it can.
# The largest size, in bytes, of the list in which a process says which parts it holds.
_MOST_HELD = 2000


class CopiesOnPeers:
  """Sends this process's part of each emergency copy to its peers, and after a restart gets the part that it lacks.

  The peers are the processes `receivers`. In `folder`, this process keeps its own part and the parts that it receives.

  Attributes:
    unsent: the reason that a peer lacks the newest part of this process; '' if all peers have it.
    rates: how fast the last part that a peer received was sent, in bytes per second, for each peer.
  """

  def __init__(self, folder: Path, network: Peers, receivers: Sequence[int]):
    self._process, self._folder, self._network, self._receivers = jax.process_index(), folder, network, receivers
    self.unsent = ''
    self.rates: dict[int, float] = {}
    self.close = network.close

  def send(self, name: str, parts: Sequence[bytes | memoryview]) -> None:
    """Sends a file, in parts, to the peers; `unsent` says what failed."""
    unsent, size = [], sum(map(len, parts))
    for peer in self._receivers:
      began = time.perf_counter()
      try:
        self._network.put(peer, name, parts)
        self.rates[peer] = size / max(time.perf_counter() - began, 1e-9)
      except PeerError as failure:
        unsent.append(first_line(failure))
    self.unsent = '; '.join(unsent)

  def fetch_missing(self, copies: dict[int, EmergencyCopy], oldest: int, reason_against: Judge) -> list[str]:
    """Gets this process's part of the newest copy whose parts are all on some host; returns what failed.

    A process takes its part from its own host if the part is there, and otherwise from any host that has it. `copies`
    has, by step, the copies whose part of this process is on this host. A fetched copy is added. Copies of steps up to
    `oldest` are ignored.
    """
    held = {(step, self._process): copy.save for step, copy in copies.items()}
    for step, file in files_in(self._folder):
      process = file.name.partition('.')[2]
      if process.isdecimal() and int(process) != self._process and step > oldest:
        with contextlib.suppress(*NO_COPY):
          held[step, int(process)] = save_in(file)
    holders: dict[tuple[int, str], dict[int, list[int]]] = {}  # {(step, save): {process of the part: holders}}
    for holder, told in enumerate(gather_texts(_list_parts(held), _MOST_HELD)):
      for word in told.split():
        name, _, save = word.partition(':')
        of_step, _, process = name.partition('.')
        holders.setdefault((int(of_step), save), {}).setdefault(int(process), []).append(holder)
    count = jax.process_count()
    whole = [copy for copy, parts in holders.items() if parts.keys() >= set(range(count))]
    problems = []
    for step, save in sorted(whole, reverse=True):
      problem = ''
      if step not in copies or copies[step].save != save:
        for holder in sorted(holders[step, save][self._process], key=lambda n: (n - self._process) % count):
          if not (problem := self._fetch(holder, step, save, copies, reason_against)):
            break
      problems += [problem] if problem else []
      if not any(gather_texts(problem)):
        break
    return problems

  def _fetch(self, holder: int, step: int, save: str, copies: dict[int, EmergencyCopy], reason_against: Judge) -> str:
    """Gets this process's part of a copy from another process; returns why that fails, '' if it works."""
    name = f'{step}.{self._process}'
    try:
      self._network.get(holder, name, self._folder / name)
      copy = EmergencyCopy(self._folder / name)
    except (PeerError, *NO_COPY) as error:
      return f'the part of step {step} on process {holder} cannot be used: {first_line(error)}'
    if (copy.step, copy.save) != (step, save):
      return f'process {holder} has given a part of another copy than the one of step {step}'
    if not (problem := reason_against(copy)):
      copies[step] = copy
    return problem


def join_peers(
  folder: Path, lineage: int, count: int, failure_domain: int, part_bytes: int
) -> tuple[CopiesOnPeers | None, str, int]:
  """Connects the processes, so that each can send its part, of `part_bytes`, to peers. All processes call this.

  Args:
    count, failure_domain: `peers` and `failure_domain` of `EmergencyCopiesParams`.

  Returns:
    Three values. The first is a `CopiesOnPeers`, or None if all processes have the same folder. The second is a line
    about the network traffic and the memory that the copies take. The third is the largest number of bytes that the
    processes with this folder keep together.

  Raises:
    UserError: there are not enough failure domains.
  """
  process, folders = jax.process_index(), folders_of_all(folder)
  if len(set(folders)) == 1:
    return None, 'emergency copies: all processes have the same folder, so none sends its part to another', 0
  domains = failure_domains(folders, failure_domain)
  if len(set(domains)) <= count:
    raise UserError(
      f'task.train.emergency_copies.peers = {count} needs {count + 1} failure domains, and '
      f'{number_of(len(folders), "process")} in domains of {failure_domain} have {len(set(domains))}; processes that '
      'share a folder are in one domain'
    )
  receivers = receivers_of(domains, count)
  received = Counter(peer for of_one in receivers for peer in of_one)
  kept = [copies_kept(count) * (1 + received[process]) for process in range(len(folders))]
  most = max(kept)
  costs = (
    f'emergency copies: process {process} sends its part of the state, {format_bytes(part_bytes)}, to '
    f'{"process" if count == 1 else "processes"} {", ".join(map(str, receivers[process]))} at each copy; a process '
    f'keeps up to {most} such parts, {format_bytes(most * part_bytes)}'
  )
  in_folder = sum(parts for parts, other in zip(kept, folders) if other == folders[process]) * part_bytes
  return CopiesOnPeers(folder, Peers(folder, lineage), receivers[process]), costs, in_folder


def receivers_of(domains: Sequence[int], count: int) -> list[list[int]]:
  """Returns, for each process, the `count` processes that receive its part; fewer if there are too few domains.

  `domains` has the failure domain of each process. A sender and its receivers are all in different domains. All
  processes receive equally many parts. If one domain is too large for that, each part goes to the domains that have
  received least.
  """
  members: dict[int, list[int]] = {}
  for process, domain in enumerate(domains):
    members.setdefault(domain, []).append(process)
  line = [process for domain in members.values() for process in domain]
  largest = max(map(len, members.values()))
  found: list[list[int]] = [[] for _ in domains]
  if len(line) >= (1 + count) * largest:  # Processes that are `largest` apart in `line` are in different domains.
    for at, process in enumerate(line):
      found[process] = [line[(at + i * largest) % len(line)] for i in range(1, 1 + count)]
    return found
  received = dict.fromkeys(members, 0)
  for process, domain in enumerate(domains):
    others = sorted((received[other] / len(members[other]), other) for other in members if other != domain)
    for _, other in others[:count]:
      found[process].append(members[other][received[other] % len(members[other])])
      received[other] += 1
  return found


def failure_domains(folders: Sequence[str], size: int) -> list[int]:
  """Returns the number of each process's failure domain. Processes that may be lost together have the same number.

  A domain consists of `size` successive processes. Domains with processes that share a folder become one; see
  `folders_of_all`.
  """
  found: list[int] = []
  of_folder: dict[str, int] = {}
  joined: dict[int, int] = {}  # Maps a domain to the earlier one that it was merged into.

  def root(domain: int) -> int:
    while domain in joined:
      domain = joined[domain]
    return domain

  for process, folder in enumerate(folders):
    found.append(process // size)
    pair = sorted({root(process // size), root(of_folder.setdefault(folder, process // size))})
    if len(pair) == 2:
      joined[pair[1]] = pair[0]
  return [root(domain) for domain in found]


def folders_of_all(folder: Path) -> list[str]:
  """Returns a text for each process that identifies its folder. All processes call this."""
  about = os.stat(folder)
  return gather_texts(f'{socket.gethostname()} {about.st_dev} {about.st_ino}')


def _list_parts(held: dict[tuple[int, int], str]) -> str:
  """Returns a text with `step.process:save` for each part, the newest first, cut to `_MOST_HELD` bytes."""
  newest = sorted(held.items(), key=lambda part: -part[0][0])
  text = ''.join(f' {step}.{process}:{save}' for (step, process), save in newest)
  return text if len(text) <= _MOST_HELD else text[: _MOST_HELD + 1].rpartition(' ')[0]
