/* pointwise_grad.cu: the derivatives of the elementwise ops, as ../pointwise.def gives them. */
#include "pointwise.h"

/* The structs of this file have names of their own: kernels are templates, which the linker joins
   by name. */

#define XT_UNARY(name, doc, keeps, y_of, dx_of)                                                    \
    XT_OP_DX(grad_##name, q0, q1, dx_of)                                                           \
    XT_FLOAT_KERNEL(name, grad_##name, 0, 0)
#define XT_UNARY_ANY(name, doc, keeps, y_of, int_of, dx_of) XT_UNARY(name, doc, keeps, y_of, dx_of)
#define XT_BINARY(name, doc, keeps_a, keeps_b, y_of, da_of, db_of)                                 \
    XT_OP_DAB(grad_##name##_a, da_of)                                                              \
    XT_OP_DAB(grad_##name##_b, db_of)                                                              \
    XT_FLOAT_KERNEL(name##_a, grad_##name##_a, 0, 0)                                               \
    XT_FLOAT_KERNEL(name##_b, grad_##name##_b, 0, 0)
#define XT_BINARY_ANY(name, doc, keeps_a, keeps_b, y_of, int_of, da_of, db_of)                     \
    XT_BINARY(name, doc, keeps_a, keeps_b, y_of, da_of, db_of)
#define XT_BINARY_BOTH(name, a, b, doc, keeps_a, keeps_b, y_of, da_of, db_of)                      \
    XT_OP_BOTH(grad_##name, a, b, da_of, db_of)                                                    \
    XT_FLOAT_KERNEL(name, grad_##name, 0, 0)
#define XT_COMPARE(name, doc, y_of)
#define XT_CHOICE(name, doc, keeps, attribute, choices, y_0, dx_0, y_1, dx_1)                      \
    XT_OP_DX(grad_##name##_0, q0, q1, dx_0)                                                        \
    XT_OP_DX(grad_##name##_1, q0, q1, dx_1)                                                        \
    XT_FLOAT_KERNEL(name##_0, grad_##name##_0, 0, 0)                                               \
    XT_FLOAT_KERNEL(name##_1, grad_##name##_1, 0, 0)                                               \
    static enum xt_status name##_kernel(struct xt_ctx *ctx, const struct xt_launch *l) {           \
        return l->attrs[0].i ? name##_1_kernel(ctx, l) : name##_0_kernel(ctx, l);                  \
    }
#define XT_BOUNDED(name, doc, keeps, first, second, y_of, dx_of)                                   \
    XT_OP_DX(grad_##name, first, second, dx_of)                                                    \
    XT_FLOAT_KERNEL(name, grad_##name, l->attrs[0].f, l->attrs[1].f)

#include "../pointwise.def"

/* ---- the table ------------------------------------------------------------------------------- */

#define XT_UNARY(name, ...) {#name "_grad", XT_FLOATS, XT_STRIDED, name##_kernel},
#define XT_UNARY_ANY XT_UNARY
#define XT_BINARY(name, ...)                                                                       \
    {#name "_grad_a", XT_FLOATS, XT_STRIDED, name##_a_kernel},                                     \
        {#name "_grad_b", XT_FLOATS, XT_STRIDED, name##_b_kernel},
#define XT_BINARY_ANY XT_BINARY
#define XT_BINARY_BOTH XT_UNARY
#define XT_CHOICE XT_UNARY
#define XT_BOUNDED XT_UNARY
#define XT_COMPARE(name, ...)

const struct xt_kernel xt_cuda_pointwise_grad_kernels[] = {
#include "../pointwise.def"
    {},
};
