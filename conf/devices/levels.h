/* Rounding of weights to int8 for CPUs that add products in 16 bits: Groups of conf/devices/int8.py. */

/* The columns of the two groups of eight columns. Products of the weights of a group are added in 16 bits. */
static const int GROUPS[2][4] = {{0, 1, 4, 5}, {2, 3, 6, 7}};

/* Copy up to eight of a row's `left` numbers, divided by `step`, and zeros after them. */
INLINED void load_eight(const float *row, long left, float step, float *x)
{
    for (int i = 0; i < 8; i++)
        x[i] = i < left ? row[i] / step : 0;
}

/* Return which of the `count` numbers of levels `tried`, in ascending order, gives a row the smallest squared error. */
static long best_levels(long d, const float *row, float largest, long limit, long count, const long *tried)
{
    float errors[count];
    for (long t = 0; t < count; t++)
        errors[t] = d / 12.0f / (tried[t] * tried[t]);
    for (long i = 0; i < d; i += 8) {
        float x[8];
        load_eight(row + i, d - i, largest, x);
        for (int g = 0; g < 4; g++) {
            float sum = 0, squares = 0;
            for (int j = 0; j < 4; j++) {
                float part = g % 2 ? -x[GROUPS[g / 2][j]] : x[GROUPS[g / 2][j]];
                part = part > 0 ? part : 0;
                sum += part;
                squares += part * part;
            }
            /* Most groups are never changed, not even with the most levels. */
            for (long t = count - 1; t >= 0 && sum * tried[t] > limit; t--) {
                float lost = 1 - limit / (sum * tried[t]); /* of each weight */
                errors[t] += lost * lost * squares;
            }
        }
    }
    long best = 0;
    for (long t = 1; t < count; t++)
        best = errors[t] < errors[best] ? t : best;
    return tried[best];
}

/* Reduce the numbers of a group that have the same sign by one factor if their sum is above `limit`. */
INLINED void limit_groups(int *x, int limit)
{
    for (int g = 0; g < 4; g++) {
        const int *group = GROUPS[g / 2];
        int sign = g % 2 ? -1 : 1, sum = 0;
        for (int j = 0; j < 4; j++)
            sum += sign * x[group[j]] > 0 ? sign * x[group[j]] : 0;
        for (int j = 0; sum > limit && j < 4; j++)
            if (sign * x[group[j]] > 0)
                x[group[j]] = x[group[j]] * limit / sum;
    }
}

/* Round the rows of a weight (n, d), each to its best number of levels, and limit the groups. `scale` (n) is the value
   of a level. */
void round_groups(long n, long d, const float *weight, float tiny, long limit, long count, const long *tried,
                  int8_t *rounded, float *scale, int threads)
{
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (long r = 0; r < n; r++) {
        const float *row = weight + r * d;
        float largest = largest_of(row, d);
        largest = largest < tiny ? tiny : largest; /* stays NaN or infinity, and so does the scale */
        float step = scale[r] = largest / best_levels(d, row, largest, limit, count, tried);
        for (long i = 0; i < d; i += 8) {
            float x[8];
            int y[8];
            load_eight(row + i, d - i, step, x);
            for (int j = 0; j < 8; j++)
                y[j] = isnan(x[j]) ? 0 : (int)rintf(x[j]);
            limit_groups(y, (int)limit);
            for (int j = 0; j < 8 && i + j < d; j++)
                rounded[r * d + i + j] = (int8_t)y[j];
        }
    }
}
