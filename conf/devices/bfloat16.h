/* Products of rows and weights in bfloat16, with sums in float32. Without instructions for bfloat16 the rows are in
   float32, and so are the products. */

#define COLUMNS 2 /* of a row of a weight in four bytes */
typedef uint16_t exact; /* a weight of the output head */
typedef float sum;

#define value_of number_of

/* `TILE` rows of a product at once: their sums fill the registers. */
#ifdef __AVX512F__
#define TILE 12
#define VECTORS 1
#else
#define TILE 5
#define VECTORS 2
#endif

typedef numbers registers, sum_vector, result_vector;
typedef factor input; /* of a product */

#if defined(__AMX_INT8__) && defined(__AMX_BF16__) && defined(__AVX512BF16__)
#define TILES
#define add_tile _tile_dpbf16ps
#define FEWEST_TILED 1 /* rows: vectors would add in another order */
#endif

/* Add the products of two columns, or of four (`twos` 2), of `count` rows of x and of 16 rows of a weight. */
INLINED void multiply_columns(const int twos, const int count, registers sums[TILE][VECTORS], long d, const input *x,
                              const char *weight)
{
    const pairs *w = (const pairs *)weight;
    for (int r = 0; r < count; r++)
        for (int j = 0; j < VECTORS; j++)
            for (int t = 0; t < twos; t++)
                sums[r][j] = add_pair(sums[r][j], x + r * d + 2 * t, w[t * VECTORS + j]);
}

/* Return vector j of the products of a block of outputs from o on. */
INLINED result_vector results_of(sum_vector sums, const matrix *m, long o, int j, float factor)
{
    return sums;
}

/* Write d numbers as row r of a product's input. Its product is not scaled: `largest` is 1. */
static void round_row(const float *restrict row, long r, long d, input *restrict x, float *largest)
{
    largest[r] = 1;
    to_factors(row, d, x + r * d);
}
