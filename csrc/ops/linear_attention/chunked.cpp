// Linear attention of a chunk of tokens as matrix products. With b_t the sum of the logarithms of the decays up to
// token t of the chunk, and S the state before the chunk, the rule unrolls to
//   u_t = step_t * (v_t - e^b_t S^T k_t - sum over s < t of e^(b_t - b_s) (k_t . k_s) u_s)
//   out_t = e^b_t S^T q_t + sum over s <= t of e^(b_t - b_s) (q_t . k_s) u_s
//   S' = e^b_C S + sum over s of k_s (outer) e^(b_C - b_s) u_s
// (arXiv:2412.06464, section 3; the additive rule has no sum over s < t). Exponents are never positive.
#include "ops/linear_attention/kernels.h"
#include "ops/simd.h"

namespace DYNO_KERNEL_NAMESPACE {
namespace {

constexpr int kRows = 4;
constexpr int kWide = kLanes == 16 ? 4 : 2;

float exp_of(float x) { return exp(broadcast(x))[0]; }

// c[kM, kVectors * kLanes] (+)= a[kM, k] * b[k, …]
template <int kM, int kVectors>
void tile(int64_t k, const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc, bool add) {
  vf sum[kM][kVectors];
  for (int i = 0; i < kM; ++i) {
    for (int j = 0; j < kVectors; ++j) sum[i][j] = add ? load(c + i * ldc + j * kLanes) : vf{};
  }
  for (int64_t p = 0; p < k; ++p) {
    vf row[kVectors];
    for (int j = 0; j < kVectors; ++j) row[j] = load(b + p * ldb + j * kLanes);
    for (int i = 0; i < kM; ++i) {
      const vf factor = broadcast(a[i * lda + p]);
      for (int j = 0; j < kVectors; ++j) sum[i][j] += factor * row[j];
    }
  }
  for (int i = 0; i < kM; ++i) {
    for (int j = 0; j < kVectors; ++j) store(c + i * ldc + j * kLanes, sum[i][j]);
  }
}

template <int kM>
void rows(int64_t n, int64_t k, const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc,
          bool add) {
  int64_t j = 0;
  for (; j + kWide * kLanes <= n; j += kWide * kLanes) tile<kM, kWide>(k, a, lda, b + j, ldb, c + j, ldc, add);
  for (; j + kLanes <= n; j += kLanes) tile<kM, 1>(k, a, lda, b + j, ldb, c + j, ldc, add);
  for (; j < n; ++j) {
    for (int i = 0; i < kM; ++i) {
      float sum = add ? c[i * ldc + j] : 0.0f;
      for (int64_t p = 0; p < k; ++p) sum += a[i * lda + p] * b[p * ldb + j];
      c[i * ldc + j] = sum;
    }
  }
}

// c[m, n] (+)= a[m, k] * b[k, n]
void product(int64_t m, int64_t n, int64_t k, const float* a, int64_t lda, const float* b, int64_t ldb, float* c,
             int64_t ldc, bool add) {
  int64_t i = 0;
  for (; i + kRows <= m; i += kRows) rows<kRows>(n, k, a + i * lda, lda, b, ldb, c + i * ldc, ldc, add);
  for (; i < m; ++i) rows<1>(n, k, a + i * lda, lda, b, ldb, c + i * ldc, ldc, add);
}

void scale(float* x, int64_t n, float factor) {
  for (int64_t i = 0; i < n; ++i) x[i] *= factor;
}

// Solves (I + L) u = u in place, with L strictly lower triangular and passed negated: blocks of rows by products, row
// by row within a block.
void solve(int64_t count, int64_t dv, const float* negated, float* u) {
  for (int64_t block = 0; block < count; block += kRows) {
    const int64_t end = block + kRows < count ? block + kRows : count;
    product(end - block, dv, block, negated + block * count, count, u, dv, u + block * dv, dv, true);
    for (int64_t t = block + 1; t < end; ++t) {
      product(1, dv, t - block, negated + t * count + block, count, u + block * dv, dv, u + t * dv, dv, true);
    }
  }
}

}  // namespace

void linear_chunk(const LinearTokens& x, float* scratch) {
  const int64_t n = x.count, dk = x.dk, dv = x.dv;
  float* keys = scratch;              // [dk, n], transposed
  float* u = keys + dk * n;           // [n, dv]
  float* among_keys = u + n * dv;     // [n, n]
  float* among = among_keys + n * n;  // [n, n], queries with keys
  float* sums = among + n * n;        // [n]: b
  float* decays = sums + n;           // [n]: e^b
  float total = 0;
  for (int64_t t = 0; t < n; ++t) {
    sums[t] = total += x.log_decay[t];
    decays[t] = exp_of(total);
    for (int64_t i = 0; i < dk; ++i) keys[i * n + t] = x.k[t * dk + i];
  }
  product(n, n, dk, x.q, dk, keys, n, among, n, false);
  for (int64_t t = 0; t < n; ++t) {
    for (int64_t s = 0; s < n; ++s) among[t * n + s] = s <= t ? among[t * n + s] * exp_of(sums[t] - sums[s]) : 0.0f;
  }
  if (x.delta) {
    product(n, n, dk, x.k, dk, keys, n, among_keys, n, false);
    product(n, dv, dk, x.k, dk, x.state, dv, u, dv, false);
    for (int64_t t = 0; t < n; ++t) {
      for (int64_t s = 0; s < t; ++s) among_keys[t * n + s] *= -x.step[t] * exp_of(sums[t] - sums[s]);
      for (int64_t j = 0; j < dv; ++j) {
        u[t * dv + j] = x.step[t] * (x.v[t * x.v_stride + j] - decays[t] * u[t * dv + j]);
      }
    }
    solve(n, dv, among_keys, u);
  } else {
    for (int64_t t = 0; t < n; ++t) {
      for (int64_t j = 0; j < dv; ++j) u[t * dv + j] = x.step[t] * x.v[t * x.v_stride + j];
    }
  }
  product(n, dv, dk, x.q, dk, x.state, dv, x.out, x.out_stride, false);
  for (int64_t t = 0; t < n; ++t) {
    float* out = x.out + t * x.out_stride;
    const float* v = x.v + t * x.v_stride;
    for (int64_t j = 0; j < dv; ++j) out[j] = decays[t] * out[j] + x.skip * v[j];
  }
  product(n, dv, n, among, n, u, dv, x.out, x.out_stride, true);
  for (int64_t s = 0; s < n; ++s) scale(u + s * dv, dv, exp_of(total - sums[s]));
  scale(x.state, dk * dv, exp_of(total));
  product(dk, dv, n, keys, n, u, dv, x.state, dv, true);
}

}  // namespace DYNO_KERNEL_NAMESPACE
