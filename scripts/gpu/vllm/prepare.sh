#!/usr/bin/env bash
# Packs stock vLLM's CUDA build and the Python packages that it needs into parts small enough to be carried.
#
#     scripts/gpu/vllm/prepare.sh [--mib 36] [--ptx] [--moe] [CHECKOUT]
#
# CHECKOUT (default: the current folder) is the root of a checkout of Kedge. Everything goes to CHECKOUT/.gpu-vllm, which
# git ignores: parts of at most --mib MiB, and their sums. Needs pip, xz, readelf, 2 GB of disk and 5 to 9 minutes, most of
# them for xz. --ptx keeps PTX of kernels that have no machine code for sm_90 (Marlin, int8), --moe the kernels for mixtures
# of experts: a dense bf16 model needs neither. Then scripts/gpu/run.sh there.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
mib=36 ptx= moe= checkout=$PWD
while (($#)); do
    case $1 in
        --mib) mib=$2; shift ;;
        --ptx) ptx=--ptx ;;
        --moe) moe=1 ;;
        *) checkout=$(cd "$1" && pwd) ;;
    esac
    shift
done
version=${VLLM_VERSION:-0.32.0}
work=${GPU_VLLM_WORK:-${TMPDIR:-/tmp}/gpu-vllm-work}
out=$checkout/.gpu-vllm
mkdir -p "$work/wheels"
rm -rf "$work/tree" "$out"
mkdir -p "$work/tree" "$out"

platforms=()
for tag in manylinux_2_34 manylinux_2_31 manylinux_2_28 manylinux_2_27 manylinux_2_26 manylinux_2_24 manylinux_2_17 manylinux2014 manylinux_2_5 manylinux1; do
    platforms+=(--platform "${tag}_x86_64")
done
for_there=(--only-binary=:all: --no-deps --python-version 3.12 --implementation cp --abi cp312 --abi abi3 --abi none "${platforms[@]}")

echo "== downloading"
ls "$work"/wheels/vllm-"$version"-*.whl >/dev/null 2>&1 ||
    python3 -m pip download -q --disable-pip-version-check "${for_there[@]}" -d "$work/wheels" "vllm==$version"
grep -v '^#' "$here/wheels.txt" > "$work/needed.txt"
python3 -m pip install -q --disable-pip-version-check "${for_there[@]}" --no-compile --target "$work/tree" -r "$work/needed.txt"

echo "== stripping"
rm -rf "$work/full" "$work/tree/bin" "$work/tree/tvm_ffi/3rdparty"
python3 -m zipfile -e "$work"/wheels/vllm-"$version"-*.whl "$work/full"
kernels=(_C_stable_libtorch.abi3.so vllm_flash_attn/_vllm_fa3_C.abi3.so cumem_allocator.abi3.so spinloop.abi3.so fs_io_C.abi3.so)
[[ $moe ]] && kernels+=(_moe_C_stable_libtorch.abi3.so)
for kernel in "${kernels[@]}"; do
    if readelf -S "$work/full/vllm/$kernel" | grep -q nv_fatbin; then
        python3 "$here/fatbin.py" "$work/full/vllm/$kernel" "$work/full/vllm/$kernel.new" --arch 90 $ptx
    else
        cp "$work/full/vllm/$kernel" "$work/full/vllm/$kernel.new"
    fi
done
find "$work/full" -name '*.so' -delete
for kernel in "${kernels[@]}"; do mv "$work/full/vllm/$kernel.new" "$work/full/vllm/$kernel"; done
rm -rf "$work/full/vllm/vllm-rs" "$work"/full/vllm/third_party/{deep_gemm,fmha_sm100} "$work"/full/*.data
cp -a "$work"/full/. "$work/tree/"
find "$work/tree" -name __pycache__ -prune -exec rm -rf {} +

echo "== the plug-in's entry point"
info=$work/tree/kedge-0.dist-info
mkdir -p "$info"
printf 'Metadata-Version: 2.1\nName: kedge\nVersion: 0\n' > "$info/METADATA"
printf '[vllm.general_plugins]\nkedge = kedge.integrations.vllm.entry_point:register\n' > "$info/entry_points.txt"

echo "== packing"
# FlashAttention's variants repeat one another, far apart, hence the dictionary. That takes minutes and is kept for next time.
flash=vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so packed=$work/flash-$version.tar.xz
pack() { tar cf - --owner=0 --group=0 --mtime=@0 -C "$work/tree" "$@"; }
[[ -s $packed ]] || { pack "./$flash" | xz -T1 --lzma2=preset=6,dict=256MiB > "$packed.new" && mv "$packed.new" "$packed"; }
(cd "$work/tree" && find . -type f ! -path "./$flash" | LC_ALL=C sort) > "$work/names"
{ pack -T "$work/names" | xz -T1 --lzma2=preset=7,dict=64MiB; cat "$packed"; } > "$work/site.tar.xz"
split -b "${mib}m" -d -a 2 "$work/site.tar.xz" "$out/part-"
(cd "$out" && sha256sum part-* > sums)
rm -rf "$work/full"
ls -l "$out" | awk 'NR > 1 { printf "%8.2f MiB  %s\n", $5 / 1048576, $9 }'
tracked=$(cd "$checkout" && git ls-files -z | xargs -0 stat -c %s | awk '{ s += $1 } END { printf "%.1f", s / 1048576 }')
echo "the checkout itself: $tracked MiB; 64 MiB in all can be copied at a time"
