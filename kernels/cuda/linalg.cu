#include "cuda.h"

const struct xt_kernel xt_cuda_linalg_kernels[] = {
    {},
};

struct xt_cublas {};
void xt_cublas_free(struct xt_cublas *blas) {
    (void)blas;
}
