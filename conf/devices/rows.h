/* Rows between two products (products.h): norms, activations, and their rounding. */

typedef float vector __attribute__((vector_size(32), aligned(4)));

INLINED __m128 halves(vector v)
{
    return _mm_add_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
}

/* The scalar product of two rows whose length is a multiple of eight. */
INLINED float dot(const float *a, const float *b, long n)
{
    vector products = {0};
    for (long i = 0; i < n; i += 8)
        products += *(const vector *)(a + i) * *(const vector *)(b + i);
    __m128 sums = halves(products);
    return (sums[0] + sums[2]) + (sums[1] + sums[3]);
}

/* `dot` with a row of the output head. */
INLINED float dot_exact(const float *a, const exact *b, long n)
{
    vector products = {0};
    for (long i = 0; i < n; i += 8)
        for (int j = 0; j < 8; j++)
            products[j] += a[i + j] * value_of(b[i + j]);
    __m128 sums = halves(products);
    return (sums[0] + sums[2]) + (sums[1] + sums[3]);
}

/* e^x to the last bit or two: 2^whole times a polynomial (Cephes' expf). */
INLINED float exponential(float x)
{
    x = x > 88.0f ? 88.0f : x;
    x = x < -87.0f ? -87.0f : x;
    float whole = rintf(x * 1.44269504f);
    float r = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    int32_t power = ((int32_t)whole + 127) << 23;
    return p * *(float *)&power;
}

/* h += y, unless y is null; then norm(h) = weight * h / sqrt(|h|^2 + epsilon). The norm is written
   to `normed`, or if that is null as a product's input. */
void add_norm(long n, long d, float *h, const float *y, long stride, const float *restrict bias, const float *weight,
              float epsilon, float *normed, input *x, float *largest)
{
    float *restrict row = malloc(d * sizeof(float));
    for (long r = 0; r < n; r++, h += d) {
        if (y)
            for (long i = 0; i < d; i++)
                h[i] += y[r * stride + i] * largest[r] + bias[i];
        float factor = 1 / sqrtf(dot(h, h, d) + epsilon);
        float *out = normed ? normed + r * d : row;
        for (long i = 0; i < d; i++)
            out[i] = h[i] * factor * weight[i];
        if (!normed)
            round_row(row, r, d, x, largest);
    }
    free(row);
}

/* silu(g) * u of y = [g | u | ...], two times d numbers, times `shrink` as a product's input. */
void activate(long n, long d, const float *y, long stride, const float *restrict bias, const float *restrict shrink,
              input *x, float *largest)
{
    float *restrict row = malloc(d * sizeof(float));
    for (long r = 0; r < n; r++) {
        const float *restrict g = y + r * stride, *restrict u = g + d;
        float t = largest[r];
        for (long i = 0; i < d; i++) {
            float gate = g[i] * t + bias[i];
            float up = u[i] * t + bias[d + i];
            row[i] = gate / (1 + exponential(-gate)) * up * shrink[i];
        }
        round_row(row, r, d, x, largest);
    }
    free(row);
}
