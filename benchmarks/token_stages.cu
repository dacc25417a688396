// The skeleton of a token as one kernel: blocks that stay, a program of stages, barriers between them, and weights that
// the copy engine brings before a stage begins. token_stages.py builds and runs it, and explains the figures. Needs
// sm_90 and of dyno only the headers of csrc/device.
//
// A stage has every block read a vector of kWidth words that all blocks wrote in the stage before, multiply its share
// of the stage's weights by it, and write its slice of the next vector. The arithmetic is of unsigned words, whose sums
// are the same in any order: every way must give the same bits as the host.
//
//   token_stages PROGRAM REPEATS        a line of JSON for each way
//   PROGRAM: a file with a line "bytes routed" for each stage; weights of a routed stage are known with its vector
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

#include "device/bulk_copy.cuh"
#include "device/dependent.cuh"
#include "device/mbarrier.cuh"
#include "device/ptx.cuh"

namespace {

using namespace dyno;

constexpr int kWidth = 1024;  // words of the vector: 2,048 halves
constexpr int kWarps = 8, kThreads = kWarps * 32;
constexpr int kChunk = kWidth * 4;  // most bytes of one copy: each word meets one of the vector
constexpr int kBarrierBytes = 1024;
constexpr uint64_t kPatienceNs = 2'000'000'000;

// How a block learns that all blocks have written the vector.
enum class Wait {
  counter,   // one counter; one thread of each block looks at it, then the block loads the vector
  warps,     // one counter; one lane of each warp looks
  flags,     // a flag of each block; a thread of every block looks at each
  words,     // the number of the stage stands beside each word, in the same eight bytes
  nothing,   // it does not: the time of the loop alone, wrong results
  launches,  // a launch for each stage, which may start before the one before has ended
};
constexpr const char* kNames[] = {"counter", "warps", "flags", "words", "nothing", "launches"};

struct Stage {
  uint64_t offset;  // of its weights
  uint32_t chunks;  // of a warp
  uint32_t chunk_bytes;
  uint32_t routed;  // weights stand twice; the first word of the vector chooses
  __host__ __device__ uint64_t bytes(uint32_t blocks) const { return uint64_t{blocks} * kWarps * chunks * chunk_bytes; }
};

struct Program {
  const uint8_t* weights;
  const Stage* stages;
  uint32_t count;
  uint32_t* vectors;  // two of kWidth words
  uint2* words;       // two of kWidth words with the number of their stage
  uint32_t* counter;
  uint32_t* flags;  // one of each block
  uint32_t depth;   // chunks of a warp's ring
  uint32_t ahead;   // whether weights are fetched before their stage
};

__device__ uint64_t nanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;\n" : "=l"(now));
  return now;
}
__device__ uint32_t load_acquire(const uint32_t* p) {
  uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];\n" : "=r"(value) : "l"(p) : "memory");
  return value;
}
__device__ void add_release(uint32_t* p) {
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;\n" ::"l"(p) : "memory");
}
__device__ void store_release(uint32_t* p, uint32_t value) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;\n" ::"l"(p), "r"(value) : "memory");
}
__device__ uint4 load_volatile(const uint2* p) {  // two words with their stages; each is read at once
  uint4 v;
  asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}
__device__ void store_volatile(uint2* p, uint32_t value, uint32_t stage) {
  asm volatile("st.volatile.global.v2.u32 [%0], {%1, %2};\n" ::"l"(p), "r"(value), "r"(stage) : "memory");
}

// Ends the kernel with an error after two seconds, so that a fault is no hang.
template <typename Ready>
__device__ void wait_until(Ready ready) {
  if (ready()) return;
  const uint64_t begun = nanoseconds();
  while (!ready()) {
    if (nanoseconds() - begun > kPatienceNs) __trap();
  }
}

// The chunks of one warp in the order of the program, fetched as far ahead as its ring and what is known allow.
struct Feed {
  const Program& p;
  uint32_t data, barriers;  // shared addresses of slot 0
  uint32_t stage, last, chunk = 0, asked = 0, taken = 0;
  uint64_t policy;

  __device__ Feed(const Program& program, uint32_t shared, uint32_t warp, uint32_t from, uint32_t to)
      : p(program),
        data(shared + kBarrierBytes + warp * program.depth * kChunk),
        barriers(shared + warp * program.depth * 8),
        stage(from),
        last(to),
        policy(device::evict_first_policy()) {}

  // Asks for what is known: up to stage `known` everything, behind it all but routed stages. `choice`: of `known`.
  __device__ void advance(uint32_t warp, uint32_t known, bool arrived, uint32_t choice) {
    while (asked - taken < p.depth && stage < last) {
      const Stage s = p.stages[stage];
      if (chunk == s.chunks) {
        chunk = 0, ++stage;
        continue;
      }
      const bool is_known = arrived ? stage <= known : stage < known;
      if (!is_known && (s.routed || !p.ahead)) return;
      uint64_t at = s.offset + (uint64_t{blockIdx.x * kWarps + warp} * s.chunks + chunk) * s.chunk_bytes;
      if (s.routed) at += choice * s.bytes(gridDim.x);
      const uint32_t slot = asked % p.depth;
      device::bulk_copy(data + slot * kChunk, p.weights + at, s.chunk_bytes, barriers + slot * 8, policy);
      ++asked, ++chunk;
    }
  }
};

// The vector of stage `stage` into shared memory.
template <Wait kWait>
__device__ void receive(const Program& p, uint32_t stage, uint32_t* x) {
  const uint32_t side = stage & 1, number = threadIdx.x;
  if constexpr (kWait == Wait::words) {
    const uint2* from = p.words + side * kWidth;
    for (uint32_t i = number; i < kWidth / 2; i += kThreads) {
      uint4 two;
      wait_until([&] {
        two = load_volatile(from + 2 * i);
        return two.y == stage && two.w == stage;
      });
      x[2 * i] = two.x, x[2 * i + 1] = two.z;
    }
    return;
  }
  if constexpr (kWait == Wait::counter) {
    if (number == 0) wait_until([&] { return load_acquire(p.counter) >= stage * gridDim.x; });
    __syncthreads();
  } else if constexpr (kWait == Wait::warps) {
    if (number % 32 == 0) wait_until([&] { return load_acquire(p.counter) >= stage * gridDim.x; });
    __syncwarp();
  } else if constexpr (kWait == Wait::flags) {
    if (number < gridDim.x) wait_until([&] { return load_acquire(p.flags + number) >= stage; });
    __syncthreads();
  } else if constexpr (kWait == Wait::launches) {
    device::wait_for_previous();
  }
  const auto* from = reinterpret_cast<const uint4*>(p.vectors + side * kWidth);
  for (uint32_t i = number; i < kWidth / 4; i += kThreads) reinterpret_cast<uint4*>(x)[i] = __ldcg(from + i);
}

// The block's slice of the vector of stage `stage`.
template <Wait kWait>
__device__ void send(const Program& p, uint32_t stage, const uint32_t* x, uint32_t sum) {
  const uint32_t lane = threadIdx.x, side = stage & 1;
  const uint32_t begin = blockIdx.x * kWidth / gridDim.x, end = (blockIdx.x + 1) * kWidth / gridDim.x;
  for (uint32_t at = begin + lane; at < end; at += 32) {
    const uint32_t value = x[at] * 1664525u + sum + at;
    if constexpr (kWait == Wait::words) {
      store_volatile(p.words + side * kWidth + at, value, stage);
    } else {
      p.vectors[side * kWidth + at] = value;
    }
  }
  __syncwarp();
  if (lane != 0) return;
  if constexpr (kWait == Wait::counter || kWait == Wait::warps) add_release(p.counter);
  if constexpr (kWait == Wait::flags) store_release(p.flags + blockIdx.x, stage);
}

template <Wait kWait>
__global__ void __launch_bounds__(kThreads) run(const __grid_constant__ Program p, uint32_t from, uint32_t to) {
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ __align__(16) uint32_t vectors[2][kWidth];
  __shared__ uint32_t sums[2][kWarps];
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if constexpr (kWait == Wait::launches) device::let_next_start();
  Feed feed(p, device::shared_address(shared), warp, from, to);
  if (lane == 0) {
    for (uint32_t slot = 0; slot < p.depth; ++slot) device::barrier_init(feed.barriers + slot * 8, 1);
    device::barrier_init_done();
    feed.advance(warp, from, false, 0);
  }
  __syncwarp();
  for (uint32_t stage = from; stage < to; ++stage) {
    uint32_t* x = vectors[stage & 1];
    receive<kWait>(p, stage, x);
    __syncthreads();  // the vector is there
    const uint32_t choice = x[0] & 1;
    if (lane == 0) feed.advance(warp, stage, true, choice);
    __syncwarp();
    const uint32_t chunks = p.stages[stage].chunks, bytes = p.stages[stage].chunk_bytes;
    uint32_t sum = 0;
    for (uint32_t chunk = 0; chunk < chunks; ++chunk) {
      const uint32_t slot = feed.taken % p.depth;
      device::barrier_wait(feed.barriers + slot * 8, feed.taken / p.depth & 1);
      const auto* w = reinterpret_cast<const uint4*>(shared + kBarrierBytes + (warp * p.depth + slot) * kChunk);
      for (uint32_t i = lane; i < bytes / 16; i += 32) {
        const uint4 a = w[i], b = reinterpret_cast<const uint4*>(x)[i];
        sum += a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w;
      }
      __syncwarp();  // all lanes have read the slot
      ++feed.taken;
      if (lane == 0) feed.advance(warp, stage, true, choice);
    }
    sum = __reduce_add_sync(0xffffffffu, sum);
    if (lane == 0) sums[stage & 1][warp] = sum;
    __syncthreads();  // all warps' sums are written
    if (warp != 0) continue;
    uint32_t total = 0;
    for (int i = 0; i < kWarps; ++i) total += sums[stage & 1][i];
    send<kWait>(p, stage + 1, x, total);
  }
}

__host__ __device__ uint32_t weight(uint64_t index) {
  const auto low = static_cast<uint32_t>(index), high = static_cast<uint32_t>(index >> 32);
  return (low * 2654435761u ^ low >> 7) + high * 40503u;
}
__global__ void fill(uint32_t* weights, uint64_t count) {
  const uint64_t step = uint64_t{gridDim.x} * blockDim.x;
  for (uint64_t i = uint64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step) weights[i] = weight(i);
}

void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  std::fprintf(stderr, "error: %s: %s\n", what, cudaGetErrorString(status));
  std::exit(1);
}

std::vector<uint32_t> initial() {
  std::vector<uint32_t> x(kWidth);
  for (uint32_t i = 0; i < kWidth; ++i) x[i] = i * 2246822519u + 374761393u;
  return x;
}

// The last vector by the host; weights are computed again.
std::vector<uint32_t> reference(const std::vector<Stage>& stages, uint32_t blocks) {
  std::vector<uint32_t> x = initial();
  for (const Stage& s : stages) {
    const std::vector<uint32_t> before = x;
    const uint64_t base = s.offset + (s.routed ? (before[0] & 1) * s.bytes(blocks) : 0);
    const uint32_t words = s.chunk_bytes / 4;
    uint64_t next = base / 4;
    for (uint32_t block = 0; block < blocks; ++block) {
      uint32_t sum = 0;
      for (uint32_t chunk = 0; chunk < kWarps * s.chunks; ++chunk, next += words) {
        for (uint32_t i = 0; i < words; ++i) sum += weight(next + i) * before[i];
      }
      const uint32_t end = (block + 1) * kWidth / blocks;
      for (uint32_t at = block * kWidth / blocks; at < end; ++at) x[at] = before[at] * 1664525u + sum + at;
    }
  }
  return x;
}

struct Device {
  uint32_t blocks = 0;
  Program program{};
  cudaStream_t stream = nullptr;
  std::vector<Stage> stages;

  void start() const {  // the first vector, nothing counted
    const std::vector<uint32_t> x = initial();
    std::vector<uint2> words(kWidth);
    for (int i = 0; i < kWidth; ++i) words[i] = {x[i], 0};
    check(cudaMemcpy(program.vectors, x.data(), kWidth * 4, cudaMemcpyHostToDevice), "copy");
    check(cudaMemset(program.words, 0xff, 2 * kWidth * sizeof(uint2)), "memset");
    check(cudaMemcpy(program.words, words.data(), kWidth * sizeof(uint2), cudaMemcpyHostToDevice), "copy");
    check(cudaMemset(program.counter, 0, 4), "memset");
    check(cudaMemset(program.flags, 0, blocks * 4), "memset");
    check(cudaDeviceSynchronize(), "start");  // `stream` does not wait for the default stream
  }
  std::vector<uint32_t> last(Wait wait) const {
    const uint32_t side = program.count & 1;
    std::vector<uint32_t> x(kWidth);
    std::vector<uint2> words(kWidth);
    check(cudaMemcpy(x.data(), program.vectors + side * kWidth, kWidth * 4, cudaMemcpyDeviceToHost), "copy");
    check(cudaMemcpy(words.data(), program.words + side * kWidth, kWidth * sizeof(uint2), cudaMemcpyDeviceToHost),
          "copy");
    if (wait == Wait::words) {
      for (int i = 0; i < kWidth; ++i) x[i] = words[i].x;
    }
    return x;
  }
  size_t shared_bytes() const { return kBarrierBytes + size_t{kWarps} * program.depth * kChunk; }

  template <Wait kWait>
  void launch(uint32_t from, uint32_t to) const {
    const size_t bytes = shared_bytes();
    check(cudaFuncSetAttribute(run<kWait>, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)),
          "shared memory");
    cudaLaunchAttribute attribute{};
    if (kWait == Wait::launches) {
      attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
      attribute.val.programmaticStreamSerializationAllowed = 1;
    } else {  // all blocks are on the chip together, or the launch fails
      attribute.id = cudaLaunchAttributeCooperative;
      attribute.val.cooperative = 1;
    }
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(blocks), config.blockDim = dim3(kThreads);
    config.dynamicSmemBytes = bytes, config.stream = stream;
    config.attrs = &attribute, config.numAttrs = 1;
    check(cudaLaunchKernelEx(&config, run<kWait>, program, from, to), "launch");
  }

  // Microseconds of each repeat; one before them warms up.
  template <Wait kWait>
  std::vector<float> times(int repeats) const {
    cudaGraphExec_t graph = nullptr;
    if (kWait == Wait::launches) {
      cudaGraph_t captured = nullptr;
      check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed), "capture");
      for (uint32_t stage = 0; stage < program.count; ++stage) launch<kWait>(stage, stage + 1);
      check(cudaStreamEndCapture(stream, &captured), "capture");
      check(cudaGraphInstantiate(&graph, captured, 0), "graph");
    }
    cudaEvent_t begin, end;
    check(cudaEventCreate(&begin), "event"), check(cudaEventCreate(&end), "event");
    std::vector<float> found;
    for (int repeat = 0; repeat <= repeats; ++repeat) {
      start();
      check(cudaEventRecord(begin, stream), "event");
      if (graph != nullptr) {
        check(cudaGraphLaunch(graph, stream), "graph");
      } else {
        launch<kWait>(0, program.count);
      }
      check(cudaEventRecord(end, stream), "event");
      check(cudaStreamSynchronize(stream), kNames[static_cast<int>(kWait)]);
      float ms = 0;
      check(cudaEventElapsedTime(&ms, begin, end), "event");
      if (repeat > 0) found.push_back(ms * 1000);
    }
    std::sort(found.begin(), found.end());
    return found;
  }

  template <Wait kWait>
  void report(const char* kind, int repeats, const std::vector<uint32_t>& truth) const {
    const std::vector<float> us = times<kWait>(repeats);
    const bool same = last(kWait) == truth;
    std::printf(R"({"way": "%s", "ahead": %s, "ring_kib": %zu, "us": %.2f, "least_us": %.2f, "most_us": %.2f, )"
                R"("exact": %s})"
                "\n",
                kind, program.ahead ? "true" : "false", shared_bytes() / 1024, us[us.size() / 2], us.front(), us.back(),
                kWait == Wait::nothing ? "null"
                : same                 ? "true"
                                       : "false");
    std::fflush(stdout);
    if (kWait != Wait::nothing && !same) {
      std::fprintf(stderr, "error: %s computed another vector than the host\n", kind);
      std::exit(1);
    }
  }
};

template <typename T>
T* allocate(size_t count) {
  void* p = nullptr;
  check(cudaMalloc(&p, count * sizeof(T)), "memory of the device");
  return static_cast<T*>(p);
}

}  // namespace

int main(int argc, char** argv) {
  std::ifstream file(argc == 3 ? argv[1] : "");
  const int repeats = argc == 3 ? std::atoi(argv[2]) : 0;
  if (!file || repeats < 1) {
    std::fprintf(stderr, "usage: token_stages PROGRAM REPEATS\n");
    return 2;
  }
  int processors = 0;
  check(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, 0), "device");
  Device d;
  d.blocks = static_cast<uint32_t>(processors);
  if (d.blocks > kThreads) {
    std::fprintf(stderr, "error: %u multiprocessors; `flags` has a thread for each of at most %d\n", d.blocks,
                 kThreads);
    return 1;
  }
  uint64_t total = 0, read = 0;
  for (double bytes = 0, routed = 0; file >> bytes >> routed;) {
    const auto share = static_cast<uint32_t>(bytes / (d.blocks * kWarps));
    Stage s{total, (share + kChunk - 1) / kChunk, 0, routed != 0};
    s.chunk_bytes = s.chunks == 0 ? 512 : (share / s.chunks + 511) / 512 * 512;  // 16 bytes of each lane
    read += s.bytes(d.blocks), total += s.bytes(d.blocks) * (s.routed ? 2 : 1);
    d.stages.push_back(s);
  }
  d.program.count = static_cast<uint32_t>(d.stages.size());
  auto* weights = allocate<uint32_t>(total / 4 + 4);
  auto* stages = allocate<Stage>(d.stages.size());
  check(cudaMemcpy(stages, d.stages.data(), d.stages.size() * sizeof(Stage), cudaMemcpyHostToDevice), "copy");
  d.program.weights = reinterpret_cast<const uint8_t*>(weights), d.program.stages = stages;
  d.program.vectors = allocate<uint32_t>(2 * kWidth), d.program.words = allocate<uint2>(2 * kWidth);
  d.program.counter = allocate<uint32_t>(1), d.program.flags = allocate<uint32_t>(d.blocks);
  check(cudaStreamCreateWithFlags(&d.stream, cudaStreamNonBlocking), "stream");
  fill<<<d.blocks * 8, 256>>>(weights, total / 4);
  check(cudaDeviceSynchronize(), "weights");
  std::printf(R"({"stages": %u, "blocks": %u, "bytes": %llu})"
              "\n",
              d.program.count, d.blocks, static_cast<unsigned long long>(read));
  const std::vector<uint32_t> truth = reference(d.stages, d.blocks);
  for (const uint32_t ahead : {1u, 0u}) {
    d.program.ahead = ahead;
    d.program.depth = 6;  // 192 KiB
    d.report<Wait::counter>("counter", repeats, truth);
    d.report<Wait::warps>("warps", repeats, truth);
    d.report<Wait::flags>("flags", repeats, truth);
    d.report<Wait::words>("words", repeats, truth);
    d.report<Wait::nothing>("nothing", repeats, truth);
    d.program.depth = 3;  // 96 KiB: the blocks of two launches fit on a multiprocessor
    d.report<Wait::launches>("launches", repeats, truth);
  }
  return 0;
}
