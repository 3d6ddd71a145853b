# Sourced by the other scripts: changes to the project's root, and prepares ./.venv with the gateway's requirements
# (`setup_running`) or also with development tools (`setup_venv`). It asks no questions, needs only a Python 3.11 with venv,
# and takes no time if pyproject.toml names the same packages as before.
#
# With PDPROXY_LOCKED, as in continuous integration, `setup_venv` installs exactly requirements/dev.txt, and checks hashes.
#
# With --help a script prints the comment at its head, and neither installs nor runs anything. If .venv is ready,
# `setup_venv` returns, so that a program with options prints them, too.

set -euo pipefail
called_from=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=.venv/bin/python

# vLLM's images set these variables, and prometheus-client would store metrics there.
unset PROMETHEUS_MULTIPROC_DIR prometheus_multiproc_dir

say() { printf '%s\n' "$*" >&2; }

helping=""
for word in "$@"; do
  case $word in
  -h | --help) helping=yes ;;
  --) break ;;
  esac
done
if [ -n "$helping" ]; then
  sed -n '2,${ /^#/!q; s/^# \{0,1\}//p; }' "scripts/$(basename "$0")"
  printf '\n'
fi

# Exits after the head comment, for scripts without further help.
leave_if_helping() { [ -z "$helping" ] || exit 0; }

# For scripts whose only option is --help.
takes_no_arguments() {
  leave_if_helping
  if [ $# -gt 0 ]; then
    say "$0 takes no arguments, and got $1; see --help"
    exit 2
  fi
}

# Installs Debian packages. If that is not possible, prints the sentence, which names the requirement, and exits.
install_packages() { # the sentence, then the packages
  if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    say "$1"
    exit 1
  fi
  say "installing ${*:2}"
  local install=(env DEBIAN_FRONTEND=noninteractive apt-get install --quiet --yes --no-install-recommends "${@:2}")
  "${install[@]}" >/dev/null || { apt-get update --quiet >/dev/null && "${install[@]}" >/dev/null; }
}

# Prints the first interpreter that is new enough and can make a virtual environment. Each one is run, because a name on
# the PATH may be a broken shim.
find_python() {
  local candidate incomplete=""
  for candidate in "${PYTHON:-python3}" python3 python3.13 python3.12 python3.11 python; do
    "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 || continue
    if "$candidate" -c 'import ensurepip, venv' >/dev/null 2>&1; then
      printf '%s\n' "$candidate"
      return
    fi
    incomplete=$candidate
  done
  if [ -n "$incomplete" ]; then
    say "$incomplete cannot make virtual environments: on Debian and Ubuntu, apt-get install python3-venv (or" \
      "$("$incomplete" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])'))"
  else
    say "Python 3.11 or newer is needed, and the PATH has none under the names python3, python3.13, python3.12 and python3.11" \
      "(PYTHON=/path/to/python names another)"
  fi
  return 1
}

# Identifies the contents of .venv: the Python version, the directory, since a virtual environment cannot be moved, and the
# parts of pyproject.toml that name packages. The settings of ruff and mypy are no reason to make it again.
fingerprint() {
  "$python" -c 'import hashlib, os, sys, tomllib
file = tomllib.load(open("pyproject.toml", "rb"))
parts = repr((file["build-system"], file["project"], file["tool"]["setuptools"])).encode()
print(sys.version_info[:3], os.getcwd(), hashlib.sha256(parts).hexdigest())' 2>/dev/null
}

is_made_as() { # file of a fingerprint
  local made_from
  made_from=$(fingerprint) && [ "$made_from" = "$(cat ".venv/$1" 2>/dev/null)" ]
}

# Whether .venv has exactly the packages of the lock file, if they are asked for.
is_locked_as_asked() {
  [ -z "${PDPROXY_LOCKED:-}" ] || cmp --silent requirements/dev.txt .venv/locked.txt
}

make_venv_with() { # file of the fingerprint, pip's requirement, and its description
  local base
  leave_if_helping
  base=$(find_python)
  say "making .venv with $("$base" --version) and $3, once"
  # pip must install into the virtual environment, even if the machine's default is a user, target or prefix install.
  local install=(env -u PIP_TARGET -u PIP_PREFIX -u PIP_ROOT PIP_USER=0 "$python" -m pip install)
  install+=(--disable-pip-version-check)
  if ! is_made_as fingerprint.running; then
    "$base" -m venv --clear .venv
    # Older versions of pip take twice as long to resolve packages, and an upgrade takes two seconds.
    if "$python" -c 'import ensurepip, sys; sys.exit(int(ensurepip.version().split(".")[0]) >= 24)'; then
      "${install[@]}" --quiet --upgrade pip || say "using the pip of this Python"
    fi
  fi
  if [ -n "${PDPROXY_LOCKED:-}" ] && [ "$2" != . ]; then
    "${install[@]}" --quiet --require-hashes -r requirements/dev.txt
    "${install[@]}" --quiet --no-deps --no-build-isolation -e .
    cp requirements/dev.txt .venv/locked.txt
  else
    "${install[@]}" ${4:-} -e "$2"
  fi
  fingerprint >".venv/$1"
}

setup_running() {
  is_made_as fingerprint || is_made_as fingerprint.running ||
    make_venv_with fingerprint.running . "the gateway's requirements (about 15 seconds)" --quiet
}

setup_venv() {
  is_made_as fingerprint && is_locked_as_asked ||
    make_venv_with fingerprint '.[dev]' "the gateway and its development tools (a minute or two)"
}

# Installs a server by which several gateways share state.
setup_store() {
  [ -z "$helping" ] && ! command -v valkey-server >/dev/null && ! command -v redis-server >/dev/null || return 0
  install_packages "a server is needed: apt-get install valkey-server or redis-server (Debian, Ubuntu)" redis-server
}

# Runs the module or package of scripts/lab with the script's name: `lab.kill_timing` for scripts/kill-timing. Paths on its
# command line are relative to the directory of the call.
run_lab() {
  local name
  name=$(basename "$0")
  # These programs count and measure handoffs. Without the option, decoders would compute their short prompts.
  export PROXY_KV__SKIP_PREFILL=${PROXY_KV__SKIP_PREFILL-false}
  CALLED_FROM=$called_from PYTHONPATH=scripts exec "$python" -m "lab.${name//-/_}" "$@"
}
