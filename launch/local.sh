#!/usr/bin/env bash
# Run r3 on this machine: one rank per GPU, or two ranks on CPU.
#
#   launch/local.sh BASE [--section.field value ...]
#
# BASE is a preset, my.yaml, my_presets.py:function, or --from RUN_DIR: see train.py --help.
#
# NPROC   number of ranks (default: the GPUs that torch sees, or 2 without any)
# PYTHON  interpreter (default: .venv/bin/python of this checkout, else the python3 in PATH)
# MAX_RESTARTS  how often failed ranks are started again (default 0); a run resumes by itself
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
unset RANK # some clusters set it for every job: a check as rank 1 would print nothing
python=${PYTHON:-$root/.venv/bin/python}
if [ -z "${PYTHON:-}" ] && ! "$python" -c '' >/dev/null 2>&1; then
  python=$(command -v python3 || true)
  note="r3: $root/.venv has no Python that runs; 'make setup' makes one"
fi
# A Python without torch would end in a traceback. What it cannot import otherwise, it says itself.
find='import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)'
if ! "${python:-false}" -c "$find" >/dev/null 2>&1; then
  [ -z "${note:-}" ] || echo "$note" >&2
  echo "r3: ${python:-python3} has no torch, or does not run: run 'make setup', or set PYTHON" >&2
  exit 2
fi
if [ -n "${note:-}" ]; then echo "$note; taking $python" >&2; fi

for word in "$@"; do
  case $word in
    # These need no ranks, or are refused without a plan.
    -h | --help | --models | --dry-run | --check | --plan-for* | --world[-_]size* | --device[-_]gib* | --host[-_]gib*)
      exec "$python" "$root/train.py" "$@"
      ;;
  esac
done

case ${NPROC:-1} in
  *[!0-9]* | 0*)
    echo "r3: NPROC=$NPROC must be the number of ranks, at least 1" >&2
    exit 2
    ;;
esac
case ${MAX_RESTARTS:-0} in
  *[!0-9]*)
    echo "r3: MAX_RESTARTS=$MAX_RESTARTS must be a number, 0 or more" >&2
    exit 2
    ;;
esac

gpus=0
if command -v nvidia-smi >/dev/null; then # torch is asked, which takes a second: it may be a CPU build
  gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')
fi
if [ "$gpus" -gt 0 ]; then
  ranks=${NPROC:-$gpus}
else
  ranks=${NPROC:-2}
fi

# With GPUs too: torchrun would set 1, and packing and checks on the host would run on one core.
cores=$("$python" -I "$root/r3/runtime/limits.py") # nproc knows no quota of a container
threads=$((cores / ranks))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}

export R3_RESUME="${NPROC:+NPROC=$NPROC }$0 --from RUN_DIR" # what a run that stops tells its user to type

# Mistakes in settings, data or reward end here, in seconds, with one message and exit code 2, instead of once per rank.
exec "$python" "$root/launch/ranks.py" --check --standalone --nproc_per_node "$ranks" \
  --max_restarts "${MAX_RESTARTS:-0}" "$root/train.py" "$@"
