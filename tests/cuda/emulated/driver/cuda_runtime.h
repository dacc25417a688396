// The calls of CUDA's runtime and driver that the memory of a cache makes, on a device that counts and computes
// nothing. Work on a stream is over when somebody waits for it, so a test sees memory that goes too early.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <utility>
#include <vector>

namespace emulated {

inline constexpr size_t kPieceBytes = 4096;

struct Stream {
  int64_t begun = 0, over = 0;  // numbers of works
};

struct Event {
  Stream* stream = nullptr;
  int64_t behind = 0;
};

struct Work {
  int64_t number = 0;
  std::set<uintptr_t> pieces;  // that it reads or writes
};

inline Stream stream;
inline std::vector<Work> works;
inline std::set<uintptr_t> mapped;   // addresses of pieces
inline size_t most_pieces = 0;       // that the device has
inline int64_t faults = 0;           // pieces that a work lacks, from its start to its end
inline int64_t waits = 0;            // for work that was not over
inline int64_t failing_records = 0;  // so many records of events fail

inline void begin(uintptr_t at, size_t bytes) {
  Work work{.number = ++stream.begun, .pieces = {}};
  for (uintptr_t piece = at / kPieceBytes * kPieceBytes; piece < at + bytes; piece += kPieceBytes) {
    faults += mapped.count(piece) == 0 ? 1 : 0;
    work.pieces.insert(piece);
  }
  works.push_back(std::move(work));
}

inline void wait(int64_t number) {
  if (number <= stream.over) return;
  ++waits;
  stream.over = number;
  std::erase_if(works, [](const Work& work) { return work.number <= stream.over; });
}

}  // namespace emulated

using cudaStream_t = emulated::Stream*;
using cudaEvent_t = emulated::Event*;
using cudaGraph_t = void*;
using cudaGraphExec_t = void*;
enum cudaError_t : uint8_t { cudaSuccess, cudaErrorNotReady, cudaErrorUnknown };
enum cudaDriverEntryPointQueryResult : uint8_t { cudaDriverEntryPointSuccess };
inline constexpr int cudaEnableDefault = 0;
#define CUDART_VERSION 13000

inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  if (emulated::failing_records > 0) {
    --emulated::failing_records;
    return cudaErrorUnknown;
  }
  *event = {stream, stream->begun};
  return cudaSuccess;
}
inline cudaError_t cudaEventQuery(cudaEvent_t event) {
  return event->behind <= event->stream->over ? cudaSuccess : cudaErrorNotReady;
}
inline cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  emulated::wait(event->behind);
  return cudaSuccess;
}
inline cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  emulated::wait(stream->begun);
  return cudaSuccess;
}
inline cudaError_t cudaMemsetAsync(void* at, int, size_t bytes, cudaStream_t) {
  emulated::begin(reinterpret_cast<uintptr_t>(at), bytes);
  return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** found, unsigned version, int flags,
                                             cudaDriverEntryPointQueryResult* result);
