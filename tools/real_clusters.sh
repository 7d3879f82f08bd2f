#!/usr/bin/env bash
# Trains in two processes under a real Slurm and a real mpirun on this machine, as root on Debian or Ubuntu.
#
#   tools/real_clusters.sh DIRECTORY [PYTHON]
#
# Installs slurm-wlm, munge and openmpi-bin if they are missing; starts munged, slurmctld and slurmd with a configuration
# of one node in DIRECTORY, runs jobs, and ends these daemons again. Exits with 0 if all runs end as they should:
#
#   slurm         srun with two tasks trains to the end
#   preempted     scancel --signal=TERM in the middle: both save the same step and exit with 143; again: to the end
#   launched      the script of `launch --slurm` starts all again after a SIGKILL of one process
#   mpirun        two ranks train to the end, with the loss of the Slurm run
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
work=$(mkdir -p "$1" && cd "$1" && pwd)
python=${2:-python3}
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
export JAX_PLATFORMS=cpu
host=$(hostname -s)
pids=()

say() { printf '\n== %s\n' "$*"; }
fail() { echo "FAILED: $*" >&2; exit 1; }
finish() {
  for pid in "${pids[@]}"; do kill "$pid" 2> /dev/null || true; done
}
trap finish EXIT

if ! command -v slurmctld munged mpirun > /dev/null; then
  say 'installing'
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends slurm-wlm munge openmpi-bin > "$work/apt.log"
fi

say 'starting munged, slurmctld, slurmd'
mkdir -p "$work"/{munge,state,spool}
chmod 755 "$work"
dd if=/dev/urandom of="$work/munge/key" bs=1024 count=1 status=none
chmod 400 "$work/munge/key"
chmod 700 "$work/munge"
socket=$work/munge/socket
munged --foreground --force --key-file="$work/munge/key" --socket="$socket" --pid-file="$work/munge/pid" \
  --log-file="$work/munge/log" --seed-file="$work/munge/seed" &
pids+=($!)
cat > "$work/slurm.conf" << END
ClusterName=here
SlurmctldHost=$host
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$socket
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SlurmctldPort=16817
SlurmdPort=16818
StateSaveLocation=$work/state
SlurmdSpoolDir=$work/spool
SlurmctldPidFile=$work/slurmctld.pid
SlurmdPidFile=$work/slurmd.pid
SlurmctldLogFile=$work/slurmctld.log
SlurmdLogFile=$work/slurmd.log
KillWait=30
NodeName=$host CPUs=$(nproc) State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE
END
export SLURM_CONF=$work/slurm.conf
sleep 1
slurmctld -D -c > "$work/slurmctld.out" 2>&1 &
pids+=($!)
slurmd -D -c > "$work/slurmd.out" 2>&1 &
pids+=($!)
for _ in $(seq 60); do
  sinfo -h -o %T 2> /dev/null | grep -q idle && break
  sleep 1
done
sinfo

train=("$python" -m praxis_lite train --exp=lm.SyntheticLmTiny --devices=2 --noverify --hang_timeout_s=120
  --set 'task.ici_mesh_shape=(1,4,1)')

say 'two tasks under Slurm'
srun --ntasks=2 --overcommit --label "${train[@]}" --job_log_dir="$work/slurm" --set task.train.num_train_steps=20 \
  2>&1 | tee "$work/slurm.txt"
grep -q 'found by Slurm job' "$work/slurm.txt" || fail 'Slurm was not found'
grep -q 'step 20 of 20: saved' "$work/slurm.txt" || fail 'the run under Slurm has not ended'

say 'a job of Slurm that is preempted, and started again'
cat > "$work/job.sh" << END
#!/bin/bash
srun --overcommit --label ${train[*]@Q} --grace_s=60 --job_log_dir=$work/preempted --set task.train.num_train_steps=4000
END
job=$(sbatch --parsable --ntasks=2 --overcommit --output="$work/preempted.txt" "$work/job.sh")
for _ in $(seq 180); do
  grep -q 'step 20/' "$work/preempted.txt" 2> /dev/null && break
  sleep 1
done
scancel --signal=TERM "$job"
for _ in $(seq 120); do
  [ -z "$(squeue -h -j "$job" 2> /dev/null)" ] && break
  sleep 1
done
tail -5 "$work/preempted.txt"
[ "$(grep -c 'Exited with exit code 143\|exit code 143' "$work/preempted.txt")" -ge 1 ] || fail 'no task has exited with 143'
saved=$(ls "$work/preempted/checkpoints" | grep -E '^[0-9]+$' | sort -n | tail -1)
echo "saved step $saved"
srun --ntasks=2 --overcommit "${train[@]}" --job_log_dir="$work/preempted" \
  --set task.train.num_train_steps=$((saved + 10)) 2>&1 | tee "$work/again.txt" | tail -3
grep -q "restored step $saved of" "$work/again.txt" || fail 'it did not continue from the saved step'
grep -q "step $((saved + 10)) of $((saved + 10)): saved" "$work/again.txt" || fail 'the continued run has not ended'

say 'the script of launch --slurm, with a process that is killed'
mkdir -p "$work/bin"
printf '#!/bin/bash\nexec "%s" -m praxis_lite "$@"\n' "$(command -v "$python")" > "$work/bin/praxis-lite"
chmod +x "$work/bin/praxis-lite"
PATH=$work/bin:$PATH praxis-lite launch --slurm --processes=2 --processes_per_node=2 --max_restarts=1 -- \
  "${train[@]:3}" --job_log_dir="$work/launched" --set task.train.num_train_steps=60 \
  --set task.train.save_interval_steps=20 > "$work/launched.sh"
job=$(PATH=$work/bin:$PATH sbatch --parsable --overcommit --output="$work/launched.txt" "$work/launched.sh")
for _ in $(seq 180); do
  [ -e "$work/launched/checkpoints/20" ] && break
  sleep 1
done
kill -9 "$("$python" -c 'import json, sys; print(json.load(open(sys.argv[1]))["pid"])' "$work/launched/heartbeats/1.json")"
for _ in $(seq 180); do
  [ -z "$(squeue -h -j "$job" 2> /dev/null)" ] && break
  sleep 1
done
grep -q 'attempt 0 ended with 137' "$work/launched.txt" || fail 'the step was not started again'
grep -q 'has shown no sign of life for' "$work/launched.txt" || fail 'the loss was not noticed'
grep -q 'step 60 of 60: saved' "$work/launched.txt" || fail 'the run that lost a process has not ended'

say 'two ranks under mpirun'
mpirun --allow-run-as-root --oversubscribe -n 2 --tag-output "${train[@]}" --job_log_dir="$work/mpirun" \
  --set task.train.num_train_steps=20 2>&1 | tee "$work/mpirun.txt"
grep -q 'found by Open MPI' "$work/mpirun.txt" || fail 'Open MPI was not found'
loss() { grep -o 'eval/validation loss [0-9.]*' "$1"; }
[ "$(loss "$work/slurm.txt")" = "$(loss "$work/mpirun.txt")" ] || fail 'the losses differ'

say "all as it should be: $(loss "$work/mpirun.txt") under both"
