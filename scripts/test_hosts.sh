#!/usr/bin/env bash
# For a nightly job: runs the integrations with the hosts' own code on a CPU, in the newest release of each and the one
# before. Each has an environment of its own in .hosts (1 to 3 GB, a few minutes, once), for they cannot be combined's
# versions of transformers. OpenRLHF comes without what needs CUDA: its test has stand-ins for DeepSpeed, vLLM and
# flash-attn. Arguments choose releases: bash scripts/test_hosts.sh verl==0.9.1 trl==1.16.0
set -euo pipefail
cd "$(dirname "$0")/.."
python="${FASTP3O_PYTHON:-python3}"

if (($# != 1)); then
    releases=("$@")
    if ((!$#)); then
        for host in trl verl openrlhf; do
            newest="$("$python" -m pip index versions "$host" 2> /dev/null | sed -n 's/^Available versions: //p' | cut -d, -f1,2)"
            [[ -n "$newest" ]] || { echo "pip finds no release of $host" >&2; exit 1; }
            for version in ${newest//,/}; do releases+=("$host==$version"); done
        done
    fi
    failed=()
    for release in "${releases[@]}"; do bash scripts/test_hosts.sh "$release" || failed+=("$release"); done
    ((!${#failed[@]})) || { echo "failed: ${failed[*]}" >&2; exit 1; }
    exit
fi

release="$1" host="${1%%==*}" env=".hosts/$1"
echo "== $release"
if [[ ! -f "$env/installed" ]]; then
    "$python" -m venv --clear "$env"
    grep -E '^(torch|triton)==' scripts/constraints.txt > "$env/constraints.txt"
    pip=("$env/bin/python" -m pip --disable-pip-version-check install --quiet --constraint "$env/constraints.txt")
    "${pip[@]}" . pytest pytest-timeout hypothesis psutil
    case "$host" in
        trl) "${pip[@]}" "$release" ;;
        verl) "${pip[@]}" "$release" TransferQueue cachetools fastapi uvicorn ;; # its trainer's, named only by its extras
        openrlhf)
            "${pip[@]}" --no-deps "$release"
            "$env/bin/python" -c 'import importlib.metadata as m; print(*m.requires("openrlhf"), sep="\n")' |
                grep -Ev '^(bitsandbytes|deepspeed|flash-attn|optimum|pynvml|transformers-stream-generator|wandb)|extra' \
                    > "$env/requirements.txt"
            "${pip[@]}" --requirement "$env/requirements.txt"
            ;;
    esac
    touch "$env/installed"
fi
tests=(-m hosts -k "$host" tests/fastp3o/integrations/test_hosts.py)
[[ "$host" != trl ]] || tests=(tests/fastp3o/integrations/test_trl.py tests/fastp3o/integrations/test_readme.py)
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
"$env/bin/python" -m pytest --quiet -W ignore -p no:cacheprovider "${tests[@]}"
