#!/usr/bin/env bash
# The page in a headless Chromium: crates/server/tests/page/run.sh [MODEL] [PROGRAM]
#
# Wants node 20.10 or newer and a Chromium (CHROMIUM, or one in the path). Screenshots are left in target/page, to be looked at.
set -euo pipefail
cd "$(dirname "$0")/../../../.."
model=${1:-smollm2}
program=${2:-target/release/spillgate}
chromium=${CHROMIUM:-$(command -v chromium || command -v chromium-browser || command -v google-chrome)}
log=$(mktemp)
# So little memory that cells spill and the CPU has a share, so that the monitor has something to show.
"$program" serve "$model" --port 0 --temp 0 --ctx 8192 --device-mem 150 --parallel 4 --json > "$log" &
server=$!
trap 'kill "$server" 2>/dev/null; wait "$server" 2>/dev/null; rm -f "$log"' EXIT
for _ in $(seq 600); do
  [ -s "$log" ] && break
  kill -0 "$server" || exit 1
  sleep 0.1
done
url=$(sed -E 's/.*"url": ?"([^"]+)".*/\1/' "$log" | head -1)
node --experimental-websocket crates/server/tests/page/page.mjs "$url" "$chromium" target/page
