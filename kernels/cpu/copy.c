/* Copies one layer of N blocks from the CPU arena to the paged cache, rotating keys, and a step's tokens to the arena,
 * in one pass each. The twins are in reference.py; rotated keys equal theirs bit for bit. Called from block_copy.py,
 * which declares the same structs. A number out of range is an error before anything is written. */
#include <emmintrin.h>
#include <stdint.h>
#include <string.h>

enum { DONE = 0, OUT_OF_RANGE = 1 };
enum { MAX_PAIRS = 512 }; /* of a head, as in block_copy.py */
enum { SCRATCH_BYTES = 1 << 14, STREAM_BYTES = 1 << 22, PARALLEL_BYTES = 1 << 17 };

typedef struct {
    const int64_t *arena_blocks, *numbers; /* of each block: in the arena, in the cache */
    const int64_t *positions;              /* of its first token */
    int64_t num_loads, num_arena_blocks, num_blocks;
    int64_t arena_block_bytes; /* from one block of the arena to the next */
    int64_t block_size, num_heads, head_dim, item_bytes;
    int64_t value_bytes; /* of a token; keys and values may have heads of different sizes */
    int64_t num_threads;
} Load;

typedef struct {
    const void *cos, *sin; /* [num_positions, num_pairs] */
    int64_t num_positions, num_pairs;
    int64_t item_bytes;                     /* of cos and sin: 2 is bf16, 4 is float32 */
    int64_t interleaved, rounds_each_product; /* as in kvstore.rope.rotary: the style, and bf16 without upcast */
} Turn;

static inline float widen(uint16_t bits) {
    uint32_t word = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &word, 4);
    return value;
}

/* Rounds to nearest even. A NaN from bf16 has no low bits that could carry into its sign, so it stays NaN. */
static inline uint32_t rounded(float value) {
    uint32_t word;
    memcpy(&word, &value, 4);
    return word + 0x7fff + (word >> 16 & 1);
}

static inline uint16_t narrow(float value) { return rounded(value) >> 16; }

static inline float as_bf16(float value) {
    uint32_t word = rounded(value) & 0xffff0000u;
    memcpy(&value, &word, 4);
    return value;
}

static inline float same(float value) { return value; }

/* A token's heads. step: between elements of the pairs' first halves; other: from a first to its second. */
#define DEFINE_TURN(NAME, TYPE, WIDEN, EACH, NARROW)                                                                   \
    static inline __attribute__((always_inline)) void NAME##_head(                                                     \
        const TYPE *restrict in, TYPE *restrict out, const float *restrict cos, const float *restrict sin,             \
        int64_t num_pairs, int64_t step, int64_t other) {                                                              \
        for (int64_t i = 0; i < num_pairs; i++) {                                                                      \
            float a = WIDEN(in[i * step]), b = WIDEN(in[i * step + other]);                                            \
            out[i * step] = NARROW(EACH(a * cos[i]) - EACH(b * sin[i]));                                               \
            out[i * step + other] = NARROW(EACH(b * cos[i]) + EACH(a * sin[i]));                                       \
        }                                                                                                              \
    }                                                                                                                  \
    static void NAME(const Load *load, const Turn *turn, const void *source, void *target, const float *cos,           \
                     const float *sin) {                                                                               \
        int64_t num_pairs = turn->num_pairs, rest = load->head_dim - 2 * num_pairs;                                    \
        const TYPE *in = source;                                                                                       \
        TYPE *out = target;                                                                                            \
        for (int64_t head = 0; head < load->num_heads; head++, in += load->head_dim, out += load->head_dim) {          \
            if (turn->interleaved)                                                                                     \
                NAME##_head(in, out, cos, sin, num_pairs, 2, 1);                                                       \
            else                                                                                                       \
                NAME##_head(in, out, cos, sin, num_pairs, 1, num_pairs);                                               \
            if (rest) memcpy(out + 2 * num_pairs, in + 2 * num_pairs, rest * sizeof(TYPE));                            \
        }                                                                                                              \
    }

DEFINE_TURN(turn_each, uint16_t, widen, as_bf16, narrow)
DEFINE_TURN(turn_once, uint16_t, widen, same, narrow)
DEFINE_TURN(turn_float, float, same, same, same)

static void widen_row(const void *table, int64_t item_bytes, int64_t row, int64_t width, float *restrict out) {
    if (item_bytes == 4) {
        memcpy(out, (const float *)table + row * width, width * 4);
        return;
    }
    const uint16_t *in = (const uint16_t *)table + row * width;
    for (int64_t i = 0; i < width; i++) out[i] = widen(in[i]);
}

/* streams: write past the caches, which then need not first read what is overwritten. Only if a layer is larger than
 * they would keep until attention reads it: below STREAM_BYTES, loading and reading together took longer. */
static void copy(char *target, const char *source, int64_t num_bytes, int streams) {
    if (!streams || ((uintptr_t)target | num_bytes) & 15) {
        memcpy(target, source, num_bytes);
        return;
    }
    for (int64_t at = 0; at < num_bytes; at += 16)
        _mm_stream_si128((__m128i *)(target + at), _mm_loadu_si128((const __m128i *)(source + at)));
}

/* The hardware's own prefetching ends at a page, and the next block is elsewhere. */
static inline void fetch(const char *start, int64_t num_bytes) {
    for (int64_t at = 0; at < num_bytes; at += 64) __builtin_prefetch(start + at);
}

static void turn_token(const Load *load, const Turn *turn, const char *source, char *target, int64_t position) {
    float cos[MAX_PAIRS], sin[MAX_PAIRS];
    widen_row(turn->cos, turn->item_bytes, position, turn->num_pairs, cos);
    widen_row(turn->sin, turn->item_bytes, position, turn->num_pairs, sin);
    if (load->item_bytes == 4)
        turn_float(load, turn, source, target, cos, sin);
    else if (turn->rounds_each_product)
        turn_each(load, turn, source, target, cos, sin);
    else
        turn_once(load, turn, source, target, cos, sin);
}

/* next, values: keys and values of the following block, which are fetched meanwhile. */
static void turn_block(const Load *load, const Turn *turn, const char *source, char *target, int64_t position,
                       const char *next, const char *values, int streams) {
    char scratch[SCRATCH_BYTES] __attribute__((aligned(64)));
    int64_t size = load->num_heads * load->head_dim * load->item_bytes;
    for (int64_t i = 0; i < load->block_size; i++, source += size, target += size) {
        fetch(next + i * size, size);
        fetch(values + i * load->value_bytes, load->value_bytes);
        int staged = streams && size <= SCRATCH_BYTES;
        turn_token(load, turn, source, staged ? scratch : target, position + i);
        if (staged) copy(target, scratch, size, 1);
    }
}

static inline int within(int64_t number, int64_t count) { return number >= 0 && number < count; }

static int loads_fit(const Load *load, const Turn *turn) {
    int64_t num_starts = turn ? turn->num_positions - load->block_size + 1 : 0;
    for (int64_t i = 0; i < load->num_loads; i++) {
        if (!within(load->arena_blocks[i], load->num_arena_blocks)) return 0;
        if (!within(load->numbers[i], load->num_blocks)) return 0;
        if (turn && !within(load->positions[i], num_starts)) return 0;
    }
    return 1;
}

/* keys, values: this layer's in arena block 0, keys raw. turn: NULL to rotate nothing. */
int kvstore_load_layer(const Load *load, const Turn *turn, const char *keys, const char *values, char *key_cache,
                       char *value_cache) {
    if (!loads_fit(load, turn)) return OUT_OF_RANGE;
    int64_t size = load->block_size * load->num_heads * load->head_dim * load->item_bytes, last = load->num_loads - 1;
    int64_t value_size = load->block_size * load->value_bytes, whole = (size + value_size) * load->num_loads;
    int streams = whole >= STREAM_BYTES;
#pragma omp parallel num_threads((int)load->num_threads) if (whole >= PARALLEL_BYTES)
    {
#pragma omp for schedule(static) nowait
        for (int64_t i = 0; i <= last; i++) {
            int64_t at = load->arena_blocks[i] * load->arena_block_bytes;
            int64_t next = load->arena_blocks[i < last ? i + 1 : i] * load->arena_block_bytes;
            char *key = key_cache + load->numbers[i] * size;
            if (turn)
                turn_block(load, turn, keys + at, key, load->positions[i], keys + next, values + next, streams);
            else
                copy(key, keys + at, size, streams);
            copy(value_cache + load->numbers[i] * value_size, values + at, value_size, streams);
        }
        if (streams) _mm_sfence(); /* each thread for its own writes: others read them as soon as all are done */
    }
    return DONE;
}

/* keys or values of one layer: a step's, and where they lie in arena block 0 */
typedef struct {
    char *arena;
    const char *tokens;
    int64_t stride, size; /* bytes from one token of the step to the next, and of one */
} Part;

typedef struct {
    const int64_t *rows, *places; /* rows: NULL for the first ones */
    int64_t num_tokens, num_rows, num_arena_blocks;
    int64_t arena_block_bytes, block_size;
} Save;

static inline int64_t row_of(const Save *save, int64_t i) { return save->rows ? save->rows[i] : i; }

static int tokens_fit(const Save *save) {
    int64_t num_places = save->num_arena_blocks * save->block_size;
    for (int64_t i = 0; i < save->num_tokens; i++)
        if (!within(save->places[i], num_places) || !within(row_of(save, i), save->num_rows)) return 0;
    return 1;
}

/* Saves raw keys and values of a step's tokens to their places in the arena: arena block * block_size + offset. */
int kvstore_save_layers(const Save *save, const Part *parts, int64_t num_parts) {
    if (!tokens_fit(save)) return OUT_OF_RANGE;
    for (const Part *part = parts; part < parts + num_parts; part++)
        for (int64_t i = 0; i < save->num_tokens; i++) {
            int64_t arena_block = save->places[i] / save->block_size;
            int64_t offset = save->places[i] - arena_block * save->block_size;
            memcpy(part->arena + arena_block * save->arena_block_bytes + offset * part->size,
                   part->tokens + row_of(save, i) * part->stride, part->size);
        }
    return DONE;
}
