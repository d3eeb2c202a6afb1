/*
 * optim_type.h: the updates of one block in one arithmetic: T is float or double. optim.c includes
 * this once for each, with F(name) naming the functions, SHARED(name) those of update_type.h, and
 * T_DTYPE the dtype that needs no conversion.
 */

/* Elements as T: themselves, or converted into `buffer`. */
static T *F(take)(void *data, enum xt_dtype dtype, int64_t n, T *buffer) {
    if (dtype == T_DTYPE) return data;
    XT_CPU(load_f32)(data, dtype, n, (float *)(void *)buffer); /* only when T is float */
    return buffer;
}

static void F(give)(const T *from, enum xt_dtype dtype, int64_t n, void *data) {
    if (dtype == T_DTYPE) {
        if (from != data) memcpy(data, from, (size_t)n * sizeof(T));
    } else if (sizeof(T) == sizeof(float)) {
        XT_CPU(store_f32)((const float *)(const void *)from, dtype, n, data);
    } else {
        float narrow[OPTIM_BLOCK];
        for (int64_t i = 0; i < n; i++) narrow[i] = (float)from[i];
        XT_CPU(store_f32)(narrow, dtype, n, data);
    }
}

static void F(adamw)(const struct update *u, int64_t n, T *restrict p, const T *restrict g,
                     T *restrict m, T *restrict v) {
    const union xt_attr *a = u->attrs;
    const struct xt_adamw step = {a[0].f, a[1].f,   a[2].f,     a[3].f,
                                  a[4].f, u->scale, u->unbias1, u->unbias2};
    const struct SHARED(adamw_factors) f = SHARED(adamw_factors_of)(&step);
#pragma omp simd
    for (int64_t i = 0; i < n; i++) SHARED(adamw_element)(&f, g[i], p + i, m + i, v + i);
}

static void F(sgd)(const struct update *u, int64_t n, T *restrict p, const T *restrict g,
                   T *restrict b) {
    const union xt_attr *a = u->attrs;
    const struct xt_sgd step = {a[0].f, a[1].f, a[2].f, a[4].f, u->scale, a[3].i != 0, a[5].i == 1};
    const struct SHARED(sgd_factors) f = SHARED(sgd_factors_of)(&step);
    if (step.momentum == 0)
        for (int64_t i = 0; i < n; i++) SHARED(sgd_plain_element)(&f, g[i], p + i);
    else
        for (int64_t i = 0; i < n; i++) SHARED(sgd_element)(&f, g[i], p + i, b + i);
}

/* Elements at..at + n of one group. */
static void F(update_block)(const struct update *u, struct xt_tensor *const *group, int64_t at,
                            int64_t n) {
    T p_buffer[OPTIM_BLOCK], g_buffer[OPTIM_BLOCK];
    struct xt_tensor *pt = group[0], *copy = group[u->roles - 1];
    void *p_data = element(pt, at);
    T *p = F(take)(p_data, pt->dtype, n, p_buffer);
    const T *g = F(take)(element(group[1], at), group[1]->dtype, n, g_buffer);
    if (u->roles == 5)
        F(adamw)(u, n, p, g, element(group[2], at), element(group[3], at));
    else
        F(sgd)(u, n, p, g, group[2] ? element(group[2], at) : NULL);
    F(give)(p, pt->dtype, n, p_data);
    if (copy) F(give)(p, copy->dtype, n, element(copy, at));
}

static void F(scale_block)(const struct update *u, struct xt_tensor *t, int64_t at, int64_t n) {
    T buffer[OPTIM_BLOCK];
    void *data = element(t, at);
    T *x = F(take)(data, t->dtype, n, buffer);
    const T scale = (T)u->scale;
    for (int64_t i = 0; i < n; i++) x[i] *= scale;
    F(give)(x, t->dtype, n, data);
}

static double F(squares)(struct xt_tensor *t, int64_t at, int64_t n) {
    T buffer[OPTIM_BLOCK];
    const T *x = F(take)(element(t, at), t->dtype, n, buffer);
    const int64_t half = n / 2;
    double sum = 0, other = 0; /* of two halves at once: additions need not wait for each other */
#pragma omp simd reduction(+ : sum, other)
    for (int64_t i = 0; i < half; i++) {
        sum += (double)x[i] * (double)x[i];
        other += (double)x[half + i] * (double)x[half + i];
    }
    return sum + other + (n % 2 ? (double)x[n - 1] * (double)x[n - 1] : 0);
}
