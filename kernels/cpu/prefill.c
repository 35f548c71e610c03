/* Attention of many tokens of one request over its pages, by tiles (AMX) or by vectors of bfloat16: flash attention
 * (Dao et al., 2022) with scores transposed.
 *
 * A tile of scores is keys * queries, 16 * 16. Keys are read row by row, and softmax goes down the rows with sixteen
 * queries in one vector, so there are no sums across lanes. Weights are rounded to bfloat16 in pairs of keys, as the
 * second product takes them; its other side is a chunk of values, transposed once for all queries of a unit of work.
 * Scores and sums are float32. Positions count from the request's first token. */

#include "team.h"
#include "tiles.h"
#include "vectors.h"

#define MAX_HEAD_DIM 256
#define CHUNK 256 /* keys at a time; their data stays in the second cache */
#define PAIR 32   /* tokens of a head that are computed together: two tiles */
#define ROWS 8    /* keys, or numbers of a value, whose sums with a pair's queries stay in vector registers */

/* One request. Strides are in elements; a row of out is num_heads * head_dim. window: 0 for none. */
struct prefill {
    const uint16_t *query, *key_cache, *value_cache;
    const int64_t *blocks;
    uint16_t *out;
    char *scratch;
    int64_t query_stride, num_tokens, context_len, num_heads, num_kv_heads, head_dim, num_blocks, block_size, window;
    int64_t unit_tokens, scratch_bytes;
    float scale;
};

#ifdef HAS_PRODUCTS

/* Two tiles of queries: their transposed rows as pairs of numbers, and the state of their sums, transposed. All of them
 * share the arrays of a chunk. */
struct pair {
    uint16_t *query; /* [2][head_dim / 32][16 pairs][16 queries][2] */
    float *sums;     /* [2][head_dim][16 queries] */
    float *largest;  /* [2][16 queries], of scores in powers of two */
    float *weight;   /* [2][16 queries] */
};

/* Scratch of one thread. keys, rows: [CHUNK][head_dim]; values: [CHUNK / 32][head_dim][32]; scores: [2][CHUNK][16];
 * weights: [2][CHUNK / 2][16][2]. */
struct scratch {
    uint16_t *keys, *rows, *values, *weights;
    float *scores;
    char *pairs;
};

INLINE int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

INLINE int64_t up_to_32(int64_t x)
{
    return (x + 31) / 32 * 32;
}

static int64_t pair_bytes(int64_t head_dim)
{
    return 2 * head_dim * 32 + 2 * head_dim * 64 + 4 * 64;
}

static struct scratch divided(char *at, int64_t head_dim)
{
    struct scratch scratch;
    int64_t rows = CHUNK * head_dim * 2;
    scratch.keys = (uint16_t *)at;
    scratch.rows = (uint16_t *)(at + rows);
    scratch.values = (uint16_t *)(at + 2 * rows);
    scratch.scores = (float *)(at + 3 * rows);
    scratch.weights = (uint16_t *)(at + 3 * rows + 2 * CHUNK * 64);
    scratch.pairs = at + 3 * rows + 3 * CHUNK * 64;
    return scratch;
}

static struct pair pair_at(const struct scratch *scratch, int64_t number, int64_t head_dim)
{
    char *at = scratch->pairs + number * pair_bytes(head_dim);
    struct pair pair = {(uint16_t *)at, (float *)(at + head_dim * 64), 0, 0};
    pair.largest = pair.sums + 2 * head_dim * 16;
    pair.weight = pair.largest + 32;
    return pair;
}

/* Sixteen numbers at multiples of `stride` bytes; lanes beyond `count` are 0. */
INLINE __m512i gathered(const void *from, int64_t stride, int64_t count)
{
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    __m512i offsets = _mm512_mullo_epi32(lanes, _mm512_set1_epi32((int)stride));
    __mmask16 mask = count >= 16 ? 0xffff : count <= 0 ? 0 : (__mmask16)((1 << count) - 1);
    return _mm512_mask_i32gather_epi32(_mm512_setzero_si512(), mask, offsets, from, 1);
}

/* Begins with the queries of `head` from `token` on, up to `end`. */
static void begin_pair(const struct prefill *job, struct pair *pair, int64_t head, int64_t token, int64_t end)
{
    int64_t dim = job->head_dim, stride = job->query_stride * 2;
    for (int half = 0; half < 2; half++) {
        int64_t first = token + 16 * half;
        const uint16_t *rows = job->query + first * job->query_stride + head * dim;
        for (int64_t i = 0; i < dim / 2; i++)
            _mm512_storeu_si512(pair->query + (half * dim / 2 + i) * 32, gathered(rows + 2 * i, stride, end - first));
    }
    memset(pair->sums, 0, 2 * dim * 64);
    memset(pair->weight, 0, 2 * 64);
    for (int i = 0; i < 32; i++)
        pair->largest[i] = -INFINITY;
}

/* Reads keys and values of `count` positions from `first` on, padded to whole tiles with 0. */
static void read_chunk(const struct prefill *job, const struct scratch *scratch, int64_t kv_head, int64_t first,
                       int64_t count)
{
    int64_t dim = job->head_dim, size = job->block_size, row = job->num_kv_heads * dim, rounded_up = up_to_32(count);
    for (int64_t i = 0; i < count; i++) {
        int64_t position = first + i, at = (job->blocks[position / size] * size + position % size) * row + kv_head * dim;
        memcpy(scratch->keys + i * dim, job->key_cache + at, dim * 2);
        memcpy(scratch->rows + i * dim, job->value_cache + at, dim * 2);
    }
    memset(scratch->keys + count * dim, 0, (rounded_up - count) * dim * 2);
    memset(scratch->rows + count * dim, 0, (rounded_up - count) * dim * 2);
    for (int64_t i = 0; i < rounded_up; i += 32)
        for (int64_t d = 0; d < dim; d += 2) {
            const uint16_t *from = scratch->rows + i * dim + d;
            __m512i even = gathered(from, 4 * dim, 16), odd = gathered(from + dim, 4 * dim, 16);
            uint16_t *to = scratch->values + (i * dim + d * 32);
            const __m512i low = _mm512_set1_epi32(0xffff);
            _mm512_storeu_si512(to, _mm512_ternarylogic_epi32(low, even, _mm512_slli_epi32(odd, 16), 0xca));
            _mm512_storeu_si512(to + 32, _mm512_ternarylogic_epi32(low, _mm512_srli_epi32(even, 16), odd, 0xca));
        }
}

#ifdef HAS_TILES

/* Scores of so many keys of the chunk, a multiple of 32. */
INLINE void score(const struct pair *pair, const struct scratch *scratch, int64_t num_keys, int64_t dim)
{
    settle();
    for (int64_t i = 0; i < num_keys; i += 32) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t d = 0; d < dim; d += 32) {
            _tile_loadd(4, (scratch->keys + i * dim + d), dim * 2);
            _tile_loadd(6, (pair->query + d * 16), 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, (pair->query + (dim + d) * 16), 64);
            _tile_dpbf16ps(1, 4, 7);
            _tile_loadd(5, (scratch->keys + (i + 16) * dim + d), dim * 2);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(0, (scratch->scores + i * 16), 64);
        _tile_stored(1, (scratch->scores + (CHUNK + i) * 16), 64);
        _tile_stored(2, (scratch->scores + (i + 16) * 16), 64);
        _tile_stored(3, (scratch->scores + (CHUNK + i + 16) * 16), 64);
    }
}

#else

/* sums[row][half] += the sum over so many pairs of numbers of columns[half][pair] * rows[row][pair]: a vector of
 * columns, 32 numbers, is 16 queries. Strides are in numbers. */
INLINE void multiply(floats sums[ROWS][2], const uint16_t *rows, int64_t row_stride, const uint16_t *columns,
                     int64_t half_stride, int64_t num_pairs)
{
    for (int64_t i = 0; i < num_pairs; i++) {
        __m512bh first = (__m512bh)_mm512_loadu_si512(columns + 32 * i);
        __m512bh second = (__m512bh)_mm512_loadu_si512(columns + half_stride + 32 * i);
        for (int row = 0; row < ROWS; row++) {
            int32_t pair;
            memcpy(&pair, rows + row * row_stride + 2 * i, sizeof pair);
            __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
            sums[row][0] = (floats)_mm512_dpbf16_ps((__m512)sums[row][0], first, both);
            sums[row][1] = (floats)_mm512_dpbf16_ps((__m512)sums[row][1], second, both);
        }
    }
}

/* Scores of so many keys of the chunk, a multiple of 32. */
INLINE void score(const struct pair *pair, const struct scratch *scratch, int64_t num_keys, int64_t dim)
{
    for (int64_t i = 0; i < num_keys; i += ROWS) {
        floats sums[ROWS][2] = {};
        multiply(sums, scratch->keys + i * dim, dim, pair->query, dim * 16, dim / 2);
        for (int row = 0; row < ROWS; row++)
            for (int half = 0; half < 2; half++)
                memcpy(scratch->scores + (half * CHUNK + i + row) * 16, &sums[row][half], 64);
    }
}

#endif

/* 2^x, 0 below -150, with a relative error of 5e-5, as it is then rounded to bfloat16; NaN for NaN. By Taylor's series
 * of e^(f * ln 2), |f| <= 1/2. */
INLINE floats power_of_two(floats x)
{
    __m512 bounded = _mm512_max_ps(_mm512_set1_ps(-160.0f), x);
    __m512 whole = _mm512_roundscale_ps(bounded, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    floats f = bounded - whole;
    floats sum = fused(f, all(0.00961813f), all(0.05550411f));
    sum = fused(sum, f, all(0.24022651f));
    sum = fused(sum, f, all(0.69314718f));
    sum = fused(sum, f, all(1.0f));
    return _mm512_scalef_ps(sum, whole);
}

/* The scores of one key in powers of two; -inf for a query that does not see it. position: of the key; at: of the
 * queries. */
INLINE floats visible(floats scores, int64_t position, ints at, int64_t window)
{
    const floats never = all(-INFINITY);
    ints key = (ints)_mm512_set1_epi32((int)position);
    scores = chosen(key > at, scores, never);
    if (window)
        scores = chosen(key <= at - (int32_t)window, scores, never);
    return scores;
}

/* Two vectors of floats as bfloat16, one in the low halves, the other in the high halves. */
INLINE __m512i paired(floats low, floats high)
{
    __m512i a = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(low));
    __m512i b = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(high));
    return _mm512_or_si512(a, _mm512_slli_epi32(b, 16));
}

/* Softmax of one tile's scores. Earlier sums are scaled down to a new largest score. first: position of the chunk;
 * token: of the tile's first query. */
static void weigh(const struct prefill *job, struct pair *pair, const struct scratch *scratch, int half,
                  int64_t num_keys, int64_t first, int64_t token)
{
    const float *scores = scratch->scores + half * CHUNK * 16;
    uint16_t *weights = scratch->weights + half * CHUNK * 16;
    float *largest = pair->largest + half * 16, *weight = pair->weight + half * 16;
    const floats factor = all(job->scale * 1.44269504f);
    const ints lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    ints at = lanes + (int32_t)token;
    int64_t window = job->window, free_from = window ? token + 15 - window + 1 : 0, free_to = token + 1;
    floats before = load(largest, 0, false), most = before;
    for (int64_t i = 0; i < num_keys; i++) {
        floats s = load(scores, i * 16, false) * factor;
        if (first + i < free_from || first + i >= free_to)
            s = visible(s, first + i, at, window);
        most = _mm512_max_ps(s, most);
    }
    floats base = chosen(most == -INFINITY, most, (floats){}); /* nothing seen so far */
    floats sum = {};
    for (int64_t i = 0; i < num_keys; i += 2) {
        floats power[2];
        for (int j = 0; j < 2; j++) {
            floats s = load(scores, (i + j) * 16, false) * factor;
            if (first + i + j < free_from || first + i + j >= free_to)
                s = visible(s, first + i + j, at, window);
            power[j] = power_of_two(s - base);
        }
        sum += power[0] + power[1];
        _mm512_storeu_si512(weights + i * 16, paired(power[0], power[1]));
    }
    floats shrunk = power_of_two(before - base);
    floats total_weight = load(weight, 0, false) * shrunk + sum;
    memcpy(weight, &total_weight, 64);
    memcpy(largest, &most, 64);
    if (_mm512_cmp_ps_mask(before, most, _CMP_NEQ_UQ))
        for (int64_t d = 0; d < job->head_dim; d++) {
            floats scaled = load(pair->sums, (half * job->head_dim + d) * 16, false) * shrunk;
            memcpy(pair->sums + (half * job->head_dim + d) * 16, &scaled, 64);
        }
}

#ifdef HAS_TILES

/* Adds the values of so many keys by weight. */
INLINE void add_values(const struct pair *pair, const struct scratch *scratch, int64_t num_keys, int64_t dim)
{
    float *first = pair->sums, *second = first + dim * 16;
    settle();
    for (int64_t d = 0; d < dim; d += 32) {
        _tile_loadd(0, (first + d * 16), 64);
        _tile_loadd(1, (second + d * 16), 64);
        _tile_loadd(2, (first + (d + 16) * 16), 64);
        _tile_loadd(3, (second + (d + 16) * 16), 64);
        for (int64_t i = 0; i < num_keys; i += 32) {
            _tile_loadd(4, (scratch->values + i * dim + d * 32), 64);
            _tile_loadd(6, (scratch->weights + i * 16), 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, (scratch->weights + (CHUNK + i) * 16), 64);
            _tile_dpbf16ps(1, 4, 7);
            _tile_loadd(5, (scratch->values + i * dim + (d + 16) * 32), 64);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(0, (first + d * 16), 64);
        _tile_stored(1, (second + d * 16), 64);
        _tile_stored(2, (first + (d + 16) * 16), 64);
        _tile_stored(3, (second + (d + 16) * 16), 64);
    }
}

#else

/* Adds the values of so many keys by weight. */
INLINE void add_values(const struct pair *pair, const struct scratch *scratch, int64_t num_keys, int64_t dim)
{
    for (int64_t d = 0; d < dim; d += ROWS) {
        floats sums[ROWS][2];
        for (int row = 0; row < ROWS; row++)
            for (int half = 0; half < 2; half++)
                sums[row][half] = load(pair->sums, (half * dim + d + row) * 16, false);
        for (int64_t i = 0; i < num_keys; i += 32)
            multiply(sums, scratch->values + i * dim + d * 32, 32, scratch->weights + i * 16, CHUNK * 16, 16);
        for (int row = 0; row < ROWS; row++)
            for (int half = 0; half < 2; half++)
                memcpy(pair->sums + (half * dim + d + row) * 16, &sums[row][half], 64);
    }
}

#endif

static void end_pair(const struct prefill *job, const struct pair *pair, int64_t head, int64_t token, int64_t end)
{
    int64_t dim = job->head_dim, row = job->num_heads * dim;
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    __m512i offsets = _mm512_mullo_epi32(lanes, _mm512_set1_epi32((int)row * 2));
    for (int half = 0; half < 2; half++) {
        int64_t first = token + 16 * half, count = end - first;
        if (count <= 0)
            return;
        __mmask16 mask = count >= 16 ? 0xffff : (__mmask16)((1 << count) - 1);
        floats inverse = 1.0f / load(pair->weight, half * 16, false);
        for (int64_t d = 0; d < dim; d += 2) {
            const float *sums = pair->sums + (half * dim + d) * 16;
            __m512i both = paired(load(sums, 0, false) * inverse, load(sums, 16, false) * inverse);
            _mm512_mask_i32scatter_epi32(job->out + first * row + head * dim + d, mask, offsets, both, 1);
        }
    }
}

INLINE int64_t num_units(const struct prefill *job)
{
    return (job->num_tokens + job->unit_tokens - 1) / job->unit_tokens * job->num_kv_heads;
}

/* All query heads of one KV head, of `unit_tokens` tokens. */
static void attend_tokens(const struct prefill *job, const struct scratch *scratch, int64_t unit)
{
    int64_t dim = job->head_dim, group = job->num_heads / job->num_kv_heads, kv_head = unit % job->num_kv_heads;
    int64_t start = unit / job->num_kv_heads * job->unit_tokens, end = least(start + job->unit_tokens, job->num_tokens);
    int64_t before = job->context_len - job->num_tokens, num_pairs = (end - start + PAIR - 1) / PAIR;
    for (int64_t p = 0; p < group * num_pairs; p++) {
        struct pair pair = pair_at(scratch, p, dim);
        begin_pair(job, &pair, kv_head * group + p / num_pairs, start + p % num_pairs * PAIR, end);
    }
    int64_t first = job->window && before + start + 1 > job->window ? before + start + 1 - job->window : 0;
    for (; first < before + end; first += CHUNK) {
        int64_t count = least(CHUNK, before + end - first);
        read_chunk(job, scratch, kv_head, first, count);
        for (int64_t p = 0; p < group * num_pairs; p++) {
            struct pair pair = pair_at(scratch, p, dim);
            int64_t token = start + p % num_pairs * PAIR, seen = before + least(token + PAIR, end) - first;
            if (seen <= 0 || (job->window && first + count + job->window <= before + token + 1))
                continue;
            int64_t num_keys = up_to_32(least(seen, count));
            score(&pair, scratch, num_keys, dim);
            weigh(job, &pair, scratch, 0, num_keys, first, before + token);
            weigh(job, &pair, scratch, 1, num_keys, first, before + token + 16);
            add_values(&pair, scratch, num_keys, dim);
        }
    }
    for (int64_t p = 0; p < group * num_pairs; p++) {
        struct pair pair = pair_at(scratch, p, dim);
        end_pair(job, &pair, kv_head * group + p / num_pairs, start + p % num_pairs * PAIR, end);
    }
}

/* The units of the last tokens come first, as they see most keys. */
static void attend_unit(const void *whole, int64_t item, int thread)
{
    const struct prefill *job = whole;
    struct tile_shapes before, shapes = full_tiles();
    struct scratch scratch = divided(job->scratch + thread * job->scratch_bytes, job->head_dim);
    set_tiles(&before, &shapes);
    attend_tokens(job, &scratch, num_units(job) - 1 - item);
    restore_tiles(&before);
}

#endif

/* Bytes of scratch for each thread. */
int64_t kv_prefill_scratch(int64_t num_heads, int64_t num_kv_heads, int64_t head_dim, int64_t unit_tokens)
{
#ifdef HAS_PRODUCTS
    int64_t num_pairs = num_heads / num_kv_heads * ((unit_tokens + PAIR - 1) / PAIR);
    return 3 * CHUNK * head_dim * 2 + 3 * CHUNK * 64 + num_pairs * pair_bytes(head_dim);
#else
    return 0;
#endif
}

/* Call it only if there are products. head_dim: a multiple of 32. Returns -1 and does nothing if a block is not in the
 * cache. */
int kv_prefill(const struct prefill *job, int num_threads)
{
#ifdef HAS_PRODUCTS
    for (int64_t i = 0; i < (job->context_len + job->block_size - 1) / job->block_size; i++)
        if (job->blocks[i] < 0 || job->blocks[i] >= job->num_blocks)
            return -1;
    in_team(attend_unit, job, num_units(job), num_threads);
    return 0;
#else
    return -1;
#endif
}
