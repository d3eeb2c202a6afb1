/*
 * pointwise.c: the elementwise ops. What they compute stands in ../pointwise.def; here each row
 * becomes one plain loop a type, and a kernel that hands the loop to pointwise_loop.h.
 */
#include "math.h"
#include "pointwise_loop.h"

/* ---- from rows to loops ---------------------------------------------------------------------- */

/* The loops of one op, by the dtype computed in; NULL where there is none. */
struct blocks {
    block_fn *by_dtype[XT_DTYPE_COUNT];
};

/* What rows say beside arithmetic. */
#define XT_WRAP(x) ((uint64_t)(x))
#define XT_LESS(x, bound) ((x) > (bound) ? (bound) : (x)) /* NaN stays */
#define XT_MORE(x, bound) ((x) < (bound) ? (bound) : (x))
#define XT_GELU_INNER(x) ((real)0.79788456080286535588 * ((x) + (real)0.044715 * (x) * (x) * (x)))

#define BLOCK_FN(name)                                                                             \
    static void name(int64_t n, const void *const *in, void *const *out, const double *p)

/* y of one argument, with two numbers from p. */
#define BLOCK_X(name, T, arithmetic, first, second, expression)                                    \
    BLOCK_FN(name) {                                                                               \
        typedef arithmetic real;                                                                   \
        const T *px = in[0];                                                                       \
        T *restrict py = out[0];                                                                   \
        const real first = (real)p[0], second = (real)p[1];                                        \
        (void)first, (void)second;                                                                 \
        for (int64_t i = 0; i < n; i++) {                                                          \
            const real x = (real)px[i];                                                            \
            py[i] = (T)(expression);                                                               \
        }                                                                                          \
    }

/* dx of one argument. No gradient gives none, even where the derivative is infinite: what `where`
   did not select must not turn into 0 * inf. */
#define BLOCK_DX(name, T, first, second, expression)                                               \
    BLOCK_FN(name) {                                                                               \
        typedef T real;                                                                            \
        const T *pg = in[0], *px = in[1], *py = in[2];                                             \
        T *restrict pd = out[0];                                                                   \
        const real first = (real)p[0], second = (real)p[1];                                        \
        (void)first, (void)second;                                                                 \
        for (int64_t i = 0; i < n; i++) {                                                          \
            const real g = pg[i], x = px[i], y = py[i];                                            \
            (void)x, (void)y;                                                                      \
            pd[i] = g == 0 ? g : expression;                                                       \
        }                                                                                          \
    }

/* y of two arguments. */
#define BLOCK_AB(name, T, arithmetic, result, a, b, expression)                                    \
    BLOCK_FN(name) {                                                                               \
        typedef arithmetic real;                                                                   \
        const T *pa = in[0], *pb = in[1];                                                          \
        result *restrict py = out[0];                                                              \
        (void)p;                                                                                   \
        for (int64_t i = 0; i < n; i++) {                                                          \
            const real a = (real)pa[i], b = (real)pb[i];                                           \
            py[i] = (result)(expression);                                                          \
        }                                                                                          \
    }

/* da or db of two arguments. */
#define BLOCK_DAB(name, T, expression)                                                             \
    BLOCK_FN(name) {                                                                               \
        typedef T real;                                                                            \
        const T *pg = in[0], *pa = in[1], *pb = in[2], *py = in[3];                                \
        T *restrict pd = out[0];                                                                   \
        (void)p;                                                                                   \
        for (int64_t i = 0; i < n; i++) {                                                          \
            const real g = pg[i], a = pa[i], b = pb[i], y = py[i];                                 \
            (void)a, (void)b, (void)y;                                                             \
            pd[i] = g == 0 ? g : expression;                                                       \
        }                                                                                          \
    }

/* da and db of two arguments. */
#define BLOCK_BOTH(name, T, a, b, da, db)                                                          \
    BLOCK_FN(name) {                                                                               \
        typedef T real;                                                                            \
        const T *pg = in[0], *pa = in[1], *pb = in[2];                                             \
        T *restrict pda = out[0], *restrict pdb = out[1];                                          \
        (void)p;                                                                                   \
        for (int64_t i = 0; i < n; i++) {                                                          \
            const real g = pg[i], a = pa[i], b = pb[i];                                            \
            pda[i] = g == 0 ? g : da;                                                              \
            pdb[i] = g == 0 ? g : db;                                                              \
        }                                                                                          \
    }

/* A kernel of the loops that LOOPS(name, T) makes for each float type. */
#define FLOAT_LOOPS(name) [XT_F32] = name##_f32, [XT_F64] = name##_f64
#define INT_LOOPS(name) [XT_I32] = name##_i32, [XT_I64] = name##_i64, [XT_U8] = name##_u8
#define KERNEL(name, ...)                                                                          \
    static enum xt_status name##_kernel(struct xt_ctx *ctx, const struct xt_launch *l) {           \
        static const struct blocks blocks = {{__VA_ARGS__}};                                       \
        return run(ctx, l, &blocks, no_numbers);                                                   \
    }

static const double no_numbers[2] = {0, 0};

/* Inputs broadcast to the shape of output 0; 16-bit floats computed in f32. */
static enum xt_status run(struct xt_ctx *ctx, const struct xt_launch *l,
                          const struct blocks *blocks, const double *p) {
    const struct xt_tensor *y = l->out[0];
    struct loop loop;
    loop.block = blocks->by_dtype[compute_dtype(l->in[0]->dtype)];
    loop.p = p;
    loop.n_in = loop.n_out = 0;
    loop_shape(&loop, y->ndim, y->shape);
    for (int k = 0; k < l->n_in; k++)
        add_in(&loop, l->in[k], l->in[k] ? compute_dtype(l->in[k]->dtype) : XT_F32);
    for (int k = 0; k < l->n_out; k++) add_out(&loop, l->out[k], compute_dtype(l->out[k]->dtype));
    loop_run(ctx, &loop);
    return XT_OK;
}

#define XT_UNARY(name, doc, keeps, y_of, dx_of)                                                    \
    BLOCK_X(name##_f32, float, float, p0, p1, y_of)                                                \
    BLOCK_X(name##_f64, double, double, p0, p1, y_of)                                              \
    BLOCK_DX(name##_grad_f32, float, p0, p1, dx_of)                                                \
    BLOCK_DX(name##_grad_f64, double, p0, p1, dx_of)                                               \
    KERNEL(name, FLOAT_LOOPS(name))                                                                \
    KERNEL(name##_grad, FLOAT_LOOPS(name##_grad))

#define XT_UNARY_ANY(name, doc, keeps, y_of, int_of, dx_of)                                        \
    BLOCK_X(name##_f32, float, float, p0, p1, y_of)                                                \
    BLOCK_X(name##_f64, double, double, p0, p1, y_of)                                              \
    BLOCK_X(name##_i32, int32_t, int64_t, p0, p1, int_of)                                          \
    BLOCK_X(name##_i64, int64_t, int64_t, p0, p1, int_of)                                          \
    BLOCK_X(name##_u8, uint8_t, int64_t, p0, p1, int_of)                                           \
    BLOCK_DX(name##_grad_f32, float, p0, p1, dx_of)                                                \
    BLOCK_DX(name##_grad_f64, double, p0, p1, dx_of)                                               \
    KERNEL(name, FLOAT_LOOPS(name), INT_LOOPS(name))                                               \
    KERNEL(name##_grad, FLOAT_LOOPS(name##_grad))

#define GRAD_AB(name, da_of, db_of)                                                                \
    BLOCK_DAB(name##_grad_a_f32, float, da_of)                                                     \
    BLOCK_DAB(name##_grad_a_f64, double, da_of)                                                    \
    BLOCK_DAB(name##_grad_b_f32, float, db_of)                                                     \
    BLOCK_DAB(name##_grad_b_f64, double, db_of)                                                    \
    KERNEL(name##_grad_a, FLOAT_LOOPS(name##_grad_a))                                              \
    KERNEL(name##_grad_b, FLOAT_LOOPS(name##_grad_b))

#define XT_BINARY(name, doc, keeps_a, keeps_b, y_of, da_of, db_of)                                 \
    BLOCK_AB(name##_f32, float, float, float, a, b, y_of)                                          \
    BLOCK_AB(name##_f64, double, double, double, a, b, y_of)                                       \
    KERNEL(name, FLOAT_LOOPS(name))                                                                \
    GRAD_AB(name, da_of, db_of)

#define XT_BINARY_ANY(name, doc, keeps_a, keeps_b, y_of, int_of, da_of, db_of)                     \
    BLOCK_AB(name##_f32, float, float, float, a, b, y_of)                                          \
    BLOCK_AB(name##_f64, double, double, double, a, b, y_of)                                       \
    BLOCK_AB(name##_i32, int32_t, int64_t, int32_t, a, b, int_of)                                  \
    BLOCK_AB(name##_i64, int64_t, int64_t, int64_t, a, b, int_of)                                  \
    BLOCK_AB(name##_u8, uint8_t, int64_t, uint8_t, a, b, int_of)                                   \
    KERNEL(name, FLOAT_LOOPS(name), INT_LOOPS(name))                                               \
    GRAD_AB(name, da_of, db_of)

#define XT_BINARY_BOTH(name, a, b, doc, keeps_a, keeps_b, y_of, da_of, db_of)                      \
    BLOCK_AB(name##_f32, float, float, float, a, b, y_of)                                          \
    BLOCK_AB(name##_f64, double, double, double, a, b, y_of)                                       \
    BLOCK_BOTH(name##_grad_f32, float, a, b, da_of, db_of)                                         \
    BLOCK_BOTH(name##_grad_f64, double, a, b, da_of, db_of)                                        \
    KERNEL(name, FLOAT_LOOPS(name))                                                                \
    KERNEL(name##_grad, FLOAT_LOOPS(name##_grad))

#define XT_COMPARE(name, doc, y_of)                                                                \
    BLOCK_AB(name##_f32, float, float, uint8_t, a, b, y_of)                                        \
    BLOCK_AB(name##_f64, double, double, uint8_t, a, b, y_of)                                      \
    BLOCK_AB(name##_i32, int32_t, int64_t, uint8_t, a, b, y_of)                                    \
    BLOCK_AB(name##_i64, int64_t, int64_t, uint8_t, a, b, y_of)                                    \
    BLOCK_AB(name##_u8, uint8_t, int64_t, uint8_t, a, b, y_of)                                     \
    KERNEL(name, FLOAT_LOOPS(name), INT_LOOPS(name))

#define CHOICE_KERNEL(name)                                                                        \
    static enum xt_status name##_kernel(struct xt_ctx *ctx, const struct xt_launch *l) {           \
        static const struct blocks blocks[2] = {{{FLOAT_LOOPS(name##_0)}},                         \
                                                {{FLOAT_LOOPS(name##_1)}}};                        \
        return run(ctx, l, &blocks[l->attrs[0].i], no_numbers);                                    \
    }
#define XT_CHOICE(name, doc, keeps, attribute, choices, y_0, dx_0, y_1, dx_1)                      \
    BLOCK_X(name##_0_f32, float, float, p0, p1, y_0)                                               \
    BLOCK_X(name##_0_f64, double, double, p0, p1, y_0)                                             \
    BLOCK_X(name##_1_f32, float, float, p0, p1, y_1)                                               \
    BLOCK_X(name##_1_f64, double, double, p0, p1, y_1)                                             \
    BLOCK_DX(name##_grad_0_f32, float, p0, p1, dx_0)                                               \
    BLOCK_DX(name##_grad_0_f64, double, p0, p1, dx_0)                                              \
    BLOCK_DX(name##_grad_1_f32, float, p0, p1, dx_1)                                               \
    BLOCK_DX(name##_grad_1_f64, double, p0, p1, dx_1)                                              \
    CHOICE_KERNEL(name)                                                                            \
    CHOICE_KERNEL(name##_grad)

#define BOUNDED_KERNEL(name)                                                                       \
    static enum xt_status name##_kernel(struct xt_ctx *ctx, const struct xt_launch *l) {           \
        static const struct blocks blocks = {{FLOAT_LOOPS(name)}};                                 \
        const double numbers[2] = {l->attrs[0].f, l->attrs[1].f};                                  \
        return run(ctx, l, &blocks, numbers);                                                      \
    }
#define XT_BOUNDED(name, doc, keeps, first, second, y_of, dx_of)                                   \
    BLOCK_X(name##_f32, float, float, first, second, y_of)                                         \
    BLOCK_X(name##_f64, double, double, first, second, y_of)                                       \
    BLOCK_DX(name##_grad_f32, float, first, second, dx_of)                                         \
    BLOCK_DX(name##_grad_f64, double, first, second, dx_of)                                        \
    BOUNDED_KERNEL(name)                                                                           \
    BOUNDED_KERNEL(name##_grad)

#include "../pointwise.def"

/* ---- selection ------------------------------------------------------------------------------- */

/* y = cond ? a : b, bit by bit: the dtype of a and b is only a size. */
#define SELECT(name, C, T)                                                                         \
    BLOCK_FN(name) {                                                                               \
        const C *pc = in[0];                                                                       \
        const T *pa = in[1], *pb = in[2];                                                          \
        T *restrict py = out[0];                                                                   \
        (void)p;                                                                                   \
        for (int64_t i = 0; i < n; i++) {                                                          \
            const T keep = (T)(pc[i] != 0 ? UINT64_MAX : 0);                                       \
            py[i] = (T)((pa[i] & keep) | (pb[i] & (T)~keep));                                      \
        }                                                                                          \
    }
#define SELECTS(bits)                                                                              \
    SELECT(select_u8_##bits, uint8_t, uint##bits##_t)                                              \
    SELECT(select_i32_##bits, int32_t, uint##bits##_t)                                             \
    SELECT(select_i64_##bits, int64_t, uint##bits##_t)
SELECTS(8)
SELECTS(16)
SELECTS(32)
SELECTS(64)

static block_fn *select_block(enum xt_dtype cond, size_t bytes) {
    static block_fn *const table[3][4] = {
        {select_u8_8, select_u8_16, select_u8_32, select_u8_64},
        {select_i32_8, select_i32_16, select_i32_32, select_i32_64},
        {select_i64_8, select_i64_16, select_i64_32, select_i64_64},
    };
    return table[cond == XT_U8    ? 0
                 : cond == XT_I32 ? 1
                                  : 2][bytes == 1   ? 0
                                       : bytes == 2 ? 1
                                       : bytes == 4 ? 2
                                                    : 3];
}

/* A loop over the shape of t that has no operand yet and reads no numbers. */
static struct loop loop_over(const struct xt_tensor *t, block_fn *block) {
    struct loop loop;
    loop.block = block;
    loop.p = no_numbers;
    loop.n_in = loop.n_out = 0;
    loop_shape(&loop, t->ndim, t->shape);
    return loop;
}

static enum xt_status where(struct xt_ctx *ctx, const struct xt_launch *l) {
    const struct xt_tensor *cond = l->in[0], *y = l->out[0];
    struct loop loop = loop_over(y, select_block(cond->dtype, xt_dtype_bytes(y->dtype)));
    for (int k = 0; k < 3; k++) add_in(&loop, l->in[k], l->in[k]->dtype);
    add_out(&loop, y, y->dtype);
    loop_run(ctx, &loop);
    return XT_OK;
}

/* y = mask ? value : x. */
static enum xt_status masked_fill(struct xt_ctx *ctx, const struct xt_launch *l) {
    const struct xt_tensor *x = l->in[0], *mask = l->in[1], *y = l->out[0];
    struct loop loop = loop_over(y, select_block(mask->dtype, xt_dtype_bytes(y->dtype)));
    char value[sizeof(double)];
    XT_CPU(convert)(&l->attrs[0].f, XT_F64, 1, value, y->dtype);
    add_in(&loop, mask, mask->dtype);
    add_constant(&loop, value, y->dtype);
    add_in(&loop, x, x->dtype);
    add_out(&loop, y, y->dtype);
    loop_run(ctx, &loop);
    return XT_OK;
}

/* ---- copies ---------------------------------------------------------------------------------- */

static enum xt_status copy(struct xt_ctx *ctx, const struct xt_tensor *from,
                           const struct xt_tensor *to) {
    struct loop loop = loop_over(to, NULL);
    add_in(&loop, from, to->dtype);
    add_out(&loop, to, to->dtype);
    loop_run(ctx, &loop);
    return XT_OK;
}

static enum xt_status cast(struct xt_ctx *ctx, const struct xt_launch *l) {
    return copy(ctx, l->in[0], l->out[0]);
}

static enum xt_status copy_in_place(struct xt_ctx *ctx, const struct xt_launch *l) {
    return copy(ctx, l->in[1], l->in[0]);
}

static enum xt_status fill_in_place(struct xt_ctx *ctx, const struct xt_launch *l) {
    const struct xt_tensor *x = l->in[0];
    struct loop loop = loop_over(x, NULL);
    char value[sizeof(double)];
    XT_CPU(convert)(&l->attrs[0].f, XT_F64, 1, value, x->dtype);
    add_constant(&loop, value, x->dtype);
    add_out(&loop, x, x->dtype);
    loop_run(ctx, &loop);
    return XT_OK;
}

/* x + scale * other; out may be either input, never a part of one (thus ivdep). */
#define ADD_SCALED(name, T, arithmetic)                                                            \
    BLOCK_FN(name) {                                                                               \
        const T *x = in[0], *other = in[1];                                                        \
        T *y = out[0];                                                                             \
        const arithmetic scale = (arithmetic)p[0];                                                 \
        _Pragma("GCC ivdep") for (int64_t i = 0; i < n; i++) y[i] =                                \
            (T)((arithmetic)x[i] + scale * (arithmetic)other[i]);                                  \
    }
ADD_SCALED(add_scaled_f32, float, float)
ADD_SCALED(add_scaled_f64, double, double)

/* Integers wrap; the scale is an integer (the shape rule checks). */
#define ADD_SCALED_INT(name, T)                                                                    \
    BLOCK_FN(name) {                                                                               \
        const T *x = in[0], *other = in[1];                                                        \
        T *y = out[0];                                                                             \
        const uint64_t scale = (uint64_t)(int64_t)p[0];                                            \
        _Pragma("GCC ivdep") for (int64_t i = 0; i < n; i++) y[i] =                                \
            (T)((uint64_t)x[i] + scale * (uint64_t)other[i]);                                      \
    }
ADD_SCALED_INT(add_scaled_i32, int32_t)
ADD_SCALED_INT(add_scaled_i64, int64_t)
ADD_SCALED_INT(add_scaled_u8, uint8_t)

static enum xt_status add_in_place(struct xt_ctx *ctx, const struct xt_launch *l) {
    static const struct blocks blocks = {{FLOAT_LOOPS(add_scaled), INT_LOOPS(add_scaled)}};
    const struct xt_tensor *x = l->in[0];
    enum xt_dtype compute = compute_dtype(x->dtype);
    struct loop loop = loop_over(x, blocks.by_dtype[compute]);
    const double scale[2] = {l->attrs[0].f, 0};
    loop.p = scale;
    add_in(&loop, x, compute);
    add_in(&loop, l->in[1], compute);
    add_out(&loop, x, compute);
    loop_run(ctx, &loop);
    return XT_OK;
}

/* ---- the table ------------------------------------------------------------------------------- */

#define XT_UNARY(name, ...)                                                                        \
    {#name, XT_FLOATS, XT_STRIDED, name##_kernel},                                                 \
        {#name "_grad", XT_FLOATS, XT_STRIDED, name##_grad_kernel},
#define XT_UNARY_ANY(name, ...)                                                                    \
    {#name, XT_ANY, XT_STRIDED, name##_kernel},                                                    \
        {#name "_grad", XT_FLOATS, XT_STRIDED, name##_grad_kernel},
#define GRADS_AB(name)                                                                             \
    {#name "_grad_a", XT_FLOATS, XT_STRIDED, name##_grad_a_kernel},                                \
        {#name "_grad_b", XT_FLOATS, XT_STRIDED, name##_grad_b_kernel},
#define XT_BINARY(name, ...) {#name, XT_FLOATS, XT_STRIDED, name##_kernel}, GRADS_AB(name)
#define XT_BINARY_ANY(name, ...) {#name, XT_ANY, XT_STRIDED, name##_kernel}, GRADS_AB(name)
#define XT_BINARY_BOTH XT_UNARY
#define XT_CHOICE XT_UNARY
#define XT_BOUNDED XT_UNARY
#define XT_COMPARE(name, ...) {#name, XT_ANY, XT_STRIDED, name##_kernel},

const struct xt_kernel XT_CPU(pointwise_kernels)[] = {
#include "../pointwise.def"
    {"where", XT_INTS, XT_STRIDED, where},
    {"masked_fill", XT_ANY, XT_STRIDED, masked_fill},
    {"cast", XT_ANY, XT_STRIDED, cast},
    {"fill_", XT_ANY, XT_STRIDED, fill_in_place},
    {"copy_", XT_ANY, XT_STRIDED, copy_in_place},
    {"add_", XT_ANY, XT_STRIDED, add_in_place},
    {0},
};
