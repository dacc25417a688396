#!/usr/bin/env bash
# Builds the fuzz target of the GGUF reader and runs it: tests/fuzz/run.sh [SECONDS]
#
# Uses clang with libFuzzer, AddressSanitizer and UndefinedBehaviorSanitizer (Debian: clang and libclang-rt-dev). Where
# clang or its runtime is missing, says so and uses g++ with its sanitizers and a mutation driver without coverage.
# Environment: PYTHON (an interpreter with dyno or at least NumPy; default python3), BUILD (default build-fuzz),
# FUZZ_CXX (compiler to use whatever the detection says). A finding leaves its input in $BUILD/findings, exit status 1.
set -euo pipefail

seconds=${1:-60}
if ! [[ $seconds =~ ^[1-9][0-9]*$ ]]; then
  echo "run.sh: SECONDS is '$seconds'; expected a positive number" >&2
  exit 2
fi
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python=${PYTHON:-python3}
build=${BUILD:-$root/build-fuzz}
mkdir -p "$build/corpus" "$build/seeds" "$build/findings"

if [[ -n ${FUZZ_CXX:-} ]]; then
  compiler=$FUZZ_CXX
elif ! compiler=$(command -v clang++); then
  echo "NOTE: no clang++ here; falling back to g++ and a mutation driver without coverage feedback" >&2
  compiler=g++
else
  probe='#include <cstddef>
#include <cstdint>
extern "C" int LLVMFuzzerTestOneInput(const uint8_t*, size_t) { return 0; }'
  if ! "$compiler" -x c++ -std=c++20 -fsanitize=fuzzer,address,undefined -o "$build/probe" - <<<"$probe" 2>/dev/null; then
    echo "NOTE: $compiler cannot link its fuzzer runtime (Debian: libclang-rt-dev);" \
      "falling back to g++ and a mutation driver without coverage feedback" >&2
    compiler=g++
  fi
fi

generator=()
if command -v ninja >/dev/null; then generator=(-G Ninja); fi
cmake -S "$root" -B "$build/$(basename "$compiler")" "${generator[@]}" -DCMAKE_CXX_COMPILER="$compiler" \
  -DDYNO_BUILD_FUZZ=ON -DDYNO_BUILD_PYTHON=OFF >"$build/configure.log" || {
  cat "$build/configure.log" >&2
  exit 1
}
grep 'Fuzz target' "$build/configure.log"
cmake --build "$build/$(basename "$compiler")" --target gguf_fuzz
target=$build/$(basename "$compiler")/tests/fuzz/gguf_fuzz

if ! "$python" -c 'import dyno.testing' 2>/dev/null; then
  export PYTHONPATH=$root/python${PYTHONPATH:+:$PYTHONPATH}
fi
"$python" "$root/tests/fuzz/make_corpus.py" "$build/seeds"

status=0
if grep -q 'Fuzz target: libFuzzer' "$build/configure.log"; then
  "$target" -max_total_time="$seconds" -max_len=65536 -timeout=10 -rss_limit_mb=2048 -malloc_limit_mb=64 \
    -dict="$root/tests/fuzz/gguf.dict" -artifact_prefix="$build/findings/" -print_final_stats=1 -verbosity=0 \
    "$build/corpus" "$build/seeds" 2>&1 | sed '/###### Recommended dictionary/,/###### End of recommended/d' || status=1
else
  "$target" "$build/seeds" "$seconds" "${FUZZ_SEED:-1}" "$build/findings/crash" || status=1
fi
if [[ $status -ne 0 ]]; then
  echo "FAILED: the fuzz target found something; inputs: $build/findings" >&2
fi
exit $status
