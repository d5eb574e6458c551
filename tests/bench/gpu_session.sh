#!/usr/bin/env bash
# The GPU check on a machine that has a GPU, Python with torch, and no network.
#
#   tests/bench/gpu_session.sh WHEELS OUT [SECONDS] [ARGUMENTS of check_gpu.py]
#
# WHEELS is a folder of wheels for what the machine lacks (`make gpu-wheels` fills one), OUT gets
# gpu.json, a log and what was compiled, SECONDS (275) is the time for all of it. A GPU that is lent
# for a quarter of an hour runs `decide` first, then `confirm` on the same machine; `--only PART ...`
# repeats single parts. The wheels go into the Python that runs the check, because the processes it
# starts must find them, too. KIT_COMMIT names the commit where there is no git folder. Every row is
# in OUT/gpu.json as soon as it is measured, so a session that is cut short keeps its rows.
set -euo pipefail
[ $# -ge 2 ] || { echo "usage: $0 WHEELS OUT [SECONDS] [decide|confirm|rest] [--only PART ...]" >&2; exit 2; }

wheels=$1 out=$2 seconds=${3:-275}
shift $(($# < 3 ? $# : 3))
python=${PYTHON:-python3}
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
started=$(date +%s)
mkdir -p "$out"

if compgen -G "$wheels/*.whl" > /dev/null && ! "$python" -c "import soundfile, orjson" 2> /dev/null; then
  "$python" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir \
    --disable-pip-version-check --root-user-action=ignore "$wheels"/*.whl \
    || echo "the wheels were not installed; parts that need them will say so" >&2
fi
nvidia-smi 2>&1 | tee "$out/nvidia-smi.txt" || true

export PYTHONPATH="$root" PYTHONUNBUFFERED=1 OMP_WAIT_POLICY=PASSIVE TOKENIZERS_PARALLELISM=false
left=$((seconds - ($(date +%s) - started) - 5))
"$python" "$root/tests/bench/check_gpu.py" --folder "$out" --limit-s "$left" "$@" 2>&1 | tee "$out/log.txt"
