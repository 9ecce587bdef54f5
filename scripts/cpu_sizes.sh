#!/bin/sh
# Runs `tokenmill bench cpu` on models of two sizes at two CPU levels, the tables of docs/performance.md: see --help.
set -eu
usage="usage: scripts/cpu_sizes.sh MODELS OUT LLAMA_PYTHON LLAMA_AVX2_PYTHON OPENVINO_PYTHON [OPTIONS OF BENCH CPU]
MODELS: folder with what these write:
  python scripts/random_model.py qwen2.5-1.5b q4_0 MODELS --folder
  python scripts/random_model.py llama-3.2-3b q4_0 MODELS --folder
  python scripts/random_model.py qwen2.5-1.5b q4_k_m MODELS
OUT: folder for the tables and figures"
[ $# -ge 5 ] || { echo "$usage"; exit 2; }
models=$1 out=$2 llama=$3 llama_avx2=$4 openvino=$5
shift 5
python=${PYTHON:-python}
mkdir -p "$out"

# NAME LEVEL MODEL NEW PEERS...: one table
compare() {
    name=$1 level=$2 model=$3 new=$4
    shift 4
    begin=$(date +%s)
    $python $level -m tokenmill bench cpu -m "$models/$model.gguf" --rounds 1 --new "$new" --requests 16 -o "$out/$name.json" "$@" |
        tee "$out/$name.md"
    echo "$name took $(($(date +%s) - begin)) s"
}

compare 1.5b-avx512 "" qwen2.5-1.5b-q4_0 64 --against "llama.cpp:as is,openvino:int4" \
    --peer llama.cpp="$llama" --peer openvino="$openvino" "$@"
compare 1.5b-avx2 "tests/cpu_level avx2" qwen2.5-1.5b-q4_0 64 --against "llama.cpp:as is" --peer llama.cpp="$llama_avx2" "$@"
compare 3b-avx512 "" llama-3.2-3b-q4_0 32 --against "llama.cpp:as is,openvino:int4" \
    --peer llama.cpp="$llama" --peer openvino="$openvino" "$@"
compare 3b-avx2 "tests/cpu_level avx2" llama-3.2-3b-q4_0 32 --against "llama.cpp:as is" --peer llama.cpp="$llama_avx2" "$@"
compare 1.5b-k-avx512 "" qwen2.5-1.5b-q4_k_m 64 --against "llama.cpp:as is" --peer llama.cpp="$llama" "$@"
