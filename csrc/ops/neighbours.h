// The launches around an op of a plan, as far as its default depends on them.
#pragma once

namespace dyno::ops {

struct Neighbours {
  // The previous launch multiplies a batch of matrices, as the values of latent attention. Its blocks are on all
  // multiprocessors, where attention's blocks for few positions are on a few.
  bool after_batch = false;
};

}  // namespace dyno::ops
