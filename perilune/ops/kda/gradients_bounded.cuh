// gradients.cu, third part, one of two: a gate with a lower bound, of -5 nats a token or above. No group of 16 tokens
// decays by more than 115.4 powers of two.

constexpr bool BOUNDED = true;

// Group J of x: log2 decays, lower_bound / (1 + 2^(slope raw + slope bias)).
__device__ __forceinline__ void log2_decays(Values &x, int J, const Shared &shared, const Pair &pair, const Gate &gate,
                                            const Arguments &a, const Place &at) {
  const float slope = -LOG2E * gate.rate, shift[2] = {slope * gate.bias[0], slope * gate.bias[1]};
  float raw[2][4];
  u32 packed_raw[4];
  columns(packed_raw, shared.g, J, at);
  spread(raw, packed_raw);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float bound[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) bound[e] = pair.has(16 * J + 8 * half + 2 * at.c + e) ? a.lower_bound * LOG2E : 0.f;
#pragma unroll
    for (int e = 0; e < 4; ++e)
      x[2 * J + half][e] = bound[e & 1] * reciprocal(1.f + power_of_two(raw[half][e] * slope + shift[e >> 1]));
  }
}

// Of a gradient dg of the log decay in nats: that of the raw gate, and of A_log through this one number.
// s (1 - s) = y s^2 with s = 1 / (1 + y), exact also where s rounds to 1; the cap keeps y finite.
__device__ __forceinline__ float through_gate(float dg, float raw, float bias, const Gate &gate, const Arguments &a,
                                              float &d_A) {
  float y = power_of_two(fminf((raw + bias) * (-LOG2E * gate.rate), 43.f)), s = reciprocal(1.f + y);
  y *= dg * (a.lower_bound * gate.rate) * s * s;
  d_A = y * (raw + bias);
  return y;
}
