// gradients.cu, third part, one of two: the gate -rate softplus(raw + bias), without a bound.

constexpr bool BOUNDED = false;

// log2(1 + t) for t in [0, 1], to 4e-7 of itself: a decay hardly below 1 keeps its distance.
__device__ __forceinline__ float log2_of_one_and(float t) {
  float y = -0.0123194674f;
  y = y * t + 0.0636078707f, y = y * t - 0.155351842f, y = y * t + 0.256009697f, y = y * t - 0.35339482f;
  y = y * t + 0.480063695f, y = y * t - 0.721310088f, y = y * t + 1.44269476f;
  return y * t;
}

// softplus(x) log2(e) = log2(1 + 2^z) = max(z, 0) + log2(1 + t), z = x log2(e), t = 2^-|z|.
__device__ __forceinline__ float softplus_of(float z, float t) { return fmaxf(z, 0.f) + log2_of_one_and(t); }

constexpr float NOTHING = 150.f;  // powers of two that leave nothing of a float32
// Finite: then rate softplus is a number too, where softplus is 0.
__device__ __forceinline__ float rate_of(const Gate &gate) { return fminf(gate.rate, 0x1p120f); }

// Group J of x: log2 decays, cut off where nothing is left, so that their sums stay exact enough.
__device__ __forceinline__ void log2_decays(Values &x, int J, const Shared &shared, const Pair &pair, const Gate &gate,
                                            const Arguments &, const Place &at) {
  const float shift[2] = {LOG2E * gate.bias[0], LOG2E * gate.bias[1]}, rate = -rate_of(gate);
  float raw[2][4];
  u32 packed_raw[4];
  columns(packed_raw, shared.g, J, at);
  spread(raw, packed_raw);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float slope[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) slope[e] = pair.has(16 * J + 8 * half + 2 * at.c + e) ? rate : 0.f;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float z = raw[half][e] * LOG2E + shift[e >> 1];
      x[2 * J + half][e] = fmaxf(slope[e & 1] * softplus_of(z, power_of_two(-fabsf(z))), -4.f * NOTHING);
    }
  }
}

// Of a gradient dg of the log decay in nats: that of the raw gate, -rate sigmoid(x), and of A_log through this one
// number, the decay itself. sigmoid(x) = 1 / (1 + t) or t / (1 + t), exact at both ends. Where nothing is left dg is
// rounding noise.
__device__ __forceinline__ float through_gate(float dg, float raw, float bias, const Gate &gate, const Arguments &,
                                              float &d_A) {
  const float z = (raw + bias) * LOG2E, t = power_of_two(-fabsf(z));
  const float decay = rate_of(gate) * softplus_of(z, t), slope = rate_of(gate) * (z > 0.f ? 1.f : t);
  const bool none = decay >= NOTHING;  // not where the gate is no number
  d_A = none ? 0.f : dg * (-1.f / LOG2E) * decay;
  return none ? 0.f : -dg * slope * reciprocal(1.f + t);
}
