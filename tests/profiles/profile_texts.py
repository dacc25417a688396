"""A CUDA profile in the words of the design and a CPU profile, as text."""

from __future__ import annotations

import textwrap

CUDA_TEXT = textwrap.dedent("""\
    schema: 1
    label: NVIDIA H200 · qwen3moe 30B.A3B Q4_0
    match:
      device: {kind: cuda, compute_capability: "9.0", sm_count: 132, memory_mib: 143771, memory_gbps: 4310, pcie_gbps: 54, power_limit_w: 700}
      model:  {architecture: qwen3moe, layers: 48, embedding: 2048, experts: 128, experts_used: 8, types: {Q4_0: 0.93, Q6_K: 0.07}}
      engine: {version: 0.3.0, ops_revision: 7, build: {GGML_CUDA_LTO: false, cuda_architectures: [90a]}}
    settings:                         # ratio = full profile / full profile with this entry at its default
      ubatch:            {value: 4096, default: 512, ratio: 1.64, ci95: [1.63, 1.65], n: 9, moves: pp, group: g1}
      mmq_id_max_tokens: {value: 8192, default: 2048, ratio: 1.40, ci95: [1.39, 1.41], moves: pp, group: g1}
      cuda_graphs:       default      # measured, default wins
    kernels:
      "matmul q4_0 n=4096 k=2048": {m1-8: {variant: matvec, warps: 4, rows: 2, ratio: 1.06, ci95: [1.04, 1.08]}}
    evidence:
      workload: {pp: 4096, tg: 128}
      baseline: {pp4096: 7600.1, tg128: 345}
      tuned:    {pp4096: 12464.2, tg128: 345}
      quality:  {mean_kld: 2.1e-5, ppl_ratio: 1.0001}
      noise:    {margin: 0.01}
      journal:  sha256:0123456789abcdef
    provenance: {tuner: 0.3.0, engine_commit: 6f0e12, driver: 580.10, cuda: 13.0, date: 2026-11-20, trials: 61, seconds: 284}
    """)  # noqa: E501

CPU_TEXT = textwrap.dedent("""\
    schema: 1
    label: 2 cores · qwen3moe 20M Q4_K
    match:
      device: {kind: cpu, isa: avx512_vnni, cores: 2, l2_kib: 2048, l3_kib: 266240, memory_mib: 7900}
      model:  {architecture: qwen3moe, layers: 4, embedding: 512, experts: 8, experts_used: 2, types: {Q4_K: 1}}
      engine: {version: 0.1.0, ops_revision: 1}
    settings:
      ubatch:  {value: 1024, default: 512, ratio: 1.10, ci95: [1.08, 1.12], n: 12, moves: pp, group: g1}
      threads: {value: 1, default: 2, ratio: 1.05, ci95: [1.03, 1.07], n: 12, moves: [tg], group: g1}
      cpu_repack: default
    kernels:
      "matmul q4_k n=512 k=512":
        m1: {variant: dot, rows: 4, ratio: 1.2, ci95: [1.1, 1.3]}
        m2-8: default
    """)  # noqa: E501
