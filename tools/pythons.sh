#!/usr/bin/env bash
# pythons.sh [--declared]: prints the Pythons of this machine that are 3.11 or newer, one path a minor version, the
# newest last; with --declared only those that pyproject.toml declares. It looks on PATH and where pyenv has them. What
# does not run, or has no venv, is none: such are pyenv's shims.
set -euo pipefail

OLDEST=11 project=$(dirname "$0")/../pyproject.toml

candidates() {
  local folder
  while read -r folder; do
    compgen -G "$folder/python3.*" || true
  done < <(tr : '\n' <<< "$PATH"; compgen -G "${PYENV_ROOT:-$HOME/.pyenv}/versions/*/bin" || true)
}

declare -A found=()
while read -r path; do
  [[ $(basename "$path") =~ ^python3\.([0-9]+)$ ]] || continue
  minor=${BASH_REMATCH[1]}
  if (( minor < OLDEST )) || [[ -n ${found[$minor]:-} ]]; then continue; fi
  if [[ ${1:-} == --declared ]] && ! grep -q "Python :: 3.$minor\"" "$project"; then continue; fi
  said=$("$path" -c 'import sys, ensurepip, venv; print(sys.version_info.minor)' 2> /dev/null) || continue
  if [[ $said == "$minor" ]]; then found[$minor]=$path; fi
done < <(candidates)
for minor in $(printf '%s\n' "${!found[@]}" | sort -n); do echo "${found[$minor]}"; done
