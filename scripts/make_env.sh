#!/usr/bin/env bash
# Make .venv: the CPU profile's lock by hash, our patched wheels, samebits itself. Does nothing if nothing changed.
#   PYTHON=/path/to/python3.12   use this interpreter; else PATH, pyenv, or one that uv can fetch
# The stamp is there only while .venv is whole: a run that was killed amid an install leaves none, and the next one starts
# from an empty .venv.
set -euo pipefail
cd "$(dirname "$0")/.."

lock=manifests/locks/cpu.txt
build_lock=manifests/locks/build.txt
wheels=build/wheels/cpu
stamp=.venv/samebits-stamp
say() { echo "env: ${SECONDS}s $*" >&2; }
fail() { say "error: $*"; exit 1; }

is_312() { "$1" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' >/dev/null 2>&1; }

find_python() { # prints a Python 3.12, or nothing
    local candidate
    if [ -n "${PYTHON:-}" ]; then
        is_312 "$PYTHON" || fail "PYTHON=$PYTHON is no Python 3.12. Remedy: name one, or unset PYTHON."
        command -v "$PYTHON"
        return
    fi
    for candidate in python3.12 python3 python "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12*/bin/python; do
        if is_312 "$candidate"; then
            "$candidate" -c 'import sys; print(sys.executable)'
            return
        fi
    done
}

find_uv() { # prints a uv that runs; installs the locked one into build/uv if there is none
    local python
    for uv in uv build/uv/bin/uv; do
        if "$uv" --version >/dev/null 2>&1; then
            command -v "$uv"
            return
        fi
    done
    python=${1:-$(command -v python3 || true)}
    [ -n "$python" ] || fail "there is neither uv nor Python. Remedy: install Python 3.12 or uv."
    say "installing uv into build/uv"
    rm -rf build/uv && mkdir -p build
    "$python" -m venv build/uv || fail "$python cannot make a venv. Remedy: install its venv package, or uv."
    sed -n '/^uv==/,/[^\\]$/p' "$lock" >build/uv/requirements.txt
    build/uv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes \
        --requirement build/uv/requirements.txt || fail "pip cannot install uv. Remedy: see that pip reaches its index."
    echo build/uv/bin/uv
}

inputs() { # one hash of all that the environment is made of, but the editable sources
    { find patches manifests/locks manifests/upstreams.toml manifests/native.toml pyproject.toml scripts/make_env.sh \
        src/samebits/sources -type f -not -path '*/__pycache__/*' -print0 | sort -z | xargs -0 sha256sum
      echo "$PWD ${1:-}"; } | sha256sum | cut -d' ' -f1
}

python=$(find_python)
wanted=$(inputs "$python")
if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ] && [ -x .venv/bin/samebits ]; then
    say "up to date"
    exit 0
fi
uv=$(find_uv "$python")
quiet=()
[ -t 2 ] || quiet=(--quiet)

if [ ! -f "$stamp" ] || ! is_312 .venv/bin/python; then
    say "making .venv with ${python:-a Python 3.12 that uv fetches}"
    "$uv" venv --quiet --clear --python "${python:-3.12}" .venv \
        || fail "no Python 3.12. Remedy: install one (PATH, pyenv) or name it: PYTHON=/path/to/python3.12 make env"
fi
rm -f "$stamp"
export VIRTUAL_ENV=$PWD/.venv

# Compiled now, because a run starts many processes and each imports torch, vLLM and verl.
say "installing $(grep -c '==' "$lock") packages of $lock"
"$uv" pip sync "${quiet[@]}" --compile-bytecode --require-hashes --build-constraints "$lock" "$lock" "$build_lock"
"$uv" pip install --quiet --no-deps --no-build-isolation --editable .
echo "without the patched wheels" >"$stamp"

say "building the patched wheels"
.venv/bin/samebits build wheels --profile cpu --out "$wheels"
rm -f "$stamp"
"$uv" pip install --quiet --compile-bytecode --no-deps --require-hashes --no-index --find-links "$wheels" --requirement "$wheels/requirements.txt"
"$uv" pip check

echo "$wanted" >"$stamp"
say "done: .venv"
