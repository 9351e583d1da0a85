#!/usr/bin/env bash
# Makes .venv, brings Node where the machine has none of version 22 or later, and installs the pinned qmd; with
# --dev also what the tests and checks need, with --to-run only what this machine runs itself: containers bring Node and
# qmd along. All from locked versions. A second run does nothing.
set -euo pipefail

root=$(dirname -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")")
cd "$root"
venv=.venv
python=$venv/bin/python

say() { printf 'install: %s\n' "$*"; }

die() {
  say "$@" >&2
  exit 1
}

find_python() {
  local name
  for name in "${PYTHON:-python3}" python3.14 python3.13 python3.12 python3.11; do
    if command -v "$name" >/dev/null && "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
      command -v "$name"
      return
    fi
  done
  die 'Python 3.11 or later is needed and was not found; PYTHON=… names one'
}

make_venv() {
  local base
  base=$(find_python)
  # A venv without its interpreter, of another version or in a moved checkout is made again.
  if [[ -x $python ]] && "$python" -c "import sys; sys.exit(sys.prefix != '$root/$venv')" 2>/dev/null &&
    "$python" -m pip --version >/dev/null 2>&1; then
    return
  fi
  rm -rf "$venv"
  say "making $venv with $("$base" --version)"
  if ! "$base" -m venv "$venv" >/dev/null 2>&1; then
    # Debian's python3 has no ensurepip until python3-venv is there; its pip can install into a bare venv.
    rm -rf "$venv"
    "$base" -m venv --without-pip "$venv"
    "$base" -m pip --python "$python" install --quiet pip 2>/dev/null ||
      die 'this Python has neither ensurepip nor pip: install python3-venv, or set PYTHON=…'
  fi
}

is_done() { # MARK FILE...: whether these files have been installed already
  [[ -f $1 ]] && [[ $(cat "$1") == "$(digest "${@:2}")" ]]
}

digest() { cat "$@" | sha256sum | cut -d ' ' -f 1; }

pip_install() { # MARK LOCKFILE
  is_done "$1" "$2" && return
  say "installing $2"
  "$python" -m pip install --quiet --disable-pip-version-check --require-hashes --only-binary :all: -r "$2"
  digest "$2" >"$1"
}

has_node() { # NODE: of version 22 or later, with npm beside it
  command -v "$1" >/dev/null && "$1" -e 'process.exit(process.versions.node.split(".")[0] >= 22 ? 0 : 1)' &&
    command -v npm >/dev/null
}

install_node() {
  if [[ ! -f $venv/.installed-node ]] && has_node node; then
    return
  fi
  pip_install "$venv/.installed-node" requirements/node.txt
}

install_qmd() {
  local mark=qmd/node_modules/.installed
  is_done "$mark" qmd/package.json qmd/package-lock.json && return
  say 'installing qmd and its native parts (some 850 MB)'
  # A half installation is thrown away by npm ci itself.
  (cd qmd && PATH="$root/$venv/bin:$PATH" npm ci --loglevel=error)
  digest qmd/package.json qmd/package-lock.json >"$mark"
}

command -v git >/dev/null || die 'git is needed and was not found'
runtime=local
[[ ${1:-} != --to-run ]] || runtime=$(bin/runtime.sh)
# One at a time: make -j, or a second terminal.
if command -v flock >/dev/null; then
  exec 9>"$root/.install.lock"
  flock 9
fi
make_venv
pip_install "$venv/.installed-runtime" requirements/runtime.txt
if [[ ${1:-} == --dev ]]; then
  pip_install "$venv/.installed-dev" requirements/dev.txt
fi
if [[ $runtime == local ]]; then
  install_node
  install_qmd
fi
