/*
 * optim_type.h: the updates of one block in one arithmetic: T is float or double. optim.c includes
 * this once for each, with F(name) naming the functions and T_DTYPE the dtype that needs no
 * conversion.
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

/*
 * p *= 1 - lr * weight_decay
 * m += (1 - beta1) * (g - m)
 * v = beta2 * v + (1 - beta2) * g * g
 * p -= lr / (1 - beta1^step) * m / (sqrt(v) / sqrt(1 - beta2^step) + eps)
 */
static void F(adamw)(const struct update *u, int64_t n, T *restrict p, const T *restrict g,
                     T *restrict m, T *restrict v) {
    const union xt_attr *a = u->attrs;
    const T scale = (T)u->scale, keep = (T)(1 - a[0].f * a[4].f), blend = (T)(1 - a[1].f);
    const T beta = (T)a[2].f, rest = (T)(1 - a[2].f), eps = (T)a[3].f;
    const T rate = (T)(-a[0].f / u->unbias1), root = (T)sqrt(u->unbias2);
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        T e = g[i] * scale, q = p[i] * keep;
        m[i] += blend * (e - m[i]);
        v[i] = beta * v[i] + rest * e * e;
        p[i] = q + rate * m[i] / (ROOT(v[i]) / root + eps);
    }
}

/*
 * g += weight_decay * p
 * b = momentum * b + (1 - dampening) * g, at step 1 b = g
 * p -= lr * (nesterov: g + momentum * b, else b)
 */
static void F(sgd)(const struct update *u, int64_t n, T *restrict p, const T *restrict g,
                   T *restrict b) {
    const union xt_attr *a = u->attrs;
    const bool first = a[5].i == 1, nesterov = a[3].i != 0;
    const T scale = (T)u->scale, lr = (T)a[0].f, momentum = (T)a[1].f, decay = (T)a[4].f;
    const T keep = first ? 0 : momentum, blend = first ? 1 : (T)(1 - a[2].f);
    if (momentum == 0) {
        for (int64_t i = 0; i < n; i++) p[i] -= lr * (g[i] * scale + decay * p[i]);
        return;
    }
    const T from_g = nesterov ? 1 : 0, from_b = nesterov ? momentum : 1;
    for (int64_t i = 0; i < n; i++) {
        T e = g[i] * scale + decay * p[i];
        b[i] = keep * b[i] + blend * e;
        p[i] -= lr * (from_g * e + from_b * b[i]);
    }
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
