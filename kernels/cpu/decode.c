/* The attention of a layer in a decode step, in one pass over memory: rotation, the write to the paged cache, attention
 * over the pages; and rotation and write for tokens of any step. The rotation gives the same bits as torch. */

#include "team.h"
#include "vectors.h"

#define MAX_HEAD_DIM 256
#define MAX_GROUP 4 /* query heads that share one read of a page; their sums stay in registers */
#define CHUNK 64 /* tokens between two rescalings; their weights and rows stay in the first cache */
#define PARALLEL_BYTES (64 * 1024) /* of keys and values; below, waking threads costs more than they save */
#define PARALLEL_ROWS (8 * 1024)   /* bytes of keys to be rotated */

/* One step of requests with one token each. dtype 0: float32, 1: bfloat16. Strides and counts are in elements. */
struct kv_step {
    int64_t num_requests, num_heads, num_kv_heads, head_dim, dtype;
    int64_t num_blocks, block_size, max_blocks, table_stride, num_threads;
    const int64_t *block_table, *context_lens, *slots;
};

/* One layer of it. cos, sin: [num_requests, head_dim], sin with its sign, so that it is added; null: no rotation. */
struct layer {
    const void *query, *key, *value;
    int64_t query_stride, key_stride, value_stride;
    void *key_cache, *value_cache;
    const void *cos, *sin;
    void *out;
    float scale;
    int64_t window;
};

/* Rotates LANES numbers of each half of a head: each product is rounded, then the sum. */
INLINE void rotate_lanes(const void *x, const void *cos, const void *sin, void *to, int64_t i, int64_t half, bool narrow)
{
    floats a = load(x, i, narrow), b = load(x, half + i, narrow);
    floats first = all_as_held(b * load(sin, i, narrow), narrow) + all_as_held(a * load(cos, i, narrow), narrow);
    floats second =
        all_as_held(a * load(sin, half + i, narrow), narrow) + all_as_held(b * load(cos, half + i, narrow), narrow);
    put_held(to, i, all_as_held(first, narrow), narrow);
    put_held(to, half + i, all_as_held(second, narrow), narrow);
}

INLINE void rotate_head(const void *x, const void *cos, const void *sin, void *to, int64_t half, bool narrow)
{
    int64_t i = 0;
    for (; i + LANES <= half; i += LANES)
        rotate_lanes(x, cos, sin, to, i, half, narrow);
    for (; i < half; i++) {
        float a = get(x, i, narrow), b = get(x, half + i, narrow);
        float first = as_held(b * get(sin, i, narrow), narrow) + as_held(a * get(cos, i, narrow), narrow);
        float second =
            as_held(a * get(sin, half + i, narrow), narrow) + as_held(b * get(cos, half + i, narrow), narrow);
        put(to, i, first, narrow);
        put(to, half + i, second, narrow);
    }
}

INLINE void rotate_heads(const struct kv_step *step, const struct layer *layer, int64_t request, const void *from,
                         void *to, int64_t num_heads, bool narrow)
{
    int64_t width = step->head_dim, size = narrow ? 2 : 4;
    if (!layer->cos) {
        memcpy(to, from, num_heads * width * size);
        return;
    }
    const char *cos = (const char *)layer->cos + request * width * size;
    const char *sin = (const char *)layer->sin + request * width * size;
    for (int64_t h = 0; h < num_heads; h++)
        rotate_head((const char *)from + h * width * size, cos, sin, (char *)to + h * width * size, width / 2, narrow);
}

/* Writes the rotated query to `out`, where its attention reads it, and the rotated key to the cache, with the value. */
INLINE void rotate_and_write(const struct kv_step *step, const struct layer *layer, int64_t i, bool narrow)
{
    int64_t size = narrow ? 2 : 4, row = step->num_kv_heads * step->head_dim * size, slot = step->slots[i];
    char *out = (char *)layer->out + i * step->num_heads * step->head_dim * size;
    rotate_heads(step, layer, i, (const char *)layer->query + i * layer->query_stride * size, out, step->num_heads,
                 narrow);
    if (slot < 0)
        return;
    rotate_heads(step, layer, i, (const char *)layer->key + i * layer->key_stride * size,
                 (char *)layer->key_cache + slot * row, step->num_kv_heads, narrow);
    memcpy((char *)layer->value_cache + slot * row, (const char *)layer->value + i * layer->value_stride * size, row);
}

/* The state of some query heads of one request that share a KV head. */
struct heads {
    floats query[MAX_GROUP][MAX_HEAD_DIM / LANES], sums[MAX_GROUP][MAX_HEAD_DIM / LANES];
    float largest[MAX_GROUP], weight[MAX_GROUP];
    floats scores[MAX_GROUP][CHUNK / LANES];
    int64_t rows[CHUNK + LANES]; /* where the tokens of this chunk are in the caches */
};

/* Rows of one head are apart, so the processor does not prefetch the next one. */
INLINE void fetch(const void *from, int64_t row, int64_t width, bool narrow)
{
    int64_t size = narrow ? 2 : 4;
    for (int64_t i = 0; i < width * LANES * size; i += 64)
        __builtin_prefetch((const char *)from + row * size + i);
}

/* Scores of LANES tokens. Some may be copies that stand for no token; their lanes must be masked. */
INLINE void score_tile(struct heads *heads, const void *keys, const void *values, int tile, int count, int64_t width,
                       bool narrow)
{
    floats products[MAX_GROUP][LANES];
    for (int t = 0; t < LANES; t++) {
        int64_t row = heads->rows[tile * LANES + t];
        floats sums[MAX_GROUP] = {}, key[2];
        fetch(keys, heads->rows[(tile + 1) * LANES + t], width, narrow);
        fetch(values, row, width, narrow);
        int64_t i = 0;
        for (; i + 2 <= width; i += 2) {
            load_pair(keys, row + i * LANES, key, narrow);
            for (int g = 0; g < count; g++)
                sums[g] = fused(key[1], heads->query[g][i + 1], fused(key[0], heads->query[g][i], sums[g]));
        }
        if (i < width) {
            key[0] = load(keys, row + i * LANES, narrow);
            for (int g = 0; g < count; g++)
                sums[g] = fused(key[0], heads->query[g][i], sums[g]);
        }
        for (int g = 0; g < count; g++)
            products[g][t] = sums[g];
    }
    for (int g = 0; g < count; g++)
        heads->scores[g][tile] = totals(products[g]);
}

/* Adds values by weight to `size` vectors of the sums, from vector `start` on. */
INLINE void add_values(struct heads *heads, const void *values, int num_tokens, int count, int64_t start, int size,
                       bool narrow)
{
    floats sums[MAX_GROUP][4];
    for (int g = 0; g < count; g++)
        for (int i = 0; i < size; i++)
            sums[g][i] = heads->sums[g][start + i];
    for (int t = 0; t < num_tokens; t++) {
        floats value[4];
        int64_t at = heads->rows[t] + start * LANES;
        for (int i = 0; i + 2 <= size; i += 2)
            load_pair(values, at + i * LANES, value + i, narrow);
        if (size == 1)
            value[0] = load(values, at, narrow);
        for (int g = 0; g < count; g++)
            for (int i = 0; i < size; i++)
                sums[g][i] = fused(value[i], all(((const float *)heads->scores[g])[t]), sums[g][i]);
    }
    for (int g = 0; g < count; g++)
        for (int i = 0; i < size; i++)
            heads->sums[g][start + i] = sums[g][i];
}

/* Turns scores into weights, in place. Earlier sums are scaled down to a new largest score. */
INLINE void weigh(struct heads *heads, int num_tiles, int count, int64_t width)
{
    for (int g = 0; g < count; g++) {
        floats most = all(heads->largest[g]), sum = {};
        for (int i = 0; i < num_tiles; i++)
            most = chosen(heads->scores[g][i] > most, most, heads->scores[g][i]);
        float largest = most[0];
        for (int i = 1; i < LANES; i++)
            largest = most[i] > largest ? most[i] : largest;
        for (int i = 0; i < num_tiles; i++) {
            heads->scores[g][i] = exponential(heads->scores[g][i] - largest);
            sum += heads->scores[g][i];
        }
        float factor = expf(heads->largest[g] - largest);
        heads->weight[g] = heads->weight[g] * factor + total(sum);
        heads->largest[g] = largest;
        if (factor != 1.0f)
            for (int64_t i = 0; i < width; i++)
                heads->sums[g][i] *= factor;
    }
}

INLINE void attend_chunk(struct heads *heads, const void *keys, const void *values, int num_tokens, int count,
                         int64_t width, bool narrow)
{
    int num_tiles = (num_tokens + LANES - 1) / LANES;
    for (int t = num_tokens; t < (num_tiles + 1) * LANES; t++)
        heads->rows[t] = heads->rows[num_tokens - 1];
    for (int i = 0; i < num_tiles; i++)
        score_tile(heads, keys, values, i, count, width, narrow);
    for (int g = 0; g < count; g++)
        for (int t = num_tokens; t < num_tiles * LANES; t++)
            heads->scores[g][t / LANES][t % LANES] = -INFINITY;
    weigh(heads, num_tiles, count, width);
    int64_t start = 0;
    for (; start + 4 <= width; start += 4)
        add_values(heads, values, num_tokens, count, start, 4, narrow);
    if (start + 2 <= width) {
        add_values(heads, values, num_tokens, count, start, 2, narrow);
        start += 2;
    }
    if (start < width)
        add_values(heads, values, num_tokens, count, start, 1, narrow);
}

/* Attention of `count` query heads of one request, from `head` on, over its pages. */
INLINE void attend_heads(const struct kv_step *step, const struct layer *layer, int64_t request, int64_t head,
                         int count, bool narrow)
{
    struct heads heads;
    int64_t dim = step->head_dim, width = dim / LANES, size = step->block_size;
    int64_t kv_head = head / (step->num_heads / step->num_kv_heads), row = step->num_kv_heads * dim;
    int64_t end = step->context_lens[request], out = (request * step->num_heads + head) * dim;
    int64_t position = layer->window && end > layer->window ? end - layer->window : 0;
    const int64_t *table = step->block_table + request * step->table_stride;
    for (int g = 0; g < count; g++) {
        heads.largest[g] = -INFINITY;
        heads.weight[g] = 0;
        int64_t i = 0;
        for (; i + 2 <= width; i += 2)
            load_pair(layer->out, out + g * dim + i * LANES, heads.query[g] + i, narrow);
        if (i < width)
            heads.query[g][i] = load(layer->out, out + g * dim + i * LANES, narrow);
        for (i = 0; i < width; i++) {
            heads.query[g][i] *= layer->scale;
            heads.sums[g][i] = (floats){};
        }
    }
    int64_t block = position / size, offset = position % size;
    while (position < end) {
        int num_tokens = (int)(end - position < CHUNK ? end - position : CHUNK);
        for (int t = 0; t < num_tokens; t++) {
            heads.rows[t] = (table[block] * size + offset) * row + kv_head * dim;
            if (++offset == size) {
                offset = 0;
                block++;
            }
        }
        attend_chunk(&heads, layer->key_cache, layer->value_cache, num_tokens, count, width, narrow);
        position += num_tokens;
    }
    for (int g = 0; g < count; g++) {
        float inverse = heads.weight[g] == 0 ? 0 : 1 / heads.weight[g];
        int64_t i = 0, to = out + g * dim;
        for (; i < width; i++)
            heads.sums[g][i] *= inverse;
        for (i = 0; i + 2 <= width; i += 2)
            put_pair(layer->out, to + i * LANES, heads.sums[g] + i, narrow);
        for (int64_t j = i * LANES; j < dim; j++)
            put(layer->out, to + j, heads.sums[g][i][j % LANES], narrow);
    }
}

/* All query heads of one KV head of one request. The number of heads at a time is a constant in each call. */
INLINE void attend_unit(const struct kv_step *step, const struct layer *layer, int64_t unit, bool narrow)
{
    int64_t request = unit / step->num_kv_heads, group = step->num_heads / step->num_kv_heads;
    int64_t head = unit % step->num_kv_heads * group, left = group;
    for (; left >= 4; left -= 4, head += 4)
        attend_heads(step, layer, request, head, 4, narrow);
    if (left == 3)
        attend_heads(step, layer, request, head, 3, narrow);
    else if (left == 2)
        attend_heads(step, layer, request, head, 2, narrow);
    else if (left == 1)
        attend_heads(step, layer, request, head, 1, narrow);
}

struct attention {
    const struct kv_step *step;
    const struct layer *layer;
};

static void attend_narrow(const void *job, int64_t unit, int thread)
{
    const struct attention *of = job;
    (void)thread;
    attend_unit(of->step, of->layer, unit, true);
}

static void attend_wide(const void *job, int64_t unit, int thread)
{
    const struct attention *of = job;
    (void)thread;
    attend_unit(of->step, of->layer, unit, false);
}

INLINE void attend(const struct kv_step *step, const struct layer *layer, bool narrow)
{
    int64_t num_units = step->num_requests * step->num_kv_heads, num_tokens = 0;
    for (int64_t i = 0; i < step->num_requests; i++) {
        int64_t seen = step->context_lens[i];
        num_tokens += layer->window && seen > layer->window ? layer->window : seen;
        rotate_and_write(step, layer, i, narrow);
    }
    int64_t bytes = 2 * num_tokens * step->num_kv_heads * step->head_dim * (narrow ? 2 : 4);
    struct attention attention = {step, layer};
    in_team(narrow ? attend_narrow : attend_wide, &attention, num_units, bytes < PARALLEL_BYTES ? 1 : (int)step->num_threads);
}

/* Rotation, write and attention of one layer; out: [num_requests, num_heads, head_dim]. */
int kv_decode(const struct kv_step *step, const void *query, int64_t query_stride, const void *key, int64_t key_stride,
              const void *value, int64_t value_stride, void *key_cache, void *value_cache, const void *cos,
              const void *sin, float scale, int64_t window, void *out)
{
    struct layer layer = {query,       key,         value, query_stride, key_stride, value_stride,
                          key_cache,   value_cache, cos,   sin,          out,        scale,
                          window};
    if (step->dtype == 1)
        attend(step, &layer, true);
    else
        attend(step, &layer, false);
    return 0;
}

struct writing {
    const struct kv_step *step;
    const struct layer *layer;
    char *rotated;
};

#define WRITTEN_TOKENS 16 /* one thread takes at once */

static void write_some(const void *job, int64_t item, int thread)
{
    const struct writing *of = job;
    const struct kv_step *step = of->step;
    const struct layer *layer = of->layer;
    bool narrow = step->dtype == 1;
    int64_t size = narrow ? 2 : 4, row = step->num_kv_heads * step->head_dim * size;
    (void)thread;
    for (int64_t i = item * WRITTEN_TOKENS; i < (item + 1) * WRITTEN_TOKENS && i < step->num_requests; i++) {
        const char *asked = (const char *)layer->query + i * layer->query_stride * size;
        const char *from = (const char *)layer->key + i * layer->key_stride * size;
        char *to = of->rotated + i * row, *turned = (char *)layer->out + i * step->num_heads * step->head_dim * size;
        if (narrow) {
            rotate_heads(step, layer, i, asked, turned, step->num_heads, true);
            rotate_heads(step, layer, i, from, to, step->num_kv_heads, true);
        } else {
            rotate_heads(step, layer, i, asked, turned, step->num_heads, false);
            rotate_heads(step, layer, i, from, to, step->num_kv_heads, false);
        }
        if (step->slots[i] < 0)
            continue;
        memcpy((char *)layer->key_cache + step->slots[i] * row, to, row);
        memcpy((char *)layer->value_cache + step->slots[i] * row,
               (const char *)layer->value + i * layer->value_stride * size, row);
    }
}

/* Rotation and write of one layer for tokens of any requests; out: [num_requests, num_heads, head_dim], query, and
 * rotated: [num_requests, num_kv_heads, head_dim], key. */
int kv_write(const struct kv_step *step, const void *query, int64_t query_stride, const void *key, int64_t key_stride,
             const void *value, int64_t value_stride, void *key_cache, void *value_cache, const void *cos,
             const void *sin, void *out, void *rotated)
{
    struct layer layer = {query,     key,         value, query_stride, key_stride, value_stride,
                          key_cache, value_cache, cos,   sin,          out,        0,
                          0};
    struct writing writing = {step, &layer, rotated};
    int64_t size = step->dtype == 1 ? 2 : 4, row = step->num_kv_heads * step->head_dim * size;
    for (int64_t i = 0; i < step->num_requests; i++)
        if (step->slots[i] < -1 || step->slots[i] >= step->num_blocks * step->block_size)
            return -1;
    int num_threads = step->num_requests * row < PARALLEL_ROWS ? 1 : (int)step->num_threads;
    in_team(write_some, &writing, (step->num_requests + WRITTEN_TOKENS - 1) / WRITTEN_TOKENS, num_threads);
    return 0;
}

/* Whether every block and slot of the step is in the caches. Called once per step, before its layers. */
int kv_decode_fits(const struct kv_step *step)
{
    for (int64_t i = 0; i < step->num_requests; i++) {
        int64_t num_blocks = (step->context_lens[i] + step->block_size - 1) / step->block_size;
        const int64_t *blocks = step->block_table + i * step->table_stride;
        if (step->context_lens[i] < 0 || num_blocks > step->max_blocks)
            return 0;
        if (step->slots[i] < -1 || step->slots[i] >= step->num_blocks * step->block_size)
            return 0;
        for (int64_t j = 0; j < num_blocks; j++)
            if (blocks[j] < 0 || blocks[j] >= step->num_blocks)
                return 0;
    }
    return 1;
}
