#!/usr/bin/env bash
# Builds the engine under AddressSanitizer and UndefinedBehaviorSanitizer and runs what finds faults there:
#
#   tests/fuzz/run.sh [SECONDS] [gguf] [session] [suite]
#
# gguf: the fuzz target of the reader. session: that of every stage up to a few tokens, whose inputs are models. suite:
# the tests that reach the engine's memory, on the sanitized module. Without a name: both targets, SECONDS (60) each.
#
# Uses clang with libFuzzer (Debian: clang and libclang-rt-dev). If clang or its runtime is missing, says so and uses
# g++ with a mutation driver without coverage. Environment: PYTHON (an interpreter with dyno or at least NumPy, for
# `suite` with the test extra; default python3), BUILD (default build-fuzz), FUZZ_CXX (the compiler to use), FUZZ_SEED
# (default: the time), FUZZ_JSON (a file to which the number of executions is added). A finding leaves its input in
# $BUILD/findings, exit status 1.
set -euo pipefail

seconds=60
if [[ ${1:-} =~ ^[0-9] ]]; then
  seconds=$1
  shift
fi
if ! [[ $seconds =~ ^[1-9][0-9]*$ ]]; then
  echo "run.sh: SECONDS is '$seconds'; expected a positive number" >&2
  exit 2
fi
parts=("$@")
if [[ ${#parts[@]} -eq 0 ]]; then parts=(gguf session); fi
for part in "${parts[@]}"; do
  if ! [[ $part =~ ^(gguf|session|suite)$ ]]; then
    echo "run.sh: '$part' is nothing to run; expected gguf, session or suite" >&2
    exit 2
  fi
done
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python=$(command -v "${PYTHON:-python3}") || {
  echo "run.sh: PYTHON is '${PYTHON:-python3}', which is no program" >&2
  exit 2
}
python=$(cd "$(dirname "$python")" && pwd)/$(basename "$python")
folder=${BUILD:-$root/build-fuzz}
mkdir -p "$folder/findings"
folder=$(cd "$folder" && pwd)

if [[ -n ${FUZZ_CXX:-} ]]; then
  compiler=$FUZZ_CXX
elif ! compiler=$(command -v clang++); then
  echo "NOTE: no clang++ here; falling back to g++ and a mutation driver without coverage feedback" >&2
  compiler=g++
else
  probe='#include <cstddef>
#include <cstdint>
extern "C" int LLVMFuzzerTestOneInput(const uint8_t*, size_t) { return 0; }'
  if ! "$compiler" -x c++ -std=c++20 -fsanitize=fuzzer,address,undefined -o "$folder/probe" - <<<"$probe" 2>/dev/null; then
    echo "NOTE: $compiler cannot link its fuzzer runtime (Debian: libclang-rt-dev);" \
      "falling back to g++ and a mutation driver without coverage feedback" >&2
    compiler=g++
  fi
fi
build=$folder/$(basename "$compiler")
export PATH=$(dirname "$python"):$PATH  # cmake and ninja of the test extra

targets=()
switches=(-DDYNO_BUILD_PYTHON=OFF)
for part in "${parts[@]}"; do
  case $part in
    gguf) targets+=(gguf_fuzz) ;;
    session) targets+=(session_fuzz memory_overruns) ;;
    suite)
      targets+=(_core memory_overruns)
      switches=(-DDYNO_BUILD_PYTHON=ON -DPython_EXECUTABLE="$python")
      ;;
  esac
done
generator=()
if command -v ninja >/dev/null; then generator=(-G Ninja); fi
cmake -S "$root" -B "$build" "${generator[@]}" -DCMAKE_CXX_COMPILER="$compiler" -DCMAKE_BUILD_TYPE=RelWithDebInfo \
  -DCMAKE_CXX_FLAGS_RELWITHDEBINFO="-O1 -g1" -DGGML_CUDA=OFF -DDYNO_SANITIZE=address+undefined -DDYNO_BUILD_FUZZ=ON \
  -DCMAKE_UNITY_BUILD=ON "${switches[@]}" >"$folder/configure.log" || {
  cat "$folder/configure.log" >&2
  exit 1
}
grep 'Fuzz targets:' "$folder/configure.log"
cmake --build "$build" --parallel "$(nproc)" --target "${targets[@]}"

if ! "$python" -c 'import dyno.testing' 2>/dev/null; then
  export PYTHONPATH=$root/python${PYTHONPATH:+:$PYTHONPATH}
fi

# A sanitizer that does not see an overrun of the engine's own memory finds nothing in it.
check_overruns() {
  local count
  count=$("$build/tests/fuzz/memory_overruns" | cut -d ' ' -f 1)
  for ((number = 1; number <= count; ++number)); do
    if "$build/tests/fuzz/memory_overruns" "$number" >"$folder/overrun.log" 2>&1 ||
      ! grep -q 'ERROR: AddressSanitizer' "$folder/overrun.log"; then
      cat "$folder/overrun.log" >&2
      echo "FAILED: the sanitizer does not see overrun $number of tests/fuzz/memory_overruns.cpp" >&2
      exit 1
    fi
  done
}

fuzz() {  # NAME MAX_BYTES [OPTION…]
  local name=$1 most=$2
  shift 2
  mkdir -p "$folder/corpus-$name"
  # Ctrl-C ends a run early; the executions before it count, and it is no finding.
  if grep -q 'Fuzz targets: libFuzzer' "$folder/configure.log"; then
    "$build/tests/fuzz/${name}_fuzz" -max_total_time="$seconds" -max_len="$most" -timeout=120 -rss_limit_mb=3072 \
      -interrupted_exitcode=0 \
      -malloc_limit_mb=256 -artifact_prefix="$folder/findings/$name-" -print_final_stats=1 -print_funcs=0 -verbosity=0 "$@" \
      "$folder/corpus-$name" "$folder/seeds/$name" 2>&1 |
      sed '/###### Recommended dictionary/,/###### End of recommended/d' | tee "$folder/$name.log"
  else
    "$build/tests/fuzz/${name}_fuzz" "$folder/seeds/$name" "$seconds" "${FUZZ_SEED:-$(date +%s)}" \
      "$folder/findings/$name-crash" 2>&1 | tee "$folder/$name.log"
  fi
}

count() {  # NAME STATUS
  local options=()
  if [[ $2 -ne 0 ]]; then options+=(--crashed); fi
  if [[ -n ${FUZZ_JSON:-} ]]; then
    local commit
    commit=$(git -C "$root" rev-parse --short HEAD) || {
      echo "FUZZ_JSON names the commit that ran, and $root is no git checkout" >&2
      return 1
    }
    options+=(--json "$FUZZ_JSON" --commit "$commit")
  fi
  "$python" "$root/tests/fuzz/count.py" "$folder/$1.log" "$1" "${options[@]}"
}

suite() {
  local runtime site=$folder/site
  rm -rf "$site"
  mkdir -p "$site"
  cp -r "$root/python/dyno" "$root/tuner/dyno_tuner" "$site"
  rm -f "$site"/dyno/_core*.so
  cp "$build"/csrc/bindings/_core*.so "$site/dyno/"
  if [[ $("$compiler" --version) == *clang* ]]; then
    runtime=$("$compiler" -print-file-name="libclang_rt.asan-$(uname -m).so")
  else
    runtime="$("$compiler" -print-file-name=libasan.so) $("$compiler" -print-file-name=libubsan.so)"
  fi
  # An interpreter has no C++ library of its own, and the sanitizer looks for its functions when it starts. The
  # interpreter keeps much memory until it ends, so that leaks are for the targets to find.
  runtime+=" $("$compiler" -print-file-name=libstdc++.so.6)"
  (cd "$root" && env LD_PRELOAD="$runtime" ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 \
    UBSAN_OPTIONS=print_stacktrace=1 OPENBLAS_NUM_THREADS=1 PYTHONPATH="$site" \
    "$python" -m pytest -p no:cacheprovider -q -x -m "not gpu" -n auto \
    tests/gguf tests/plan tests/ops/test_small_families.py tests/e2e/test_golden.py \
    tests/python/test_shared_session.py tests/python/test_generation.py)
}

declare -A failed running
fuzzing=()
for part in "${parts[@]}"; do
  failed[$part]=0
  if [[ $part != gguf ]]; then check_overruns; fi
  if [[ $part != suite ]]; then fuzzing+=("$part"); fi
done
if [[ ${#fuzzing[@]} -gt 0 ]]; then "$python" "$root/tests/fuzz/make_corpus.py" "$folder/seeds"; fi
# A target has one thread: with two cores or more both run at once.
for part in "${fuzzing[@]}"; do
  if [[ $part == gguf ]]; then
    fuzz gguf 65536 -dict="$root/tests/fuzz/gguf.dict" &
  else
    # Twice as many inputs a second without libFuzzer's search for leaks after each and its statistics of rare
    # features. Leaks are found at the end.
    fuzz session 1048576 -detect_leaks=0 -entropic=0 &
  fi
  running[$part]=$!
  if [[ $(nproc) -eq 1 ]]; then wait "${running[$part]}" || failed[$part]=1; fi
done
for part in "${fuzzing[@]}"; do
  if [[ $(nproc) -gt 1 ]]; then wait "${running[$part]}" || failed[$part]=1; fi
  count "$part" "${failed[$part]}" || failed[$part]=1
done
for part in "${parts[@]}"; do
  if [[ $part == suite ]]; then suite || failed[suite]=1; fi
done
for part in "${parts[@]}"; do
  if [[ ${failed[$part]} -ne 0 ]]; then
    echo "FAILED: $part found something; inputs of fuzz targets: $folder/findings" >&2
    exit 1
  fi
done
