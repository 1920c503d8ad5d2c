#!/bin/sh
# Everything that is asked of a card, on the machine that has it: builds stock and patched llama.cpp, compares our
# operators with the CPU's, measures the kernel table, then stock and patched on the 27B pair's geometry. Takes about an
# hour, most of it building, and 18 GB of disk for the weights. The results lie in benchmarks/results, named by the card.
#
#   benchmarks/gpu.sh [options of cycle27b.py]       e.g. --depths 1024 --cache-types f16 --widths 1,4,8
#
# PYTHON: the interpreter that has this package (default: .venv/bin/python); BACKEND: cuda (default) or hip.
# Exits with 1 if an operator is wrong or a bar is missed.
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
backend=${BACKEND:-cuda}
dflash2=$(dirname "$python")/dflash2

"$dflash2" build --backend "$backend" --stock --targets libs,server
"$dflash2" build --backend "$backend" --targets libs,server,tests --measure-dispatch

programs=$("$python" -c "from dflash2.patches import locate; print(locate(backend='$backend').libraries)")
card=$("$programs/llama-server" --list-devices | sed -n 's/^  [A-Za-z]*0: \(.*\) (.*/\1/p' | head -n 1)
[ -n "$card" ] || { echo "the patched llama-server finds no GPU" >&2; exit 1; }
results=benchmarks/results
name=$(echo "$card" | tr 'A-Z ' 'a-z-' | tr -cd 'a-z0-9-')
cp "$programs/dflash2-dispatch.txt" "$results/dispatch-$name.txt"

status=0
"$programs/test-backend-ops" test -o DFLASH2_CONV,DFLASH2_SELECTOR,TOP_K,MUL_MAT >"$results/backend-ops-$name.log" 2>&1 ||
    { status=1; grep FAIL "$results/backend-ops-$name.log" || true; }
tail -n 4 "$results/backend-ops-$name.log"

"$python" benchmarks/cycle27b.py --backend "$backend" --json "$results/cycle27b-$name.json" --check "$@" || status=1
exit $status
