/* What layers with a state compute: short convolutions, and the gated delta rule, on states where they lie.
 *
 * The rule goes token by token. Columns of a state do not depend on one another, so some of them stay in a core's first
 * cache for many tokens. That takes fewer operations than the rule for chunks with its inverse, and the same ones for a
 * prompt and for one token. */

#include "team.h"
#include "vectors.h"

#define MAX_DIM 256 /* of a head */
#define PIECE 32    /* tokens that a thread takes at once */
#define AT_ONCE 4   /* vectors of columns */

/* query, key: [requests, tokens, heads, key_dim], value: [..., value_dim]; strides of the first three dimensions, in
 * numbers. decay, the logarithm of it, and beta: [requests, tokens, heads]. states: [heads, key_dim, value_dim] at each
 * of slots; out: as value, contiguous. narrow: query, key, value and out are bfloat16. normed: query and key are
 * divided by their length first. fresh: the states begin as zeros. */
struct delta_rule {
    const char *query, *key, *value;
    int64_t query_strides[3], key_strides[3], value_strides[3];
    const float *decay, *beta;
    float *states;
    const int64_t *slots;
    char *out;
    int64_t state_stride, num_requests, num_tokens, num_heads, key_dim, value_dim, narrow, normed, fresh;
};

/* One head's numbers of some tokens. */
struct piece {
    float query[PIECE][MAX_DIM], key[PIECE][MAX_DIM], value[PIECE][MAX_DIM];
    float decay[PIECE], beta[PIECE], match[PIECE]; /* match: key * query */
};

INLINE float dot(const float *a, const float *b, int64_t width)
{
    floats sum = {};
    for (int64_t i = 0; i < width; i += LANES)
        sum = fused(load(a, i, false), load(b, i, false), sum);
    return total(sum);
}

static void fetch(const char *from, int64_t at, float *to, int64_t width, bool narrow)
{
    for (int64_t i = 0; i < width; i += LANES) {
        floats x = narrow ? load(from, at + i, true) : load(from, at + i, false);
        memcpy(to + i, &x, sizeof x);
    }
}

static void scale(float *x, int64_t width, float by)
{
    for (int64_t i = 0; i < width; i++)
        x[i] *= by;
}

/* `count` vectors of columns of one state, over the tokens of a piece. The values become the results. */
INLINE void advance(float *from, int64_t stride, int64_t key_dim, struct piece *piece, int64_t column,
                    int64_t num_tokens, int count)
{
    float state[MAX_DIM * AT_ONCE * LANES]; /* of their own: rows of a power of two would share a part of the cache */
    for (int64_t i = 0; i < key_dim; i++)
        memcpy(state + i * count * LANES, from + i * stride, count * LANES * sizeof *state);
    for (int64_t t = 0; t < num_tokens; t++) {
        const float *key = piece->key[t], *query = piece->query[t];
        floats held[AT_ONCE] = {}, seen[AT_ONCE] = {}, decay = all(piece->decay[t]);
        for (int64_t i = 0; i < key_dim; i++)
            for (int j = 0; j < count; j++) {
                floats x = load(state, (i * count + j) * LANES, false);
                held[j] = fused(x, all(key[i]), held[j]);
                seen[j] = fused(x, all(query[i]), seen[j]);
            }
        for (int j = 0; j < count; j++) {
            float *value = piece->value[t] + column + j * LANES;
            held[j] = (load(value, 0, false) - decay * held[j]) * piece->beta[t];
            seen[j] = fused(held[j], all(piece->match[t]), decay * seen[j]);
            memcpy(value, &seen[j], sizeof seen[j]);
        }
        for (int64_t i = 0; i < key_dim; i++)
            for (int j = 0; j < count; j++) {
                float *at = state + (i * count + j) * LANES;
                floats x = fused(all(key[i]), held[j], load(at, 0, false) * decay);
                memcpy(at, &x, sizeof x);
            }
    }
    for (int64_t i = 0; i < key_dim; i++)
        memcpy(from + i * stride, state + i * count * LANES, count * LANES * sizeof *state);
}

/* One head of one request. */
static void advance_head(const void *job, int64_t item, int thread)
{
    const struct delta_rule *rule = job;
    int64_t request = item / rule->num_heads, head = item % rule->num_heads, width = rule->value_dim;
    float *state = rule->states + rule->slots[request] * rule->state_stride + head * rule->key_dim * width;
    struct piece piece;
    (void)thread;
    if (rule->fresh)
        memset(state, 0, rule->key_dim * width * sizeof *state);
    for (int64_t start = 0; start < rule->num_tokens; start += PIECE) {
        int64_t left = rule->num_tokens - start, count = left < PIECE ? left : PIECE;
        for (int64_t t = 0; t < count; t++) {
            const int64_t place[3] = {request, start + t, head}, *strides[3] = {rule->query_strides, rule->key_strides,
                                                                                  rule->value_strides};
            int64_t at[3] = {}, row = (request * rule->num_tokens + start + t) * rule->num_heads + head;
            for (int tensor = 0; tensor < 3; tensor++)
                for (int i = 0; i < 3; i++)
                    at[tensor] += place[i] * strides[tensor][i];
            fetch(rule->query, at[0], piece.query[t], rule->key_dim, rule->narrow);
            fetch(rule->key, at[1], piece.key[t], rule->key_dim, rule->narrow);
            fetch(rule->value, at[2], piece.value[t], width, rule->narrow);
            float by = 1.0f / sqrtf((float)rule->key_dim);
            if (rule->normed) {
                by /= sqrtf(dot(piece.query[t], piece.query[t], rule->key_dim) + 1e-6f);
                scale(piece.key[t], rule->key_dim, 1.0f / sqrtf(dot(piece.key[t], piece.key[t], rule->key_dim) + 1e-6f));
            }
            scale(piece.query[t], rule->key_dim, by);
            piece.match[t] = dot(piece.key[t], piece.query[t], rule->key_dim);
            piece.decay[t] = expf(rule->decay[row]);
            piece.beta[t] = rule->beta[row];
        }
        int64_t column = 0;
        for (; column + AT_ONCE * LANES <= width; column += AT_ONCE * LANES)
            advance(state + column, width, rule->key_dim, &piece, column, count, AT_ONCE);
        for (; column < width; column += LANES)
            advance(state + column, width, rule->key_dim, &piece, column, count, 1);
        for (int64_t t = 0; t < count; t++) {
            int64_t row = ((request * rule->num_tokens + start + t) * rule->num_heads + head) * width;
            for (int64_t i = 0; i < width; i += LANES)
                put_held(rule->out, row + i, all_as_held(load(piece.value[t], i, false), rule->narrow), rule->narrow);
        }
    }
}

int kv_delta_rule(const struct delta_rule *rule, int num_threads)
{
    in_team(advance_head, rule, rule->num_requests * rule->num_heads, num_threads);
    return 0;
}

#define MAX_WIDTH 8
#define GROUP 512 /* channels, and rows, that a thread takes at once */
#define ROWS 64

/* x: [requests, tokens, channels], of which the first two dimensions have strides, in numbers. weight: [channels,
 * width]; bias: [channels], null for none. states: [channels, width] at each of slots, the last inputs of a request,
 * which are shifted by its one token; null: nothing but zeros came before. out: [requests, tokens, channels]. narrow:
 * all of these are bfloat16, else float32. activated: by silu. */
struct convolution {
    const char *x, *weight, *bias;
    int64_t strides[2];
    char *states;
    const int64_t *slots;
    char *out;
    int64_t state_stride, num_requests, num_tokens, num_channels, width, narrow, activated;
};

/* The numbers of LANES channels, `step` apart. */
INLINE floats spread(const char *from, int64_t at, int64_t step, bool narrow)
{
    floats x;
    for (int lane = 0; lane < LANES; lane++)
        x[lane] = get(from, at + lane * step, narrow);
    return x;
}

/* Shift the states of LANES channels, and append x. */
INLINE void shift(char *states, int64_t at, int64_t width, floats x, bool narrow)
{
    int64_t size = narrow ? 2 : 4;
    for (int lane = 0; lane < LANES; lane++) {
        char *own = states + (at + lane * width) * size;
        memmove(own, own + size, (width - 1) * size);
        put(own, width - 1, x[lane], narrow);
    }
}

/* So many channels of some rows. All channels of a row come before the next: rows are a power of two apart, or three of
 * them, and would share a small part of the cache. */
INLINE void convolve_rows(const struct convolution *of, int64_t first, int64_t end, int64_t start, int64_t count,
                          bool narrow)
{
    int64_t width = of->width;
    floats taps[GROUP / LANES][MAX_WIDTH];
    for (int64_t i = 0; i < count; i += LANES)
        for (int64_t k = 0; k < width; k++)
            taps[i / LANES][k] = spread(of->weight, (start + i) * width + k, width, narrow);
    for (int64_t row = first; row < end; row++) {
        int64_t request = row / of->num_tokens, token = row % of->num_tokens;
        for (int64_t i = 0; i < count; i += LANES) {
            int64_t channel = start + i, at = request * of->strides[0] + channel, held = 0;
            if (of->states)
                held = of->slots[request] * of->state_stride + channel * width;
            floats sum = of->bias ? load(of->bias, channel, narrow) : (floats){};
            for (int64_t k = 0; k < width; k++) {
                int64_t from = token + k + 1 - width;
                if (from >= 0)
                    sum = fused(taps[i / LANES][k], load(of->x, at + from * of->strides[1], narrow), sum);
                else if (of->states)
                    sum = fused(taps[i / LANES][k], spread(of->states, held + k + 1, width, narrow), sum);
            }
            if (of->states)
                shift(of->states, held, width, load(of->x, at, narrow), narrow);
            if (of->activated)
                sum = activated(all_as_held(sum, narrow), false);
            put_held(of->out, row * of->num_channels + channel, all_as_held(sum, narrow), narrow);
        }
    }
}

static void convolve_some(const void *job, int64_t item, int thread)
{
    const struct convolution *of = job;
    int64_t num_groups = (of->num_channels + GROUP - 1) / GROUP, num_rows = of->num_requests * of->num_tokens;
    int64_t first = item / num_groups * ROWS, end = first + ROWS < num_rows ? first + ROWS : num_rows;
    int64_t start = item % num_groups * GROUP, left = of->num_channels - start, count = left < GROUP ? left : GROUP;
    (void)thread;
    if (of->narrow)
        convolve_rows(of, first, end, start, count, true);
    else
        convolve_rows(of, first, end, start, count, false);
}

int kv_convolve(const struct convolution *of, int num_threads)
{
    int64_t num_pieces = (of->num_requests * of->num_tokens + ROWS - 1) / ROWS;
    in_team(convolve_some, of, num_pieces * ((of->num_channels + GROUP - 1) / GROUP), num_threads);
    return 0;
}
