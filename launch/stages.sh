# The stages that the recipes share, to be sourced in the project's root by pipeline.sh and qwen.sh.

begin() { # OUT: set up the environment, and the variables of the stages
    out=$1
    if [[ $out == -* || $out == *[=\'\\]* ]]; then
        echo "error: OUT must be a folder without quotes or =, got $out. Give another one" >&2
        exit 2
    fi
    bash launch/setup.sh
    source .venv/bin/activate
    gpus=0 # PyTorch takes seconds to import: it counts only if a driver is installed
    if [[ -n $(type -P nvidia-smi rocm-smi) ]]; then
        gpus=$(python -c 'import torch; print(torch.cuda.device_count())')
    fi
    ranks=$((gpus > 0 ? gpus : $(nproc)))
    ranks=$((ranks < 2 ? ranks : 2))
    export OMP_NUM_THREADS=1 # a thread per rank: two that share a core spin
    # Large tensors come and go: keep their memory instead of returning it to the kernel each time.
    export MALLOC_MMAP_THRESHOLD_=4294967296 MALLOC_TRIM_THRESHOLD_=4294967296
}

run() { # MODULE SETTING... out=DIR: a finished stage needs one process to say so
    local last=${*: -1}
    if [[ -f ${last#out=}/manifest.json ]]; then python -m "$@"; else torchrun --standalone --nproc_per_node "$ranks" -m "$@"; fi
}

own_text() { # BASE SEQ_LEN DOCUMENTS PROMPTS SHARE CODE ANSWER: $out/code and $out/chat, the base's own text
    # DOCUMENTS of $out/documents are continued by CODE tokens at most, PROMPTS of its own answered by ANSWER
    # tokens, SHARE of the answers held out.
    local base=$1 data=(tokenizer="$1" seq_len="$2")
    run infer.regenerate model="$base" data.path="$out/documents" documents="$3" \
        temperature=0.8 sampled=0.5 max_new_tokens="$6" batch=128 out="$out/own_code"
    run infer.regenerate model="$base" own_prompts="$4" \
        temperature=0.8 sampled=0.5 max_new_tokens="$7" batch=128 out="$out/own_chat"
    python -m data_prep "${data[@]}" experiment=own data.path="$out/own_code" out="$out/code"
    python -m data_prep "${data[@]}" experiment=own_chat data.path="$out/own_chat" held_out="$5" out="$out/chat"
}
