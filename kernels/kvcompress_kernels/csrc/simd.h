// float32 vectors of the machine's width (AVX-512 or AVX2) and their loads and stores from
// float32, bfloat16 and float16 memory. The rest of the C++ code is written against these names.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <immintrin.h>

#include <cstdint>

#if defined(CPU_CAPABILITY_AVX512) && defined(__AVX512BF16__)
#define KVCOMPRESS_BF16_DOT 1
#endif

namespace kvcompress::simd {

#if defined(CPU_CAPABILITY_AVX512)

using Vec = __m512;
inline constexpr int kWidth = 16;

inline Vec zero() { return _mm512_setzero_ps(); }
inline Vec set1(float x) { return _mm512_set1_ps(x); }
inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
inline Vec load(const c10::BFloat16* p) {
  const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16));
}
inline Vec load(const c10::Half* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline void store(float* p, Vec x) { _mm512_storeu_ps(p, x); }
inline void store(c10::Half* p, Vec x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
inline void store(c10::BFloat16* p, Vec x) {
#if defined(KVCOMPRESS_BF16_DOT)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(x));
#else
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  rounded = _mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc00000));
  _mm256_storeu_si256(
      reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
#endif
}
inline Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
// Second operand when either is NaN, as the instruction does.
inline Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
// a * b + c
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline float reduce_add(Vec x) { return _mm512_reduce_add_ps(x); }
inline float reduce_max(Vec x) { return _mm512_reduce_max_ps(x); }
// The first `count` lanes of x, `other` in the rest; any count, also below 0 and above kWidth.
inline Vec keep_first(Vec x, int count, Vec other) {
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __mmask16 mask = _mm512_cmplt_epi32_mask(lane, _mm512_set1_epi32(count));
  return _mm512_mask_mov_ps(other, mask, x);
}
inline Vec round(Vec x) {
  return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
inline constexpr float kExpFloor = -110.0f;
// x * 2^n, n integral
inline Vec scale_by_power(Vec x, Vec n) { return _mm512_scalef_ps(x, n); }

#else

using Vec = __m256;
inline constexpr int kWidth = 8;

inline Vec zero() { return _mm256_setzero_ps(); }
inline Vec set1(float x) { return _mm256_set1_ps(x); }
inline Vec load(const float* p) { return _mm256_loadu_ps(p); }
inline Vec load(const c10::BFloat16* p) {
  const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(raw), 16));
}
inline Vec load(const c10::Half* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline void store(float* p, Vec x) { _mm256_storeu_ps(p, x); }
inline void store(c10::Half* p, Vec x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
inline void store(c10::BFloat16* p, Vec x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256 nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
  rounded = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc00000), _mm256_castps_si256(nan));
  rounded = _mm256_srli_epi32(rounded, 16);
  _mm_storeu_si128(
      reinterpret_cast<__m128i*>(p),
      _mm_packus_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1)));
}
inline Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
// Second operand when either is NaN, as the instruction does.
inline Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
// a * b + c
inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
inline float reduce_add(Vec x) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
inline float reduce_max(Vec x) {
  __m128 s = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  s = _mm_max_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}
// The first `count` lanes of x, `other` in the rest; any count, also below 0 and above kWidth.
inline Vec keep_first(Vec x, int count, Vec other) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i mask = _mm256_cmpgt_epi32(_mm256_set1_epi32(count), lane);
  return _mm256_blendv_ps(other, x, _mm256_castsi256_ps(mask));
}
inline Vec round(Vec x) {
  return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
inline constexpr float kExpFloor = -88.02969f;  // -127 ln 2
// x * 2^n, n integral in [-127, 127]; 0 for n = -127
inline Vec scale_by_power(Vec x, Vec n) {
  const __m256i biased = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  return _mm256_mul_ps(x, _mm256_castsi256_ps(_mm256_slli_epi32(biased, 23)));
}

#endif

// e^x for x <= 0 within 2 units in the last place; exactly 0 for -inf and wherever the result
// would be subnormal or less (AVX2) or less than the smallest subnormal (AVX-512); NaN for NaN.
inline Vec exp_nonpositive(Vec x) {
  // operand order: max() keeps a NaN of the second operand
  x = max(set1(kExpFloor), x);
  const Vec n = round(mul(x, set1(1.44269504088896341f)));
  // ln 2 in two parts, so that the difference is exact
  Vec r = fma(n, set1(-0.693359375f), x);
  r = fma(n, set1(2.12194440e-4f), r);
  Vec y = set1(1.9875691500e-4f);
  y = fma(y, r, set1(1.3981999507e-3f));
  y = fma(y, r, set1(8.3334519073e-3f));
  y = fma(y, r, set1(4.1665795894e-2f));
  y = fma(y, r, set1(1.6666665459e-1f));
  y = fma(y, r, set1(5.0000001201e-1f));
  y = add(fma(mul(r, r), y, r), set1(1.0f));
  return scale_by_power(y, n);
}
inline float exp_nonpositive(float x) {
#if defined(CPU_CAPABILITY_AVX512)
  return _mm512_cvtss_f32(exp_nonpositive(set1(x)));
#else
  return _mm256_cvtss_f32(exp_nonpositive(set1(x)));
#endif
}

}  // namespace kvcompress::simd
