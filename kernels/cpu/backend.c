/* backend.c: all CPU kernel tables of one instruction set, for runtime/backend.c. */
#include "cpu.h"

#define DECLARE(family) extern const struct xt_kernel XT_CPU(family##_kernels)[]
DECLARE(pointwise);
DECLARE(shape);
DECLARE(reduce);
DECLARE(linalg);
DECLARE(norm);
DECLARE(index);
DECLARE(loss);
DECLARE(attention);
DECLARE(random);
DECLARE(optim);

extern const struct xt_kernel *const XT_CPU(kernel_tables)[];
const struct xt_kernel *const XT_CPU(kernel_tables)[] = {
    XT_CPU(pointwise_kernels),
    XT_CPU(shape_kernels),
    XT_CPU(reduce_kernels),
    XT_CPU(linalg_kernels),
    XT_CPU(norm_kernels),
    XT_CPU(index_kernels),
    XT_CPU(loss_kernels),
    XT_CPU(attention_kernels),
    XT_CPU(random_kernels),
    XT_CPU(optim_kernels),
    NULL,
};
