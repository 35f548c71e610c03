/* Forbids tokens in rows of logits, in place. The twin is in reference.py. Called from token_masks.py. */
#include <math.h>
#include <stdint.h>

enum { BITS = 32 };

/* Row rows[i] of the logits, which are `stride` floats apart, by masks[i]: a bit per token, and words to its end. */
int kvstore_forbid_tokens(float *logits, int64_t stride, int64_t vocab_size, const int64_t *rows, const uint32_t *masks,
                          int64_t num_rows, int64_t num_words)
{
    for (int64_t i = 0; i < num_rows; i++, masks += num_words) {
        float *row = logits + rows[i] * stride;
        for (int64_t word = 0; word < vocab_size / BITS; word++) {
            uint32_t allowed = masks[word];
            if (allowed == UINT32_MAX) continue; /* most words are all or nothing: what is allowed is not touched */
            float *out = row + word * BITS;
            for (int bit = 0; bit < BITS; bit++) out[bit] = allowed >> bit & 1 ? out[bit] : -INFINITY;
        }
        for (int64_t token = vocab_size / BITS * BITS; token < vocab_size; token++)
            if (!(masks[token / BITS] >> token % BITS & 1)) row[token] = -INFINITY;
    }
    return 0;
}
