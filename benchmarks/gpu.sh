#!/usr/bin/env bash
# What to run first on a machine with a GPU, in order: about 45 minutes. See benchmarks/gpu.md.
#
#   benchmarks/gpu.sh [FOLDER [STEP...]]     results; default runs/gpu, all steps
#
# A second run adds its lines to the results of the first.
# Exit codes: 0 all steps passed, 1 a step failed or had no time (the rest still ran), 3 no GPU.
# PYTHON   interpreter (default: .venv/bin/python)
# MINUTES  start no step after this time, and end the one that runs (default: no limit)
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-.venv/bin/python}
out=${1:-runs/gpu}
wanted=" ${*:2} "

if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
  echo "no GPU: torch finds no CUDA device (nothing was run)"
  exit 3
fi
mkdir -p "$out"
record=$out/results.jsonl
# Everything is in the repository: nothing waits for a network.
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1
export VLLM_LOGGING_LEVEL=WARNING OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}
failed=0
smi() { nvidia-smi --query-gpu="$1" --format=csv,noheader 2>/dev/null | paste -s -d ';'; }
machine=$(smi name,driver_version,memory.total)

# step NAME SECONDS COMMAND...: run it, keep its output, write one line of JSON
step() {
  local name=$1 limit=$2 start=$SECONDS code=0
  shift 2
  [[ $wanted = "  " || $wanted = *" $name "* ]] || return
  if [ -n "${MINUTES:-}" ]; then
    local left=$((60 * MINUTES - SECONDS))
    if [ $left -lt 30 ]; then
      echo "== $name: no time left"
      failed=1
      return
    fi
    limit=$((limit < left ? limit : left))
  fi
  echo "== $name: $*"
  rm -rf "${out:?}/$name"  # of an earlier run, which this one would resume
  timeout --kill-after=30 "$limit" "$@" </dev/null >"$out/$name.log" 2>&1 || code=$?
  [ $code -eq 0 ] || failed=1
  # The experiment's own line of JSON, if it printed one.
  "$python" - "$name" $code $((SECONDS - start)) "$out/$name.log" "$machine" "$*" >>"$record" <<'PY'
import datetime, importlib.metadata as found, json, pathlib, sys
name, code, seconds, log, machine, command = sys.argv[1:]
lines = pathlib.Path(log).read_text(errors="replace").splitlines()
figures = next((line for line in reversed(lines) if line.startswith('{"experiment"')), "null")
packages = ("torch", "vllm", "megatron-core", "transformers", "triton")
wanted = {"r3-rl", *packages}
versions = {one.name: one.version for one in found.distributions() if one.name in wanted}
when = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
row = {"step": name, "when": when, "machine": machine, "versions": versions, "command": command}
row |= {"exit": int(code), "seconds": int(seconds), "figures": json.loads(figures)}
print(json.dumps(row))
PY
  tail -n 3 "$out/$name.log"
  echo "   exit code $code, $((SECONDS - start)) s"
}
experiment() { step "$1" "$2" "$python" -m benchmarks.gpu "${1%%-*}" "${@:3}"; }
train() { step "$1" "$2" "$python" train.py "${@:3}"; }

tiny="--parallel.ep 1 --model.dtype bfloat16 --engine.dtype bfloat16"
before=$(smi memory.used)

# The shortest first, and what others build on. These need no engine.
experiment facts 120
train check 180 tiny --check $tiny
experiment attention 240
experiment grouped 240
experiment kernels 240
# Two processes on this device: no collectives between them.
experiment ipc 120
experiment layer 180
experiment stash 180
# From the plainest engine to the one that users get.
step doctor-plain 300 "$python" -m r3.doctor tiny $tiny --engine.async_scheduling false
step doctor 300 "$python" -m r3.doctor tiny $tiny
train run 600 tiny $tiny --train.steps 25 --log.dir "$out/run" --checkpoint.every -1
experiment last-run 60 "$out/run"
# Routes, a push against a fresh engine, float32 output layer. One process per engine.
step tests 900 "$python" -m pytest -q -m gpu tests/gpu
experiment model 300 "$out/model"
train large 600 tiny $tiny --model.path "$out/model" --train.steps 3 --eval.path '' \
  --engine.kv_cache_gib 16 --train.micro_batch_tokens 8192 --log.dir "$out/large" \
  --checkpoint.every -1 --checkpoint.export false
experiment last-large 60 "$out/large"
for i in 1 2; do
  train "deterministic-$i" 300 tiny-smoke $tiny --debug.deterministic true --train.steps 4 \
    --log.dir "$out/deterministic-$i"
done
experiment same-deterministic 60 "$out/deterministic-1" "$out/deterministic-2"
for steps in 2 4; do  # the second one resumes the first
  train "deterministic-to-$steps" 300 tiny-smoke $tiny --debug.deterministic true \
    --train.steps $steps --log.dir "$out/deterministic-resumed"
done
experiment same-resumed 60 "$out/deterministic-1" "$out/deterministic-resumed"
step doctor-runner-1 300 env VLLM_USE_V2_MODEL_RUNNER=0 "$python" -m r3.doctor tiny $tiny

sleep 5
printf '{"step": "leave", "machine": "%s", "memory_before": "%s", "memory_after": "%s"}\n' \
  "$machine" "$before" "$(smi memory.used)" >>"$record"
echo "results: $record (copy it to benchmarks/results/gpu.jsonl), logs: $out"
exit $failed
