"""Flags of the binaries that the other tables do not describe: serving, sampling, logging, …

The tables have the names, and whether a value follows. They come from `--help` of builds without a GPU
(ik_llama.cpp 8337e4cd3, with the part about GPUs; llama.cpp 0c1e57098: llama-server and llama-perplexity). If
one spelling of a flag has a row in flags.py, all spellings are there and not here.
"""

from __future__ import annotations

from .line import IK, MAIN

# (engine, llama-bench or not): (switches, flags with a value)
_NAMES: dict[tuple[str, bool], tuple[str, str]] = {
    (IK, True): (
        "--help --verbose -h -v ",
        "--rpc -rpc ",
    ),
    (IK, False): (
        "--adaptive-decay --adaptive-target --adaptive-updt-w-cur --all-logits --allowlist-keyword "
        "--allowlist-keyword-delay --allowlist-pieces --allowlist-unicode-rule --banned-n "
        "--banned-string-file --check-tensors --color --conversation --dsa --dump-kv-cache "
        "--embd-normalize --embd-output-format --embd-separator --embedding --escape "
        "--expiring-logit-bias-file --fused-indexer-topk --hellaswag --help --ignore-eos --in-prefix-bos "
        "--infill --interactive --interactive-first --jinja --log-append --log-disable --log-enable "
        "--log-new --log-test --lora-init-without-apply --metrics --minilog --mlock --multiline-input "
        "--multiple-choice --no-context-shift --no-display-prompt --no-escape "
        "--no-mmproj-offload --no-ppl --no-prefill-assistant --no-slots --no-warmup --parallel-tool-calls "
        "--penalize-nl --process-output --prompt-cache-all --prompt-cache-ro --reasoning "
        "--reasoning-budget-message --send-done --simple-io --skip-chat-parsing --spec-autotune --special "
        "--split-mode-f16 --split-mode-f32 --spm-infill --swa-compress --ui-mcp-proxy --usage "
        "--validate-quants --verbose --verbose-prompt --webui-mcp-proxy --winogrande -cnv -co -dkvc "
        "-dsa -e -fidx -h -i -if -mli -pps -ptcall -rea -smf16 -smf32 -sp -v -vq ",
        "--api-key --api-key-file --attention --audio --binary-file --cache-ram --cache-ram-n-min "
        "--cache-ram-similarity --ctx-checkpoints --ctx-checkpoints-eviction --ctx-checkpoints-interval "
        "--ctx-checkpoints-tolerance "
        "--cfg-negative-prompt --cfg-negative-prompt-file "
        "--cfg-scale --chat-template --chat-template-file --chat-template-kwargs --chunk --chunk-separator "
        "--chunk-size --context-file --context-shift --control-vector --control-vector-layer-range "
        "--control-vector-scaled --defrag-thold "
        "--dry-allowed-length --dry-base --dry-multiplier --dry-penalty-last-n --dry-sequence-breaker "
        "--dsa-top-k --dynatemp-exp --dynatemp-range --frequency-penalty --gpu-fit-margin "
        "--grammar --grammar-file --graph-attn-precision --grp-attn-n --grp-attn-w "
        "--hellaswag-tasks --hf-file --hf-repo --hf-token --host --image --image-max-tokens "
        "--image-min-tokens --in-file --in-prefix --in-suffix --indexer-cache-type-k --json-schema --junk "
        "--keep --log-file --log-format --logdir --lookup-cache-dynamic --lookup-cache-static --lora "
        "--lora-scaled --method --min-p --mirostat --mirostat-ent --mirostat-lr --mmproj --mmproj-url "
        "--model-url --mtmd-kq-type --mtp-requantize-output-tensor --multiple-choice-tasks "
        "--negative-file --output --output-draft --output-frequency --output-tensor-name --override-kv "
        "--p-split --path --pca-batch --pca-iter --pooling --port --pos --positive-file "
        "--ppl-output-type --ppl-stride --prefetch-experts-threads --presence-penalty --print-token-count "
        "--prompt-cache --reasoning-budget --reasoning-format --reasoning-tokens --repeat-last-n "
        "--repeat-penalty --reverse-prompt --rope-freq-base --rope-freq-scale --rope-scale --rope-scaling "
        "--rpc --samplers --sampling-seq --save-frequency --seed --sequences --slot-prompt-similarity "
        "--slot-save-path --spec-ckpt-mode --spec-replace --sql-save-file "
        "--sqlite-zstd-ext-file --ssl-cert-file --ssl-key-file --system-prompt-file --tfs "
        "--threads-http --threads-mtmd --timeout --top-k "
        "--top-n-sigma --top-p --typical --verbosity --webui --winogrande-tasks --xtc-probability "
        "--xtc-threshold --yarn-attn-factor --yarn-beta-fast --yarn-beta-slow --yarn-ext-factor "
        "--yarn-orig-ctx -bf -cram -cram-n-min -crs -ctx-ckpt -ctx-ckpt-e -ctx-ckpt-i "
        "-ctx-ckpt-t -dsatk -dt -gan -gap -gaw -gfm -hff -hfr -hft -ictk -j -l -lcd -lcs -ld "
        "-mtprot -mu -ns -o -ofreq -okv -ps -ptc -r -s -spf -sps -tm -to ",
    ),
    (MAIN, True): (
        "--help --offline --verbose -h -v ",
        "--hf-file --hf-repo --hf-token -hf -hff -hfr -hft ",
    ),
    (MAIN, False): (
        "--agent --backend-sampling --cache-idle-slots --cache-list --cache-prompt --check-tensors "
        "--completion-bash --context-shift --cors-credentials "
        "--embd-gemma-default --embedding --embeddings --escape --fim-qwen-1 --fim-qwen-14b-spec "
        "--fim-qwen-30b-default --fim-qwen-3b-default --fim-qwen-7b-default --fim-qwen-7b-spec "
        "--gpt-oss-120b-default --gpt-oss-20b-default --hellaswag --help --ignore-eos --jinja "
        "--list-devices --log-disable --log-jsonl --log-prefix --log-timestamps --log-verbose "
        "--lora-init-without-apply --metrics --mmproj-auto --mmproj-offload --models-autoload "
        "--multiple-choice --no-agent --no-cache-idle-slots --no-cache-prompt "
        "--no-context-shift --no-cors-credentials --no-escape --no-jinja --no-log-jsonl --no-log-prefix "
        "--no-log-timestamps --no-mmproj --no-mmproj-auto --no-mmproj-offload --no-models-autoload "
        "--no-perf --no-prefill-assistant --no-reasoning-preserve --no-skip-chat-parsing --no-slots "
        "--no-spec-draft-backend-sampling --no-ui --no-ui-mcp-proxy --no-warmup --no-webui "
        "--no-webui-mcp-proxy --offline --perf --prefill-assistant --props --reasoning-preserve --rerank "
        "--reranking --reuse-port --skip-chat-parsing --slots --spec-default --spec-draft-backend-sampling "
        "--special --spm-infill --ui --ui-mcp-proxy --usage --verbose "
        "--vision-gemma-12b-default --vision-gemma-4b-default --warmup --webui --webui-mcp-proxy "
        "--winogrande -ag -bs -cl -e -h -no-ag -sp -v ",
        "--adaptive-decay --adaptive-target --alias --api-key --api-key-file --api-prefix --binary-file "
        "--cache-ram --cache-reuse --chat-template "
        "--chat-template-file --chat-template-kwargs --checkpoint-min-step --control-vector "
        "--control-vector-layer-range --control-vector-scaled --cors-headers --cors-methods --cors-origins "
        "--cpu-mask-batch --cpu-mask-batch-draft --cpu-mask-draft --cpu-range-batch --cpu-range-draft "
        "--cpu-strict-batch --cpu-strict-batch-draft --cpu-strict-draft --ctx-checkpoints --defrag-thold "
        "--docker-repo "
        "--dry-allowed-length --dry-base --dry-multiplier --dry-penalty-last-n "
        "--dry-sequence-breaker --dynatemp-exp --dynatemp-range --embd-normalize --frequency-penalty "
        "--grammar --grammar-file --hellaswag-tasks --hf-file --hf-repo "
        "--hf-token --host --image-max-tokens --image-min-tokens --json-schema --json-schema-file --keep "
        "--kv-unified-per-slot --log-colors --log-file --log-prompts-dir --log-verbosity --logit-bias "
        "--lookup-cache-dynamic --lookup-cache-static --lora --lora-scaled --mcp-servers-config "
        "--mcp-servers-json --media-path --min-p --mirostat --mirostat-ent --mirostat-lr --mmproj "
        "--mmproj-device --mmproj-url --model-url --models-dir --models-max --models-preset "
        "--mtmd-batch-max-tokens --multiple-choice-tasks "
        "--override-kv --path --poll-batch --poll-batch-draft "
        "--poll-draft --pooling --port --ppl-output-type --ppl-stride --presence-penalty --prio-batch "
        "--prio-batch-draft --prio-draft --reasoning --reasoning-budget --reasoning-budget-message "
        "--reasoning-effort --reasoning-format --repeat-last-n --repeat-penalty --reverse-prompt "
        "--rope-freq-base --rope-freq-scale --rope-scale --rope-scaling --rpc --sampler-seq --samplers "
        "--sampling-seq --seed --sleep-idle-seconds --slot-prompt-similarity --slot-save-path "
        "--spec-draft-cpu-mask --spec-draft-cpu-mask-batch --spec-draft-cpu-range --spec-draft-cpu-strict "
        "--spec-draft-cpu-strict-batch "
        "--spec-draft-poll "
        "--spec-draft-poll-batch --spec-draft-prio --spec-draft-prio-batch "
        "--spec-ngram-map-k-min-hits "
        "--spec-ngram-map-k-size-m --spec-ngram-map-k-size-n --spec-ngram-map-k4v-min-hits "
        "--spec-ngram-map-k4v-size-m --spec-ngram-map-k4v-size-n "
        "--spec-ngram-mod-n-match --spec-ngram-mod-n-max --spec-ngram-mod-n-min "
        "--spec-ngram-simple-min-hits --spec-ngram-simple-size-m --spec-ngram-simple-size-n "
        "--spec-synth-len --spec-synth-rates "
        "--sse-ping-interval --ssl-cert-file --ssl-key-file --swa-checkpoints --tags "
        "--threads-http --timeout --tools --tools-runtime --top-k "
        "--top-n-sigma --top-nsigma --top-p --typical --typical-p --ui-config --ui-config-file --verbosity "
        "--video-ffmpeg-dir --video-fps --video-timestamp-interval --webui-config --webui-config-file "
        "--winogrande-tasks --xtc-probability --xtc-threshold --yarn-attn-factor --yarn-beta-fast "
        "--yarn-beta-slow --yarn-ext-factor --yarn-orig-ctx -Cb -Cbd -Cd -Crb -Crd -a -bf -cms -cram "
        "-ctxcp -dr -dt -hf -hff -hfr -hft -j -jf -l -lcd -lcs -lv -mm -mmdev "
        "-mmu -mu -r -rea -s -sps -to ",
    ),
}
OTHERS: dict[tuple[str, bool], dict[str, bool]] = {
    where: {**dict.fromkeys(switches.split(), False), **dict.fromkeys(valued.split(), True)}
    for where, (switches, valued) in _NAMES.items()
}
"""Whether a flag takes a value, by engine and by whether the tool is llama-bench."""
