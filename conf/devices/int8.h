/* Products of rows in unsigned and weights in signed 8 bits. Every sum is exact. */

#define COLUMNS 4 /* of a row of a weight in four bytes */

#define MOST 127.0f
typedef uint8_t input; /* of a product: 128 is added */
typedef float exact;   /* a weight of the output head, which is not rounded */
typedef int32_t sum;
#define value_of(x) (x)

/* `TILE` rows of a product at once: their sums fill the registers. */
#if defined(__AVX512VNNI__)
#define TILE 12
typedef __m512i registers;
#define broadcast _mm512_set1_epi32
#define add_products _mm512_dpbusd_epi32
#elif defined(__AVXVNNI__)
#define TILE 6
typedef __m256i registers;
#define broadcast _mm256_set1_epi32
#define add_products _mm256_dpbusd_avx_epi32
#else
#define TILE 5
typedef __m256i registers;
#define broadcast _mm256_set1_epi32
#define multiply_pairs _mm256_maddubs_epi16
#define SIXTEEN_BITS

/* Add neighbouring numbers of 16 bits to sums in 32 bits. */
INLINED registers add_pairs(registers sums, registers pairs)
{
    return _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
#endif

#ifdef __AMX_INT8__
#define TILES
#define add_tile _tile_dpbusd
#define FEWEST_TILED 2 /* rows: one row is faster by vectors */
#endif

#define VECTORS (64 / sizeof(registers)) /* four columns of 16 rows of a weight */
typedef registers unaligned_registers __attribute__((aligned(1)));
typedef int32_t sum_vector __attribute__((vector_size(sizeof(registers)), aligned(4)));
typedef float result_vector __attribute__((vector_size(sizeof(registers)), aligned(4)));

/* Return 1 if the products of four columns, 0, 1, 4 and 5 or 2, 3, 6 and 7 of eight, must fit into 16 bits. */
int adds_in_sixteen_bits(void)
{
#ifdef SIXTEEN_BITS
    return 1;
#else
    return 0;
#endif
}

/* Add to each sum four products, of four columns. */
INLINED registers add_four(registers sums, registers x, registers w)
{
#ifdef SIXTEEN_BITS
    return add_pairs(sums, multiply_pairs(x, w));
#else
    return add_products(sums, x, w);
#endif
}

/* Add to each sum eight products, of four columns and of the next four. */
INLINED registers add_eight(registers sums, const registers x[2], registers w, registers next)
{
#ifdef SIXTEEN_BITS
    return add_pairs(sums, _mm256_add_epi16(multiply_pairs(x[0], w), multiply_pairs(x[1], next)));
#else
    return add_products(add_products(sums, x[0], w), x[1], next);
#endif
}

/* Add the products of four columns, or of eight (`fours` 2), of `count` rows of x and of 16 rows of a weight. */
INLINED void multiply_columns(const int fours, const int count, registers sums[TILE][VECTORS], long d, const input *x,
                              const char *weight)
{
    const unaligned_registers *w = (const unaligned_registers *)weight;
    for (int r = 0; r < count; r++) {
        registers four[2];
        for (int f = 0; f < fours; f++)
            four[f] = broadcast(*(const int32_t *)(x + r * d + 4 * f));
        for (int j = 0; j < VECTORS; j++)
            sums[r][j] = fours == 2 ? add_eight(sums[r][j], four, w[j], w[VECTORS + j])
                                    : add_four(sums[r][j], four[0], w[j]);
    }
}

/* Return vector j of the products of a block of outputs from o on, times `factor`. */
INLINED result_vector results_of(sum_vector sums, const matrix *m, long o, int j, float factor)
{
    sum_vector total = sums - ((const sum_vector *)(m->offsets + o))[j];
    return __builtin_convertvector(total, result_vector) * ((const result_vector *)(m->scale + o))[j] * factor;
}

/* Return the largest absolute value of d numbers: not a finite number if one of them is not. */
static float largest_of(const float *row, long d)
{
    /* Absolute values are ordered as the integers of the same bits, infinity and NaN last. */
    int32_t most = 0;
    for (long i = 0; i < d; i++) {
        int32_t size = ((const int32_t *)row)[i] & INT32_MAX;
        most = size > most ? size : most;
    }
    return *(float *)&most;
}

/* Write d numbers as row r of a product's input, and their largest absolute value. */
static void round_row(const float *restrict row, long r, long d, input *restrict x, float *largest)
{
    float top = largest_of(row, d);
    float factor = top > 0 && top < INFINITY ? MOST / top : 0;
    largest[r] = top;
    for (long i = 0; i < d; i++)
        x[r * d + i] = (uint8_t)(int32_t)(row[i] * factor + (MOST + 1.5f));
}
