// The fast paths of Shaketable on a CPU: keyed normals fused with their use, and block formats in one pass.
// The arithmetic mirrors faults/rng.py and faults/formats.py operation by operation; compiled without
// contraction (-ffp-contract=off), so that both give the same bits. No allocation, no state, C linkage for ctypes.

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

static inline float as_float(uint32_t u) { float f; std::memcpy(&f, &u, 4); return f; }
static inline uint32_t as_bits(float f) { uint32_t u; std::memcpy(&u, &f, 4); return u; }

static inline float load(const float* p) { return *p; }
static inline float load(const uint16_t* p) { return as_float((uint32_t)*p << 16); }  // bfloat16
static inline void store(float* p, float v) { *p = v; }
static inline void store(uint16_t* p, float v) {  // round to nearest even, NaN stays NaN
  uint32_t u = as_bits(v);
  uint32_t r = (u + 0x7FFFu + ((u >> 16) & 1u)) >> 16;
  *p = (uint16_t)((u & 0x7FFFFFFFu) > 0x7F800000u ? ((u >> 16) | 0x40u) : r);
}

static inline void pair(uint32_t c, uint32_t k0, uint32_t k1, float& a, float& b) {
  uint32_t h1 = c ^ k0;
  h1 = (h1 ^ (h1 >> 16)) * 0x21F0AAADu;
  h1 = (h1 ^ (h1 >> 15)) + k1;
  h1 = h1 * 0xD35A2D97u;
  h1 = (h1 ^ (h1 >> 15)) * 0x31848BABu;
  h1 = h1 ^ (h1 >> 16);
  uint32_t h2 = h1 + c * 0x9E3779B9u + k1;
  h2 = (h2 ^ (h2 >> 16)) * 0x7FEB352Du;
  h2 = (h2 ^ (h2 >> 15)) * 0x846CA68Bu;
  h2 = h2 ^ (h2 >> 16);
  float u = ((float)(int32_t)(h1 >> 1) + 0.5f) * 4.656612873077393e-10f;
  uint32_t bits = as_bits(u);
  int32_t e = (int32_t)(bits - 0x3F3504F3u) >> 23;
  float m = as_float(bits - ((uint32_t)e << 23)) - 1.0f;
  float p = 7.0376836292e-2f;
  p = p * m + -1.1514610310e-1f;
  p = p * m + 1.1676998740e-1f;
  p = p * m + -1.2420140846e-1f;
  p = p * m + 1.4249322787e-1f;
  p = p * m + -1.6668057665e-1f;
  p = p * m + 2.0000714765e-1f;
  p = p * m + -2.4999993993e-1f;
  p = p * m + 3.3333331174e-1f;
  float m2 = m * m;
  float ln = (m + (m2 * m * p - 0.5f * m2)) + (float)e * 0.693147180559945f;
  float v = ln * -2.0f;
  float r = std::sqrt(v > 0.0f ? v : 0.0f);
  float t = (float)(int32_t)(h2 << 2) * 3.6571409e-10f;
  float t2 = t * t;
  float s = t * (1.0f + t2 * (-1.6666654611e-1f + t2 * (8.3321608736e-3f + t2 * -1.9515295891e-4f)));
  float q = 1.0f - 0.5f * t2 + t2 * t2 * (4.166664568e-2f + t2 * (-1.388731625e-3f + t2 * 2.443315711e-5f));
  uint32_t swap = (uint32_t)((int32_t)h2 >> 31);
  uint32_t x = (as_bits(s) & swap) | (as_bits(q) & ~swap);
  uint32_t y = (as_bits(q) & swap) | (as_bits(s) & ~swap);
  a = r * as_float(x ^ ((h2 << 1) & 0x80000000u));
  b = r * as_float(y ^ (h1 << 31));
}

// Stripes of 16 pairs, which are as many as a vector unit has lanes. `use` combines a clean value with its normal.
template <typename T, typename Use>
static void each(const T* x, T* out, size_t n, uint32_t k0, uint32_t k1, Use use) {
  size_t stripes = n / 32;
#pragma omp parallel for schedule(static) if (n > 16384)
  for (size_t i = 0; i < stripes; i++) {
    const T* p = x + i * 32;
    T* w = out + i * 32;
    float z[32];
#pragma omp simd
    for (int l = 0; l < 16; l++) pair((uint32_t)(i * 16 + l), k0, k1, z[2 * l], z[2 * l + 1]);
#pragma omp simd
    for (int l = 0; l < 32; l++) store(w + l, use(load(p + l), z[l]));
  }
  for (size_t j = stripes * 32; j < n; j++) {
    float z[2];
    pair((uint32_t)(j / 2), k0, k1, z[0], z[1]);
    store(out + j, use(load(x + j), z[j % 2]));
  }
}

template <typename T>
static void relative(const T* x, T* out, size_t n, float scale, uint32_t k0, uint32_t k1) {
  each(x, out, n, k0, k1, [scale](float v, float z) { return v + v * (z * scale); });
}
template <typename T>
static void absolute(const T* x, T* out, size_t n, float scale, uint32_t k0, uint32_t k1) {
  each(x, out, n, k0, k1, [scale](float v, float z) { return v + z * scale; });
}

// |v| on the e2m1 grid 0 .5 1 1.5 2 3 4 6, ties to even, saturating at 6. Adding and subtracting 2^(23+e) rounds to
// multiples of 2^e in the current (nearest even) mode.
static inline float e2m1(float v) {
  float a = std::fabs(v);
  a = a < 6.0f ? a : 6.0f;
  float magic = a < 2.0f ? 4194304.0f : (a < 4.0f ? 8388608.0f : 16777216.0f);
  return as_float(as_bits((a + magic) - magic) | (as_bits(v) & 0x80000000u));
}

template <typename T>
static void mxfp4(const T* x, T* out, size_t rows, size_t cols) {
  size_t blocks = (cols + 31) / 32;
#pragma omp parallel for schedule(static) if (rows * cols > 16384)
  for (size_t i = 0; i < rows * blocks; i++) {
    size_t row = i / blocks, first = (i - row * blocks) * 32;
    size_t width = cols - first < 32 ? cols - first : 32;
    const T* p = x + row * cols + first;
    T* w = out + row * cols + first;
    float v[32];
    uint32_t top = 0;
    if (width == 32) {
#pragma omp simd reduction(max : top)
      for (int l = 0; l < 32; l++) {
        v[l] = load(p + l);
        uint32_t u = as_bits(v[l]) & 0x7FFFFFFFu;
        top = u > top ? u : top;
      }
    } else {
      for (size_t l = 0; l < width; l++) {
        v[l] = load(p + l);
        uint32_t u = as_bits(v[l]) & 0x7FFFFFFFu;
        top = u > top ? u : top;
      }
      for (size_t l = width; l < 32; l++) v[l] = 0.0f;
    }
    int32_t e = (int32_t)(top >> 23) - 129;  // floor(log2 max) - 2
    e = e < -127 ? -127 : e;
    // 2^e, subnormal at -127. Dividing by it is exact, as multiplying by its inverse is where that is finite.
    float scale = e > -127 ? as_float((uint32_t)(e + 127) << 23) : as_float(0x00400000u);
    if (top > 0x7F800000u) scale = NAN;
    float inverse = e == -127 ? as_float(0x7F000000u) : as_float((uint32_t)(127 - e) << 23);
#pragma omp simd
    for (int l = 0; l < 32; l++) v[l] = e2m1(v[l] * inverse) * scale;
    if (width == 32)
      for (int l = 0; l < 32; l++) store(w + l, v[l]);
    else
      for (size_t l = 0; l < width; l++) store(w + l, v[l]);
  }
}

// What a fault changed: see faults/sums.py for the twelve sums.
template <typename T>
static void changes(const T* x, const T* y, size_t n, double* out) {
  double changed = 0, alive = 0, survived = 0, finite = 0, nonzero = 0, error = 0, size = 0, ratio = 0, deviation = 0, cross = 0;
#pragma omp parallel for simd schedule(static) if (n > 262144) \
    reduction(+ : changed, alive, survived, finite, nonzero, error, size, ratio, deviation, cross)
  for (size_t i = 0; i < n; i++) {
    float c = load(x + i), f = load(y + i);
    uint32_t cb = as_bits(c) & 0x7FFFFFFFu, fb = as_bits(f) & 0x7FFFFFFFu;
    bool both_nan = (cb > 0x7F800000u) & (fb > 0x7F800000u);
    bool fine = (cb < 0x7F800000u) & (fb < 0x7F800000u), lives = cb != 0;
    double w = fine ? (double)c : 0.0, e = (fine ? (double)f : 0.0) - w;
    double r = (fine & lives) ? e / w : 0.0;
    changed += (c != f) & !both_nan;
    alive += lives;
    survived += lives & (fb != 0);
    finite += fine;
    nonzero += fine & lives;
    error += e * e;
    size += w * w;
    ratio += r * r;
    deviation += (fine & lives) ? std::fabs(e) : 0.0;
    cross += e * w;
  }
  const double found[12] = {(double)n, changed, alive, survived, finite, nonzero, error, size, size, ratio, deviation, cross};
  std::memcpy(out, found, sizeof found);
}

extern "C" {
int shaketable_abi() { return 1; }
void normals_f32(float* out, size_t n, uint32_t k0, uint32_t k1) {
  each(out, out, n, k0, k1, [](float, float z) { return z; });
}
void relative_f32(const float* x, float* out, size_t n, float s, uint32_t k0, uint32_t k1) { relative(x, out, n, s, k0, k1); }
void relative_bf16(const uint16_t* x, uint16_t* out, size_t n, float s, uint32_t k0, uint32_t k1) { relative(x, out, n, s, k0, k1); }
void absolute_f32(const float* x, float* out, size_t n, float s, uint32_t k0, uint32_t k1) { absolute(x, out, n, s, k0, k1); }
void absolute_bf16(const uint16_t* x, uint16_t* out, size_t n, float s, uint32_t k0, uint32_t k1) { absolute(x, out, n, s, k0, k1); }
void sums_f32(const float* x, const float* y, size_t n, double* out) { changes(x, y, n, out); }
void sums_bf16(const uint16_t* x, const uint16_t* y, size_t n, double* out) { changes(x, y, n, out); }
void mxfp4_f32(const float* x, float* out, size_t rows, size_t cols) { mxfp4(x, out, rows, cols); }
void mxfp4_bf16(const uint16_t* x, uint16_t* out, size_t rows, size_t cols) { mxfp4(x, out, rows, cols); }
}
