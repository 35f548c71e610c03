/* The lossless codec of bfloat16 in 12 bits an element. The form and the twin are in kernels/exact12.py, which calls
 * this. Vectors of 16 bytes suffice: decoding is about as fast as memcpy. */
#include <stdint.h>
#include <string.h>

enum {
    PIECE = 4096, /* elements */
    GROUP = 32,
    HALF = GROUP / 2,
    CODES = 16,
    EXPONENTS = 256,
    HEAD_BYTES = CODES + 2,
    GROUP_BYTES = HALF + GROUP,
    ESCAPE_BYTES = 3
};
#define INLINE static inline __attribute__((always_inline))

typedef uint8_t bytes __attribute__((vector_size(HALF)));
typedef uint8_t wide __attribute__((vector_size(GROUP)));

#pragma GCC diagnostic ignored "-Wpsabi" /* vectors are passed to inlined functions only */

INLINE bytes load(const uint8_t *from)
{
    bytes found;
    memcpy(&found, from, sizeof found);
    return found;
}

INLINE void store(uint8_t *to, bytes what)
{
    memcpy(to, &what, sizeof what);
}

INLINE int64_t smaller(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* 32 elements. high, low: what each code's exponent gives to an element's two bytes. */
INLINE void decode_group(const uint8_t *from, bytes high, bytes low, uint8_t *to)
{
    const bytes in_turns = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23};
    bytes codes = load(from), halves[2] = {codes & 15, codes >> 4};
    for (int half = 0; half < 2; half++) {
        bytes rest = load(from + HALF * (1 + half));
        bytes upper = (rest & 0x80) | __builtin_shuffle(high, halves[half]);
        bytes lower = (rest & 0x7f) | __builtin_shuffle(low, halves[half]);
        store(to + GROUP * half, __builtin_shuffle(lower, upper, in_turns));
        store(to + GROUP * half + HALF, __builtin_shuffle(lower, upper, in_turns + 8));
    }
}

/* The elements of `stored`, whatever its bytes are. Returns 0 unless it is exactly as many; `out` then holds anything. */
int kvstore_exact12_decode(const uint8_t *stored, int64_t num_bytes, uint8_t *out, int64_t num_elements)
{
    const uint8_t *end = stored + num_bytes;
    for (int64_t count; num_elements > 0; num_elements -= count, out += 2 * count) {
        count = smaller(num_elements, PIECE);
        int64_t in_last = count % GROUP, num_groups = count / GROUP + (in_last > 0);
        if (end - stored < HEAD_BYTES + num_groups * GROUP_BYTES) return 0;
        bytes exponents = load(stored), high = exponents >> 1, low = exponents << 7;
        int64_t num_escapes = stored[CODES] | stored[CODES + 1] << 8;
        stored += HEAD_BYTES;
        for (int64_t group = 0; group < count / GROUP; group++, stored += GROUP_BYTES)
            decode_group(stored, high, low, out + 2 * GROUP * group);
        if (in_last) {
            uint8_t last[2 * GROUP];
            decode_group(stored, high, low, last);
            memcpy(out + 2 * (count - in_last), last, 2 * in_last);
            stored += GROUP_BYTES;
        }
        if (end - stored < num_escapes * ESCAPE_BYTES) return 0;
        for (; num_escapes > 0; num_escapes--, stored += ESCAPE_BYTES) {
            int64_t at = stored[0] | stored[1] << 8;
            if (at >= count) return 0;
            out[2 * at] = (out[2 * at] & 0x7f) | stored[2] << 7;
            out[2 * at + 1] = (out[2 * at + 1] & 0x80) | stored[2] >> 1;
        }
    }
    return stored == end;
}

/* Write the most frequent exponents, the lower first of equally frequent ones. Returns how many there are. */
static int choose(const uint8_t *exponents, int64_t count, uint8_t *chosen)
{
    uint32_t counts[4][EXPONENTS] = {0}, keys[EXPONENTS]; /* four, or each would wait for the one before */
    for (int64_t i = 0; i < count; i++) counts[i % 4][exponents[i]]++;
    int num_keys = 0, num_chosen = 0;
    for (int exponent = 0; exponent < EXPONENTS; exponent++) {
        uint32_t n = counts[0][exponent] + counts[1][exponent] + counts[2][exponent] + counts[3][exponent];
        keys[num_keys] = n * EXPONENTS + EXPONENTS - 1 - exponent;
        num_keys += n > 0;
    }
    for (; num_chosen < CODES && num_chosen < num_keys; num_chosen++) {
        int best = num_chosen;
        for (int i = num_chosen + 1; i < num_keys; i++)
            if (keys[i] > keys[best]) best = i;
        chosen[num_chosen] = EXPONENTS - 1 - keys[best] % EXPONENTS;
        keys[best] = keys[num_chosen];
    }
    return num_chosen;
}

/* Codes of 32 exponents as bytes; known: all bits where there is one. */
INLINE wide codes_of(wide exponents, const wide *chosen, int num_chosen, wide *known)
{
    wide codes = {0};
    *known = codes;
    for (int code = 0; code < num_chosen; code++) {
        wide is = (wide)(exponents == chosen[code]);
        *known |= is;
        codes |= is & ((uint8_t)code - (wide){0});
    }
    return codes;
}

/* Returns the bytes written to `out`, or -1 if they are more than `capacity`. */
int kvstore_exact12_encode(const uint8_t *raw, int64_t num_elements, uint8_t *out, int64_t capacity)
{
    const uint8_t *start = out, *end = out + capacity;
    uint16_t elements[PIECE];
    uint8_t exponents[PIECE], rest[PIECE], escapes[PIECE * ESCAPE_BYTES];
    for (int64_t count; num_elements > 0; num_elements -= count, raw += 2 * count) {
        count = smaller(num_elements, PIECE);
        int64_t num_groups = (count + GROUP - 1) / GROUP, num_escapes = 0;
        if (end - out < HEAD_BYTES + num_groups * GROUP_BYTES) return -1;
        memcpy(elements, raw, 2 * count);
        for (int64_t i = 0; i < count; i++) exponents[i] = elements[i] >> 7;
        for (int64_t i = 0; i < count; i++) rest[i] = (elements[i] & 0x7f) | (elements[i] >> 8 & 0x80);
        uint8_t *head = out;
        memset(head, 0, CODES);
        int num_chosen = choose(exponents, count, head);
        for (int64_t i = count; i < num_groups * GROUP; i++) rest[i] = 0, exponents[i] = head[0];
        wide chosen[CODES], known;
        for (int code = 0; code < CODES; code++) chosen[code] = head[code] - (wide){0};
        out += HEAD_BYTES;
        for (int64_t i = 0; i < num_groups * GROUP; i += GROUP, out += GROUP_BYTES) {
            wide found;
            memcpy(&found, exponents + i, GROUP);
            wide codes = codes_of(found, chosen, num_chosen, &known);
            bytes halves[2];
            memcpy(halves, &codes, GROUP);
            store(out, halves[0] | halves[1] << 4);
            memcpy(out + HALF, rest + i, GROUP);
            uint64_t words[4];
            memcpy(words, &known, GROUP);
            if ((words[0] & words[1] & words[2] & words[3]) == UINT64_MAX) continue;
            for (int j = 0; j < GROUP; j++)
                if (!known[j]) {
                    uint8_t *escape = escapes + ESCAPE_BYTES * num_escapes++;
                    escape[0] = i + j, escape[1] = (i + j) >> 8, escape[2] = exponents[i + j];
                }
        }
        head[CODES] = num_escapes, head[CODES + 1] = num_escapes >> 8;
        if (end - out < num_escapes * ESCAPE_BYTES) return -1;
        memcpy(out, escapes, num_escapes * ESCAPE_BYTES);
        out += num_escapes * ESCAPE_BYTES;
    }
    return out - start;
}
