"""`praxis-lite completion`: prints a shell script that completes commands, flags and names of experiments.

The script calls `praxis-lite completion names` for the experiments. The shell waits for this call, so it only reads
sources and imports no experiment.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

from absl import flags

from praxis_lite.cli.command import Command, listed_flags
from praxis_lite.cli.command_flags import CommandFlags
from praxis_lite.common.errors import UserError, check_choice

_SHELLS = ('bash', 'zsh')

_BASH = r"""# Completion of praxis-lite for bash: eval "$(praxis-lite completion bash)"
_praxis_lite() {
  local word="${COMP_WORDS[COMP_CWORD]}" flag="" choices="" bare=""
  # Bash takes --flag=value for three words.
  if [[ $word == "=" ]]; then
    flag="${COMP_WORDS[COMP_CWORD-1]}" word=""
  elif [[ ${COMP_WORDS[COMP_CWORD-1]} == "=" ]]; then
    flag="${COMP_WORDS[COMP_CWORD-2]}"
  elif [[ ${COMP_WORDS[COMP_CWORD-1]} == --exp ]]; then
    flag=--exp
  fi
  case "$flag" in
    --exp) COMPREPLY=($(compgen -W "$(praxis-lite completion names 2>/dev/null)" -- "$word")); return ;;
    --*) compopt -o filenames 2>/dev/null; COMPREPLY=($(compgen -f -- "$word")); return ;;
  esac
  if ((COMP_CWORD == 1)); then
    COMPREPLY=($(compgen -W "@COMMANDS@" -- "$word")); return
  fi
  case "${COMP_WORDS[1]}" in
@CASES@
  esac
  if [[ $word == -* ]]; then
    compopt -o nospace 2>/dev/null
    COMPREPLY=($(compgen -W "$choices" -- "$word"))
  else
    compopt -o filenames 2>/dev/null
    COMPREPLY=($(compgen -W "$bare" -- "$word") $(compgen -f -- "$word"))
  fi
}
complete -F _praxis_lite praxis-lite
"""

_ZSH = r"""#compdef praxis-lite
# Completion of praxis-lite for zsh, after compinit: eval "$(praxis-lite completion zsh)"
_praxis_lite() {
  local -a choices
  local bare=""
  if ((CURRENT == 2)); then
    choices=(
@DESCRIBED@
    )
    _describe command choices
    return
  fi
  if [[ $PREFIX == --exp=* ]] || [[ ${words[CURRENT-1]} == --exp ]]; then
    compset -P '--exp='
    choices=(${(f)"$(praxis-lite completion names 2>/dev/null)"})
    compadd -a choices
    return
  fi
  if [[ $PREFIX == --*=* ]]; then
    compset -P '*='
    _files
    return
  fi
  case "${words[2]}" in
@CASES@
  esac
  if [[ $PREFIX == -* ]]; then
    compadd -S '' -- ${=choices}
  else
    compadd -- ${=bare}
    _files
  fi
}
compdef _praxis_lite praxis-lite
"""


def script(shell: str, commands: Mapping[str, Command]) -> str:
  """Returns the script for 'bash' or 'zsh'."""
  shells = {'completion': ' '.join(_SHELLS)}  # Arguments to complete that are not flags, by command.
  cases = [
    f'    {name}) choices="{" ".join(_flag_words(c))}" bare="{shells.get(name, "")}" ;;' for name, c in commands.items()
  ]
  described = [f"      '{c.name}:{c.summary.replace(chr(39), '')}'" for c in commands.values()]
  text = _BASH if shell == 'bash' else _ZSH
  for mark, lines in (('@COMMANDS@', [' '.join(commands)]), ('@CASES@', cases), ('@DESCRIBED@', described)):
    text = text.replace(mark, '\n'.join(lines))
  return text


def _flag_words(command: Command) -> Sequence[str]:
  words = []
  for flag in listed_flags(command):
    words += [f'--{flag.name}', f'--no{flag.name}'] if isinstance(flag, flags.BooleanFlag) else [f'--{flag.name}=']
  return [*words, '--help']


def _run(commands: Mapping[str, Command], values: flags.FlagValues) -> int:
  from praxis_lite.training import registry

  if values.shell == 'names':
    print('\n'.join(registry.names_in_sources()))
    return 0
  if not values.shell:
    raise UserError('name a shell, as in praxis-lite completion bash')
  check_choice('shell', values.shell, _SHELLS)
  print(script(values.shell, commands), end='')
  return 0


def _flags() -> CommandFlags:
  values = CommandFlags()
  values.add_text('shell', 'bash or zsh; names prints only the names of the experiments.', 'zsh', '')
  return values


def make_command(commands: Mapping[str, Command]) -> Command:
  """Returns the command `completion` for these commands."""
  return Command(
    'completion',
    'print a script for completion in bash or zsh',
    'print a script that makes bash or zsh complete commands, flags and names of experiments. To use it in every new '
    'shell, add eval "$(praxis-lite completion bash)" to ~/.bashrc, or the same with zsh to ~/.zshrc, after compinit.',
    'praxis-lite completion bash',
    _flags(),
    functools.partial(_run, commands),
    bare='shell',
    usage='SHELL',
  )
