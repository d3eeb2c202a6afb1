/*
 * stats.c: what a person wants to know of a tensor at a glance. Read on the host, whatever the
 * device, and every element: lua/xtrain/statistics.lua picks a sample of a large tensor first.
 * Nothing here is meant for the inside of a training step.
 */
#include <math.h>
#include <stdio.h>

#include "context.h"

static double element(enum xt_dtype dtype, const void *data, int64_t i) {
    switch (dtype) {
    case XT_F32: return (double)((const float *)data)[i];
    case XT_BF16: return (double)xt_bf16_to_f32(((const uint16_t *)data)[i]);
    case XT_F16: return (double)xt_f16_to_f32(((const uint16_t *)data)[i]);
    case XT_F64: return ((const double *)data)[i];
    case XT_I32: return ((const int32_t *)data)[i];
    case XT_I64: return (double)((const int64_t *)data)[i];
    default: return ((const uint8_t *)data)[i];
    }
}

/* The least and the most of integers, which a double does not always hold. */
static void count_whole(enum xt_dtype dtype, const void *data, struct xt_stats *s) {
    s->least = INT64_MAX, s->most = INT64_MIN;
    for (int64_t i = 0; i < s->n; i++) {
        int64_t x = dtype == XT_I64   ? ((const int64_t *)data)[i]
                    : dtype == XT_I32 ? ((const int32_t *)data)[i]
                                      : ((const uint8_t *)data)[i];
        if (x < s->least) s->least = x;
        if (x > s->most) s->most = x;
    }
}

static struct xt_stats count(enum xt_dtype dtype, const void *data, int64_t n) {
    struct xt_stats s = {.n = n, .min = NAN, .max = NAN, .mean = NAN, .std = NAN};
    double sum = 0, squares = 0;
    for (int64_t i = 0; i < n; i++) {
        double x = element(dtype, data, i) + 0.0; /* no -0 */
        if (isnan(x))
            s.nans++;
        else if (isinf(x))
            s.infs += x > 0, s.minus_infs += x < 0;
        else {
            if (!(s.min <= x)) s.min = x;
            if (!(s.max >= x)) s.max = x;
            sum += x;
            s.finite++;
        }
    }
    if (s.finite == 0) return s;
    if (!xt_dtype_is_float(dtype)) count_whole(dtype, data, &s);
    s.mean = sum / (double)s.finite;
    for (int64_t i = 0; i < n; i++) {
        double off = element(dtype, data, i) - s.mean;
        if (isfinite(off)) squares += off * off;
    }
    s.std = sqrt(squares / (double)s.finite);
    return s;
}

enum xt_status xt_tensor_stats(struct xt_ctx *ctx, struct xt_tensor *t, struct xt_stats *out) {
    size_t bytes = xt_nbytes(t);
    XT_TRY(xt_graph_check_read(ctx, t));
    if (bytes == 0 || (t->storage->device == XT_CPU && xt_is_contiguous(t))) {
        *out = count(t->dtype, bytes ? xt_data(t) : NULL, xt_numel(t));
        return XT_OK;
    }
    void *copy;
    struct xt_pause pause;
    XT_TRY(xt_scratch_get(ctx, XT_CPU, bytes, &copy));
    xt_pause(ctx, &pause);
    enum xt_status status = xt_tensor_to_host(ctx, t, copy, bytes);
    xt_resume(ctx, &pause);
    if (status == XT_OK) *out = count(t->dtype, copy, xt_numel(t));
    xt_scratch_put(ctx, XT_CPU, copy, bytes);
    return status;
}

const char *xt_stats_describe(const struct xt_stats *s, char *buffer, size_t bytes) {
    size_t used = 0;
    *buffer = 0;
    const struct {
        int64_t count;    /* of elements */
        const char *name; /* of what they are */
    } rare[] = {{s->nans, "NaN"}, {s->infs, "inf"}, {s->minus_infs, "-inf"}};
    for (int i = 0; i < 3; i++)
        if (rare[i].count && used < bytes)
            used += (size_t)snprintf(buffer + used, bytes - used, "%lld %s, ",
                                     (long long)rare[i].count, rare[i].name);
    if (used >= bytes) return buffer;
    if (s->finite == 0)
        snprintf(buffer + used, bytes - used, "none finite");
    else if (s->n == 1)
        snprintf(buffer + used, bytes - used, "%.6g", s->mean);
    else
        snprintf(buffer + used, bytes - used, "min %.6g, max %.6g, mean %.6g, std %.6g", s->min,
                 s->max, s->mean, s->std);
    return buffer;
}
