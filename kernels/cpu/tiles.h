/* Tiles of a processor with AMX: eight of at most 16 rows of 64 bytes, which oneDNN uses, too. Arguments of
 * GCC's functions for them are in parentheses, because these are macros without parentheses in early versions. */

#include <stdint.h>
#if defined __AMX_TILE__ && defined __AMX_BF16__ && defined __AVX512F__ && defined __AVX512BF16__ && defined __linux__
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#define HAS_TILES
#elif defined __AVX512F__ && defined __AVX512BF16__
#define HAS_VECTORS
#endif
#if defined HAS_TILES || defined HAS_VECTORS
#define HAS_PRODUCTS
#endif

#ifdef HAS_TILES

struct tile_shapes {
    uint8_t palette, start, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} __attribute__((aligned(64)));

static inline struct tile_shapes full_tiles(void)
{
    struct tile_shapes shapes = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        shapes.row_bytes[i] = 64;
        shapes.rows[i] = 16;
    }
    return shapes;
}

/* GCC's own functions tell the compiler only of the first eight bytes, and it would not write the rest. */
static inline void load_shapes(const struct tile_shapes *shapes)
{
    __asm__ volatile("ldtilecfg %0" : : "m"(*shapes));
}

/* Configures the tiles of this thread. Keeps the previous configuration in `before`. */
static inline void set_tiles(struct tile_shapes *before, const struct tile_shapes *shapes)
{
    __asm__ volatile("sttilecfg %0" : "=m"(*before));
    load_shapes(shapes);
}

/* Call it before tiles are loaded from memory that was just written: GCC's functions do not tell what they read. */
static inline void settle(void)
{
    __asm__ volatile("" : : : "memory");
}

/* oneDNN may expect its own shapes to be still configured. */
static inline void restore_tiles(const struct tile_shapes *before)
{
    if (before->palette)
        load_shapes(before);
    else
        _tile_release();
}

#else /* vectors need nothing of this */

struct tile_shapes {
    char none;
};

static inline struct tile_shapes full_tiles(void)
{
    return (struct tile_shapes){0};
}

static inline void set_tiles(struct tile_shapes *before, const struct tile_shapes *shapes)
{
    *before = *shapes;
}

static inline void restore_tiles(const struct tile_shapes *before)
{
    (void)before;
}

#endif

static inline int may_use_tiles(void)
{
#ifdef HAS_TILES
    const long request_permission = 0x1023, tile_data = 18;
    return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
#else
    return 0;
#endif
}
