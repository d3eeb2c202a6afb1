#include "cuda.h"

const struct xt_kernel xt_cuda_pointwise_kernels[] = {
    {},
};
