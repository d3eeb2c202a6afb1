/*
 * seed_test.c: seeds of all dropout sites of a long run are distinct, mixing is as documented, and
 * dropout keeps what it should of many elements.
 */
#include "ops.h"

enum { STEPS = 1000, LAYERS = 64, SITES = 4, RANKS = 8, ALL = STEPS * LAYERS * SITES * RANKS };

static int by_value(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

/* Seeds as the loop and the model make them: (base, step, rank) and then (layer, site). */
static void every_step_layer_site_and_rank_has_its_own_seed(void **state) {
    (void)state;
    static const uint64_t bases[] = {0, 1, 42, UINT64_MAX};
    uint64_t *seeds = malloc(ALL * sizeof *seeds);
    assert_non_null(seeds);
    for (size_t b = 0; b < sizeof bases / sizeof *bases; b++) {
        size_t n = 0;
        for (uint64_t step = 0; step < STEPS; step++)
            for (uint64_t rank = 0; rank < RANKS; rank++) {
                uint64_t of_step = xt_seed_mix(xt_seed_mix(bases[b], step), rank);
                for (uint64_t layer = 0; layer < LAYERS; layer++)
                    for (uint64_t site = 0; site < SITES; site++)
                        seeds[n++] = xt_seed_mix(xt_seed_mix(of_step, layer), site);
            }
        assert_int_equal(n, ALL);
        qsort(seeds, ALL, sizeof *seeds, by_value);
        size_t distinct = 1;
        for (size_t i = 1; i < ALL; i++) distinct += seeds[i] != seeds[i - 1];
        assert_int_equal(distinct, ALL);
    }
    free(seeds);
}

static void golden_seeds(void **state) {
    (void)state;
    uint64_t h = xt_seed_mix(42, 1);
    assert_true(h == 0xf34fe9248c9342e5u);
    assert_true(xt_seed_mix(h, 2) == 0xfcee76b4159be538u);
    assert_true(xt_seed_mix(xt_seed_mix(xt_seed_mix(h, 1), 1), 0xA77) == 0x6d8c53aa725bea28u);
}

/* Masks of neighbouring seeds, the first N elements: five standard deviations of the count. */
static void the_keep_rate_is_right_and_neighbours_are_unlike(void **state) {
    struct xt_ctx *ctx = *state;
    enum { N = 1000000 };
    static const double rates[] = {0.1, 0.3, 0.5, 0.9};
    for (size_t k = 0; k < sizeof rates / sizeof *rates; k++) {
        double p = rates[k], sigma = sqrt(N * p * (1 - p));
        double *before = NULL;
        for (uint64_t step = 0; step < 3; step++) {
            const struct xt_op *op;
            struct xt_args args;
            struct xt_tensor *mask;
            begin(ctx, &args, "dropout_mask", (struct xt_tensor *[]){NULL}, 1, &op);
            xt_args_list(&args, 0, (int64_t[]){N}, 1);
            args.attrs[1].f = p;
            args.attrs[2].seed = xt_seed_mix(42, step);
            ok(ctx, xt_call_run(ctx, op, &args, &mask));
            double *m = numbers(ctx, mask);
            double kept = 0, same = 0, value = (double)(float)(1 / (1 - p));
            for (int i = 0; i < N; i++) {
                assert_true(m[i] == 0 || m[i] == value);
                kept += m[i] != 0;
                same += before && (m[i] != 0) == (before[i] != 0);
            }
            assert_true(fabs(kept - N * (1 - p)) < 5 * sigma);
            double alike = p * p + (1 - p) * (1 - p); /* of two masks that have nothing in common */
            if (before) assert_true(fabs(same - N * alike) < 5 * sqrt(N * alike * (1 - alike)));
            free(before);
            before = m;
            xt_tensor_release(ctx, mask);
        }
        free(before);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_step_layer_site_and_rank_has_its_own_seed),
        cmocka_unit_test(golden_seeds),
        cmocka_unit_test_setup_teardown(the_keep_rate_is_right_and_neighbours_are_unlike, open_ctx,
                                        close_ctx),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
