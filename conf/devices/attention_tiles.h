/* Attention by tiles (AMX): queries, keys, values and weights in bfloat16, as the cache is, sums in float32.

   As in attention.h, a row's result depends on the keys and values that it attends to, in their order: each number of a
   tile of sums depends on one row of the left tile and one column of the right one. */

#define TILED 32         /* columns of a tile of bfloat16: keys whose values are added at once */
#define BLOCKS 8         /* of TILED values that are paired at once */
#define TILED_QUERIES 48 /* of a key head: 16 in each of three tiles */

#if defined(__AMX_INT8__) && defined(__AMX_BF16__) && defined(__AVX512BF16__)

/* Write the pairs of neighbours of TILED rows of values, (16, width) pairs. */
static void pair_values(const uint16_t *const *value, long width, uint16_t *pairs)
{
    uint16_t order[32];
    for (int i = 0; i < 32; i++)
        order[i] = i / 2 + i % 2 * 32; /* from 32 on of the second row */
    __m512i first = _mm512_loadu_si512(order), rest = _mm512_add_epi16(first, _mm512_set1_epi16(16));
    for (long i = 0; i < TILED; i += 2)
        for (long j = 0; j < width; j += 32, pairs += 64) {
            __m512i row = _mm512_loadu_si512(value[i] + j), next = _mm512_loadu_si512(value[i + 1] + j);
            _mm512_storeu_si512(pairs, _mm512_permutex2var_epi16(row, first, next));
            _mm512_storeu_si512(pairs + 32, _mm512_permutex2var_epi16(row, rest, next));
        }
}

/* Use tiles 0 to 3 for sums, 4 for 16 queries or their weights, 5 and 6 for the sums and weights of one row, and 7 for
   keys or values. */
static void shape_attention_tiles(long groups)
{
    uint8_t rows = groups;
    tile_shapes shapes = {.palette = 1, .rows = {16, 16, 16, 16, 16, rows, rows, 16}};
    for (int t = 0; t < 8; t++)
        shapes.width[t] = 64;
    _tile_loadconfig(&shapes);
}

/* The scores of 16 queries in each of `tiles` tiles with m keys, and numbers that are not used up to a multiple of
   16. */
static void score_tiles(long tiles, float *scores, long step, const uint16_t *queries, const uint16_t *keys, long m,
                        long width, worker *w)
{
    float transposed[8 * width] __attribute__((aligned(64))); /* of pairs */
    for (long c = 0; c < m; c += 16) {
        transpose(keys + c * width, m - c < 16 ? m - c : 16, width, transposed);
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        for (long i = 0; i < width; i += 32) {
            _tile_loadd(7, transposed + 8 * i, 64);
            _tile_loadd(4, queries + i, 2 * width);
            _tile_dpbf16ps(0, 4, 7);
            if (tiles > 1) {
                _tile_loadd(4, queries + 16 * width + i, 2 * width);
                _tile_dpbf16ps(1, 4, 7);
            }
            if (tiles > 2) {
                _tile_loadd(4, queries + 32 * width + i, 2 * width);
                _tile_dpbf16ps(2, 4, 7);
            }
        }
        _tile_stored(0, scores + c, 4 * step);
        if (tiles > 1)
            _tile_stored(1, scores + 16 * step + c, 4 * step);
        if (tiles > 2)
            _tile_stored(2, scores + 32 * step + c, 4 * step);
        fetch(w, 16);
    }
}

/* Add `blocks` blocks of values to the sums of 16 queries. */
static void weigh_tile(float *out, const uint16_t *weights, long step, const uint16_t *pairs, long blocks, long width)
{
    for (long j = 0; j < width; j += 64) {
        _tile_loadd(0, out + j, 4 * width);
        _tile_loadd(1, out + j + 16, 4 * width);
        _tile_loadd(2, out + j + 32, 4 * width);
        _tile_loadd(3, out + j + 48, 4 * width);
        for (long b = 0; b < blocks; b++) {
            const uint16_t *block = pairs + b * TILED * width + 2 * j;
            _tile_loadd(4, weights + b * TILED, 4 * step);
            _tile_loadd(7, block, 4 * width);
            _tile_dpbf16ps(0, 4, 7);
            _tile_loadd(7, block + 32, 4 * width);
            _tile_dpbf16ps(1, 4, 7);
            _tile_loadd(7, block + 64, 4 * width);
            _tile_dpbf16ps(2, 4, 7);
            _tile_loadd(7, block + 96, 4 * width);
            _tile_dpbf16ps(3, 4, 7);
        }
        _tile_stored(0, out + j, 4 * width);
        _tile_stored(1, out + j + 16, 4 * width);
        _tile_stored(2, out + j + 32, 4 * width);
        _tile_stored(3, out + j + 48, 4 * width);
    }
}

/* Add `blocks` blocks of values to the sums of one row's queries. */
static void weigh_row(float *out, const uint16_t *weights, long step, const uint16_t *pairs, long blocks, long width)
{
    for (long j = 0; j < width; j += 16) {
        _tile_loadd(5, out + j, 4 * width);
        for (long b = 0; b < blocks; b++) {
            _tile_loadd(6, weights + b * TILED, 4 * step);
            _tile_loadd(7, pairs + b * TILED * width + 2 * j, 4 * width);
            _tile_dpbf16ps(5, 6, 7);
        }
        _tile_stored(5, out + j, 4 * width);
    }
}

/* Write blocks of the values of a row's columns, from its column number `done` to number `end`, and the last value
   again in the rest of a block. Return the number of blocks, at most BLOCKS. */
static long pair_blocks(const attended *row, long done, long end, const uint16_t *values, long width, uint16_t *pairs,
                        worker *w)
{
    long in_line = row->end - row->first, blocks = 0;
    const uint16_t *value[TILED];
    for (; blocks < BLOCKS && done < end; blocks++, done += TILED) {
        for (long i = 0; i < TILED; i++) {
            long c = done + i < end ? done + i : end - 1;
            value[i] = values + (c < in_line ? row->first + c : row->columns[c - in_line]) * width;
        }
        pair_values(value, width, pairs + blocks * TILED * width);
        fetch(w, 16);
    }
    return blocks;
}

/* `attend_by_vectors` by tiles. `queries` has space for TILED_QUERIES. */
static void attend_by_tiles(long rows, long groups, float *queries, const uint16_t *keys, const uint16_t *values,
                            const attended *row, long width, const scratch *space, worker *w)
{
    long n = rows * groups, step = space->step;
    uint16_t *rounded = (uint16_t *)space->rest, *pairs = rounded + TILED_QUERIES * width;
    columns_of_all all = columns_of(rows, row);
    to_bfloat16(queries, n * width, rounded);
    score_tiles((n + 15) / 16, space->weights, step, rounded, keys + all.first * width, all.last - all.first, width, w);
    float totals[n];
    for (long q = 0; q < n; q++) {
        const attended *a = row + q / groups;
        float *weights = space->weights + q * step;
        long count = a->end - a->first + a->count;
        totals[q] = weights_of(a, weights, all.first);
        to_bfloat16(weights, (count + PADDED - 1) / PADDED * PADDED, (uint16_t *)weights);
        fetch(w, count / 32);
    }
    memset(queries, 0, n * width * sizeof(float));
    long shared = (all.shared - all.first) / TILED * TILED, blocks; /* columns in whole blocks */
    for (long c = 0; c < shared; c += blocks * TILED) {
        blocks = pair_blocks(row, c, shared, values, width, pairs, w);
        for (long q = 0; q < n; q += 16)
            weigh_tile(queries + q * width, (const uint16_t *)(space->weights + q * step) + c, step, pairs, blocks,
                       width);
    }
    for (long r = 0; r < rows; r++) {
        const uint16_t *weights = (const uint16_t *)(space->weights + r * groups * step); /* zeros after the last */
        long count = row[r].end - row[r].first + row[r].count;
        for (long c = shared; c < count; c += blocks * TILED) {
            blocks = pair_blocks(row + r, c, count, values, width, pairs, w);
            weigh_row(queries + r * groups * width, weights + c, step, pairs, blocks, width);
        }
    }
    for (long q = 0; q < n; q++)
        divide(width, queries + q * width, totals[q]);
}

#define release_tiles _tile_release
#define ATTENDS_BY_TILES(groups, width) (tiles_allowed && (groups) <= 16 && (width) % 64 == 0)
#else
#define ATTENDS_BY_TILES(groups, width) 0
#define attend_by_tiles(...)
#define shape_attention_tiles(...)
#define release_tiles()
#endif
