#!/usr/bin/env bash
# Checks and measures Kedge on this machine's GPU, step by step.
#
#     OUT=results scripts/gpu/run.sh STEP...        from the root of the checkout
#
# The embedded engine:
#
#     kernels    the Triton kernels against float64 and PyTorch, with their bandwidth
#     graphs     CUDA graphs against eager passes, greedy tokens against Transformers'
#     ttft       `kedge bench ttft`, by anchors; moved: the same without them
#     teams      `kedge bench load` with CLIENTS ("8 32"), for RUN_SECONDS (20) each
#     fidelity   a real model: `kedge bench fidelity` for TASK (reading), 500 QUESTIONS; accuracy: Table 1
#
# Stock vLLM, and the same with the plug-in:
#
#     ops        each compiled op and FlashAttention 3 against PyTorch
#     stock      five prompts twice; server: its API server with the connector
#     exact      whether all tokens are stock vLLM's with the connector and a host tier
#     translate  time to first token of five agents: dense, stock, translated; team: at the paper's size, 3 samples
#     load       teams at once, CLIENTS and RUN_SECONDS as above; aborts: REQUESTS (2000), every fifth aborted
#     cycle      ten agents with room for four; sessions: recorded coding agents
#
# And any FILE.py of your own, with the size and a file for its results. Names with + between them run side by side. Each
# leaves a log in $OUT, and JSON; one that has failed ends nothing, but the exit status is 1 then. Variables: SIZE, the
# model with random weights (8b, 32m, tiny); LIMIT, seconds for a step (240; an engine of vLLM starts in 50); DEVICE (cuda,
# cpu); EAGER=1, vLLM without CUDA graphs; PYTHON.
#
# Without a network: GPU_WHEELS, a folder of wheels to use; KEDGE_MODEL_PARTS, one with the real model's GGUF file in
# parts; .gpu-vllm, vLLM in parts as `scripts/gpu/vllm/prepare.sh` packs it (part-00, …; sums is their sha256sum). What has
# come is kept in GPU_KEEP for the next run; without all parts it ends: bring the others then.
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd) root=$PWD python=${PYTHON:-python3} size=${SIZE:-8b} device=${DEVICE:-cuda}
OUT=${OUT:-gpu-results} keep=${GPU_KEEP:-${TMPDIR:-/tmp}/gpu-kept} failed=0
(($#)) || { sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; exit 2; }
mkdir -p "$OUT" "$keep/site"
OUT=$(cd "$OUT" && pwd)
SECONDS=0
say() { echo "[$SECONDS s] $*"; }

gather() {  # name, folder: keeps the parts that are there; fails until all are
    mkdir -p "$keep/$1"
    cp "$2"/* "$keep/$1/"
    (cd "$keep/$1" && sha256sum --quiet -c sums) > "$OUT/$1-sums.log" 2>&1 && return
    say "kept $(find "$keep/$1" -name 'part-*' | wc -l) of $(wc -l < "$keep/$1/sums") parts of $1; bring the others next"
    exit 0
}

if [[ ${GPU_WHEELS:-} ]]; then
    "$python" -m pip install -q --no-index --no-deps --no-compile --upgrade --target "$keep/site" "$GPU_WHEELS"/*.whl || exit 1
fi
if [[ ${KEDGE_MODEL_PARTS:-} ]]; then
    gather model "$KEDGE_MODEL_PARTS"
    cat "$keep"/model/part-* > "$keep/model.gguf"
fi
python_is() { "$python" -c "import sys; sys.exit(sys.version_info[:2] != ($1))"; }
if [[ -d $root/.gpu-vllm && ! -e $keep/vllm-done ]] && python_is 3,12; then  # it is packed for that Python alone
    gather vllm "$root/.gpu-vllm"
    cat "$keep"/vllm/part-* | "$python" -c '
import lzma, sys, tarfile
tarfile.open(fileobj=lzma.open(sys.stdin.buffer), mode="r|", ignore_zeros=True).extractall(sys.argv[1], filter="data")' "$keep/site" || exit 1
    rm -f "$keep"/vllm/part-*
    "$python" -m compileall -q -j 0 "$keep/site" > /dev/null 2>&1  # once, not in every process that starts
    touch "$keep/vllm-done"
    say "unpacked"
fi
model=smollm2
[[ -e $keep/model.gguf ]] && model=$keep/model.gguf

export PYTHONPATH=${REHEARSAL:+$REHEARSAL:}$keep/site:$root/src:$root${PYTHONPATH:+:$PYTHONPATH}
export PYTHONUNBUFFERED=1 VLLM_LOGGING_LEVEL=${VLLM_LOGGING_LEVEL:-WARNING} VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1
export VLLM_WORKER_MULTIPROC_METHOD=spawn VLLM_PLUGINS=kedge TRITON_CACHE_DIR=$keep/triton
export VLLM_HOST_IP=127.0.0.1 NCCL_SOCKET_IFNAME=lo GLOO_SOCKET_IFNAME=lo  # one GPU, no network
[[ ${EAGER:-} ]] && export KEDGE_BENCH_VLLM='{"compilation_config": {"mode": 0, "cudagraph_mode": "NONE"}}'

step() {  # name, command...
    local name=$1; shift
    say "$name: start"
    timeout -k 5 "${LIMIT:-240}" "$@" > "$OUT/$name.log" 2>&1 &
    local rc child=$!
    trap "kill $child" TERM  # it has a process group of its own, and would keep the GPU
    wait $child
    rc=$?
    kill -KILL -- -$child 2>/dev/null  # as would an engine of vLLM's that outlives its parent
    grep -vE '^\s*$|WARNING|INFO|it/s' "$OUT/$name.log" | tail -n "${LINES_SHOWN:-14}" | cut -c1-220
    say "$name: exit status $rc"
    return $rc
}
tests() { local name=$1; shift; step "$name" "$python" -m pytest -q -p no:cacheprovider --junitxml "$OUT/$name.xml" "$@"; }
bench() { local name=$1; shift; step "$name" "$python" -m kedge bench "$@" --json "$OUT/$name.json"; }
script() { step "$1" "$python" "$here/vllm/$2" --step "$1" --size "$size" "${@:3}"; }

run() {
    local clients=(${CLIENTS:-8 32}) seconds=${RUN_SECONDS:-20} task=${TASK:-reading} shape=() memory=() methods=()
    local questions=${QUESTIONS:-500}
    [[ $task == gsm8k ]] && questions=${QUESTIONS:-240}  # there are no more
    [[ $size == tiny ]] && shape=(--question 64 --prefix 16 --output 8 --agents 2) methods=(--taught 1 --methods dense,kedge)
    [[ $size == 8b ]] && memory=(--kv-memory 40GiB --anchor-memory 8GiB)
    case $1 in
        kernels) tests kernels tests/kv/test_{translate,pages,attention}_kernel*.py ;;
        graphs) tests graphs tests/engine/local/model/test_graphs.py tests/engine/local/{test_engine,attention/test_paged}.py ;;
        ttft | moved)
            local by=token
            [[ $1 == moved ]] && by=moved
            bench "$1" ttft --model-size "$size" --estimator $by --samples 4 --repeats 2 --device "$device" "${shape[@]}" ;;
        teams) bench teams load --case "$size" --model-size "$size" --device "$device" "${clients[@]/#/--clients=}" --seconds "$seconds" "${memory[@]}" ;;
        fidelity) bench "fidelity-$task" fidelity --model "$model" --task "$task" --questions "$questions" "${methods[@]}" ;;
        accuracy) bench accuracy accuracy --model "$model" --questions "$questions" ;;
        ops | stock | exact | server) script "$1" smoke.py ;;
        translate) script translate smoke.py --quick ;;
        load | aborts)
            local asked=(--clients "${clients[@]}" --seconds "$seconds" --requests "${REQUESTS:-2000}")
            script "$1" under_load.py --json "$OUT/$1.json" "${asked[@]}" ;;
        team) bench team vllm --case team --model-size "$size" --samples 3 ;;
        cycle) bench cycle vllm --case cycle --model-size "$size" --trials 3 ;;
        sessions) bench sessions vllm --case sessions --model-size "$size" --quick ;;
        *.py) step "$(basename "$1" .py)" "$python" "$1" "$size" "$OUT/$(basename "$1" .py).json" ;;
        *) say "there is no step $1"; return 2 ;;
    esac
}

trap 'kill $(jobs -p); exit 143' TERM INT
nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader 2>/dev/null
for names in "$@"; do
    jobs=()
    for name in ${names//+/ }; do
        run "$name" & jobs+=($!)
    done
    for job in "${jobs[@]}"; do
        wait "$job" || failed=1
    done
done
say "end"
exit $failed
