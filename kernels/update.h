/*
 * update.h: what an optimizer's step does to every element, for the CPU and the GPU alike: numbers
 * of the step in f64 here, elements in update_type.h.
 */
#ifndef XT_UPDATE_H
#define XT_UPDATE_H

#include "both.h"

struct xt_adamw {
    double lr, beta1, beta2, eps, decay; /* as the row has them */
    double scale;                        /* of gradients */
    double unbias1, unbias2;             /* 1 - beta1^step, 1 - beta2^step */
};

struct xt_sgd {
    double lr, momentum, dampening, decay; /* as the row has them */
    double scale;                          /* of gradients */
    int nesterov, first;                   /* truths; first: of the first step */
};

/* min(1, max / (norm + 1e-6)), as torch.nn.utils.clip_grad_norm_ has it. */
XT_BOTH double xt_clipping(double norm, double max) {
    double by = max / (norm + 1e-6);
    return by < 1 ? by : 1;
}

/* x^n by squaring, n >= 0: pow would not have the same bits everywhere. Off by n units of the last
   place at most. */
XT_BOTH double xt_power(double x, int64_t n) {
    double y = 1;
    for (; n > 0; n >>= 1) {
        if (n & 1) y *= x;
        x *= x;
    }
    return y;
}

#define T float
#define F(name) xt_##name##_f32
#define ROOT sqrtf
#include "update_type.h"
#undef T
#undef F
#undef ROOT

#define T double
#define F(name) xt_##name##_f64
#define ROOT sqrt
#include "update_type.h"
#undef T
#undef F
#undef ROOT

#endif
