// Requirements of attention variants that depend on shapes alone.
#pragma once

#include "core/device_info.h"
#include "ops/op.h"

namespace dyno::ops {

// Whether a prompt kernel with tiles of `rows` offers `splits` parts of the keys.
Support prompt_splits(const AttentionDesc& desc, int64_t rows, int splits);
// The requirements of both variants of latent attention.
Support latent_shape(const AttentionDesc& desc, const DeviceInfo& device);

}  // namespace dyno::ops
