#!/usr/bin/env bash
# Sets up the virtual environment that the Makefile uses. A torch that is already in it is kept.
#   setup.sh demo   installs only what a run needs (train); without an argument also what tests and checks need
set -euo pipefail
VENV=${VENV:-.venv} PYTHON=${PYTHON:-python3} TORCH=${TORCH:-2.13.0}
export PIP_DISABLE_PIP_VERSION_CHECK=1

die() { echo "setup: $*" >&2; exit 3; }

command -v "$PYTHON" >/dev/null \
  || die "there is no $PYTHON; install Python 3.11 or newer, or name one: make PYTHON=python3.12 ..."
"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
  || die "$PYTHON is $("$PYTHON" -V 2>&1), Python 3.11 or newer is needed; name one: make PYTHON=python3.12 ..."

if [ ! -x "$VENV/bin/python" ] || ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
  echo "setup: making $VENV with $("$PYTHON" -V)"
  "$PYTHON" -m venv "$VENV" >/dev/null 2>&1 \
    || die "$PYTHON cannot make virtual environments; on Debian and Ubuntu: apt-get install python3-venv"
fi
# Compiling every module of torch and transformers takes longer than installing them; imports compile what is used.
pip_install() { "$VENV/bin/python" -m pip install -q --no-compile "$@"; }

# Torch first, by itself: a machine without GPU gets the CPU build where one is to be had, which is
# a tenth of the size. "+cpu" is looked for where pip looks anyway, then in PyTorch's own index.
have=$("$VENV/bin/python" -c 'import importlib.metadata as m; print(m.version("torch"))' 2>/dev/null || true)
want=${TORCH%%+*}
if [ -n "$have" ] && { [ "${have%%+*}" = "$want" ] || [ "$TORCH" = keep ]; }; then
  echo "setup: torch $have is there and is kept"
elif command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then
  echo "setup: a GPU is here; installing torch $TORCH with CUDA"
  pip_install "torch==$TORCH"
else
  echo "setup: no GPU is here; installing the CPU build of torch $want"
  pip_install "torch==$want+cpu" 2>/dev/null \
    || pip_install --retries 1 --timeout 20 \
      --extra-index-url https://download.pytorch.org/whl/cpu "torch==$want+cpu" 2>/dev/null \
    || { echo "setup: no CPU build was found; installing the plain one"; pip_install "torch==$TORCH"; }
fi

extras=train
[ "${1:-}" = demo ] || extras=$extras,dev,deepspeed
export DS_BUILD_OPS=0 # DeepSpeed comes as source: nothing is compiled while it is installed
command -v nvidia-smi >/dev/null && extras=$extras,gpu
echo "setup: installing allranks[$extras] with the versions of constraints.txt"
pip_install -c constraints.txt -e ".[$extras]" || die "the packages could not be installed; pip's own words are above"
"$VENV/bin/python" - <<'PY'
import importlib.metadata as m
print("setup: ready: " + ", ".join(f"{n} {m.version(n)}" for n in ("allranks", "torch", "transformers", "peft")))
PY
if [ "${1:-}" != demo ] && command -v npm >/dev/null; then
  npm install --silent --no-save --prefix "$VENV" axe-core@4.14.1 \
    || echo "setup: axe-core could not be installed; the tests of pages skip its checks"
fi
touch "$VENV/.allranks-demo"
[ "${1:-}" = demo ] || touch "$VENV/.allranks-ready"
