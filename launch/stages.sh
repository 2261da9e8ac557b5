# Functions shared by the recipes, which source this file in the caller's folder and set `project` to the project's root.

count_gpus() { # print their number; PyTorch takes seconds to import, so it counts only if a driver is installed
    if [[ -n $(type -P nvidia-smi rocm-smi) ]]; then
        python -c 'import torch; print(torch.cuda.device_count())'
    else
        echo 0
    fi
}

in_project() { # PATH: print a path of the caller's folder for use in the project's root
    if [[ $1 == -* ]]; then echo "$1"; else realpath -m --relative-base="$project" "$1"; fi # begin refuses options
}

check_path() { # NAME PATH WHAT: refuse a path that a list of settings cannot have
    if [[ $2 == -* || $2 == *[=\'\\]* ]]; then
        echo "error: $1 must be a $3 without quotes or =, got $2. Give another one" >&2
        exit 2
    fi
}

check_ranks() { # refuse a number of processes that torchrun does not know
    if [[ ! ${RANKS:-auto} =~ ^([1-9][0-9]*|auto|gpu|cpu)$ ]]; then
        echo "error: RANKS must be a number of processes, auto, gpu or cpu, got $RANKS. Run RANKS=1 $0 ..." >&2
        exit 2
    fi
}

begin() { # OUT: set up the environment and the variables out, gpus and ranks
    out=$1
    check_path OUT "$out" folder
    bash launch/setup.sh
    source .venv/bin/activate
    gpus=$(count_gpus)
    ranks=$((gpus > 0 ? gpus : $(nproc)))
    ranks=$((ranks < 2 ? ranks : 2))
    export OMP_NUM_THREADS=1 # one thread per rank: threads that share a core waste it by spinning
}

run() { # MODULE SETTING... out=DIR: run a stage on all ranks; a finished stage needs only one process
    local last=${*: -1}
    if [[ -f ${last#out=}/manifest.json ]]; then python -m "$@"; else python launch/torchrun.py --standalone --nproc_per_node "$ranks" -m "$@"; fi
}

own_text() { # DATA BASE DOCUMENTS QUESTIONS PROMPTS SHARE CODE ANSWER: write the base model's text to $out/code and $out/chat
    # The model continues DOCUMENTS of the folder DATA by at most CODE tokens. It answers QUESTIONS about other documents
    # and PROMPTS that it writes itself by at most ANSWER tokens. SHARE of the answers is held out. The variable
    # own_dtype is the type of the base model's weights; chat_prompts is a file of prompts in place of the model's own.
    local documents=$1 base=$2 own=(temperature=0.8 sampled=0.5 batch=128 dtype="${own_dtype:-auto}")
    local data=(tokenizer="$base" seq_len=512)
    run infer.regenerate model="$base" data.path="$documents" documents="$3" "${own[@]}" \
        max_new_tokens="$7" out="$out/own_code"
    if [[ $4 != 0 ]]; then
        run infer.regenerate model="$base" data.path="$documents" documents="$4" "${own[@]}" seed=1 \
            question="'Continue this code.'" prefix_min=24 prefix_max=128 max_new_tokens="$8" out="$out/own_chat/questions"
    fi
    local prompts=(own_prompts="$5")
    [[ -z ${chat_prompts:-} ]] || prompts=(prompts="['$chat_prompts']" documents="$5")
    run infer.regenerate model="$base" "${prompts[@]}" "${own[@]}" max_new_tokens="$8" out="$out/own_chat/prompts"
    python -m data_prep "${data[@]}" experiment=own data.path="$out/own_code" out="$out/code"
    python -m data_prep "${data[@]}" experiment=own_chat data.path="$out/own_chat" held_out="$6" out="$out/chat"
}
