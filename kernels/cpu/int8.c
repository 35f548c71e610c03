/* The lossy codec of bfloat16 in bytes with an exponent for each 32. The form and the twin are in kernels/int8.py,
 * which calls this. The compiler makes vectors of the loops over a group. */
#include <math.h>
#include <stdint.h>
#include <string.h>

enum { GROUP = 32, LEAST = 7, NOT_FINITE = 255, UNIT = 133, BIAS = 127, MOST = 127 };
#define INLINE static inline __attribute__((always_inline))

/* 2 to this power, which a float has as a normal number. */
INLINE float power(int exponent)
{
    uint32_t bits = (uint32_t)(exponent + BIAS) << 23;
    float found;
    memcpy(&found, &bits, sizeof found);
    return found;
}

/* Returns 0 if an element is not finite. */
int kvstore_int8_encode(const uint8_t *raw, uint8_t *out, int64_t num_groups)
{
    int8_t *steps = (int8_t *)out + num_groups;
    for (int64_t group = 0; group < num_groups; group++, raw += 2 * GROUP, steps += GROUP) {
        uint16_t elements[GROUP];
        uint32_t bits[GROUP];
        float values[GROUP];
        int largest = 0;
        memcpy(elements, raw, sizeof elements);
        for (int i = 0; i < GROUP; i++) {
            int exponent = elements[i] >> 7 & 0xff;
            largest = exponent > largest ? exponent : largest;
        }
        if (largest == NOT_FINITE) return 0;
        if (largest < LEAST) largest = 0;
        out[group] = (uint8_t)largest;
        float factor = largest ? power(UNIT - largest) : 0;
        for (int i = 0; i < GROUP; i++) bits[i] = (uint32_t)elements[i] << 16;
        memcpy(values, bits, sizeof values);
        for (int i = 0; i < GROUP; i++) {
            float step = rintf(values[i] * factor);
            step = step > MOST ? MOST : step;
            step = step < -MOST ? -MOST : step;
            steps[i] = (int8_t)(int)step;
        }
    }
    return 1;
}

/* Returns 0 if the bytes are none that were encoded. */
int kvstore_int8_decode(const uint8_t *stored, uint8_t *out, int64_t num_groups)
{
    const int8_t *steps = (const int8_t *)stored + num_groups;
    for (int64_t group = 0; group < num_groups; group++, out += 2 * GROUP, steps += GROUP) {
        float values[GROUP];
        uint32_t bits[GROUP];
        uint16_t elements[GROUP];
        int largest = stored[group];
        if (largest == NOT_FINITE) return 0;
        float factor = largest < LEAST ? 0 : power(largest - UNIT);
        for (int i = 0; i < GROUP; i++) values[i] = (float)steps[i] * factor;
        memcpy(bits, values, sizeof bits);
        for (int i = 0; i < GROUP; i++) elements[i] = (uint16_t)(bits[i] >> 16);
        memcpy(out, elements, sizeof elements);
    }
    return 1;
}
