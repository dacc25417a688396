// A library that the CUDA driver loads (CUDA_INJECTION64_PATH): writes a line for each launch, copy and call of the
// runtime to the file that LAUNCH_TRACE names. Needs CUPTI and nothing of dyno; timeline.py builds and reads it.
//   K start end grid threads shared cluster registers name        (nanoseconds; cluster: blocks of one)
//   M start end bytes
//   C start end name
#include <cupti.h>

#include <cstdio>
#include <cstdlib>
#include <initializer_list>

namespace {

std::FILE* out = nullptr;
constexpr size_t kBufferBytes = size_t{16} << 20;

void give_buffer(uint8_t** buffer, size_t* size, size_t* most_records) {
  *buffer = static_cast<uint8_t*>(std::aligned_alloc(8, kBufferBytes));
  *size = *buffer == nullptr ? 0 : kBufferBytes;
  *most_records = 0;
}

unsigned long long number(uint64_t value) { return value; }

void write_record(const CUpti_Activity* record) {
  if (record->kind == CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL) {
    const auto* k = reinterpret_cast<const CUpti_ActivityKernel10*>(record);
    const unsigned cluster = k->clusterX * k->clusterY * k->clusterZ;
    std::fprintf(out, "K %llu %llu %d,%d,%d %d %d %u %u %s\n", number(k->start), number(k->end), k->gridX, k->gridY,
                 k->gridZ, k->blockX, k->dynamicSharedMemory, cluster, k->registersPerThread, k->name);
  } else if (record->kind == CUPTI_ACTIVITY_KIND_MEMCPY) {
    const auto* m = reinterpret_cast<const CUpti_ActivityMemcpy6*>(record);
    std::fprintf(out, "M %llu %llu %llu\n", number(m->start), number(m->end), number(m->bytes));
  } else if (record->kind == CUPTI_ACTIVITY_KIND_RUNTIME) {
    const auto* call = reinterpret_cast<const CUpti_ActivityAPI*>(record);
    const char* name = "unknown";
    cuptiGetCallbackName(CUPTI_CB_DOMAIN_RUNTIME_API, call->cbid, &name);
    std::fprintf(out, "C %llu %llu %s\n", number(call->start), number(call->end), name);
  }
}

void take_buffer(CUcontext, uint32_t, uint8_t* buffer, size_t, size_t valid) {
  CUpti_Activity* record = nullptr;
  while (cuptiActivityGetNextRecord(buffer, valid, &record) == CUPTI_SUCCESS) write_record(record);
  std::free(buffer);
}

void finish() {
  cuptiActivityFlushAll(1);
  std::fclose(out);
}

}  // namespace

// Called by the driver. 0: the process goes on without a trace.
extern "C" int InitializeInjection() {
  const char* path = std::getenv("LAUNCH_TRACE");
  out = path == nullptr ? nullptr : std::fopen(path, "w");
  if (out == nullptr || cuptiActivityRegisterCallbacks(give_buffer, take_buffer) != CUPTI_SUCCESS) return 0;
  for (const auto kind :
       {CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL, CUPTI_ACTIVITY_KIND_MEMCPY, CUPTI_ACTIVITY_KIND_RUNTIME}) {
    if (cuptiActivityEnable(kind) != CUPTI_SUCCESS) return 0;
  }
  std::atexit(finish);
  return 1;
}
