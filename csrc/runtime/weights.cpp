#include "runtime/weights.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "core/error.h"
#include "core/sanitizers.h"
#include "gguf/dequantize.h"
#include "gguf/interleaved.h"
#include "gguf/quant_blocks.h"
#include "ops/matmul/layout.h"

namespace dyno::runtime {
namespace {

constexpr size_t kAlignment = 64;
size_t aligned(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

// The rows of head `batch` of `weight`, in the order of the file.
const std::byte* source_rows(const model::Weight& weight, int64_t batch) {
  if (!weight.picks.empty()) batch = weight.picks[static_cast<size_t>(batch)];
  const size_t row = row_bytes(weight.tensor->type, weight.cols);
  if (weight.transform == model::Transform::kv_b_v) {
    // attn_kv_b has, per head, `nope` key rows and then the value rows.
    const int64_t rows_per_head = weight.tensor->dims[1] / weight.batch;
    return weight.tensor->data + row * static_cast<size_t>(batch * rows_per_head + rows_per_head - weight.rows);
  }
  return weight.tensor->data + row * static_cast<size_t>(batch * weight.rows);
}

bool is_half(const model::Weight& weight) {
  return weight.transform == model::Transform::first_half || weight.transform == model::Transform::second_half;
}

// Copies rows [first, first + count) of the weight's matrix `batch` to `out`. The tensor alternates parts of the first
// and of the second half.
void gather_half(const model::Weight& weight, int64_t batch, int64_t first, int64_t count, std::byte* out) {
  const size_t row = row_bytes(weight.tensor->type, weight.cols);
  const int64_t part_rows = weight.batch * weight.rows / weight.parts;
  const int64_t skipped = weight.transform == model::Transform::second_half ? part_rows : 0;
  for (int64_t r = batch * weight.rows + first; r < batch * weight.rows + first + count; ++r) {
    const int64_t source = r / part_rows * 2 * part_rows + skipped + r % part_rows;
    std::memcpy(out, weight.tensor->data + row * static_cast<size_t>(source), row);
    out += row;
  }
}

// Transposes attn_kv_b's key rows of one head, [nope, kv_lora] -> [kv_lora, nope].
void transpose_keys(const model::Weight& weight, int64_t head, std::byte* out) {
  const int64_t kv_lora = weight.rows;
  const int64_t nope = weight.cols;
  const int64_t rows_per_head = weight.tensor->dims[1] / weight.batch;
  const size_t source_row = row_bytes(weight.tensor->type, kv_lora);
  const std::byte* rows = weight.tensor->data + source_row * static_cast<size_t>(head * rows_per_head);
  if (weight.tensor->type == weight.type && weight.type != DType::f32) {
    const auto* in = reinterpret_cast<const uint16_t*>(rows);
    auto* target = reinterpret_cast<uint16_t*>(out);
    for (int64_t d = 0; d < nope; ++d) {
      for (int64_t l = 0; l < kv_lora; ++l) target[l * nope + d] = in[d * kv_lora + l];
    }
    return;
  }
  auto* target = reinterpret_cast<float*>(out);
  std::vector<float> row(static_cast<size_t>(kv_lora));
  for (int64_t d = 0; d < nope; ++d) {
    dequantize_row(weight.tensor->type, rows + source_row * static_cast<size_t>(d), row.data(), kv_lora);
    for (int64_t l = 0; l < kv_lora; ++l) target[l * nope + d] = row[static_cast<size_t>(l)];
  }
}

bool on_cpu(const plan::Plan& plan, size_t weight) {
  return plan.device(plan.weights[weight].device).kind == DeviceKind::cpu;
}

// Maximum of file pages that an ongoing copy keeps resident in addition to the copy.
constexpr size_t kSlabBytes = size_t{4} << 20;

}  // namespace

// Copies slab by slab and drops the file's pages afterwards. An output matrix can be a third of a model, and both forms
// of it must not be in memory at once.
void fill_weight(const GgufFile& file, const model::Weight& weight, ops::Layout layout, std::byte* out,
                 ThreadPool& pool, int threads) {
  if (weight.transform == model::Transform::to_f32) {
    auto* values = reinterpret_cast<float*>(out);
    if (weight.picks.empty()) {
      dequantize_rows(weight.tensor->type, weight.tensor->data, values, weight.batch, weight.cols);
    } else {
      const size_t row = row_bytes(weight.tensor->type, weight.cols);
      for (size_t i = 0; i < weight.picks.size(); ++i) {
        dequantize_row(weight.tensor->type, weight.tensor->data + row * static_cast<size_t>(weight.picks[i]),
                       values + static_cast<int64_t>(i) * weight.cols, weight.cols);
      }
    }
    if (weight.scale != 1.0) {
      for (int64_t i = 0; i < weight.batch * weight.cols; ++i) values[i] *= static_cast<float>(weight.scale);
    }
    return;
  }
  const size_t batch_bytes = ops::layout_bytes(weight.type, layout, weight.rows, weight.cols);
  if (weight.transform == model::Transform::kv_b_k_transposed) {
    for (int64_t b = 0; b < weight.batch; ++b) transpose_keys(weight, b, out + batch_bytes * static_cast<size_t>(b));
    return;
  }
  // Chunks of 16 rows, which every layout can be packed from independently.
  const size_t source_row = row_bytes(weight.type, weight.cols);
  const size_t chunk_bytes = ops::layout_bytes(weight.type, layout, 16, weight.cols);
  const int64_t chunks = (weight.rows + 15) / 16;
  const int64_t total = chunks * weight.batch;
  const int64_t slab = std::max<int64_t>(threads, static_cast<int64_t>(kSlabBytes / (source_row * 16)));
  const bool interleaved = dtype_info(weight.tensor->type).kind == TypeClass::interleaved;
  const auto source_of = [&](int64_t i) {
    return source_rows(weight, i / chunks) + source_row * static_cast<size_t>(i % chunks * 16);
  };
  for (int64_t begin = 0; begin < total; begin += slab) {
    const int64_t count_here = std::min(slab, total - begin);
    pool.run(threads, [&](int thread, int count) {
      std::vector<std::byte> apart(interleaved ? source_row * 16 : 0);
      std::vector<std::byte> gathered(is_half(weight) ? source_row * 16 : 0);
      for (int64_t i = begin + count_here * thread / count; i < begin + count_here * (thread + 1) / count; ++i) {
        const int64_t chunk = i % chunks;
        const int64_t rows = std::min<int64_t>(16, weight.rows - chunk * 16);
        std::byte* target =
            out + batch_bytes * static_cast<size_t>(i / chunks) + chunk_bytes * static_cast<size_t>(chunk);
        const std::byte* source = source_of(i);
        if (!gathered.empty()) {
          gather_half(weight, i / chunks, chunk * 16, rows, gathered.data());
          source = gathered.data();
        }
        if (interleaved) {
          const int64_t unit = dtype_info(weight.tensor->type).rows;  // divides 16 and the number of the tensor's rows
          for (int64_t row = 0; row < rows; row += unit) {
            const size_t at = source_row * static_cast<size_t>(row);
            take_apart(weight.tensor->type, source + at, apart.data() + at, weight.cols);
          }
          source = apart.data();
        }
        if (layout == ops::Layout::plain) {
          std::memcpy(target, source, source_row * static_cast<size_t>(rows));
        } else {
          ops::repack_rows(weight.type, source, target, rows, weight.cols);
        }
      }
    });
    if (is_half(weight)) continue;        // its pages are interleaved with the other half's
    if (!weight.picks.empty()) continue;  // the other matrices of the tensor are still to be read
    const std::byte* first = source_of(begin);
    const std::byte* last = begin + count_here < total ? source_of(begin + count_here)
                                                       : weight.tensor->data + weight.tensor->bytes().size();
    file.advise_drop({first, static_cast<size_t>(last - first)});
  }
}

Weights::Weights(const GgufFile& file, const model::ModelDesc& model, const plan::Plan& plan, ThreadPool& pool,
                 int threads, int dealt)
    : numa_(model, plan, pool, dealt), data_(model.weights.size()) {
  const bool beside_gpu = plan.main_device().kind == DeviceKind::cuda;
  const auto crosses = [&](size_t i) {
    return beside_gpu && (plan.weights[i].stream.wanted || plan.weights[i].refills);
  };
  std::vector<BufferPart> parts(plan.weights.size()), crossing(plan.weights.size());
  size_t total = 0, all_crossing = 0;
  for (size_t i = 0; i < parts.size(); ++i) {
    if (!on_cpu(plan, i) || (plan.weights[i].mapped && !kAddressSanitizer)) continue;
    size_t& taken = crosses(i) ? all_crossing : total;
    (crosses(i) ? crossing : parts)[i] = {taken, plan.weights[i].bytes};
    taken += aligned(plan.weights[i].bytes);
  }
  numa_.check_nodes(total + all_crossing);
  owned_ = PartedBuffer(total, std::move(parts), "weights");
  streamed_ = PartedBuffer(all_crossing, std::move(crossing), "weights that a GPU takes copies of");
  numa_.place(owned_);
  numa_.place(streamed_);
  for (size_t i = 0; i < model.weights.size(); ++i) {
    if (!on_cpu(plan, i)) continue;
    const model::Weight& weight = model.weights[i];
    const plan::WeightPlacement& placement = plan.weights[i];
    if (placement.mapped && !kAddressSanitizer) {
      data_[i] = weight.tensor->data;
      continue;
    }
    std::byte* target = (crosses(i) ? streamed_ : owned_).at(i);
    if (placement.mapped) {
      std::memcpy(target, weight.tensor->data, weight.tensor->bytes().size());
      data_[i] = target;
      continue;
    }
    fill_weight(file, weight, placement.layout, target, pool, threads);
    data_[i] = target;
    if (weight.picks.empty()) file.advise_drop(weight.tensor->bytes());
  }
  numa_.mirror(owned_, "copies of weights on NUMA nodes");
  numa_.mirror(streamed_, "copies of weights on NUMA nodes");
  if (all_crossing > 0)
    lock_ = PageLock(streamed_.block(), plan.main_device().ordinal, "weights that the GPU takes copies of");
}

void Weights::copy_matrix(model::WeightId weight, int64_t matrix, model::WeightId own, int64_t place, size_t bytes) {
  const std::byte* from = data(weight) + bytes * static_cast<size_t>(matrix);
  const auto at = static_cast<size_t>(own);
  const size_t offset = bytes * static_cast<size_t>(place);
  std::memcpy(owned_.at(at) + offset, from, bytes);
  for (const auto& of_node : numa_.further()) std::memcpy(of_node.front().at(at) + offset, from, bytes);
}

std::vector<std::map<int, size_t>> Weights::bytes_by_node() const {
  std::vector<std::map<int, size_t>> all(1);
  for (const PartedBuffer* buffer : {&owned_, &streamed_}) add_by_node(*buffer, all.front());
  for (const auto& of_node : numa_.further()) {
    all.emplace_back();
    for (const PartedBuffer& buffer : of_node) add_by_node(buffer, all.back());
  }
  return all;
}

}  // namespace dyno::runtime
