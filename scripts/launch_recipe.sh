#!/usr/bin/env bash
# Run the RL recipe on this machine's CPU:
#   scripts/launch_recipe.sh [0|1] [OUT] [OPTION...]     the arm, its folder (build/loop/biARM), options of samebits run rl
#   DRY_RUN=1                                            print the configuration's hash and the command, start nothing
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
arm=${1:-0}
out=${2:-$root/build/loop/bi$arm}
options=("${@:3}")

samebits=$root/.venv/bin/samebits
if [ ! -x "$samebits" ]; then
    echo "error: launch_recipe: there is no .venv/bin/samebits. Remedy: run \`make env\` in the repository." >&2
    exit 1
fi
[ "${DRY_RUN:-0}" = 0 ] || options+=(--dry-run)
exec "$samebits" run rl --arm "$arm" --out "$out" "${options[@]}"
