/* Vectors for the C code of this folder. They are GCC's own, so the code works with every width.
 *
 * Sums are float32, and are rounded where torch rounds. No multiply-add is fused unless written as such. */

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#if defined __AVX512F__ || defined __FMA__
#include <immintrin.h>
#endif

#ifdef __AVX512F__
#define LANES 16
#else
#define LANES 8
#endif
#define INLINE static inline __attribute__((always_inline))

#pragma GCC diagnostic ignored "-Wpsabi" /* vectors are passed to inlined functions only */

typedef float floats __attribute__((vector_size(LANES * 4), may_alias)); /* single ones are read, too */
typedef int32_t ints __attribute__((vector_size(LANES * 4)));
typedef uint32_t words __attribute__((vector_size(LANES * 4)));
typedef uint16_t halves __attribute__((vector_size(LANES * 2)));

INLINE uint16_t rounded(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, 4);
    uint32_t even = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return (bits & 0x7fffffff) > 0x7f800000 ? (uint16_t)((bits >> 16) | 0x40) : (uint16_t)even;
}

INLINE float widened(uint16_t x)
{
    uint32_t bits = (uint32_t)x << 16;
    float wide;
    memcpy(&wide, &bits, 4);
    return wide;
}

INLINE float get(const void *from, int64_t i, bool narrow)
{
    return narrow ? widened(((const uint16_t *)from)[i]) : ((const float *)from)[i];
}

INLINE void put(void *to, int64_t i, float x, bool narrow)
{
    if (narrow)
        ((uint16_t *)to)[i] = rounded(x);
    else
        ((float *)to)[i] = x;
}

/* x as its dtype holds it. */
INLINE float as_held(float x, bool narrow)
{
    return narrow ? widened(rounded(x)) : x;
}

INLINE floats load(const void *from, int64_t i, bool narrow)
{
    floats wide;
    if (narrow) {
        halves x;
        memcpy(&x, (const uint16_t *)from + i, sizeof x);
#ifdef __AVX512F__ /* GCC would convert the halves one after the other */
        words bits = (words)_mm512_cvtepu16_epi32((__m256i)x) << 16;
#else
        words bits = __builtin_convertvector(x, words) << 16;
#endif
        memcpy(&wide, &bits, sizeof wide);
    } else {
        memcpy(&wide, (const float *)from + i, sizeof wide);
    }
    return wide;
}

/* Two vectors. For bfloat16, the first has the numbers at even places, the second the others: that takes half the work,
 * and a sum of products of two heads does not depend on the order. */
INLINE void load_pair(const void *from, int64_t i, floats *pair, bool narrow)
{
    if (narrow) {
        words bits;
        memcpy(&bits, (const uint16_t *)from + i, sizeof bits);
        pair[0] = (floats)(bits << 16);
        pair[1] = (floats)(bits & 0xffff0000);
    } else {
        pair[0] = load(from, i, false);
        pair[1] = load(from, i + LANES, false);
    }
}

/* Writes two vectors in the order of `load_pair`. */
INLINE void put_pair(void *to, int64_t i, const floats *pair, bool narrow)
{
    for (int64_t j = 0; j < LANES; j++) {
        put(to, i + (narrow ? 2 * j : j), pair[0][j], narrow);
        put(to, i + (narrow ? 2 * j + 1 : LANES + j), pair[1][j], narrow);
    }
}

/* a * b + sum, rounded once if the machine can; only for results that need not equal torch's bit for bit. */
INLINE floats fused(floats a, floats b, floats sum)
{
#if defined __AVX512F__
    return _mm512_fmadd_ps(a, b, sum);
#elif defined __FMA__
    return _mm256_fmadd_ps(a, b, sum);
#else
    return a * b + sum;
#endif
}

INLINE floats all(float x)
{
    return x - (floats){};
}

/* b where the mask is not 0, else a. */
INLINE floats chosen(ints mask, floats a, floats b)
{
    return (floats)(((ints)a & ~mask) | ((ints)b & mask));
}

/* e^x for x <= 0, with a relative error of 2e-7; 0 below -87. 2^n * e^f with |f| <= ln 2 / 2, by Taylor's series. */
INLINE floats exponential(floats x)
{
    const float shift = 12582912.0f; /* 1.5 * 2^23: adding it rounds to a whole number */
    floats n = (x * 1.44269504f + shift) - shift;
    floats f = fused(n, all(-0.693145752f), x);
    f = fused(n, all(-1.42860677e-6f), f);
    floats sum = fused(f, all(1.0f / 720), all(1.0f / 120));
    sum = fused(sum, f, all(1.0f / 24));
    sum = fused(sum, f, all(1.0f / 6));
    sum = fused(sum, f, all(0.5f));
    sum = fused(sum, f, all(1.0f));
    sum = fused(sum, f, all(1.0f));
    ints exponent = (ints)(n + shift) - (ints)all(shift); /* the low bits of n + shift are n */
    floats result = (floats)((ints)sum + (exponent << 23));
    return chosen(x < -87.0f, result, (floats){});
}

/* x * sigmoid(x), or gelu by its tanh formula, which is x * sigmoid(2 * sqrt(2 / pi) * (x + 0.044715 * x^3)). */
INLINE floats activated(floats x, bool gelu)
{
    floats by = x;
    if (gelu)
        by = 1.59576912f * (x + 0.044715f * x * x * x);
    floats small = exponential((floats)((ints)by | (int32_t)0x80000000)); /* e^-|by| */
    floats whole = 1.0f / (1.0f + small);
    return x * chosen(by < 0.0f, whole, small * whole);
}

INLINE float total(floats x)
{
    float sum = 0;
    for (int i = 0; i < LANES; i++)
        sum += x[i];
    return sum;
}

/* Halves the number of values of each sum: groups of 2 * HALF lanes of a, then of b, become groups of HALF. */
#define PICK(i, half, offset) ((i) / (half) * 2 * (half) + (i) % (half) + (offset))
#define PICK4(i, half, offset) \
    PICK(i, half, offset), PICK(i + 1, half, offset), PICK(i + 2, half, offset), PICK(i + 3, half, offset)
#if LANES == 16
#define PICKS(half, offset) \
    (ints){PICK4(0, half, offset), PICK4(4, half, offset), PICK4(8, half, offset), PICK4(12, half, offset)}
#else
#define PICKS(half, offset) (ints){PICK4(0, half, offset), PICK4(4, half, offset)}
#endif
#define FOLD(a, b, half) (__builtin_shuffle(a, b, PICKS(half, 0)) + __builtin_shuffle(a, b, PICKS(half, half)))

/* Lane i of the result: the sum of the lanes of sums[i]. */
INLINE floats totals(floats *sums)
{
#if LANES == 16
    for (int i = 0; i < 8; i++)
        sums[i] = FOLD(sums[2 * i], sums[2 * i + 1], 8);
#endif
    for (int i = 0; i < 4; i++)
        sums[i] = FOLD(sums[2 * i], sums[2 * i + 1], 4);
    for (int i = 0; i < 2; i++)
        sums[i] = FOLD(sums[2 * i], sums[2 * i + 1], 2);
    return FOLD(sums[0], sums[1], 1);
}

/* x as its dtype holds it. */
INLINE floats all_as_held(floats x, bool narrow)
{
    if (narrow) {
        words bits = (words)x, even = bits + 0x7fff + ((bits >> 16) & 1);
        words number = (words)((bits & 0x7fffffff) <= 0x7f800000), quiet = bits | 0x400000;
        x = (floats)(((even & number) | (quiet & ~number)) & 0xffff0000);
    }
    return x;
}

/* Writes numbers that are already in this form. */
INLINE void put_held(void *to, int64_t i, floats x, bool narrow)
{
    if (narrow) {
        halves held = __builtin_convertvector((words)x >> 16, halves);
        memcpy((uint16_t *)to + i, &held, sizeof held);
    } else {
        memcpy((float *)to + i, &x, sizeof x);
    }
}
