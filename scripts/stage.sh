# Sourced by the quickstarts behind setup.sh: how they run a stage. $RUN is the folder of all of them.

export TOKENIZERS_PARALLELISM=true
# Rewards and environments of the quickstarts are functions of the scripts that make their data.
export PYTHONPATH="$PWD/scripts${PYTHONPATH:+:$PYTHONPATH}"
# Libraries' notes on what they will change are for those who write code. Errors and other warnings are shown.
export PYTHONWARNINGS="ignore::DeprecationWarning,ignore::FutureWarning${PYTHONWARNINGS:+,$PYTHONWARNINGS}"

stage() { # stage <title> <command> <folder> <flags...>: runs a training stage that is not finished, from where it stopped
    local title="$1" command="$2" folder="$3"
    shift 3
    if [[ -d "$folder/model" ]]; then
        echo "== $title: reusing $folder/model"
        return
    fi
    echo "== $title"
    # A progress bar shows on terminals; the rest is read by those who want to know more, or when something went wrong.
    mkdir -p "$RUN/logs"
    local log="$RUN/logs/${folder##*/}.txt"
    "$PYTHON" -m fastp3o "$command" --output_dir "$folder" --resume --save_minutes 0.5 "$@" > "$log" || {
        cat "$log"
        exit 1
    }
    # The last evaluation, or else the last step.
    echo "$( (grep '^after ' "$log" || grep -E '^[A-Za-z0-9 ]+ [0-9]+/[0-9]+: ' "$log") | tail -n 1) ($log)"
}
