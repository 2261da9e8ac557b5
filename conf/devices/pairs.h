/* Numbers in bfloat16, and the products of their pairs, with sums in float32. A pair's factors are in bfloat16 too, or
   without instructions for it in float32. */

#ifdef __AVX512F__
#define NUMBERS 16
#else
#define NUMBERS 8
#endif

typedef float numbers __attribute__((vector_size(4 * NUMBERS), aligned(4)));
typedef uint32_t pairs __attribute__((vector_size(4 * NUMBERS), aligned(1)));
typedef uint16_t shorts __attribute__((vector_size(2 * NUMBERS), aligned(2)));

INLINED float number_of(uint16_t x)
{
    uint32_t bits = (uint32_t)x << 16;
    return *(float *)&bits;
}

INLINED pairs paired(shorts first, shorts second)
{
    return __builtin_convertvector(first, pairs) | __builtin_convertvector(second, pairs) << 16;
}

/* The bits of eight numbers, in float32 and bfloat16. */
typedef uint32_t eight __attribute__((vector_size(32), aligned(4)));
typedef uint16_t eight_shorts __attribute__((vector_size(16), aligned(2)));

/* Write m numbers as the nearest numbers in bfloat16, of two the even one; perhaps to the same memory. */
static void to_bfloat16(const float *x, long m, uint16_t *out)
{
#define ROUNDED(bits) (((bits) + 0x7FFF + ((bits) >> 16 & 1)) >> 16)
    long i = 0;
    for (; i + 8 <= m; i += 8) {
        eight bits = *(const eight *)(x + i);
        *(eight_shorts *)(out + i) = __builtin_convertvector(ROUNDED(bits), eight_shorts);
    }
    for (; i < m; i++)
        out[i] = ROUNDED(*(const uint32_t *)(x + i));
#undef ROUNDED
}

#ifdef __AVX512BF16__
typedef uint16_t factor;
#define value_of_factor number_of
#define to_factors to_bfloat16

/* Add the products of NUMBERS pairs and two factors. */
INLINED numbers add_pair(numbers sums, const factor *x, pairs w)
{
    __m512i both = _mm512_set1_epi32(*(const int32_t *)x);
    return (numbers)_mm512_dpbf16_ps((__m512)sums, (__m512bh)w, (__m512bh)both);
}
#else
typedef float factor;
#define value_of_factor(x) (x)

INLINED void to_factors(const float *x, long m, factor *out)
{
    if (out != x)
        memcpy(out, x, m * sizeof(float));
}

/* Add the products of NUMBERS pairs and two factors. */
INLINED numbers add_pair(numbers sums, const factor *x, pairs w)
{
    sums += x[0] * (numbers)(w << 16);
    return sums + x[1] * (numbers)(w & 0xFFFF0000);
}
#endif
