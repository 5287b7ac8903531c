#!/usr/bin/env bash
# The official clients against a real server: crates/server/tests/clients/run.sh [MODEL] [PROGRAM]
#
# Clients come from PyPI and the npm registry, into a folder of their own (CLIENTS, or target/clients), which is kept. A model with a template for
# tools says most; calls that are demanded work with every model.
set -euo pipefail
cd "$(dirname "$0")/../../../.."
model=${1:-qwen2.5-0.5b}
program=${2:-target/release/spillgate}
clients=${CLIENTS:-target/clients}
here=$PWD/crates/server/tests/clients

mkdir -p "$clients"
if ! "$clients/venv/bin/python" -c 'import openai, anthropic' 2>/dev/null; then
  python3 -m venv "$clients/venv"
  "$clients/venv/bin/pip" install -q 'openai>=2' 'anthropic>=0.40'
fi
if [ ! -d "$clients/node_modules/openai" ]; then
  (cd "$clients" && npm install --no-save --no-package-lock --silent openai)
fi
cp "$here/clients.mjs" "$clients/clients.mjs"

log=$(mktemp)
"$program" serve "$model" --port 0 --temp 0 --pooling mean --json > "$log" &
server=$!
trap 'kill "$server" 2>/dev/null; wait "$server" 2>/dev/null; rm -f "$log"' EXIT
for _ in $(seq 600); do
  [ -s "$log" ] && break
  kill -0 "$server" || exit 1
  sleep 0.1
done
url=$(python3 -c 'import json, sys; print(json.loads(open(sys.argv[1]).readline())["url"])' "$log")

"$clients/venv/bin/python" "$here/clients.py" "$url"
node "$clients/clients.mjs" "$url"
