"""Every command line and cmake line that the diagnosis was made for, with what it has to say about it."""

from __future__ import annotations

from pathlib import Path

import pytest
from doctor_lines import find, says
from dyno_tuner.core.errors import TuneError
from dyno_tuner.doctor import Facts, diagnose
from dyno_tuner.doctor.facts import gather, parse_cc
from dyno_tuner.doctor.flags import FLAGS
from dyno_tuner.doctor.gone import GONE
from dyno_tuner.doctor.gpu_rules import LIMITS
from dyno_tuner.doctor.line import ENGINES, IK, MAIN
from dyno_tuner.doctor.op_ids import ERAS
from dyno_tuner.doctor.others import OTHERS
from dyno_tuner.doctor.switches import BUILD, ENVIRONMENT
from dyno_tuner.targets.ggml.help import Help, parse_help
from fake_engines import DATA

TURING, AMPERE, VOLTA, PASCAL = Facts(cc=7.5), Facts(cc=8.6), Facts(cc=7.0), Facts(cc=6.1)
HOPPER, BLACKWELL, GB10 = Facts(cc=9.0), Facts(cc=12.0), Facts(cc=12.1)


# line, engine to give, version, facts, token, its status, part of what is said
CASES: list[tuple[str, str | None, str | None, Facts | None, str, str, str]] = [
    # build switches
    ("-DGGML_CUDA_LTO=ON", IK, None, None, "-DGGML_CUDA_LTO", "missing", "never merged"),
    ("cmake -B b -DGGML_CUDA_F16=ON", None, None, TURING, "-DGGML_CUDA_F16", "does", "hardly any effect"),
    ("cmake -DGGML_CUDA_F16:BOOL=ON", IK, None, PASCAL, "-DGGML_CUDA_F16", "wrong-gpu", "1/64"),
    ("cmake -D GGML_CUDA_F16=ON", MAIN, None, None, "-D GGML_CUDA_F16", "removed", "no longer has it"),
    ("cmake -DGGML_CUDA_FORCE_MMQ=ON", IK, None, TURING, "-DGGML_CUDA_FORCE_MMQ", "inert", "no effect"),
    ("cmake -DGGML_CUDA_FORCE_MMQ=ON", MAIN, None, AMPERE, "-DGGML_CUDA_FORCE_MMQ", "inert", "no effect"),
    ("cmake -DGGML_CUDA_FORCE_MMQ=ON", MAIN, None, VOLTA, "-DGGML_CUDA_FORCE_MMQ", "does", "kernels"),
    ("cmake -DGGML_CUDA_IQK_FORCE_BF16=1", IK, None, AMPERE, "-DGGML_CUDA_IQK", "does", "overflow"),
    ("cmake -DGGML_CUDA_IQK_FORCE_BF16=OFF", IK, None, TURING, "-DGGML_CUDA_IQK", "does", "overflow"),
    ("cmake -DGGML_CUDA_FORCE_DMMV=ON", IK, None, None, "-DGGML_CUDA_FORCE_DMMV", "inert", "MMVQ"),
    ("cmake -DGGML_CUDA_PEER_MAX_BATCH_SIZE=4", IK, None, None, "-DGGML_CUDA_PEER", "inert", "never read"),
    ("cmake -DGGML_CUDA_GRAPH_OPT=1", MAIN, None, None, "-DGGML_CUDA_GRAPH_OPT", "invalid", "environment"),
    ("cmake -DGGML_CUDA_FORCE_MQM=ON", IK, None, None, "-DGGML_CUDA_FORCE_MQM", "unknown",
        "GGML_CUDA_FORCE_MMQ"),
    ("cmake -DCMAKE_CUDA_ARCHITECTURES=61", MAIN, None, TURING, "-DCMAKE_CUDA", "wrong-gpu", "add 75"),
    ("cmake -DCMAKE_CUDA_ARCHITECTURES=80-real;86", IK, None, AMPERE, "-DCMAKE_CUDA", "does", "switch"),
    ("cmake -DCMAKE_CUDA_ARCHITECTURES=86-real", MAIN, None, HOPPER, "-DCMAKE_CUDA", "wrong-gpu", "no arch"),
    ("cmake -DCMAKE_CUDA_ARCHITECTURES=86-virtual", MAIN, None, HOPPER, "-DCMAKE_CUDA", "does", "switch"),
    ("cmake -DCMAKE_CUDA_ARCHITECTURES=90a", MAIN, None, BLACKWELL, "-DCMAKE_CUDA", "wrong-gpu", "no arch"),
    ("cmake -DCMAKE_CUDA_ARCHITECTURES=90a", MAIN, None, HOPPER, "-DCMAKE_CUDA", "does", "switch"),
    ("cmake -DCMAKE_CUDA_ARCHITECTURES=100f", MAIN, None, BLACKWELL, "-DCMAKE_CUDA", "wrong-gpu", "no arch"),
    ("cmake -DCMAKE_CUDA_ARCHITECTURES=120f-real", MAIN, None, BLACKWELL, "-DCMAKE_CUDA", "does", "switch"),
    ("cmake -DCMAKE_CUDA_ARCHITECTURES=90", IK, None, AMPERE, "-DCMAKE_CUDA", "wrong-gpu", "no architecture"),
    # llama.cpp turns 12X into 12Xa, also of its PTX.
    ("cmake -DCMAKE_CUDA_ARCHITECTURES=120", MAIN, None, GB10, "-DCMAKE_CUDA", "wrong-gpu", "12X into 12Xa"),
    ("cmake -DCMAKE_CUDA_ARCHITECTURES=120-virtual", MAIN, None, GB10, "-DCMAKE_CUDA", "wrong-gpu", "12Xa"),
    ("cmake -DCMAKE_CUDA_ARCHITECTURES=120-real", MAIN, None, GB10, "-DCMAKE_CUDA", "wrong-gpu", "12Xa"),
    ("cmake -DCMAKE_CUDA_ARCHITECTURES=120", IK, None, GB10, "-DCMAKE_CUDA", "does", "switch"),
    ("cmake -DCMAKE_CUDA_ARCHITECTURES=121", MAIN, None, GB10, "-DCMAKE_CUDA", "does", "switch"),
    ("cmake -DCMAKE_CUDA_ARCHITECTURES=120", MAIN, None, BLACKWELL, "-DCMAKE_CUDA", "does", "switch"),
    ("cmake -DCMAKE_CUDA_ARCHITECTURES=120f", MAIN, None, GB10, "-DCMAKE_CUDA", "does", "switch"),
    ("cmake -DCMAKE_CUDA_ARCHITECTURES=75,86", MAIN, None, AMPERE, "-DCMAKE_CUDA", "invalid", "'75,86'"),
    ("cmake -DCMAKE_CUDA_ARCHITECTURES=75,86", IK, None, None, "-DCMAKE_CUDA", "invalid", "separated by"),
    ("cmake -DCMAKE_CUDA_ARCHITECTURES=75;8.6", MAIN, None, AMPERE, "-DCMAKE_CUDA", "invalid", "'8.6'"),
    ("cmake -DCMAKE_CUDA_ARCHITECTURES=sm_86", MAIN, None, AMPERE, "-DCMAKE_CUDA", "invalid", "'sm_86'"),
    ("cmake -DCMAKE_CUDA_ARCHITECTURES=all-major", MAIN, None, AMPERE, "-DCMAKE_CUDA", "does", "switch"),
    ("cmake -DCMAKE_CUDA_ARCHITECTURES=native", MAIN, None, AMPERE, "-DCMAKE_CUDA", "does", "switch"),
    ("cmake -DCMAKE_CUDA_ARCHITECTURES=OFF", IK, None, AMPERE, "-DCMAKE_CUDA", "does", "switch"),
    ("cmake -DGGML_SCHED_MAX_COPIES=4", IK, None, Facts(gpus=1), "-DGGML_SCHED", "inert", "one GPU"),
    ("GGML_CUDA_F16=ON llama-cli", IK, None, None, "GGML_CUDA_F16", "invalid", "give it to cmake"),
    # environment
    ("GGML_CUDA_GRAPH_OPT=1 llama-cli", None, None, AMPERE, "GGML_CUDA_GRAPH_OPT", "does", "no kernel "
        "fusion"),
    ("GGML_CUDA_GRAPH_OPT=2 llama-cli", MAIN, None, None, "GGML_CUDA_GRAPH_OPT", "inert", "only the value 1"),
    ("GGML_CUDA_GRAPH_OPT=1 llama-cli", MAIN, None, PASCAL, "GGML_CUDA_GRAPH_OPT", "inert", "below 7.0"),
    ("GGML_CUDA_GRAPH_OPT=1 llama-cli", IK, None, None, "GGML_CUDA_GRAPH_OPT", "missing", "absent"),
    ("GGML_CUDA_GRAPH_OPT=1 GGML_CUDA_DISABLE_GRAPHS=1 llama-cli", None, None, None, "GGML_CUDA_GRAPH_OPT",
     "inert", "turns off"),
    ("llama-cli --cuda-graph-opt", None, None, None, "--cuda-graph-opt", "missing", "no such flag"),
    ("GGML_CUDA_DISABLE_GRAPHS=0 llama-cli", IK, None, AMPERE, "GGML_CUDA_DISABLE", "invalid", "presence"),
    ("GGML_CUDA_DISABLE_GRAPHS=1 llama-cli", IK, None, TURING, "GGML_CUDA_DISABLE", "inert", "below"),
    ("GGML_CUDA_CUBLAS_COMPUTE_TYPE=bf16 llama-cli", None, None, TURING, "GGML_CUDA_CUBLAS", "wrong-gpu",
        "bf16"),
    ("GGML_CUDA_CUBLAS_COMPUTE_TYPE=f16 llama-cli", None, None, TURING, "GGML_CUDA_CUBLAS", "does", "cuBLAS"),
    ("CUDA_SCALE_LAUNCH_QUEUES=4x llama-cli", MAIN, None, None, "CUDA_SCALE", "does", "queues"),
    # -cuda
    ("-cuda mmq-id-size=0", None, None, None, "mmq-id-size", "does", "0 never"),
    ("-cuda fusion=0,grahps=0", None, None, None, "grahps", "invalid", "nearest: graphs"),
    ("-cuda graphs=true", None, None, None, "graphs", "invalid", "0 or 1"),
    ("-cuda graphs=0", None, None, TURING, "graphs", "inert", "below compute capability 8.0"),
    ("-cuda fa-offset=4", None, None, None, "fa-offset", "invalid", "0 to 3"),
    ("-cuda mmq-id-size=8 -ub 512 -b 512", None, None, Facts(experts=128, experts_used=8), "mmq-id-size",
        "inert",
     "same path"),
    ("-cuda mmq-id-size=2 -ub 512 -b 512", None, None, Facts(experts=128, experts_used=8), "mmq-id-size",
        "does", ""),
    ("-cuda mmq-id-size=0", None, None, Facts(moe=False), "mmq-id-size", "inert", "no experts"),
    ("-sm graph -cuda graphs=1", None, None, None, "graphs", "inert", "without CUDA graphs"),
    ("llama-cli -cuda graphs=0", MAIN, None, None, "-cuda", "missing", "a flag of ik_llama.cpp"),
    # removed, renamed, other tool
    ("llama-server -fmoe", IK, None, None, "-fmoe", "removed", "on by default"),
    ("llama-bench -fmoe 1", IK, None, None, "-fmoe 1", "does", "fused"),
    ("llama-server -fmoe", IK, "2025-10-01", None, "-fmoe", "unknown", "date is unknown"),
    ("llama-server -fmoe", IK, "2026-09-01", None, "-fmoe", "removed", "on by default"),
    ("llama-server -fa -ub 512", IK, None, None, "-fa", "removed", "bare -fa"),
    ("llama-server -fa on", IK, None, None, "-fa on", "does", "flash"),
    ("llama-server -sm row", IK, None, None, "-sm row", "removed", "a71934998"),
    ("llama-server -sm row", IK, "2025-11-30", None, "-sm row", "does", "works"),
    ("llama-server -sm row", MAIN, None, None, "-sm row", "does", "deprecated"),
    ("llama-bench -mmp 0", MAIN, None, None, "-mmp 0", "removed", "-lm"),
    ("llama-server --no-mmap", MAIN, None, None, "--no-mmap", "removed", "-lm"),
    ("llama-server --no-mmap", IK, None, None, "--no-mmap", "does", "reads"),
    ("llama-bench -op 27,0", IK, None, None, "-op", "missing", "does not take"),
    ("llama-bench -d 4096", IK, None, None, "-d", "missing", "-gp"),
    ("llama-bench -tb 8", MAIN, None, None, "-tb", "missing", "only -t"),
    ("llama-server -op -1,0", MAIN, None, None, "-op", "missing", "--no-op-offload"),
    ("llama-server -mla 3", MAIN, None, None, "-mla", "missing", "a flag of ik_llama.cpp"),
    ("llama-sweep-bench -c 4096", MAIN, None, None, "llama-sweep", "missing", "batched-bench"),
    ("llama-cli -ser 6,1", IK, None, None, "-ser", "inert", "ignored since"),
    ("llama-cli -ser 6,1", IK, "2025-10-18", None, "-ser", "does", "fewer"),
    ("llama-cli -rcache", IK, None, None, "-rcache", "removed", "no longer"),
    ("llama-bench -rcache 1", IK, None, None, "-rcache", "inert", "without any effect"),
    ("llama-cli -fdn 4", IK, None, None, "-fdn", "removed", "deprecated"),
    ("llama-bench -ncmoe 4", IK, None, None, "-ncmoe", "missing", "--n-cpu-moe"),
    ("llama-server --port 8080 --jinja -np 4", IK, None, None, "-np 4", "does", "They share -c"),
    ("llama-server --min-p 0.6 --no-webui", MAIN, None, None, "--min-p 0.6", "does", "a known flag"),
    ("llama-server --temp 0.6", MAIN, None, None, "--temp 0.6", "does", "temperature of sampling"),
    ("llama-server --temperature 0.6", MAIN, None, None, "--temperature 0.6", "does", "changes answers"),
    ("llama-server --temp 0.6", IK, None, None, "--temp 0.6", "does", "temperature of sampling"),
    # a switch that is off
    ("cmake -DGGML_CUDA_USE_GRAPHS=OFF", IK, None, None, "-DGGML_CUDA_USE", "does", "leaves CUDA graphs out"),
    ("cmake -DGGML_CUDA_USE_GRAPHS=ON", IK, None, None, "-DGGML_CUDA_USE", "does", "compiles CUDA graphs"),
    ("cmake -DGGML_CUDA_GRAPHS=0", MAIN, None, None, "-DGGML_CUDA_GRAPHS", "does", "leaves CUDA graphs out"),
    ("cmake -DGGML_NCCL=OFF", IK, None, None, "-DGGML_NCCL", "does", "turned off; with ON"),
    ("cmake -DGGML_CUDA_FUSION=0", IK, None, None, "-DGGML_CUDA_FUSION", "does", "default of -cuda fusion"),
    ("llama-server --port", MAIN, None, None, "--port", "invalid", "needs a value"),
    ("llama-server --mertics", MAIN, None, None, "--mertics", "unknown", "--metrics"),
    # what the threads quote: PR 891, issue 474 and 765, PR 728
    ("cmake -B build -DGGML_CUDA=ON -DCMAKE_CUDA_SEPARABLE_COMPILATION=ON -DCMAKE_CUDA_FLAGS=-dlto", IK, None,
        None, "-DCMAKE_CUDA_SEP", "does", "slower in generation"),
    ("cmake -B build -DCMAKE_INTERPROCEDURAL_OPTIMIZATION=TRUE", IK, None, None, "-DCMAKE_INTER", "does",
        "slower in generation"),
    ("llama-server -op 29,0 -rtr -ot exps=CPU", IK, "2025-06-05", None, "-op", "does", "MOE_FUSED_UP_GATE"),
    ("llama-server -rtr -ot exps=CPU -b 4096 -ub 4096", IK, None, None, "-rtr", "does", "repacks"),
    ("llama-server -ot exps=CPU -op 26,0,27,0,29,0", IK, "2025-08-20", None, "-op", "renumbered", "OUT_PROD"),
    ("llama-server -ot exps=CPU -op 28,0,30,0", IK, None, None, "-op", "does", "FUSED_UP_GATE"),
    ("llama-server -cuda mmq-id-size=0 -ub 2048", IK, None, None, "mmq-id-size", "does", "0 never"),
    ("GGML_CUDA_DISABLE_FUSION=1 llama-server", MAIN, None, None, "GGML_CUDA_DISABLE_F", "does", "fusion"),
    ("GGML_CUDA_P2P=0 llama-server", MAIN, None, None, "GGML_CUDA_P2P", "invalid", "presence"),
    ("GGML_CUDA_NO_PINNED=0 llama-server", IK, None, None, "GGML_CUDA_NO_PINNED", "invalid", "presence"),
    ("GGML_CUDA_DISABLE_FUSION=1 llama-server", IK, None, None, "GGML_CUDA_DISABLE_F", "missing", "fusion=0"),
    ("llama-cli --flash-atn on", MAIN, None, None, "--flash-atn", "unknown", "--flash-attn"),
    ("llama-cli --flash-attn=on", MAIN, None, None, "--flash-attn=on", "unknown", "write a space"),
    ("numactl --interleave=all llama-bench -tb 8", MAIN, None, None, "-tb", "missing", "only -t"),
    ("taskset -c 0-3 llama-bench -d 4096", IK, None, None, "-d", "missing", "-gp"),
    # combinations
    ("llama-cli -ub 4096", MAIN, None, None, "-ub", "invalid", "give -b 4096"),
    ("llama-cli -ub 4096 -b 4096", MAIN, None, None, "-ub", "does", ""),
    ("llama-cli -c 1024 -b 2048", MAIN, None, None, "-b", "invalid", "context of 1024"),
    ("llama-cli -ctv q8_0 -fa off", MAIN, None, None, "-ctv", "invalid", "flash attention"),
    ("llama-cli -ctv q8_0 -fa disabled", MAIN, None, None, "-ctv", "invalid", "flash attention"),
    ("llama-cli -fa disabled", IK, None, None, "-fa", "invalid", "not one of on, off, auto"),
    ("llama-cli -ctk q8_0 -ctv q4_0", IK, None, None, "-ctv", "needs", "FA_ALL_QUANTS"),
    ("llama-cli -ctk q8_0 -ctv iq4_nl", IK, None, None, "-ctv", "does", ""),
    ("llama-cli -ctk iq4_nl", MAIN, None, None, "-ctk", "invalid", "iq4_nl"),
    ("llama-cli -ctk q8_KV", MAIN, None, None, "-ctk", "invalid", "is not one of"),
    ("llama-cli --fit -ot exps=CPU", IK, None, None, "-ot", "invalid", "--fit"),
    ("llama-cli -mla 1 -amb 512", IK, None, None, "-amb", "inert", "-mla 2 or 3"),
    ("llama-cli -mla 3", IK, None, Facts(architecture="qwen3moe"), "-mla", "inert", "forced to 0"),
    ("llama-cli -sm graph -mla 0", IK, None, None, "-mla", "invalid", "stops"),
    ("llama-cli -sm tensor -ctk q8_0", MAIN, None, None, "-ctk", "invalid", "unquantized"),
    ("llama-cli -sm layer", MAIN, None, Facts(gpus=1), "-sm", "inert", "one GPU"),
    ("llama-cli -no-ooae -ub 1024", IK, None, Facts(experts=384, experts_used=8), "-no-ooae", "inert",
        "1536"),
    ("llama-cli -no-ooae -ub 2048", IK, None, Facts(experts=384, experts_used=8), "-no-ooae", "does", ""),
    ("llama-cli -op 28,0,31,0 -ub 512", IK, None, Facts(experts=256, experts_used=8), "-op", "inert", "1024"),
    ("llama-cli -ngl 999 -rtr", IK, None, None, "-rtr", "inert", "host memory"),
    ("llama-cli -ngl 999 -ncmoe 20 -rtr", IK, None, None, "-rtr", "does", ""),
    ("llama-bench -ngl 999 --n-cpu-moe 20 -rtr 1", IK, None, None, "-rtr", "does", ""),
    ("llama-cli -ngl 999 -fit off --no-op-offload", MAIN, None, None, "--no-op", "inert", "host memory"),
    # flash attention off by its other name
    ("llama-cli -ctv q8_0 -no-fa", IK, None, None, "-ctv", "invalid", "flash attention"),
    ("llama-cli -no-fa -fa on -ctk q8_0 -ctv q8_0", IK, None, None, "-ctv", "does", ""),
    ("llama-cli -ctv-first q8_0,4 -fa off", IK, None, None, "-ctv-first", "invalid", "flash attention"),
    ("llama-cli -ctk f32 -ctv f32", MAIN, None, None, "-ctk", "does", "converts the cache to f16"),
    # what a later token replaces
    ("llama-cli -ub 512 -b 4096 -ub 4096", IK, None, None, "-ub 512", "inert", "-ub 4096"),
    ("llama-cli -ub 8192 -ub 512", MAIN, None, None, "-ub 8192", "inert", "-ub 512"),
    ("llama-bench -ub 512 -ub 1024", MAIN, None, None, "-ub 512", "does", ""),
    ("llama-cli -fa on -no-fa", IK, None, None, "-fa on", "inert", "-no-fa"),
    ("llama-cli -ncmoe 4 -cmoe", IK, None, None, "-ncmoe", "inert", "-cmoe"),
    ("llama-cli -ncmoe 4 -ncmoe 8", IK, "2026-03-18", None, "-ncmoe 4", "does", ""),
    ("llama-cli -ncmoe 4 -ncmoe 8", MAIN, None, None, "-ncmoe 4", "does", ""),
    ("llama-cli -ot a=CPU -ot b=CPU", MAIN, None, None, "-ot a", "does", ""),
    ("llama-cli -cuda graphs=0 -cuda fusion=0", IK, None, None, "graphs=0", "inert", "-cuda fusion=0"),
    ("llama-cli -cuda fusion=1,fusion=0", IK, None, None, "fusion=1", "inert", "fusion=0"),
    ("GGML_CUDA_GRAPH_OPT=1 GGML_CUDA_GRAPH_OPT=0 llama-cli", MAIN, None, None, "GGML_CUDA_GRAPH_OPT=1",
     "inert", "comes later"),
    ("cmake -DGGML_NATIVE=ON -DGGML_NATIVE=OFF", MAIN, None, None, "-DGGML_NATIVE=ON", "inert", "later"),
    # one GPU
    ("llama-cli -ts 1,1", MAIN, None, Facts(gpus=1), "-ts", "inert", "one GPU"),
    ("llama-cli -mg 0", MAIN, None, Facts(gpus=1), "-mg", "inert", "one GPU"),
    ("llama-cli -mg 1", MAIN, None, Facts(gpus=1), "-mg", "does", ""),
    ("llama-cli -sm graph --max-gpu 2", IK, None, Facts(gpus=1), "--max-gpu", "inert", "one GPU"),
    ("llama-cli -sm graph -smgs", IK, None, Facts(gpus=1), "-smgs", "inert", "one GPU"),
    ("llama-cli -sm graph -sas", IK, None, Facts(gpus=1), "-sas", "inert", "one GPU"),
    ("llama-cli -sm graph -grt q8_0", IK, None, Facts(gpus=1), "-grt", "inert", "one GPU"),
    ("llama-cli -cuda enable-p2p=0", IK, None, Facts(gpus=1), "enable-p2p", "inert", "one GPU"),
    ("GGML_CUDA_P2P=1 llama-cli", MAIN, None, Facts(gpus=1), "GGML_CUDA_P2P", "inert", "one GPU"),
    ("cmake -DGGML_CUDA_NO_PEER_COPY=ON", IK, None, Facts(gpus=1), "-DGGML_CUDA_NO", "inert", "one GPU"),
    ("llama-cli -sm graph -cuda graphs=1", IK, None, Facts(gpus=1), "graphs", "does", ""),
    ("llama-cli -sas", IK, None, None, "-sas", "inert", "graph split"),
    ("llama-cli -sm graph -sas", IK, None, None, "-sas", "does", ""),
    # by architecture
    ("llama-cli -amb 512", IK, None, Facts(architecture="qwen3moe"), "-amb", "inert", "latent"),
    ("llama-cli -amb 512 -fa off", IK, None, Facts(architecture="qwen3moe"), "-amb", "does", ""),
    ("llama-cli -amb 512", IK, None, Facts(architecture="deepseek2"), "-amb", "does", ""),
    ("llama-cli -amb 64", IK, None, None, "-amb", "invalid", "raised to 128"),
    ("llama-cli -mla 3", IK, None, Facts(architecture="glm-dsa"), "-mla", "does", ""),
    ("llama-cli -mla 1 -ngl 20", IK, None, Facts(architecture="deepseek2", layers=61), "-mla", "invalid",
     "forced to 3"),
    ("llama-cli -mla 3 -ngl 20", IK, None, Facts(architecture="deepseek2", layers=61), "-mla", "does", ""),
    ("llama-cli -sm graph -mla 0", IK, None, Facts(architecture="qwen3moe"), "-mla", "inert", "forced to 0"),
    ("llama-cli -ger", IK, None, Facts(architecture="qwen3moe"), "-ger", "inert", "no groups"),
    ("llama-cli -ger", IK, None, Facts(architecture="bailingmoe2"), "-ger", "does", "answers"),
    ("llama-cli -sm graph", IK, None, Facts(architecture="gemma3"), "-sm", "invalid", "layer is used "
        "instead"),
    ("llama-cli -sm graph", IK, None, Facts(architecture="granitemoe"), "-sm", "invalid", "layer is used "
        "instead"),
    ("llama-cli -sm graph", IK, None, Facts(architecture="gpt-oss"), "-sm", "does", ""),
    ("llama-cli -sm graph -cuda graphs=1", IK, None, Facts(architecture="gemma3"), "graphs", "does", ""),
    ("llama-cli -sm graph -grt f16", IK, None, Facts(architecture="gpt-oss"), "-grt", "invalid", "f32"),
    ("llama-cli -sm tensor", MAIN, None, Facts(architecture="deepseek2"), "-sm", "invalid", "does not "
        "support deepseek2"),
    ("llama-cli -sm tensor", MAIN, None, Facts(architecture="qwen3moe"), "-sm", "does", ""),
    ("GGML_CUDA_GRAPH_OPT=1 llama-cli", MAIN, None, Facts(architecture="deepseek2"), "GGML_CUDA_GRAPH_OPT",
     "inert", "three"),
    # experts and offload
    ("llama-cli -op 28,0,31,0", IK, None, Facts(moe=False), "-op", "inert", "no experts"),
    ("llama-cli -op 27,0,28,0", IK, None, Facts(moe=False), "-op", "does", "for the expert ops"),
    ("llama-bench --n-cpu-moe 4", IK, None, Facts(moe=False), "--n-cpu-moe", "inert", "no experts"),
    ("llama-cli -op 28,1", IK, None, None, "-op", "inert", "the default of every op"),
    ("llama-cli -op 28,0 -op 28,1", IK, None, None, "-op 28,1", "does", ""),
    ("llama-cli -op -1,0 -cuda offload-batch-size=64", IK, None, None, "offload-batch-size", "inert",
     "nothing to upload"),
    ("GGML_OP_OFFLOAD_MIN_BATCH=64 llama-cli --no-op-offload", MAIN, None, None, "GGML_OP", "inert",
     "nothing to upload"),
    ("llama-cli -ub 16 --no-op-offload", MAIN, None, None, "--no-op-offload", "inert", "from 32 tokens"),
    ("GGML_OP_OFFLOAD_MIN_BATCH=1024 llama-cli", MAIN, None, None, "GGML_OP", "does", ""),
    ("llama-cli -no-ooae -b 256", IK, None, Facts(experts=128, experts_used=8), "-no-ooae", "inert", "512"),
    ("llama-cli --fit -cmoe", IK, None, None, "-cmoe", "invalid", "--fit"),
    ("llama-bench --fit 1 --n-cpu-moe 4", IK, None, None, "--n-cpu-moe", "invalid", "--fit"),
    ("llama-cli -rtr --no-mmap", IK, None, None, "--no-mmap", "inert", "-rtr"),
    ("llama-bench -fmoe 0 -cuda graphs=1", IK, None, None, "graphs", "inert", "-fmoe 0"),
    ("llama-cli -no-fmoe -cuda graphs=1", IK, None, Facts(moe=False), "graphs", "does", ""),
    # values
    ("llama-cli -ngl many", MAIN, None, None, "-ngl", "invalid", "a number"),
    ("llama-cli -ngl 20", MAIN, None, None, "-ngl", "does", ""),
    ("llama-cli --poll 200", MAIN, None, None, "--poll", "invalid", "0 to 100"),
    ("GGML_CUDA_DISABLE_FUSION=0 llama-cli", MAIN, None, None, "GGML_CUDA_DISABLE_F", "inert", "stays on"),
    ("GGML_CUDA_PDL=1 llama-cli", MAIN, None, Facts(cc=9.0), "GGML_CUDA_PDL", "inert", "by default"),
    ("GGML_CUDA_PDL=0 llama-cli", MAIN, None, Facts(cc=9.0), "GGML_CUDA_PDL", "does", ""),
    ("GGML_CUDA_MMQ_PREC=q5 llama-cli", MAIN, None, None, "GGML_CUDA_MMQ", "invalid", "q4, q8, auto"),
    ("GGML_CUDA_MMQ_PREC=q8 llama-cli", MAIN, None, AMPERE, "GGML_CUDA_MMQ", "inert", "Blackwell"),
    ("GGML_CUDA_CUBLAS_COMPUTE_TYPE=tf32 llama-cli", MAIN, None, None, "GGML_CUDA_CU", "invalid", "bf16"),
    # Turing without tensor cores
    ("cmake -DCMAKE_CUDA_ARCHITECTURES=61-virtual;80-virtual -DGGML_CUDA_FORCE_MMQ=ON", MAIN, None, TURING,
     "-DCMAKE_CUDA", "needs", "GTX 16"),
    ("cmake -DCMAKE_CUDA_ARCHITECTURES=61-virtual;80-virtual -DGGML_CUDA_FORCE_MMQ=ON", MAIN, None, TURING,
     "-DGGML_CUDA_FORCE", "needs", "GTX 16"),
    ("cmake -DCMAKE_CUDA_ARCHITECTURES=61-virtual;80-virtual", MAIN, None, TURING, "-DCMAKE_CUDA",
     "wrong-gpu", "add 75"),
    ("cmake -DCMAKE_CUDA_ARCHITECTURES=61-virtual;80-virtual -DGGML_CUDA_FORCE_MMQ=ON", IK, None, TURING,
     "-DCMAKE_CUDA", "wrong-gpu", "add 75"),
    ("cmake -DGGML_CUDA_FORCE_MMQ=ON", IK, None, VOLTA, "-DGGML_CUDA_FORCE", "does", "tiles"),
    ("cmake -DGGML_CUDA_FORCE_MMQ=ON", MAIN, None, Facts(cc=6.0), "-DGGML_CUDA_FORCE", "inert", "below 6.1"),
]  # fmt: skip


# Every flag, key and variable that the reference quotes for the runtime: each is taken as it stands there.
ACCEPTED: list[tuple[str, str]] = [
    (
        IK,
        "llama-cli -c 8192 -b 4096 -ub 4096 -ngl 99 -ot exps=CPU,x=CUDA0 -sm layer -ts 1,1 -mg 0 -dev CUDA0",
    ),
    (
        IK,
        "llama-server -cmoe -t 8 -tb 16 --numa distribute --no-mmap -thp --defer-experts --prefetch-experts",
    ),
    (IK, "llama-server -ncmoe 10 -mqkv -muge -gr -mea 256 -wgt 8 -dr -nkvo -khad -vhad"),
    (IK, "llama-server --fit --fit-margin 1024 -no-gr -no-fmoe -no-fug -no-mmad -ger -no-ooae -op -1,0"),
    (IK, "llama-server -sm graph --max-gpu 2 -smgs -sas -grt q8_0 -mla 3 -fa on -amb 512"),
    (IK, "llama-server -fa auto -ctk q8_0 -ctv q8_0 -rtr -ot exps=CPU -cmoe -ser 6,1"),
    (
        IK,
        "llama-server -cuda fusion=0,offload-batch-size=64,offload-batch-size-per-byte=2,enable-p2p=0",
    ),
    (IK, "llama-server -cuda fa-offset=0.5,mmq-id-size=64,graphs=0 -fa 1"),
    (
        IK,
        "llama-bench -p 512 -n 128 -gp 512,64 -b 2048 -ub 512 -ctk f16 -ctv f16 -t 8 -tgb 8,16 -ngl 99",
    ),
    (IK, "llama-bench --n-cpu-moe 4 -sm layer -mg 0 -nkvo 0 -fa 1 -mla 3 -amb 0 -gr 1 -mmp 1 --numa isolate"),
    (
        IK,
        "llama-bench -pg 1,2 -embd 0 -ts 1/1 -r 3 -w 1 -rtr 0 -cuda graphs=1 -mqkv 0 -muge 0 -thp 0 -fmoe 1",
    ),
    (
        IK,
        "llama-bench -no-fug 0 -no-ooae 0 -sas 0 --fit 0 --fit-margin 512 --max-gpu 2 --print-overrides 0",
    ),
    (IK, "llama-sweep-bench -nrep 3 -wb --sweep-stride 2 --sweep-memory --output-format jsonl -ub 512 -n 64"),
    (IK, "llama-perplexity -f text -c 512 --chunks 20 --kl-divergence-base base --kl-divergence"),
    (IK, "GGML_CUDA_DISABLE_GRAPHS=1 GGML_CUDA_NO_PINNED=1 GGML_CUDA_REGISTER_HOST=1 llama-cli -m x"),
    (IK, "GGML_CUDA_HOST_MALLOC_THP=1 GGML_CUDA_ENABLE_UNIFIED_MEMORY=1 GGML_SCHED_DEBUG=1 llama-cli -m x"),
    (IK, "GGML_MOE_PREFETCH_AHEAD=2 IK_LEGACY_GRAPH_REUSE=1 LLAMA_HOTSWAP_X=1 llama-perplexity -m x"),
    (
        MAIN,
        "llama-server -m x -b 4096 -ub 4096 -ngl all -ot a=CPU -cmoe -fit off -sm row -ts 1,1 -mg 0 "
        "-dev CUDA0",
    ),
    (MAIN, "llama-server -ncmoe 4 -ncffn 2 -ngl auto -fitt 1024 -fitc 4096 -t 8 -tb 8 -C 0xff -Cr 0-7"),
    (
        MAIN,
        "llama-server --cpu-strict 1 --prio 2 --numa numactl -lm mlock -lzm on -nkvo -kvu --swa-full",
    ),
    (MAIN, "llama-server --no-host --repack -fa on -ctk q8_0 -ctv q8_0 --no-op-offload"),
    (
        MAIN,
        "llama-bench --poll 50 --cpu-strict 0 -nopo 1 -d 4096 -ncmoe 4 -sm tensor -fa auto -lm none",
    ),
    (
        MAIN,
        "llama-bench --no-warmup --progress --repack 1 -p 512-2048+512 -C 0x1 --prio 0 --delay 1",
    ),
    (MAIN, "llama-server -fa 1 -fit 0"),
    (MAIN, "llama-server -fa enabled -fit disabled"),
    (MAIN, "llama-server -fa -1 -fit true"),
    (MAIN, "llama-bench -fa 0,1,on"),
    (MAIN, "llama-batched-bench --output-format jsonl -npp 512 -ntg 64 -npl 1"),
    (
        MAIN,
        "GGML_CUDA_GRAPH_OPT=1 GGML_CUDA_P2P=1 GGML_CUDA_ALLREDUCE=1 GGML_CUDA_DEVICES=0 llama-server -m x",
    ),
    (MAIN, "GGML_CUDA_MMQ_PREC=q8 GGML_CUDA_CUBLAS_COMPUTE_TYPE=f32 GGML_CUDA_PDL=0 llama-server -m x"),
    (MAIN, "GGML_OP_OFFLOAD_MIN_BATCH=64 LLAMA_GRAPH_REUSE_DISABLE=1 LLAMA_ATTN_ROT_DISABLE=1 llama-server"),
    (MAIN, "GGML_SCHED_DEBUG=1 CUDA_SCALE_LAUNCH_QUEUES=4x GGML_CUDA_REGISTER_HOST=1 llama-server"),
]


@pytest.mark.parametrize(("engine", "words"), ACCEPTED, ids=[f"{e}: {w[:60]}" for e, w in ACCEPTED])
def test_everything_that_the_reference_quotes_is_known(engine: str, words: str) -> None:
    line = diagnose(words.split(), engine=engine)
    bad = {i.text: says(i) for i in line.items if str(i.status) not in ("does", "inert", "needs")}
    assert not bad


# Of other programs than those whose help was recorded, or taken though no help lists them.
_UNLISTED = {
    (IK, "common"): {"--n-gpu-layers", "--n-predict", "--kl-divergence-base", "--save-all-logits"},
    (MAIN, "common"): {"-f", "--file", "-p", "--prompt", "--output-format", "-npp", "-ntg", "-npl",
                       "--chunks", "--kl-divergence-base", "--save-all-logits", "--kl-divergence"},
}  # fmt: skip


@pytest.mark.parametrize("tool", ["bench", "common"])
@pytest.mark.parametrize(("engine", "name"), [(IK, "ik_llama.cpp-4840"), (MAIN, "llama.cpp-0c1e570")])
def test_the_tables_agree_with_what_real_binaries_list(engine: str, name: str, tool: str) -> None:
    listed = parse_help((DATA / f"{name}-{tool}.help").read_text())
    listed = Help({n: f for n, f in listed.flags.items() if not f.removed})
    rows = [f for f in FLAGS if f.engine == engine and tool in f.tools]
    missing = {n for f in rows for n in f.names if n not in listed.flags}
    assert missing == _UNLISTED.get((engine, tool), set())
    lost = [g for g in GONE if g.engine == engine and tool in g.tools and g.value is None]
    assert not [n for g in lost for n in g.names if n in listed.flags]
    named, others = {n for f in rows for n in f.names}, set(OTHERS[engine, tool == "bench"])
    # All spellings of a flag stand in one table: a long name says no less than the short one.
    assert not {
        f.names for f in listed.flags.values() if not (set(f.names) <= named or set(f.names) <= others)
    }
    assert not named & others


@pytest.mark.parametrize(
    ("words", "engine", "version", "facts", "token", "status", "text"),
    CASES,
    ids=[f"{c[0]}-{c[1]}-{c[2]}" for c in CASES],
)
def test_quoted_lines(
    words: str,
    engine: str | None,
    version: str | None,
    facts: Facts | None,
    token: str,
    status: str,
    text: str,
) -> None:
    line = diagnose(words.split(), engine=engine, version=version, facts=facts)
    item = find(line, token)
    assert (item.status, text in says(item)) == (status, True), says(item)
    assert line.wrong == any(n.wrong for i in line.items for n in i.notes)
    assert all(i.notes for i in line.items), "a token about which nothing is said"


def test_the_build_line_of_the_turing_thread() -> None:
    line = diagnose(
        [
            "GGML_CUDA_F16=ON",
            "GGML_CUDA_USE_GRAPHS=OFF",
            "GGML_CUDA_IQK_FORCE_BF16=1",
            "GGML_SCHED_MAX_COPIES=1",
        ],
        facts=TURING,
    )
    assert line.engine == IK
    assert [str(i.status) for i in line.items] == ["does", "inert", "wrong-gpu", "inert"]


def test_engine_is_told_from_the_line() -> None:
    for words, engine in (
        ("llama-server -rtr -ub 512", IK), ("-cuda graphs=0", IK), ("llama-sweep-bench -c 512", IK), ("-fmoe",
            IK),
        ("llama-bench -nopo 1", MAIN), ("GGML_CUDA_GRAPH_OPT=1 llama-cli", MAIN), ("llama-server -m x", MAIN),
        ("llama-server --no-mmap", MAIN), ("/opt/ik/bin/llama-sweep-bench.exe -c 1", IK),
    ):  # fmt: skip
        line = diagnose(words.split())
        assert line.engine == engine, words
        assert line.engine_reason
    assert "but only" in diagnose(["llama-cli", "-rtr", "-cuda", "graphs=0", "-nr"]).engine_reason
    assert diagnose(["llama-cli"], version="8337e4cd38a").engine == IK


@pytest.mark.parametrize(
    ("words", "engine", "token", "status", "text"),
    [
        ("llama-server --grouped-expert-routing", IK, "--grouped", "does", "changes answers"),
        ("llama-bench --graph-reuse 0", IK, "--graph-reuse 0", "does", "reuse of graphs"),
        ("llama-server --graph-reduce-type f64", IK, "--graph-reduce-type", "invalid", "is not one of"),
        ("llama-server --max-extra-alloc much", IK, "--max-extra-alloc", "invalid", "whole number"),
        ("llama-server --cache-type-k-last q8_0,4", IK, "--cache-type-k-last q8_0,4", "does", "answers"),
        ("llama-server --n-cpu-ffn 2", MAIN, "--n-cpu-ffn 2", "does", "host memory"),
        ("llama-server --no-kv-unified", MAIN, "--no-kv-unified", "does", "KV buffer"),
        ("llama-server --fit-ctx few", MAIN, "--fit-ctx", "invalid", "whole number"),
    ],
)
def test_a_long_name_says_what_the_short_one_says(
    words: str, engine: str, token: str, status: str, text: str
) -> None:
    line = diagnose(words.split())
    item = find(line, token)
    assert line.engine == engine, line.engine_reason
    assert (str(item.status), text in says(item)) == (status, True), says(item)


def test_a_name_that_both_engines_list_tells_neither() -> None:
    for words in ("llama-server --no-warmup", "llama-server -dr user/repo", "llama-server --embeddings"):
        assert "the line fits both engines" in diagnose(words.split()).engine_reason, words
    assert says(find(diagnose(["llama-server", "--port", "--metrics"]), "--port")).endswith("after it")


def test_a_flag_without_its_value_lists_all_that_it_takes() -> None:
    line = diagnose(["llama-server", "-ngl"], engine=MAIN)
    assert says(find(line, "-ngl")).endswith("it needs a value after it: a number, auto, all")
    line = diagnose(["llama-server", "-c"], engine=MAIN)
    assert says(find(line, "-c")).endswith("it needs a value after it")


def test_words_as_one_string_and_continuations() -> None:
    one = diagnose(["llama-server -m 'my model.gguf' \\\n -ub 512"])
    assert [i.text for i in one.items] == ["llama-server", "-m my model.gguf", "-ub 512"]
    for bad in ([], [""], ["llama-cli 'x"], ["x"] * 5000):
        with pytest.raises(TuneError):
            diagnose(bad)


def test_versions_that_cannot_be_placed() -> None:
    for version in ("deadbeef", "2025-13-01", "41d6c42b9", "v1", "0c1e57098"):
        with pytest.raises(TuneError, match=version):
            diagnose(["llama-cli"], engine=IK, version=version)


def test_gpu_and_model_facts(tiny_dir: Path) -> None:
    assert [parse_cc(t) for t in ("7.5", "75", "sm_75", "90a", "12.0")] == [7.5, 7.5, 7.5, 9.0, 12.0]
    for bad in ("", "turing", "7", "999.9", "-7.5", "7.5.1"):
        with pytest.raises(TuneError):
            parse_cc(bad)
    with pytest.raises(TuneError, match="contradict"):
        gather(None, None, False, 8, None, None)
    with pytest.raises(TuneError, match="no such file"):
        gather(None, None, None, None, None, Path("/no/such.gguf"))
    model = next(p for p in sorted(tiny_dir.glob("*.gguf")) if "qwen3moe" in p.name)
    facts = gather(None, None, None, None, None, model)
    assert facts.architecture == "qwen3moe"
    assert facts.moe
    assert None not in (facts.experts, facts.experts_used, facts.layers)


def test_tables_are_consistent() -> None:
    for engine in ENGINES:
        for tool in ("bench", "common"):
            names = [n for f in FLAGS if f.engine == engine and tool in f.tools for n in f.names]
            assert len(names) == len(set(names)), sorted(n for n in names if names.count(n) > 1)
            alive = set(names)
            for row in GONE:
                if row.engine == engine and tool in row.tools and row.value is None:
                    assert not alive & set(row.names), row.names
        for table in (BUILD, ENVIRONMENT):
            switches = [s.name for s in table if s.engine == engine]
            assert len(switches) == len(set(switches))
    known = {("cmake", s.name, s.engine) for s in BUILD if s.gone is None}
    known |= {("env", s.name, s.engine) for s in ENVIRONMENT} | {("cuda", "graphs", IK)}
    assert {(x.kind, x.name, x.engine) for x in LIMITS} <= known
    assert [e.since for e in ERAS] == sorted(e.since for e in ERAS)
    assert all(len(set(e.ids.values())) == len(e.ids) for e in ERAS)
