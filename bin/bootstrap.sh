#!/usr/bin/env bash
# Makes the demo remote, a bare repository with three branches of bin/demo-memory, and a first .env.
# What is there already is left alone, so it may run at every start. Commit hashes are the same everywhere.
set -euo pipefail

root=$(dirname -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")")
demo=$root/bin/demo-memory
data=${MEMGW_DATA_DIR:-data}
[[ $data == /* ]] || data=$root/$data
remote=$data/remote-memory.git
env_file=$root/.env

# Everything is built under these names and published by rename. They say which run is building, so that the
# leftovers of a killed run can be told from the work of a live one.
run=$HOSTNAME.$$
scratch=$data/.remote-memory.git.bootstrap-tmp.$run
env_aside=$root/.env.bootstrap-tmp.$run

# No setting, hook, template, signature, ignore or attributes file of the user or the machine reaches git.
# Without HOME and XDG_CONFIG_HOME it has nowhere to look for the last two.
unset "${!GIT_@}" HOME XDG_CONFIG_HOME
export GIT_CONFIG_GLOBAL=/dev/null GIT_CONFIG_NOSYSTEM=1 GIT_ATTR_NOSYSTEM=1
export GIT_AUTHOR_NAME='memgw demo' GIT_AUTHOR_EMAIL=demo@example.com
export GIT_COMMITTER_NAME='memgw demo' GIT_COMMITTER_EMAIL=demo@example.com

shown() { printf '%s' "${1#"$root"/}"; }

say() { printf 'bootstrap: %s\n' "$*"; }

die() {
  say "$@" >&2
  exit 1
}

is_abandoned() { # HOST.PID PATH
  local host=${1%.*} pid=${1##*.} changed
  if [[ $host == "$HOSTNAME" ]]; then
    [[ $pid == "$$" ]] || ! kill -0 "$pid" 2>/dev/null
  else # A container beside us, perhaps. A build takes a second: after an hour nobody is at it.
    changed=$(stat -c %Y -- "$2" 2>/dev/null) && (($(date +%s) - changed > 3600))
  fi
}

remove_leftovers() {
  local path
  for path in "$data"/.remote-memory.git.bootstrap-tmp.* "$root"/.env.bootstrap-tmp.*; do
    if [[ -e $path ]] && is_abandoned "${path##*.bootstrap-tmp.}" "$path"; then
      rm -rf -- "$path"
      say "removed $(shown "$path"), left by a killed run"
    fi
  done
}

# The path is given outright, since a search from inside it could find the project's own repository above.
is_repository() { git --git-dir="$1" rev-parse --git-dir >/dev/null 2>&1; }

stage() { # FOLDER PATTERN...: the folder's files over what the index has; nothing is taken out of it
  local folder=$demo/$1
  git -C "$folder" --work-tree="$folder" -c core.autocrlf=false -c core.fileMode=false \
    add --ignore-removal -- "${@:2}"
}

commit() { # BRANCH PARENT DATE MESSAGE: the index as the branch's new tip; PARENT is empty for the first
  local -x GIT_AUTHOR_DATE=$3 GIT_COMMITTER_DATE=$3
  local tree id
  tree=$(git write-tree)
  # commit-tree runs no hooks and does not read commit.gpgSign.
  id=$(git commit-tree ${2:+-p "$2"} -m "$4" "$tree")
  git update-ref "refs/heads/$1" "$id"
}

build_remote() { # GIT_DIR
  git init --quiet --bare --template= --object-format=sha1 --initial-branch=main "$1"
  local -x GIT_DIR=$1 GIT_INDEX_FILE=$scratch/index
  git config receive.denyDeletes false
  git config receive.denyNonFastForwards false

  stage main README.md glossary.md 'people/*.md' 'preferences/*.md'
  commit main '' '2026-01-15T09:30:00+00:00' 'Start the team memory: glossary, owners, preferences'
  stage main 'decisions/*.md' 'api/*.md' 'incidents/*.md'
  commit main main '2026-02-10T16:12:00+00:00' 'Add the decisions so far, the API conventions and the review of INC-2026-004'
  stage main '*.md'
  commit main main '2026-02-26T11:05:00+00:00' 'Add runbooks, carrier notes and the meetings since January'

  git read-tree main
  stage memory-2026-03 '*.md'
  commit memory/2026-03 main '2026-03-20T15:40:00+00:00' 'March: deploy window on trial, on-call rota without Tomas, notes'

  git read-tree main
  stage task-TASK-001 '*.md'
  commit task/TASK-001 main '2026-03-10T13:25:00+00:00' 'TASK-001: eight retries for webhooks, with plan, findings and open questions'
}

make_remote() {
  if is_repository "$remote"; then
    say "$(shown "$remote") is there already: left alone"
    return
  fi
  mkdir -- "$scratch"
  build_remote "$scratch/repo.git"
  # -T: never into a directory of that name. A directory that has something in it is not replaced either.
  local why
  if why=$(mv -fT -- "$scratch/repo.git" "$remote" 2>&1); then
    say "made $(shown "$remote") with main, memory/2026-03 and task/TASK-001"
  elif is_repository "$remote"; then
    say "$(shown "$remote") was made by another run meanwhile: left alone"
  else
    die "$(shown "$remote") is in the way and is not a Git repository ($why)"
  fi
}

make_env_file() {
  if [[ -e $env_file || -L $env_file ]]; then
    say '.env is there already: left alone'
    return
  fi
  local url=data/remote-memory.git
  if [[ -n ${MEMGW_DATA_DIR:-} ]]; then url=$remote; fi
  if [[ $url == *[!A-Za-z0-9/._-]* ]]; then url="'$url'"; fi
  printf '%s\n' '# Made by bin/bootstrap.sh for the demo memory. .env.example tells what else can be set.' \
    "GIT_REMOTE_URL=$url" >"$env_aside"
  # -n: an .env that came meanwhile stays. Whether that is an exit status depends on the coreutils version.
  mv -nT -- "$env_aside" "$env_file" || true
  [[ -e $env_file ]] || die '.env could not be made'
  if [[ -e $env_aside ]]; then
    say '.env was made by another run meanwhile: left alone'
  else
    say "made .env with GIT_REMOTE_URL=$url"
  fi
}

command -v git >/dev/null || die 'git is needed and was not found'
mkdir -p -- "$data"
remove_leftovers
trap 'rm -rf -- "$scratch" "$env_aside"' EXIT
make_remote
make_env_file
