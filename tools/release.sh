#!/usr/bin/env bash
# release.sh: builds the wheel and the source archive in dist/, and tries the wheel in an empty environment.
#
#   tools/release.sh             refuses a version whose entry in CHANGELOG.md has no date
#   tools/release.sh --rehearse  builds and tries an unreleased version too
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-.venv/bin/python}
version=$("$python" -c 'import tomllib; print(tomllib.load(open("pyproject.toml", "rb"))["project"]["version"])')
if [[ ${1:-} != --rehearse ]]; then
  grep -qE "^## $version \([0-9]{4}-[0-9]{2}-[0-9]{2}\)$" CHANGELOG.md ||
    { echo "CHANGELOG.md has no line '## $version (YYYY-MM-DD)': date the entry first" >&2; exit 1; }
  [[ -z $(git status --porcelain) ]] || { echo 'there are uncommitted changes' >&2; exit 1; }
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
rm -rf dist
"$python" -m build --outdir dist . > "$work/build.log" || { tail -20 "$work/build.log" >&2; exit 1; }
ls -l dist

"$python" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check dist/*.whl mypy
cd "$work"  # Away from the checkout, so that only the wheel is found.
praxis=$work/venv/bin/praxis-lite
export JAX_PLATFORMS=cpu
[[ $("$praxis" --version) == "praxis_lite $version" ]] || { echo 'the wheel has another version' >&2; exit 1; }
"$praxis" list > list.txt && grep -q lm.StdlibLm list.txt
"$praxis" show --exp=lm_sizes.Llama8B > show.txt && grep -q softmax show.txt
"$praxis" train --exp=lm.StdlibLmTiny --devices=4 --set 'task.ici_mesh_shape=(4,)' --job_log_dir=run
"$praxis" decode --job_log_dir=run --prompt='def ' --max_tokens=4
cat > user.py <<'PY'
from praxis_lite import Config, Layer
from praxis_lite.layers import Linear

config: Config[Linear] = Config(Linear, input_dims=2, output_dims=3)
layer: Layer = config.instantiate()
PY
"$work/venv/bin/mypy" --strict-optional user.py
echo "dist/ has praxis_lite $version, and its wheel works in an empty environment"
