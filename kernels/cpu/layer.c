/* A layer without its attention, for a step of few rows: norms, and products with weights as oneDNN has packed them:
 * [out / COLUMNS][in / 2][COLUMNS][2], bfloat16, where COLUMNS is 32 for tiles (AMX) and 64 for vectors, and the last
 * block is padded. Memory bounds such a product, so a weight is fetched far ahead of its use, as oneDNN does not
 * (bench/LOG.md). */

#include "team.h"
#include "tiles.h"
#include "vectors.h"

#define AHEAD 8192 /* bytes of a weight between the place that is fetched and the one that is used */

/* One row. wide: the scale is float32 and applied before rounding, else after. */
INLINE void norm_row(const void *x, const void *scale, void *out, int64_t width, float eps, bool wide, bool narrow)
{
    floats sums[4] = {};
    int64_t i = 0;
    for (; i + 4 * LANES <= width; i += 4 * LANES)
        for (int j = 0; j < 4; j++) {
            floats value = load(x, i + j * LANES, narrow);
            sums[j] = fused(value, value, sums[j]);
        }
    float sum = total((sums[0] + sums[1]) + (sums[2] + sums[3]));
    for (; i < width; i++)
        sum += get(x, i, narrow) * get(x, i, narrow);
    float inverse = (float)(1.0 / sqrt((double)sum / (double)width + eps)); /* double: the trial allows 2 ulps */
    if (wide)
        for (i = 0; i < width; i++)
            put(out, i, get(x, i, narrow) * inverse * ((const float *)scale)[i], narrow);
    else
        for (i = 0; i < width; i++)
            put(out, i, as_held(get(x, i, narrow) * inverse, narrow) * get(scale, i, narrow), narrow);
}

/* A row by silu(gate), rounded once more. width: a multiple of LANES. */
INLINE void gate_row(void *row, const void *gate, int64_t width, bool narrow)
{
    for (int64_t i = 0; i < width; i += LANES) {
        floats x = load(row, i, narrow) * activated(load(gate, i, narrow), false);
        put_held(row, i, all_as_held(x, narrow), narrow);
    }
}

/* gate: as out, null for none. variant: 1: the input is bfloat16, else float32; 2: wide. */
struct norms {
    const char *x, *gate;
    const void *scale;
    char *out;
    int64_t num_rows, inner, stride, width, variant;
    float eps;
};

#define NORM_ROWS 32 /* one thread takes at once */

static void norm_some(const void *job, int64_t item, int thread)
{
    const struct norms *norms = job;
    int64_t size = norms->variant & 1 ? 2 : 4, end = (item + 1) * NORM_ROWS;
    (void)thread;
    for (int64_t row = item * NORM_ROWS; row < end && row < norms->num_rows; row++) {
        const char *x = norms->x + (row / norms->inner * norms->stride + row % norms->inner * norms->width) * size;
        char *out = norms->out + row * norms->width * size;
        if (norms->variant == 0)
            norm_row(x, norms->scale, out, norms->width, norms->eps, false, false);
        else if (norms->variant == 1)
            norm_row(x, norms->scale, out, norms->width, norms->eps, false, true);
        else if (norms->variant == 2)
            norm_row(x, norms->scale, out, norms->width, norms->eps, true, false);
        else
            norm_row(x, norms->scale, out, norms->width, norms->eps, true, true);
        if (norms->gate)
            gate_row(out, norms->gate + row * norms->width * size, norms->width, size == 2);
    }
}

/* Root mean square norm of [num_rows / inner, inner, width], of which the outer dimension has a stride. out is
 * contiguous. gate, variant: as in `struct norms`. */
int rms_norm(const void *x, const void *gate, const void *scale, void *out, int64_t num_rows, int64_t inner,
             int64_t stride, int64_t width, float eps, int variant, int num_threads)
{
    struct norms norms = {x, gate, scale, out, num_rows, inner, stride, width, variant, eps};
    in_team(norm_some, &norms, (num_rows + NORM_ROWS - 1) / NORM_ROWS, num_threads);
    return 0;
}

/* y = x * weight + bias; x: [rows, in], y: [rows, out], contiguous. bias: null for none. in: a multiple of 32, out: of
 * LANES. */
struct product {
    const uint16_t *weight, *bias;
    int64_t in, out;
};

/* scale: float32 if wide, else bfloat16. */
struct norm {
    const void *scale;
    float eps;
    int64_t width, wide;
};

/* A layer without its attention. gelu: the gate is gelu by its tanh formula, else silu. */
struct layer_parts {
    struct norm before, between;
    struct product qkv, out, gate, up, down;
    int64_t gelu;
};

#if defined HAS_TILES
#define COLUMNS 32    /* of a weight that are stored together */
#define GROUP_ROWS 32 /* multiplied at once, and the most of a step: with more, oneDNN is faster */

/* Tiles 0 to 3: sums, by half of the rows and half of the columns; 4, 5: rows of x; 6, 7: columns of the weight. */
INLINE void shape_tiles(struct tile_shapes *before, int64_t rows)
{
    struct tile_shapes shapes = full_tiles();
    int64_t second = rows > 16 ? rows - 16 : 1, first = rows > 16 ? 16 : rows;
    shapes.rows[0] = shapes.rows[1] = shapes.rows[4] = first;
    shapes.rows[2] = shapes.rows[3] = shapes.rows[5] = second;
    set_tiles(before, &shapes);
}

/* Sums of one block of columns, [rows, 32], without bias. */
INLINE void multiply(const struct product *product, int64_t block, const uint16_t *x, int64_t rows, float *sums,
                     bool is_first)
{
    (void)is_first;
    const char *weight = (const char *)(product->weight + block * COLUMNS * product->in);
    int64_t stride = product->in * 2;
    settle();
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t k = 0; k < product->in; k += 32, weight += 2048) {
        for (int i = 0; i < 2048; i += 64)
            _mm_prefetch(weight + AHEAD + i, _MM_HINT_T0);
        _tile_loadd(4, (x + k), stride);
        _tile_loadd(6, weight, 128);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, (weight + 64), 128);
        _tile_dpbf16ps(1, 4, 7);
        if (rows > 16) {
            _tile_loadd(5, (x + 16 * product->in + k), stride);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums, COLUMNS * 4);
    _tile_stored(1, (sums + 16), COLUMNS * 4);
    if (rows > 16) {
        _tile_stored(2, (sums + 16 * COLUMNS), COLUMNS * 4);
        _tile_stored(3, (sums + 16 * COLUMNS + 16), COLUMNS * 4);
    }
}

#elif defined HAS_VECTORS
#define COLUMNS 64
#define GROUP_ROWS 30
#define ROWS_AT_ONCE 6 /* their sums, 4 vectors of a weight and one number of x fit into the registers */
#define DEPTH 2048     /* of a block of a weight, 256 KiB, which stays in a cache while all rows of a group use it */

INLINE void shape_tiles(struct tile_shapes *before, int64_t rows)
{
    (void)before, (void)rows;
}

/* Sums of so many rows, a constant, and one block of columns, over so much of `in`. They are added to earlier sums, or
 * replace them. is_first: the weight comes from memory, else from a cache. */
INLINE void multiply_rows(const uint16_t *weight, const uint16_t *x, int64_t stride, int64_t depth, int num_rows,
                          float *sums, bool adds, bool is_first)
{
    __m512 found[ROWS_AT_ONCE][4];
    for (int row = 0; row < num_rows; row++)
        for (int i = 0; i < 4; i++)
            found[row][i] = adds ? _mm512_loadu_ps(sums + row * COLUMNS + i * LANES) : _mm512_setzero_ps();
    for (int64_t k = 0; k < depth; k += 2, weight += 2 * COLUMNS) {
        __m512bh columns[4];
        for (int i = 0; i < 4; i++) {
            if (is_first)
                _mm_prefetch((const char *)(weight + 32 * i) + AHEAD, _MM_HINT_T0);
            columns[i] = (__m512bh)_mm512_loadu_si512(weight + 32 * i);
        }
        for (int row = 0; row < num_rows; row++) {
            int32_t pair;
            memcpy(&pair, x + row * stride + k, sizeof pair);
            __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
            for (int i = 0; i < 4; i++)
                found[row][i] = _mm512_dpbf16_ps(found[row][i], both, columns[i]);
        }
    }
    for (int row = 0; row < num_rows; row++)
        for (int i = 0; i < 4; i++)
            _mm512_storeu_ps(sums + row * COLUMNS + i * LANES, found[row][i]);
}

/* Sums of one block of columns, [rows, 64], without bias. is_first: these rows are the first to use the block. */
INLINE void multiply(const struct product *product, int64_t block, const uint16_t *x, int64_t rows, float *sums,
                     bool is_first)
{
    int64_t in = product->in, num_parts = (rows + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
    for (int64_t k = 0; k < in; k += DEPTH) {
        const uint16_t *weight = product->weight + (block * in + k) * COLUMNS;
        int64_t depth = in - k < DEPTH ? in - k : DEPTH;
        for (int64_t part = 0, done = 0, count; part < num_parts; part++, done += count) {
            const uint16_t *from = x + done * in + k;
            float *to = sums + done * COLUMNS;
            bool first = is_first && part == 0;
            count = (rows - done) / (num_parts - part);
            if (count == 1)
                multiply_rows(weight, from, in, depth, 1, to, k, first);
            else if (count == 2)
                multiply_rows(weight, from, in, depth, 2, to, k, first);
            else if (count == 3)
                multiply_rows(weight, from, in, depth, 3, to, k, first);
            else if (count == 4)
                multiply_rows(weight, from, in, depth, 4, to, k, first);
            else if (count == 5)
                multiply_rows(weight, from, in, depth, 5, to, k, first);
            else
                multiply_rows(weight, from, in, depth, 6, to, k, first);
        }
    }
}

#endif

#ifdef HAS_PRODUCTS

INLINE int64_t num_blocks(const struct product *product)
{
    return (product->out + COLUMNS - 1) / COLUMNS;
}

/* Columns of it that are not there to fill it up. */
INLINE int64_t in_block(const struct product *product, int64_t block)
{
    int64_t left = product->out - block * COLUMNS;
    return left < COLUMNS ? left : COLUMNS;
}

INLINE void store(uint16_t *to, floats x)
{
    __m256i halves = (__m256i)_mm512_cvtneps_pbh(x);
    memcpy(to, &halves, sizeof halves);
}

/* Half a row of a block, with its bias. */
INLINE floats biased(const struct product *product, int64_t column, const float *sums)
{
    floats x = load(sums, 0, false);
    if (product->bias)
        x += load(product->bias, column, true);
    return x;
}

/* One block of y, [rows, out], plus `added` if there is one; rounded once. */
INLINE void finish(const struct product *product, int64_t block, const uint16_t *x, const uint16_t *added, uint16_t *y,
                   int64_t rows, bool is_first)
{
    float sums[GROUP_ROWS * COLUMNS];
    multiply(product, block, x, rows, sums, is_first);
    for (int64_t row = 0; row < rows; row++)
        for (int64_t i = 0, width = in_block(product, block); i < width; i += LANES) {
            int64_t column = block * COLUMNS + i, at = row * product->out + column;
            floats value = biased(product, column, sums + row * COLUMNS + i);
            if (added)
                value += load(added, at, true);
            store(y + at, value);
        }
}

/* One block of activated(gate(x)) * up(x); the gate is rounded before it is multiplied. */
INLINE void finish_gated(const struct layer_parts *parts, int64_t block, const uint16_t *x, uint16_t *y, int64_t rows,
                         bool is_first)
{
    float gates[GROUP_ROWS * COLUMNS], sums[GROUP_ROWS * COLUMNS];
    multiply(&parts->gate, block, x, rows, gates, is_first);
    multiply(&parts->up, block, x, rows, sums, is_first);
    for (int64_t row = 0; row < rows; row++)
        for (int64_t i = 0, width = in_block(&parts->up, block); i < width; i += LANES) {
            int64_t column = block * COLUMNS + i, at = row * parts->up.out + column, from = row * COLUMNS + i;
            uint16_t gate[LANES];
            store(gate, activated(biased(&parts->gate, column, gates + from), parts->gelu));
            store(y + at, biased(&parts->up, column, sums + from) * load(gate, 0, true));
        }
}

/* Of the group that begins with this row. */
INLINE int64_t in_group(int64_t rows, int64_t row)
{
    return rows - row < GROUP_ROWS ? rows - row : GROUP_ROWS;
}

/* All rows of one block of y, plus `added` if there is one. */
struct computed {
    const struct product *product;
    const uint16_t *x, *added;
    uint16_t *y;
    int64_t rows;
};

static void compute_block(const void *job, int64_t block, int thread)
{
    const struct computed *of = job;
    struct tile_shapes before;
    (void)thread;
    shape_tiles(&before, of->rows);
    for (int64_t row = 0; row < of->rows; row += GROUP_ROWS) {
        const uint16_t *sum = of->added ? of->added + row * of->product->out : 0;
        finish(of->product, block, of->x + row * of->product->in, sum, of->y + row * of->product->out,
               in_group(of->rows, row), !row);
    }
    restore_tiles(&before);
}

/* Threads take blocks one by one, so a thread whose processor has other work takes fewer. */
static void compute(const struct product *product, const uint16_t *x, const uint16_t *added, uint16_t *y, int64_t rows,
                    int num_threads)
{
    struct computed computed = {product, x, added, y, rows};
    in_team(compute_block, &computed, num_blocks(product), num_threads);
}

/* The same for activated(gate(x)) * up(x). */
struct gated {
    const struct layer_parts *parts;
    const uint16_t *x;
    uint16_t *y;
    int64_t rows;
};

static void compute_gated_block(const void *job, int64_t block, int thread)
{
    const struct gated *of = job;
    struct tile_shapes before;
    (void)thread;
    shape_tiles(&before, of->rows);
    for (int64_t row = 0; row < of->rows; row += GROUP_ROWS)
        finish_gated(of->parts, block, of->x + row * of->parts->up.in, of->y + row * of->parts->up.out,
                     in_group(of->rows, row), !row);
    restore_tiles(&before);
}

static void normalise(const struct norm *norm, const uint16_t *x, uint16_t *y, int64_t rows, int num_threads)
{
    rms_norm(x, 0, norm->scale, y, rows, rows, 0, norm->width, norm->eps, norm->wide ? 3 : 1, num_threads);
}

#endif

/* Whether tiles can be used. The system must allow a process to use them. */
int kv_has_tiles(void)
{
    return may_use_tiles();
}

/* How many rows the products below take. */
int kv_product_rows(void)
{
#ifdef HAS_TILES
    return GROUP_ROWS;
#else
    return 1 << 20;
#endif
}

/* How many columns of a weight are stored together for the products below; 0 if there are no products. */
int kv_product_columns(void)
{
#if defined HAS_TILES
    return may_use_tiles() ? COLUMNS : 0;
#elif defined HAS_PRODUCTS
    return COLUMNS;
#else
    return 0;
#endif
}

/* This and the following functions: call them only if there are products, with at most the rows that these take. Each
 * returns 0. */
int kv_product(const struct product *product, const uint16_t *x, uint16_t *y, int64_t rows, int num_threads)
{
#ifdef HAS_PRODUCTS
    compute(product, x, 0, y, rows, num_threads);
    return 0;
#else
    return -1;
#endif
}

/* The layer before its attention: norm and joined product of q, k and v. scratch: [rows, in]. */
int kv_before_attention(const struct layer_parts *parts, const uint16_t *x, uint16_t *scratch, uint16_t *y,
                        int64_t rows, int num_threads)
{
#ifdef HAS_PRODUCTS
    normalise(&parts->before, x, scratch, rows, num_threads);
    compute(&parts->qkv, scratch, 0, y, rows, num_threads);
    return 0;
#else
    return -1;
#endif
}

/* The layer after its attention. attended: [rows, in of `out`]; x, which is added, and y: [rows, hidden]; scratch: 2 *
 * [rows, hidden] + [rows, out of `gate`]. */
int kv_after_attention(const struct layer_parts *parts, const uint16_t *attended, const uint16_t *x, uint16_t *scratch,
                       uint16_t *y, int64_t rows, int num_threads)
{
#ifdef HAS_PRODUCTS
    uint16_t *sum = scratch, *normed = sum + rows * parts->out.out, *hidden = normed + rows * parts->out.out;
    struct gated gated = {parts, normed, hidden, rows};
    compute(&parts->out, attended, x, sum, rows, num_threads);
    normalise(&parts->between, sum, normed, rows, num_threads);
    in_team(compute_gated_block, &gated, num_blocks(&parts->up), num_threads);
    compute(&parts->down, hidden, sum, y, rows, num_threads);
    return 0;
#else
    return -1;
#endif
}
