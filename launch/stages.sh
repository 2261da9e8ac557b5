# Functions shared by the recipes. pipeline.sh and qwen.sh source this file in the project's root.

begin() { # OUT: set up the environment and the variables out, gpus and ranks
    out=$1
    if [[ $out == -* || $out == *[=\'\\]* ]]; then
        echo "error: OUT must be a folder without quotes or =, got $out. Give another one" >&2
        exit 2
    fi
    bash launch/setup.sh
    source .venv/bin/activate
    local counts # both in one process, since importing PyTorch is slow
    counts=$(python -c 'import os, torch; n = torch.cuda.device_count(); print(n, min(2, len(os.sched_getaffinity(0)), n or 2))')
    read -r gpus ranks <<<"$counts"
    export OMP_NUM_THREADS=1 # one thread per rank: threads that share a core waste it by spinning
    # Keep the memory of large freed tensors instead of returning it to the kernel.
    export MALLOC_MMAP_THRESHOLD_=4294967296 MALLOC_TRIM_THRESHOLD_=4294967296
}

run() { # MODULE SETTING... out=DIR: run a stage on all ranks; a finished stage needs only one process
    local last=${*: -1}
    if [[ -f ${last#out=}/manifest.json ]]; then python -m "$@"; else torchrun --standalone --nproc_per_node "$ranks" -m "$@"; fi
}

own_text() { # BASE SEQ_LEN DOCUMENTS PROMPTS SHARE CODE ANSWER: write the base model's text to $out/code and $out/chat
    # The model continues DOCUMENTS of $out/documents by at most CODE tokens, and answers PROMPTS that it writes itself
    # by at most ANSWER tokens. SHARE of the answers is held out.
    local base=$1 data=(tokenizer="$1" seq_len="$2")
    run infer.regenerate model="$base" data.path="$out/documents" documents="$3" \
        temperature=0.8 sampled=0.5 max_new_tokens="$6" batch=128 out="$out/own_code"
    run infer.regenerate model="$base" own_prompts="$4" \
        temperature=0.8 sampled=0.5 max_new_tokens="$7" batch=128 out="$out/own_chat"
    python -m data_prep "${data[@]}" experiment=own data.path="$out/own_code" out="$out/code"
    python -m data_prep "${data[@]}" experiment=own_chat data.path="$out/own_chat" held_out="$5" out="$out/chat"
}
