/*
 * update_type.h: the updates of one element in one arithmetic: T is float or double. The CPU and
 * the GPU include this once for each, with F(name) naming the functions and ROOT the square root,
 * and compile it without fused multiply-adds, so that both get the same bits.
 */

/* What adamw does to an element, rounded once from f64. */
struct F(adamw_factors) {
    T scale;      /* of gradients */
    T keep;       /* 1 - lr * weight_decay */
    T blend;      /* 1 - beta1 */
    T beta, rest; /* beta2 and 1 - beta2 */
    T eps;
    T rate; /* -lr / (1 - beta1^step) */
    T root; /* sqrt(1 - beta2^step) */
};

XT_BOTH struct F(adamw_factors) F(adamw_factors_of)(const struct xt_adamw *a) {
    struct F(adamw_factors) f;
    f.scale = (T)a->scale;
    f.keep = (T)(1 - a->lr * a->decay);
    f.blend = (T)(1 - a->beta1);
    f.beta = (T)a->beta2;
    f.rest = (T)(1 - a->beta2);
    f.eps = (T)a->eps;
    f.rate = (T)(-a->lr / a->unbias1);
    f.root = (T)sqrt(a->unbias2);
    return f;
}

/*
 * p *= 1 - lr * weight_decay
 * m += (1 - beta1) * (g - m)
 * v = beta2 * v + (1 - beta2) * g * g
 * p -= lr / (1 - beta1^step) * m / (sqrt(v) / sqrt(1 - beta2^step) + eps)
 */
XT_BOTH void F(adamw_element)(const struct F(adamw_factors) * f, T g, T *p, T *m, T *v) {
    const T e = g * f->scale, q = *p * f->keep;
    const T moved = *m + f->blend * (e - *m);
    const T square = f->beta * *v + f->rest * e * e;
    *m = moved;
    *v = square;
    *p = q + f->rate * moved / (ROOT(square) / f->root + f->eps);
}

/* What sgd does to an element. */
struct F(sgd_factors) {
    T scale, lr, decay; /* of gradients; the learning rate; weight_decay */
    T keep, blend;      /* of the buffer and of the gradient that joins it */
    T from_g, from_b;   /* of the two in the step */
};

XT_BOTH struct F(sgd_factors) F(sgd_factors_of)(const struct xt_sgd *s) {
    struct F(sgd_factors) f;
    f.scale = (T)s->scale;
    f.lr = (T)s->lr;
    f.decay = (T)s->decay;
    f.keep = s->first ? 0 : (T)s->momentum;
    f.blend = s->first ? 1 : (T)(1 - s->dampening);
    f.from_g = s->nesterov ? 1 : 0;
    f.from_b = s->nesterov ? (T)s->momentum : 1;
    return f;
}

/*
 * g += weight_decay * p
 * b = momentum * b + (1 - dampening) * g, at step 1 b = g
 * p -= lr * (nesterov: g + momentum * b, else b)
 */
XT_BOTH void F(sgd_element)(const struct F(sgd_factors) * f, T g, T *p, T *b) {
    const T e = g * f->scale + f->decay * *p;
    const T moved = f->keep * *b + f->blend * e;
    *b = moved;
    *p -= f->lr * (f->from_g * e + f->from_b * moved);
}

/* Without momentum, when there is no buffer. */
XT_BOTH void F(sgd_plain_element)(const struct F(sgd_factors) * f, T g, T *p) {
    *p -= f->lr * (g * f->scale + f->decay * *p);
}
