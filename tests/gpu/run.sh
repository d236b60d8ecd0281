#!/usr/bin/env bash
# The NCCL transport on the GPU of this machine, with what is built already (`make build`). Needs a driver and libnccl.so.2
# 2.30 or newer on the loader's path (several ranks share one GPU here). Every run compares every element with the trainer's.
# Prints a table; a run that is not right ends the script with its report.
set -euo pipefail
cd "$(dirname "$0")/../.."

bin="${WEIGHTREFIT_BIN:-$(tests/cache target)/release}"
rounds="${ROUNDS:-5}"
export NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_NVLS_ENABLE=0 NCCL_MAX_CTAS=2 NCCL_DEBUG="${NCCL_DEBUG:-WARN}"
if ! "$bin/weightrefit" version >/dev/null; then
    echo "run \`make build\` first" >&2
    exit 2
fi
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT

line() { printf '%-44s %-10s %s\n' "$@"; }
line run transport "transfer ms of each round"
for file in tests/local/tiny.yaml examples/minilm.yaml; do
    # NCCL goes in clear: a copy of the refit says that it may.
    grep -q TrustedFabric "$file" && cp "$file" "$folder/refit.yaml" ||
        sed '0,/^spec:/s//spec:\n  transfer: {encryption: TrustedFabric}/' "$file" > "$folder/refit.yaml"
    for run in tcp nccl "nccl --device-memory"; do
        transport="${run%% *}"
        # shellcheck disable=SC2086 # two words where there are two
        timeout 120 "$bin/weightrefit" local -f "$folder/refit.yaml" --rounds "$rounds" --transport $run \
            -o json > "$folder/report.json" || { cat "$folder/report.json"; exit 1; }
        python3 - "$folder/report.json" "$file" "$transport" "$run" <<'PYTHON'
import json, sys
report = json.load(open(sys.argv[1]))
used = {carrier["transport"] for carrier in report.get("carriers", [])} or {"tcp"}
assert report["verdict"]["mismatchedElements"] == 0 and used == {sys.argv[3]}, report
times = " ".join(str(line["phaseMilliseconds"].get("transfer", "-")) for line in report["rounds"])
print(f"{sys.argv[2]:44} {sys.argv[4].replace('nccl --device-memory', 'on device'):10} {times}")
PYTHON
    done
done
