#!/usr/bin/env bash
# Runs what needs a GPU, stage by stage, within a time limit, and goes on where the last call stopped:
#
#     scripts/gpu_check.sh --out gpu-results --seconds 560
#
# GPU_WHEELS=DIR adds Python packages from a folder of wheels, for a machine without a network. PYTHON names the
# interpreter. KEDGE_MODEL_PARTS=DIR brings the real model, a GGUF file, in parts (part-00, ...; sums is their sha256sum):
# each call keeps what is there, and the one with the last part runs. Everything else is in scripts/gpu/ (--help) and
# docs/guides/gpu.md.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}"

if [[ -n ${GPU_WHEELS:-} ]]; then
    packages=$(mktemp -d)
    trap 'rm -rf "$packages"' EXIT
    "$python" -m pip install --quiet --no-index --no-deps --no-compile --target "$packages" "$GPU_WHEELS"/*.whl
    export PYTHONPATH="$PYTHONPATH:$packages"
fi
if [[ -n ${KEDGE_MODEL_PARTS:-} ]]; then
    kept=${TMPDIR:-/tmp}/kedge-model
    mkdir -p "$kept"
    cp "$KEDGE_MODEL_PARTS"/* "$kept"
    if ! (cd "$kept" && sha256sum --quiet -c sums); then
        echo "kept what is there in $kept; bring the other parts next"
        exit 0
    fi
    cat "$kept"/part-* > "$kept/model.gguf"
    export KEDGE_MODEL_FILE=$kept/model.gguf
fi
"$python" -m scripts.gpu.check "$@"
