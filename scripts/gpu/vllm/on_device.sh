#!/usr/bin/env bash
# Unpacks the carried parts and runs stock vLLM, with Kedge's connector and without, on this machine's GPU.
#
#     scripts/gpu/vllm/on_device.sh [STEP...]        from the root of the checkout
#
# Steps, in this order if none is named:
#
#     ops        each compiled op and FlashAttention 3 against PyTorch
#     stock      stock vLLM, 8B of random weights, five prompts twice
#     exact      the bundled model: whether all tokens are stock vLLM's with the connector and a host tier
#     translate  time to the first token of five agents: computed whole, on stock vLLM, translated
#
# Also server (the API server with the connector), team, load, cycle, sessions (`kedge bench vllm`), ttft (the embedded
# engine), and any *.py of your own. Names with + between them run side by side. Results go to $OUT (default:
# gpu-vllm-results), a log for each step. A failed step does not end the run. Variables: SIZE=8b|32m|tiny; EAGER=1, without
# CUDA graphs; LIMIT, seconds for each step (240: an engine starts in 50); GPU_VLLM_KEEP, where things are unpacked. With
# only some of the parts here, it keeps those and ends: run it again with the others.
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$PWD
OUT=${OUT:-gpu-vllm-results}
keep=${GPU_VLLM_KEEP:-${TMPDIR:-/tmp}/gpu-vllm}
python=${PYTHON:-python3}
size=${SIZE:-8b}
mkdir -p "$OUT" "$keep/parts" "$keep/site"
OUT=$(cd "$OUT" && pwd)
SECONDS=0
say() { echo "[$SECONDS s] $*"; }

if [[ ! -e $keep/done ]]; then
    cp "$root"/.gpu-vllm/{part-*,sums} "$keep/parts/" 2>/dev/null
    if ! (cd "$keep/parts" && sha256sum --quiet -c sums) > "$OUT/sums.log" 2>&1; then
        say "kept $(ls "$keep/parts" | grep -c part-) of $(wc -l < "$keep/parts/sums") parts; copy the others next"
        exit 0
    fi
    cat "$keep"/parts/part-* | "$python" -c '
import lzma, sys, tarfile
tarfile.open(fileobj=lzma.open(sys.stdin.buffer), mode="r|", ignore_zeros=True).extractall(sys.argv[1], filter="data")' "$keep/site" || exit 1
    rm -f "$keep"/parts/part-*
    "$python" -m compileall -q -j 0 "$keep/site" > /dev/null 2>&1  # once, not in every process that starts
    touch "$keep/done"
    say "unpacked"
fi

export PYTHONPATH=${REHEARSAL:+$REHEARSAL:}$keep/site:$root/src:$root${PYTHONPATH:+:$PYTHONPATH}
export PYTHONUNBUFFERED=1 VLLM_LOGGING_LEVEL=${VLLM_LOGGING_LEVEL:-WARNING} VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1
export VLLM_WORKER_MULTIPROC_METHOD=spawn VLLM_PLUGINS=kedge TRITON_CACHE_DIR=$keep/triton
export VLLM_HOST_IP=127.0.0.1 NCCL_SOCKET_IFNAME=lo GLOO_SOCKET_IFNAME=lo  # one GPU, no network
[[ ${EAGER:-} ]] && export KEDGE_BENCH_VLLM='{"compilation_config": {"mode": 0, "cudagraph_mode": "NONE"}}'

step() {  # name, command...
    local name=$1; shift
    say "$name: start"
    timeout -k 5 "${LIMIT:-240}" "$@" > "$OUT/$name.log" 2>&1
    local rc=$?
    grep -vE '^\s*$|WARNING|INFO|it/s' "$OUT/$name.log" | tail -n "${LINES_SHOWN:-14}" | cut -c1-220
    say "$name: exit status $rc"
    return $rc
}

smoke() { step "$1" "$python" "$here/smoke.py" --step "$1" --size "$size" "${@:2}"; }
bench() { local name=$1; shift; step "$name" "$python" -c 'from kedge.cli.main import app; app()' bench vllm --model-size "$size" --json "$OUT/$name.json" "$@"; }

run() {
    case $1 in
        ops | stock | exact | server) smoke "$1" ;;
        translate) smoke translate --quick ;;
        team) bench team --case team --samples 3 ${QUICK:+--quick} ;;
        load) bench load --case load --clients "${CLIENTS:-8}" --seconds "${RUN_SECONDS:-15}" ;;
        cycle) bench cycle --case cycle --trials 3 ;;
        sessions) bench sessions --case sessions --quick ;;
        ttft) step ttft "$python" -c 'from kedge.cli.main import app; app()' bench ttft --model-size "$size" --estimator token --samples 4 --repeats 2 \
            --device "${DEVICE:-cuda}" --json "$OUT/ttft.json" ;;
        *.py) step "$(basename "$1" .py)" "$python" "$1" "$size" "$OUT/$(basename "$1" .py).json" ;;
        *) say "unknown step $1" ;;
    esac
}

nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader 2>/dev/null
for names in ${@:-ops stock exact translate}; do
    for name in ${names//+/ }; do run "$name" & done
    wait
done
say "end"
