// Each overrun that AddressSanitizer has to see in the engine's own memory, one by its number: exit status 0 means that
// it was not seen. tests/fuzz/run.sh calls every one before it trusts the targets.
#include <cstdio>
#include <cstdlib>

#include "runtime/host_buffer.h"

int main(int argc, char** argv) {
  using dyno::runtime::HostBuffer;
  using dyno::runtime::PartedBuffer;
  using dyno::runtime::StripedBuffer;
  const HostBuffer whole(100, "a buffer");
  // Two values that share a place, and one behind them.
  const PartedBuffer parts(192, {{0, 60}, {0, 64}, {64, 128}}, "parts");
  const StripedBuffer stripes(64, 2, "stripes");
  switch (argc > 1 ? std::atoi(argv[1]) : 0) {
    case 0:  // all of it can be used
      whole.data()[99] = parts.at(0)[59] = parts.at(1)[63] = parts.at(2)[127] = std::byte{1};
      stripes.data()[63] = stripes.data()[stripes.stride() + 63] = std::byte{1};
      std::puts("4 overruns");
      return 0;
    case 1:
      whole.data()[100] = std::byte{1};
      break;
    case 2:
      parts.at(0)[60] = std::byte{1};
      break;
    case 3:
      parts.at(1)[64] = std::byte{1};
      break;
    case 4:
      stripes.data()[64] = std::byte{1};
      break;
    default:
      std::fprintf(stderr, "usage: %s [NUMBER]\n", argv[0]);
      return 0;
  }
  std::fprintf(stderr, "overrun %s was not seen\n", argv[1]);
  return 0;
}
