#!/usr/bin/env bash
# Make the three pull requests below build/prs, and with options push and open them:
#   scripts/open_prs.sh [--from UPSTREAM=REPOSITORY]... [--push REMOTE [--create]]      options of samebits deliver prs
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
samebits=$root/.venv/bin/samebits
if [ ! -x "$samebits" ]; then
    echo "error: open_prs: there is no .venv/bin/samebits. Remedy: run \`make env\` in the repository." >&2
    exit 1
fi
exec "$samebits" deliver prs "$@"
