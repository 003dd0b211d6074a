#!/usr/bin/env bash
# What to run first on a machine with a GPU: about 15 minutes on an H100. See benchmarks/gpu.md.
#
#   benchmarks/gpu.sh [--bundle FOLDER] [--out FOLDER] [--minutes N] [--rehearse] [STEP...]
#
# PYTHON   interpreter (default: .venv/bin/python, else python3)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[ -x .venv/bin/python ] && default=.venv/bin/python || default=python3
exec "${PYTHON:-$default}" -m benchmarks.gpu_steps "$@"
