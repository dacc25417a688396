// Fuzz target: a model file, or the shards of one, through every stage: header, model, plan, choice of kernels, load
// and a few tokens. The first bytes of an input choose the settings and what is done. Nothing but dyno::Error may come
// out.
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/error.h"
#include "core/text.h"
#include "gguf/text.h"
#include "gguf_tree.h"
#include "runtime/session.h"

namespace {

using dyno::fuzz::Bytes;
using dyno::fuzz::SessionInput;
using dyno::runtime::Session;

// A file of a few KiB can ask for any context; what takes long to clear finds nothing more.
constexpr size_t kMaxBytes = size_t{32} << 20;

// How far inputs come, printed at the end: a fuzzer that never decodes tests the reader alone.
struct Counts {
  uint64_t inputs = 0, planned = 0, loaded = 0, decoded = 0;
  ~Counts() {
    std::fprintf(stderr, "%llu inputs: %llu planned, %llu loaded, %llu decoded\n",
                 static_cast<unsigned long long>(inputs), static_cast<unsigned long long>(planned),
                 static_cast<unsigned long long>(loaded), static_cast<unsigned long long>(decoded));
  }
} g_counts;

// Inputs that came as far as a plan. Mutations start from these: changes of an input that the reader refuses are nearly
// always refused as well, and a corpus soon consists of such inputs.
class Planned {
 public:
  void add(std::span<const uint8_t> input) {
    Bytes& place = inputs_.size() < kMost ? inputs_.emplace_back() : inputs_[dyno::fuzz::below(random_, kMost)];
    place.assign(input.begin(), input.end());
  }
  // An input that came far three times in four, else this one.
  std::span<const uint8_t> or_else(std::span<const uint8_t> input, dyno::fuzz::Random& random) const {
    if (inputs_.empty() || dyno::fuzz::below(random, 4) == 0) return input;
    return inputs_[dyno::fuzz::below(random, inputs_.size())];
  }

 private:
  static constexpr size_t kMost = 256;
  std::vector<Bytes> inputs_;
  dyno::fuzz::Random random_;
} g_planned;

// The settings, one byte a choice; zeros past their end.
class Choices {
 public:
  explicit Choices(const std::array<uint8_t, SessionInput::kSettings>& bytes) : bytes_(bytes) {}

  uint8_t byte() { return at_ < bytes_.size() ? bytes_[at_++] : 0; }
  bool flag() { return (byte() & 1) != 0; }
  bool once_in(int n) { return byte() % n == 1; }
  int64_t below(int64_t n) { return n <= 0 ? 0 : (byte() | byte() << 8) % n; }
  bool more() const { return at_ < bytes_.size(); }

 private:
  const std::array<uint8_t, SessionInput::kSettings>& bytes_;
  size_t at_ = 0;
};

// Numbers that nobody should give.
int64_t odd(Choices& c) {
  static constexpr std::array<int64_t, 6> kNumbers = {
      -1, 0, 65537, int64_t{1} << 33, std::numeric_limits<int64_t>::max(), std::numeric_limits<int64_t>::min()};
  return kNumbers[static_cast<size_t>(c.below(kNumbers.size()))];
}

std::optional<dyno::DType> cache_type(Choices& c) {
  using dyno::DType;
  static constexpr std::array kTypes = {DType::f32, DType::f16, DType::bf16, DType::q8_0, DType::q4_0};
  const auto which = static_cast<size_t>(c.below(kTypes.size() + 2));
  return which < kTypes.size() ? std::optional(kTypes[which]) : std::nullopt;
}

dyno::plan::ContextOptions context_of(Choices& c) {
  dyno::plan::ContextOptions context;
  context.ctx = c.once_in(32) ? odd(c) : 1 + c.below(96);
  context.kv_type_k = cache_type(c);
  context.kv_type_v = cache_type(c);
  context.sequences = c.once_in(32) ? odd(c) : 1 + c.below(3);
  return context;
}

dyno::runtime::SessionSettings session_of(Choices& c) {
  dyno::runtime::SessionSettings s;
  s.ubatch = c.once_in(32) ? odd(c) : 1 + c.below(40);
  s.threads = c.once_in(16) ? 1 + static_cast<int>(c.below(3)) : 1;
  s.threads_batch = c.once_in(16) ? 1 + static_cast<int>(c.below(3)) : 0;
  s.cuda_graphs = false;
  s.fusion = !c.flag();
  s.flash_attention = !c.flag();
  s.graph_concurrency = c.once_in(4);
  s.mla_mode = static_cast<dyno::plan::MlaMode>(c.below(3));
  s.paths.matvec_max_tokens = c.once_in(32) ? odd(c) : 1 + c.below(8);
  return s;
}

// Rules for tensors that most models have, and some that nobody should give.
dyno::plan::PlacementOptions placement_of(Choices& c) {
  static constexpr std::array kTensors = {"blk\\.0\\.", "ffn_", "attn_(k|kv)", "norm", "_(up|down)",
                                          "output",     "e",    "(",           ""};
  static constexpr std::array kDevices = {"cpu:1", "cpu:2", "CPU", "cpu:3", "cuda:0", ""};
  dyno::plan::PlacementOptions placement;
  placement.virtual_devices.resize(static_cast<size_t>(c.once_in(16) ? c.below(20) : 2));
  for (dyno::plan::VirtualDevice& device : placement.virtual_devices) {
    if (c.once_in(8)) device.memory_bytes = static_cast<size_t>(odd(c));
    // Links that take no time: a fuzzer has none to wait.
    if (c.once_in(8)) device.link.bytes_per_second = c.flag() ? 1e12 : 1.0;
  }
  for (int64_t left = 1 + c.below(3); left > 0; --left) {
    placement.rules.push_back(dyno::str_cat(kTensors[static_cast<size_t>(c.below(kTensors.size()))], "=",
                                            kDevices[static_cast<size_t>(c.below(kDevices.size()))]));
  }
  placement.cpu_moe = c.once_in(8);
  placement.n_cpu_moe = c.once_in(8) ? odd(c) : 0;
  if (c.once_in(8)) placement.n_gpu_layers = odd(c);
  return placement;
}

dyno::DeviceInfo device_of(Choices& c, bool gpu) {
  static const dyno::DeviceInfo here = dyno::detect_cpu();
  dyno::DeviceInfo device = here;
  device.isa = static_cast<dyno::CpuIsa>(c.below(static_cast<int64_t>(here.isa) + 1));
  if (gpu) {
    device.kind = dyno::DeviceKind::cuda;
    device.compute_capability = c.flag() ? 90 : 75;
    device.sm_count = 132;
    device.memory_bytes = int64_t{24} << 30;
    device.shared_per_block_bytes = 232'448;
  }
  return device;
}

// A configuration of some op: one of its candidates, which may be spoiled.
dyno::profile::KernelEntry entry_of(Choices& c, const dyno::plan::Plan& plan) {
  const dyno::plan::OpUse& use = plan.keys[static_cast<size_t>(c.below(static_cast<int64_t>(plan.keys.size())))];
  const int first = static_cast<int>(c.below(dyno::plan::kBuckets));
  const int last = first + static_cast<int>(c.below(dyno::plan::kBuckets - first));
  dyno::profile::KernelEntry entry{
      .op_key = use.key, .tokens = "", .first_bucket = first, .last_bucket = last, .config = {}, .origin = "fuzz"};
  const auto tokens = dyno::ops::bucket_range(first).first;
  const auto all = dyno::ops::candidates(dyno::ops::with_tokens(use.desc, tokens), plan.device(use.device),
                                         dyno::ops::CandidateSet::compiled);
  const auto family = dyno::ops::family_of(use.desc);
  const dyno::ops::Config config = all.empty() ? dyno::ops::default_config(use.desc, plan.device(use.device))
                                               : all[static_cast<size_t>(c.below(static_cast<int64_t>(all.size())))];
  entry.config = dyno::ops::config_entries(family, config);
  if (c.once_in(4))
    entry.config[static_cast<size_t>(c.below(static_cast<int64_t>(entry.config.size())))].value = odd(c);
  return entry;
}

std::vector<dyno::profile::KernelEntry> entries_of(Choices& c, const dyno::plan::Plan& plan) {
  std::vector<dyno::profile::KernelEntry> entries;
  if (plan.keys.empty()) return entries;
  for (int64_t n = c.below(4); n > 0; --n) entries.push_back(entry_of(c, plan));
  return entries;
}

void print_all(const Session& session) {
  const dyno::plan::Plan& plan = session.plan();
  size_t sum = session.model().describe().size() + plan.describe(session.model()).size();
  for (size_t key = 0; key < plan.keys.size(); ++key) {
    for (const int64_t tokens : {int64_t{1}, plan.ubatch}) {
      sum += session.selection().choice(static_cast<int32_t>(key), tokens).reason.size();
    }
  }
  volatile size_t sink = sum;  // keeps the reads alive under the optimiser
  (void)sink;
}

void decode(Choices& c, Session& session) {
  const dyno::model::ModelDesc& model = session.model();
  const int64_t sequences = session.plan().context.sequences;
  dyno::runtime::DecodeRequest request;
  std::vector<std::vector<int32_t>> tokens;
  for (int64_t slot = 0; slot < sequences && slot < 3; ++slot) {
    if (slot > 0 && c.flag()) continue;
    const int64_t room = session.plan().context.ctx - session.position(static_cast<int32_t>(slot));
    const int64_t count = c.once_in(16) ? room + 1 : 1 + c.below(std::min<int64_t>(room, 48));
    if (count > 200) return;
    std::vector<int32_t>& ids = tokens.emplace_back(static_cast<size_t>(count));
    for (int32_t& id : ids) id = static_cast<int32_t>((c.byte() * 7919 + (&id - ids.data()) * 31) % model.n_vocab);
    if (c.once_in(64)) ids.back() = static_cast<int32_t>(c.flag() ? model.n_vocab : -1);
  }
  int32_t slot = 0;
  for (const std::vector<int32_t>& ids : tokens) request.sequences.push_back({.slot = slot++, .tokens = ids});
  request.rows = static_cast<dyno::runtime::LogitRows>(c.below(3));
  request.every = 1 + c.below(5);
  const auto total = static_cast<size_t>(Session::token_count(request));
  const auto rows = static_cast<size_t>(Session::row_count(request));
  int64_t used = 0, experts = 0;
  for (const auto& layer : model.layers) {
    used = std::max(used, layer.ffn.used);
    experts = std::max(experts, layer.ffn.experts);
  }
  std::vector<int32_t> pinned, captured;
  const size_t routed = static_cast<size_t>(model.moe_layers()) * total * static_cast<size_t>(used);
  if (routed > 0 && c.once_in(4)) {
    for (size_t i = 0; i < routed; ++i) pinned.push_back(static_cast<int32_t>(c.byte() % experts));
    request.pinned_routing = pinned.data();
  }
  if (routed > 0 && c.once_in(4)) {
    captured.resize(routed);
    request.captured_routing = captured.data();
  }
  std::vector<dyno::runtime::OpTime> times(session.plan().keys.size());
  if (c.once_in(8)) request.op_times = times.data();
  const std::shared_ptr<float[]> logits = session.logits_memory(rows * static_cast<size_t>(model.n_vocab));
  request.logits = logits.get();
  session.decode(request);
  ++g_counts.decoded;
}

void generate(Choices& c, Session& session) {
  const auto n_vocab = session.model().n_vocab;
  const std::array<int32_t, 2> prompt = {static_cast<int32_t>(c.byte() % n_vocab), 0};
  auto generation = session.generation(0, std::span(prompt).first(1 + static_cast<size_t>(c.flag())),
                                       {.temperature = static_cast<float>(c.below(3)),
                                        .top_k = static_cast<int32_t>(c.below(9)),
                                        .top_p = static_cast<float>(c.below(10)) / 8,
                                        .min_p = static_cast<float>(c.below(10)) / 8});
  const std::array<dyno::runtime::Draw, 2> draws = {
      {{.uniform = 0.25f, .forced = -1}, {.uniform = 0.99f, .forced = 0}}};
  generation.queue(draws, n_vocab);
  for (size_t i = 0; i < draws.size(); ++i) session.next_token(generation);
}

void act(Choices& c, Session& session) {
  const auto slot = static_cast<int32_t>(c.below(3));
  switch (c.below(12)) {
    case 0:
      session.rewind(slot, c.below(40));
      break;
    case 1:
      session.reset(slot);
      break;
    case 2:
      session.set(session_of(c));
      break;
    case 3:
      session.set_context(context_of(c));
      break;
    case 4:
      session.set_kernels(entries_of(c, session.plan()));
      break;
    case 5:
    case 6:
      generate(c, session);
      break;
    default:
      decode(c, session);
  }
}

template <typename Step>
bool survives(const Step& step) {
  try {
    step();
    return true;
  } catch (const dyno::Error& error) {
    if (!dyno::is_utf8(error.what())) __builtin_trap();
    return false;
  }
}

void run(Choices& c, const std::string& path) {
  using dyno::runtime::Loading;
  const bool gpu = c.once_in(8);
  const dyno::DeviceInfo device = device_of(c, gpu);
  dyno::plan::LoadOptions load{.numerics = c.once_in(4) ? dyno::plan::Numerics::exact : dyno::plan::Numerics::standard,
                               .cpu_repack = !c.flag()};
  const dyno::plan::ContextOptions context = context_of(c);
  const dyno::runtime::SessionSettings settings = session_of(c);
  if (!gpu && c.once_in(4)) load.placement = placement_of(c);
  // A copy is on the heap, where a view that leaves it is seen.
  const auto file = std::make_shared<const dyno::GgufFile>(dyno::GgufFile::open(path, dyno::Reading::copy));
  std::vector<dyno::profile::KernelEntry> kernels;
  {
    const dyno::model::ModelDesc model = dyno::model::describe_model(*file);
    const dyno::plan::Plan plan =
        dyno::plan::build_plan(model, device, load, context, settings.ubatch, settings.mla_mode);
    ++g_counts.planned;
    if (!gpu && plan.total_bytes() > kMaxBytes) return;
    kernels = entries_of(c, plan);
  }
  if (gpu || c.once_in(8)) {
    print_all(Session(file, load, context, settings, device, std::move(kernels), Loading::plan_only));
    return;
  }
  Session session(file, load, context, settings, device, std::move(kernels));
  ++g_counts.loaded;
  survives([&] { decode(c, session); });
  for (int i = 0; i < 5 && c.more(); ++i) {
    // An error leaves the session as it was; what follows must go on from there.
    survives([&] { act(c, session); });
    if (session.plan().total_bytes() > kMaxBytes) return;
  }
}

}  // namespace

// A request for more memory than a process may have is answered like that of a full machine. Every input takes some
// hundred KiB, which the usual quarantine of freed memory would have the system clear again each time.
extern "C" const char* __asan_default_options() { return "allocator_may_return_null=1:quarantine_size_mb=16"; }

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const dyno::fuzz::Folder folder;
  ++g_counts.inputs;
  const uint64_t planned = g_counts.planned;
  const SessionInput input = dyno::fuzz::parse_input({data, size});
  const std::string path = folder.write(input.files);
  Choices choices(input.settings);
  survives([&] { run(choices, path); });
  if (g_counts.planned > planned) g_planned.add({data, size});
  return 0;
}

namespace {

// `input` after one to three changes, with entries of `other`.
Bytes changed(SessionInput input, const SessionInput& other, dyno::fuzz::Random& random) {
  for (size_t n = 1 + dyno::fuzz::below(random, 3); n > 0; --n) mutate_input(input, other, random);
  return write_input(input);
}

}  // namespace

// libFuzzer and the mutation driver both call these two, if a target has them.
extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size, unsigned int seed) {
  dyno::fuzz::Random random(seed);
  const SessionInput input = dyno::fuzz::parse_input(g_planned.or_else({data, size}, random));
  const Bytes out = changed(input, input, random);
  if (out.size() > max_size) return size;
  std::copy(out.begin(), out.end(), data);
  return out.size();
}

extern "C" size_t LLVMFuzzerCustomCrossOver(const uint8_t* first, size_t first_size, const uint8_t* second,
                                            size_t second_size, uint8_t* out, size_t max_size, unsigned int seed) {
  dyno::fuzz::Random random(seed);
  const SessionInput input = dyno::fuzz::parse_input(g_planned.or_else({first, first_size}, random));
  const Bytes bytes = changed(input, dyno::fuzz::parse_input({second, second_size}), random);
  if (bytes.size() > max_size) return 0;
  std::copy(bytes.begin(), bytes.end(), out);
  return bytes.size();
}
