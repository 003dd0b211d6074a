#!/usr/bin/env bash
# What to run first on a machine with a GPU, in order: about 45 minutes. See benchmarks/gpu.md.
#
#   benchmarks/gpu.sh [FOLDER]     results; default runs/gpu
#
# Exit codes: 0 all steps passed, 1 a step failed (the rest still ran), 3 no GPU.
# PYTHON  interpreter (default: .venv/bin/python)
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-.venv/bin/python}
out=${1:-runs/gpu}

if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
  echo "no GPU: torch finds no CUDA device (nothing was run)"
  exit 3
fi
mkdir -p "$out"
record=$out/results.jsonl
: >"$record"
export VLLM_LOGGING_LEVEL=WARNING OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}
failed=0

# step NAME SECONDS COMMAND...: run it, keep its output, write one line of JSON
step() {
  local name=$1 limit=$2 start=$SECONDS code=0
  shift 2
  echo "== $name: $*"
  timeout --kill-after=30 "$limit" "$@" </dev/null >"$out/$name.log" 2>&1 || code=$?
  [ $code -eq 0 ] || failed=1
  # The experiment's own line of JSON, if it printed one.
  "$python" - "$name" $code $((SECONDS - start)) "$out/$name.log" "$*" >>"$record" <<'PY'
import json, pathlib, sys
name, code, seconds, log, command = sys.argv[1:]
lines = pathlib.Path(log).read_text(errors="replace").splitlines()
figures = next((line for line in reversed(lines) if line.startswith('{"experiment"')), "null")
row = {"step": name, "command": command, "exit": int(code), "seconds": int(seconds)}
print(json.dumps(row | {"figures": json.loads(figures)}))
PY
  tail -n 3 "$out/$name.log"
  echo "   exit code $code, $((SECONDS - start)) s"
}
experiment() { step "$1" "$2" "$python" -m benchmarks.gpu "${1%%-*}" "${@:3}"; }
train() { step "$1" "$2" "$python" train.py "${@:3}"; }

tiny="--parallel.ep 1 --model.dtype bfloat16 --engine.dtype bfloat16"
used() { nvidia-smi --query-gpu=memory.used --format=csv,noheader | paste -s -d ' '; }
before=$(used)

experiment facts 120
train check 180 tiny --check $tiny
experiment attention 240
experiment grouped 240
experiment kernels 240
# From the plainest engine to the one that users get.
step doctor-plain 300 "$python" -m r3.doctor tiny $tiny --engine.async_scheduling false
step doctor 300 "$python" -m r3.doctor tiny $tiny
step doctor-runner-1 300 env VLLM_USE_V2_MODEL_RUNNER=0 "$python" -m r3.doctor tiny $tiny
# Routes, a push against a fresh engine, float32 output layer.
step tests 900 "$python" -m pytest -q -m gpu tests/gpu
# One process per engine, two on this device: no collectives between them.
experiment ipc 120
train run 600 tiny $tiny --train.steps 25 --log.dir "$out/run" --checkpoint.every 0
experiment last-run 60 "$out/run"
for i in 1 2; do
  train "deterministic-$i" 300 tiny-smoke $tiny --debug.deterministic true --train.steps 4 \
    --log.dir "$out/deterministic-$i"
done
experiment same-deterministic 60 "$out/deterministic-1" "$out/deterministic-2"
experiment layer 180
experiment stash 180
experiment model 300 "$out/model"
train large 600 tiny $tiny --model.path "$out/model" --train.steps 3 --eval.path '' \
  --train.micro_batch_tokens 8192 --log.dir "$out/large" --checkpoint.every 0
experiment last-large 60 "$out/large"

sleep 5
printf '{"step": "leave", "memory_before": "%s", "memory_after": "%s"}\n' "$before" "$(used)" \
  >>"$record"
echo "results: $record (copy it to benchmarks/results/gpu.jsonl), logs: $out"
exit $failed
