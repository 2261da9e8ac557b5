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

own_text() { # DATA BASE DOCUMENTS QUESTIONS PROMPTS SHARE CODE ANSWER: $out/code and $out/chat, the base's own text
    # DOCUMENTS of the folder DATA are continued by CODE tokens at most. QUESTIONS about other documents and PROMPTS of
    # the model's own are answered by ANSWER tokens at most; SHARE of the answers is held out.
    local documents=$1 base=$2 own=(temperature=0.8 sampled=0.5 batch=128)
    local data=(tokenizer="$base" seq_len=512)
    run infer.regenerate model="$base" data.path="$documents" documents="$3" "${own[@]}" \
        max_new_tokens="$7" out="$out/own_code"
    if [[ $4 != 0 ]]; then
        run infer.regenerate model="$base" data.path="$documents" documents="$4" "${own[@]}" seed=1 \
            question="'Continue this code.'" prefix_min=24 prefix_max=128 max_new_tokens="$8" out="$out/own_chat/questions"
    fi
    run infer.regenerate model="$base" own_prompts="$5" "${own[@]}" max_new_tokens="$8" out="$out/own_chat/prompts"
    python -m data_prep "${data[@]}" experiment=own data.path="$out/own_code" out="$out/code"
    python -m data_prep "${data[@]}" experiment=own_chat data.path="$out/own_chat" held_out="$6" out="$out/chat"
}
