#!/usr/bin/env bash
# compat.sh: tries praxis_lite on each Python of this machine, with the oldest and with the newest release of every
# dependency that pyproject.toml allows there, and prints a table.
#
#   tools/compat.sh                                  all Pythons, both sets, the quick tests of the short set
#   tools/compat.sh --sets=newest --tests=all        the whole suite
#   tools/compat.sh --pythons=python3.13 --tests='tests/layers tests/models'
#   tools/compat.sh --newest-python --sets=newest    what .ci/run does
#
# Each cell of the table has an environment of its own in .venv-compat/, which a later run uses again (--fresh makes it
# anew), and takes the README's commands in short form: a model is trained, on one device and on a mesh, verified, and
# asked for text. It exits with 1 if anything failed. To resolve the oldest releases it installs uv, in an environment.
set -euo pipefail
cd "$(dirname "$0")/.."

# What a new release of JAX or Python breaks first: programs that are traced, lowered and partitioned.
SHORT='tests/jax_internals tests/test_call.py tests/test_layer.py tests/sharding/test_unknown_programs.py
  tests/sharding/test_xla_flags.py tests/plan/test_collectives.py tests/training/test_flops.py
  tests/training/test_partitioned_task.py tests/explain/test_check.py tests/learning/test_probe.py
  tests/decoding/test_sampler.py tests/runs/test_unknown_jax.py'
PYTHONS='' SETS='oldest newest' TESTS=$SHORT WHICH='not slow' FRESH=''
for argument in "$@"; do
  case $argument in
    --pythons=*) PYTHONS=${argument#*=} ;;
    --newest-python) PYTHONS=$(tools/pythons.sh --declared | tail -1) ;;
    --sets=*) SETS=${argument#*=} ;;
    --tests=all) TESTS=tests WHICH='' ;;
    --tests=*) TESTS=${argument#*=} WHICH='' ;;
    --fresh) FRESH=1 ;;
    *) sed -n '2,13p' "$0" >&2; echo "unknown argument: $argument" >&2; exit 2 ;;
  esac
done
PYTHONS=${PYTHONS:-$(tools/pythons.sh)}
[[ -n $PYTHONS ]] || { echo 'there is no Python 3.11 or newer here' >&2; exit 1; }

home=$PWD/.venv-compat
mkdir -p "$home"
# Settings of pip that uv does not read.
certificate=$(${PYTHONS%%[[:space:]]*} -m pip config get global.cert 2> /dev/null || true)
index=$(${PYTHONS%%[[:space:]]*} -m pip config get global.index-url 2> /dev/null || true)
export SSL_CERT_FILE=${SSL_CERT_FILE:-$certificate} UV_INDEX_URL=${UV_INDEX_URL:-$index}
[[ -n $SSL_CERT_FILE ]] || unset SSL_CERT_FILE
[[ -n $UV_INDEX_URL ]] || unset UV_INDEX_URL
unset PYTHONPATH XLA_FLAGS JAX_PLATFORMS VIRTUAL_ENV

install_uv() {
  [[ -x $home/uv/bin/uv ]] && return
  "$1" -m venv "$home/uv"
  "$home/uv/bin/python" -m pip install --quiet --disable-pip-version-check uv
}

# Makes the environment $3 of Python $1 with the set $2.
build() {
  local env=$3 resolution=highest
  [[ $2 == oldest ]] && resolution=lowest-direct
  [[ -n $FRESH ]] && rm -rf "$env"
  [[ $env/.installed -nt pyproject.toml ]] && return
  rm -rf "$env"
  install_uv "$1"
  "$home/uv/bin/uv" venv --quiet --seed --python "$1" "$env"
  # Wheels alone: an old release that has to be compiled for a new Python is not one that anybody installs.
  "$home/uv/bin/uv" pip compile --quiet --only-binary :all: --resolution "$resolution" --extra dev \
    --python "$env/bin/python" --output-file "$env/requirements.txt" pyproject.toml
  "$home/uv/bin/uv" pip install --quiet --python "$env/bin/python" --requirement "$env/requirements.txt"
  "$home/uv/bin/uv" pip install --quiet --python "$env/bin/python" --no-deps --editable .
  touch "$env/.installed"
}

# The README's commands in short form; the first that fails is named.
commands() {
  local bin=$1 run=$2 few='--set=task.train.num_train_steps=4 --set=task.evaluate.max_batches=2'
  rm -rf "$run" "$run-mesh"
  # shellcheck disable=SC2086
  {
    "$bin/praxis-lite" train --exp=lm.StdlibLm --job_log_dir="$run" $few || { echo 'train fails'; return 1; }
    "$bin/praxis-lite" decode --exp=lm.StdlibLm --job_log_dir="$run" --num_samples=2 --prompt='class Reader:' \
      --set=task.model.decoder.max_decode_steps=8 || { echo 'decode fails'; return 1; }
    "$bin/praxis-lite" train --exp=lm.StdlibLmTensor --devices=4 --job_log_dir="$run-mesh" $few ||
      { echo 'train on a mesh fails'; return 1; }
    "$bin/praxis-lite" decode --exp=lm.StdlibLmTensor --devices=4 --job_log_dir="$run-mesh" --num_samples=2 \
      --prompt='class Reader:' --set=task.model.decoder.max_decode_steps=8 || { echo 'decode on a mesh fails'; return 1; }
    "$bin/praxis-lite" verify --exp=lm.StdlibLmTensor --quick || { echo 'verify fails'; return 1; }
  } > "$run.log" 2>&1
}

table=$home/table.md failed=0
echo '| Python | releases | JAX | NumPy | optax | Orbax | TensorFlow | train, decode, verify | tests | minutes |' > "$table"
echo '|---|---|---|---|---|---|---|---|---|---|' >> "$table"
for python in $PYTHONS; do
  version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  for set in $SETS; do
    start=$SECONDS env=$home/$version-$set
    echo "== Python $version, $set releases"
    if ! build "$python" "$set" "$env"; then
      echo "| $version | $set | cannot be installed | | | | | | | |" >> "$table"
      # Of a Python that is newer than those that are declared, some dependencies may have no wheels yet.
      if grep -q "Python :: $version\"" pyproject.toml; then failed=1; fi
      continue
    fi
    of=$("$env/bin/python" -c 'from importlib.metadata import version as v
print(" | ".join(v(n) for n in ("jax", "numpy", "optax", "orbax-checkpoint", "tensorflow-cpu")))')
    ran=ok
    commands "$env/bin" "$env/run" || { ran=$(tail -1 "$env/run.log"); failed=1; tail -20 "$env/run.log"; }
    # shellcheck disable=SC2086
    "$env/bin/python" -m pytest -n 2 --dist=loadfile --no-loadscope-reorder -rfE -m "$WHICH" $TESTS > "$env/tests.log" 2>&1 || failed=1
    grep -E '^(FAILED|ERROR)' "$env/tests.log" || true
    said=$(grep -E '(passed|failed|errors?) in [0-9]' "$env/tests.log" | tail -1 | sed 's/ in .*//' || true)
    echo "| $version | $set | $of | $ran | ${said:-none ran} | $(( (SECONDS - start + 30) / 60 )) |" >> "$table"
  done
done
cat "$table"
exit $failed
