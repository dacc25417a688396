// The executor's part for draft heads: hidden rows, and the most probable token of a row of logits.
#include <cstring>
#include <memory>

#include "core/cuda/check.h"
#include "runtime/cuda/executor_cuda.h"
#include "runtime/cuda/rows.h"

namespace dyno::runtime {

std::shared_ptr<float[]> CudaExecutor::rows_memory(size_t count) {
  const DeviceScope scope(info().ordinal, "making room for hidden rows");
  // One more float than needed: a copy must not continue into another allocation, even if that follows directly.
  const auto memory = std::make_shared<PinnedBuffer>((count + 1) * sizeof(float), "hidden rows");
  return {memory, reinterpret_cast<float*>(memory->data())};
}

void CudaExecutor::upload_rows(const MicroBatch& batch) {
  const plan::NodeList& list = list_for(batch);
  if (list.rows_in == plan::kNoValue) {
    DYNO_CHECK(PlanError, batch.rows_from.empty(), "[executor] hidden rows were given to a list that reads none");
    return;
  }
  check_rows_from(batch);
  const plan::Value& value = plan_.values[static_cast<size_t>(list.rows_in)];
  for_rows_together(batch.rows_from, model_.n_embd, [&](size_t first, size_t count) {
    DYNO_CUDA_CHECK(cudaMemcpyAsync(memory_of(list.rows_in) + value.bytes_per_token * first, batch.rows_from[first],
                                    value.bytes_per_token * count, cudaMemcpyHostToDevice, stream_.get()));
  });
}

void CudaExecutor::download_rows(const MicroBatch& batch) {
  const plan::NodeList& list = list_for(batch);
  DYNO_CHECK(PlanError, list.hidden != plan::kNoValue, "[executor] hidden rows are asked of a list that keeps none");
  const plan::Value& value = plan_.values[static_cast<size_t>(list.hidden)];
  for_rows_together(batch.rows_to, model_.n_embd, [&](size_t first, size_t count) {
    DYNO_CUDA_CHECK(cudaMemcpyAsync(batch.rows_to[first], memory_of(list.hidden) + value.bytes_per_token * first,
                                    value.bytes_per_token * count, cudaMemcpyDeviceToHost, stream_.get()));
  });
}

void CudaExecutor::find_likely_rows(const MicroBatch& batch) {
  const size_t rows = batch.logit_rows.size(), bytes = rows * sizeof(Likely);
  fit_row_results(bytes);  // safe, because each call waits for its tokens
  auto* likely = reinterpret_cast<Likely*>(row_results_.data());
  find_likely(reinterpret_cast<const float*>(logits_.data()), static_cast<int64_t>(rows), model_.n_vocab, likely,
              stream_.get());
  finish();
  std::memcpy(batch.likely, likely, bytes);
}

}  // namespace dyno::runtime
