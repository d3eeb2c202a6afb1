/* shape_test.c: views, copies, joins, and picking by position. */
#include "ops.h"

static void reshape_of_a_contiguous_tensor_is_a_view_and_of_a_transposed_one_a_copy(void **state) {
    struct xt_ctx *ctx = *state;
    struct xt_tensor *x = make(ctx, XT_F32, SHAPE(2, 3), (double[]){1, 2, 3, 4, 5, 6}, 0);
    struct xt_tensor *y = with_list(ctx, "reshape", x, SHAPE(3, -1));
    want_shape(y, SHAPE(3, 2));
    assert_true(xt_same_storage(x, y));
    struct xt_tensor *t = with_ints(ctx, "transpose", x, 2, (int64_t[]){0, 1});
    struct xt_tensor *z = with_list(ctx, "reshape", t, SHAPE(6));
    assert_false(xt_same_storage(x, z));
    want_near(ctx, z, (double[]){1, 4, 2, 5, 3, 6}, 0);
    struct xt_tensor *w = with_list(ctx, "reshape", t, SHAPE(3, 1, 2, 1));
    assert_true(xt_same_storage(x, w));
    want_near(ctx, w, (double[]){1, 4, 2, 5, 3, 6}, 0);
    xt_tensor_release(ctx, x);
    xt_tensor_release(ctx, y);
    xt_tensor_release(ctx, z);
    xt_tensor_release(ctx, t);
    xt_tensor_release(ctx, w);
}

static void reshape_that_does_not_fit_names_both(void **state) {
    struct xt_ctx *ctx = *state;
    struct xt_tensor *x = make(ctx, XT_F32, SHAPE(2, 3), NULL, 1);
    const struct xt_op *op;
    struct xt_args args;
    begin(ctx, &args, "reshape", &x, 1, &op);
    xt_args_list(&args, 0, (int64_t[]){4, -1}, 2);
    want_failure(ctx, op, &args, XT_SHAPE, "f32 2x3");
    begin(ctx, &args, "reshape", &x, 1, &op);
    xt_args_list(&args, 0, (int64_t[]){-1, -1}, 2);
    want_failure(ctx, op, &args, XT_SHAPE, "more than one -1");
    xt_tensor_release(ctx, x);
}

static void views_show_the_right_elements(void **state) {
    struct xt_ctx *ctx = *state;
    struct xt_tensor *x =
        make(ctx, XT_I64, SHAPE(2, 3, 2), (double[]){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}, 0);
    struct xt_tensor *y = with_list(ctx, "permute", x, SHAPE(2, 0, -2));
    want_shape(y, SHAPE(2, 2, 3));
    want_near(ctx, y, (double[]){0, 2, 4, 6, 8, 10, 1, 3, 5, 7, 9, 11}, 0);
    xt_tensor_release(ctx, y);
    y = with_ints(ctx, "slice", x, 3, (int64_t[]){1, 1, -1});
    want_shape(y, SHAPE(2, 2, 2));
    want_near(ctx, y, (double[]){2, 3, 4, 5, 8, 9, 10, 11}, 0);
    xt_tensor_release(ctx, y);
    y = with_ints(ctx, "slice", x, 3, (int64_t[]){1, 2, 1});
    want_shape(y, SHAPE(2, 0, 2));
    xt_tensor_release(ctx, y);
    y = with_ints(ctx, "select", x, 2, (int64_t[]){1, -1});
    want_shape(y, SHAPE(2, 2));
    want_near(ctx, y, (double[]){4, 5, 10, 11}, 0);
    xt_tensor_release(ctx, y);
    y = with_ints(ctx, "unsqueeze", x, 1, (int64_t[]){-1});
    want_shape(y, SHAPE(2, 3, 2, 1));
    struct xt_tensor *z = with_list(ctx, "squeeze", y, 0, (int64_t[]){0});
    want_shape(z, SHAPE(2, 3, 2));
    want_same_bits(ctx, x, z);
    xt_tensor_release(ctx, y);
    xt_tensor_release(ctx, z);
    y = with_list(ctx, "expand", x, SHAPE(2, -1, 3, 2));
    want_shape(y, SHAPE(2, 2, 3, 2));
    assert_int_equal(xt_strides(y)[0], 0);
    xt_tensor_release(ctx, y);
    xt_tensor_release(ctx, x);
}

static void positions_out_of_range_are_named_as_lua_counts(void **state) {
    struct xt_ctx *ctx = *state;
    struct xt_tensor *x = make(ctx, XT_F32, SHAPE(2, 3), NULL, 1);
    const struct xt_op *op;
    struct xt_args args;
    begin(ctx, &args, "select", &x, 1, &op);
    args.attrs[0].i = 1;
    args.attrs[1].i = 3;
    want_failure(ctx, op, &args, XT_ARGUMENT, "select: i is 4, dim 2 has size 3 (f32 2x3)");
    begin(ctx, &args, "slice", &x, 1, &op);
    args.attrs[0].i = 0;
    args.attrs[1].i = 0;
    args.attrs[2].i = 2;
    want_failure(ctx, op, &args, XT_ARGUMENT, "last is 3, dim 1 has size 2");
    begin(ctx, &args, "permute", &x, 1, &op);
    xt_args_list(&args, 0, (int64_t[]){1, 1}, 2);
    want_failure(ctx, op, &args, XT_ARGUMENT, "dimension 2 twice");
    begin(ctx, &args, "expand", &x, 1, &op);
    xt_args_list(&args, 0, (int64_t[]){4, 3}, 2);
    want_failure(ctx, op, &args, XT_SHAPE, "does not expand to 4x3");
    xt_tensor_release(ctx, x);
}

static const enum xt_dtype all_dtypes[] = {XT_F32, XT_BF16, XT_F16, XT_F64, XT_I32, XT_I64, XT_U8};

/* x permuted and made contiguous must equal indexing by hand, at any size and element width. */
static void copies_of_permuted_tensors_hold_the_same_elements(void **state) {
    struct xt_ctx *ctx = *state;
    static const int64_t shapes[][4] = {{2, 3, 4, 5},   {1, 70, 1, 65},  {3, 1, 40, 33},
                                        {4, 33, 2, 64}, {0, 3, 2, 2},    {1, 1, 1, 1},
                                        {2, 5, 37, 3},  {1, 200, 300, 2}};
    static const int64_t orders[][4] = {{0, 1, 2, 3}, {3, 2, 1, 0}, {0, 2, 1, 3},
                                        {1, 3, 0, 2}, {0, 1, 3, 2}, {2, 3, 0, 1}};
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++)
        for (size_t o = 0; o < sizeof orders / sizeof *orders; o++) {
            enum xt_dtype dtype = all_dtypes[(s * 6 + o) % 7];
            struct xt_tensor *x = make(ctx, dtype, 4, shapes[s], NULL, 5);
            struct xt_tensor *p = with_list(ctx, "permute", x, 4, orders[o]);
            struct xt_tensor *y;
            ok(ctx, xt_unary(ctx, "contiguous", p, &y));
            double *from = numbers(ctx, x), *to = numbers(ctx, y);
            int64_t i = 0, n[4], at[4];
            for (int d = 0; d < 4; d++) n[d] = shapes[s][orders[o][d]];
            for (at[0] = 0; at[0] < n[0]; at[0]++)
                for (at[1] = 0; at[1] < n[1]; at[1]++)
                    for (at[2] = 0; at[2] < n[2]; at[2]++)
                        for (at[3] = 0; at[3] < n[3]; at[3]++, i++) {
                            int64_t in[4], place = 0;
                            for (int d = 0; d < 4; d++) in[orders[o][d]] = at[d];
                            for (int d = 0; d < 4; d++) place = place * shapes[s][d] + in[d];
                            assert_true(to[i] == from[place]);
                        }
            free(from);
            free(to);
            xt_tensor_release(ctx, x);
            xt_tensor_release(ctx, p);
            xt_tensor_release(ctx, y);
        }
}

static void concat_and_stack_join_in_order(void **state) {
    struct xt_ctx *ctx = *state;
    struct xt_tensor *in[2] = {
        make(ctx, XT_F32, SHAPE(2, 2), (double[]){1, 2, 3, 4}, 0),
        make(ctx, XT_F32, SHAPE(2, 1), (double[]){5, 6}, 0),
    };
    const struct xt_op *op;
    struct xt_args args;
    struct xt_tensor *y;
    begin(ctx, &args, "concat", in, 2, &op);
    args.attrs[0].i = -1;
    ok(ctx, xt_call_run(ctx, op, &args, &y));
    want_shape(y, SHAPE(2, 3));
    want_near(ctx, y, (double[]){1, 2, 5, 3, 4, 6}, 0);
    xt_tensor_release(ctx, y);
    args.attrs[0].i = 0;
    want_failure(ctx, op, &args, XT_SHAPE, "tensor 1 is f32 2x2, tensor 2 is f32 2x1");
    begin(ctx, &args, "stack", (struct xt_tensor *[]){in[0], in[0]}, 2, &op);
    args.attrs[0].i = 2;
    ok(ctx, xt_call_run(ctx, op, &args, &y));
    want_shape(y, SHAPE(2, 2, 2));
    want_near(ctx, y, (double[]){1, 1, 2, 2, 3, 3, 4, 4}, 0);
    xt_tensor_release(ctx, y);
    xt_tensor_release(ctx, in[0]);
    xt_tensor_release(ctx, in[1]);
}

static void repeat_kv_repeats_each_head_beside_itself(void **state) {
    struct xt_ctx *ctx = *state;
    struct xt_tensor *v = make(ctx, XT_F32, SHAPE(1, 1, 2, 1), (double[]){10, 20}, 0), *var, *seed;
    ok(ctx, xt_var_new(ctx, v, &var));
    struct xt_tensor *y = with_ints(ctx, "repeat_kv", var, 1, (int64_t[]){2});
    want_shape(y, SHAPE(1, 1, 4, 1));
    want_near(ctx, y, (double[]){10, 10, 20, 20}, 0);
    seed = make(ctx, XT_F32, SHAPE(1, 1, 4, 1), (double[]){1, 1, 1, 1}, 0);
    ok(ctx, xt_backward(ctx, y, seed, false));
    want_near(ctx, xt_grad_of(var), (double[]){2, 2}, 0);
    xt_tensor_release(ctx, v);
    xt_tensor_release(ctx, var);
    xt_tensor_release(ctx, y);
    xt_tensor_release(ctx, seed);
}

static void gradients_agree_with_differences(void **state) {
    struct xt_ctx *ctx = *state;
    struct xt_tensor *x = make(ctx, XT_F64, SHAPE(2, 3, 4), NULL, 3);
    static const struct {
        const char *name;
        int n_list, n_ints;
        int64_t values[4];
    } rows[] = {
        {"reshape", 2, 0, {6, -1}},  {"permute", 3, 0, {2, 0, 1}}, {"transpose", 0, 2, {0, -1}},
        {"slice", 0, 3, {1, -2, 2}}, {"select", 0, 2, {2, -3}},    {"expand", 4, 0, {2, 2, 3, 4}},
        {"unsqueeze", 0, 1, {1}},    {"contiguous", 0, 0, {0}},    {"clone", 0, 0, {0}},
    };
    for (size_t r = 0; r < sizeof rows / sizeof *rows; r++) {
        const struct xt_op *op;
        struct xt_args args;
        begin(ctx, &args, rows[r].name, &x, 1, &op);
        if (rows[r].n_list) xt_args_list(&args, 0, rows[r].values, rows[r].n_list);
        for (int i = 0; i < rows[r].n_ints; i++) args.attrs[i].i = rows[r].values[i];
        want_gradient(ctx, op, &args, 0);
    }
    struct xt_tensor *in[3] = {x, make(ctx, XT_F64, SHAPE(2, 5, 4), NULL, 4), x};
    const struct xt_op *op;
    struct xt_args args;
    begin(ctx, &args, "concat", in, 3, &op);
    args.attrs[0].i = 1;
    for (int i = 0; i < 3; i++) want_gradient(ctx, op, &args, i);
    begin(ctx, &args, "stack", (struct xt_tensor *[]){x, x}, 2, &op);
    args.attrs[0].i = 3;
    want_gradient(ctx, op, &args, 1);
    xt_tensor_release(ctx, in[1]);
    in[1] = make(ctx, XT_F64, SHAPE(2, 3, 2, 5), NULL, 4);
    begin(ctx, &args, "repeat_kv", &in[1], 1, &op);
    args.attrs[0].i = 3;
    want_gradient(ctx, op, &args, 0);
    xt_tensor_release(ctx, in[1]);
    xt_tensor_release(ctx, x);
}

/* ---- positions held in tensors --------------------------------------------------------------- */

static void embedding_picks_rows_and_adds_gradients_in_order(void **state) {
    struct xt_ctx *ctx = *state;
    struct xt_tensor *w = make(ctx, XT_F32, SHAPE(3, 2), (double[]){1, 2, 3, 4, 5, 6}, 0), *var;
    struct xt_tensor *in[2] = {NULL, make(ctx, XT_I32, SHAPE(2, 2), (double[]){2, 0, 2, 2}, 0)};
    struct xt_tensor *y, *seed;
    ok(ctx, xt_var_new(ctx, w, &var));
    in[0] = var;
    for (int time = 1; time <= 2; time++) { /* the second time the gradient is added to */
        ok(ctx, xt_apply_name(ctx, "embedding", in, 2, &y));
        want_shape(y, SHAPE(2, 2, 2));
        want_near(ctx, y, (double[]){5, 6, 1, 2, 5, 6, 5, 6}, 0);
        seed = make(ctx, XT_F32, SHAPE(2, 2, 2), (double[]){1, 2, 3, 4, 5, 6, 7, 8}, 0);
        ok(ctx, xt_backward(ctx, y, seed, false));
        want_near(ctx, xt_grad_of(var), (double[]){3 * time, 4 * time, 0, 0, 13 * time, 16 * time},
                  0);
        xt_tensor_release(ctx, y);
        xt_tensor_release(ctx, seed);
    }
    xt_tensor_release(ctx, in[1]);
    in[1] = make(ctx, XT_I64, SHAPE(2, 2), (double[]){2, 0, 3, 1}, 0);
    const struct xt_op *op;
    struct xt_args args;
    begin(ctx, &args, "embedding", in, 2, &op);
    want_failure(ctx, op, &args, XT_VALUE, "embedding: ids[2][1] is 3, the vocabulary has 3");
    xt_tensor_release(ctx, in[1]);
    in[1] = make(ctx, XT_I64, SHAPE(0), NULL, 0);
    ok(ctx, xt_apply_name(ctx, "embedding", in, 2, &y));
    want_shape(y, SHAPE(0, 2));
    xt_zero_grad(ctx, var);
    seed = make(ctx, XT_F32, SHAPE(0, 2), NULL, 0);
    ok(ctx, xt_backward(ctx, y, seed, false));
    want_near(ctx, xt_grad_of(var), (double[]){0, 0, 0, 0, 0, 0}, 0);
    xt_tensor_release(ctx, seed);
    xt_tensor_release(ctx, y);
    xt_tensor_release(ctx, in[1]);
    xt_tensor_release(ctx, var);
    xt_tensor_release(ctx, w);
}

static void index_select_and_gather_pick_along_any_dim(void **state) {
    struct xt_ctx *ctx = *state;
    struct xt_tensor *x = make(ctx, XT_F64, SHAPE(2, 3), (double[]){1, 2, 3, 4, 5, 6}, 0);
    struct xt_tensor *in[2] = {x, make(ctx, XT_I64, SHAPE(4), (double[]){2, 0, 2, 2}, 0)}, *y;
    const struct xt_op *op;
    struct xt_args args;
    begin(ctx, &args, "index_select", in, 2, &op);
    args.attrs[0].i = 1;
    ok(ctx, xt_call_run(ctx, op, &args, &y));
    want_near(ctx, y, (double[]){3, 1, 3, 3, 6, 4, 6, 6}, 0);
    want_gradient(ctx, op, &args, 0);
    args.attrs[0].i = 0;
    want_failure(ctx, op, &args, XT_VALUE, "index[1] is 2, dim 1 of x has size 2");
    xt_tensor_release(ctx, y);
    xt_tensor_release(ctx, in[1]);
    in[1] = make(ctx, XT_I32, SHAPE(1, 3), (double[]){1, 0, 1}, 0);
    begin(ctx, &args, "gather", in, 2, &op);
    args.attrs[0].i = 0;
    ok(ctx, xt_call_run(ctx, op, &args, &y));
    want_near(ctx, y, (double[]){4, 2, 6}, 0);
    want_gradient(ctx, op, &args, 0);
    xt_tensor_release(ctx, y);
    xt_tensor_release(ctx, in[1]);
    in[1] = make(ctx, XT_I64, SHAPE(2, 4), (double[]){1, 1, 1, 0, 2, 2, 0, 1}, 0);
    begin(ctx, &args, "gather", in, 2, &op);
    args.attrs[0].i = 1;
    ok(ctx, xt_call_run(ctx, op, &args, &y));
    want_near(ctx, y, (double[]){2, 2, 2, 1, 6, 6, 4, 5}, 0);
    want_gradient(ctx, op, &args, 0);
    xt_tensor_release(ctx, y);
    xt_tensor_release(ctx, in[1]);
    xt_tensor_release(ctx, x);
}

static void embedding_gradients_are_the_same_bits_at_any_thread_count(void **state) {
    struct xt_ctx *ctx = *state;
    enum { N = 700, V = 90, D = 130 };
    struct xt_tensor *w = make(ctx, XT_F32, SHAPE(V, D), NULL, 1);
    struct xt_tensor *ids = make(ctx, XT_I64, SHAPE(N), NULL, 2), *first = NULL;
    int64_t *at = xt_data(ids);
    for (int i = 0; i < N; i++) at[i] = (int64_t)(xt_splitmix64((uint64_t)i) % V);
    for (int threads = 1; threads <= 5; threads++) {
        struct xt_tensor *var, *y, *seed = make(ctx, XT_F32, SHAPE(N, D), NULL, 3);
        xt_set_threads(ctx, threads);
        ok(ctx, xt_var_new(ctx, w, &var));
        ok(ctx, xt_apply_name(ctx, "embedding", (struct xt_tensor *[]){var, ids}, 2, &y));
        ok(ctx, xt_backward(ctx, y, seed, false));
        if (first)
            want_same_bits(ctx, first, xt_grad_of(var));
        else
            first = xt_tensor_retain(xt_grad_of(var));
        xt_tensor_release(ctx, var);
        xt_tensor_release(ctx, y);
        xt_tensor_release(ctx, seed);
    }
    xt_tensor_release(ctx, first);
    xt_tensor_release(ctx, ids);
    xt_tensor_release(ctx, w);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, open_ctx, close_ctx)

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(reshape_of_a_contiguous_tensor_is_a_view_and_of_a_transposed_one_a_copy),
        TEST(reshape_that_does_not_fit_names_both),
        TEST(views_show_the_right_elements),
        TEST(positions_out_of_range_are_named_as_lua_counts),
        TEST(copies_of_permuted_tensors_hold_the_same_elements),
        TEST(concat_and_stack_join_in_order),
        TEST(repeat_kv_repeats_each_head_beside_itself),
        TEST(gradients_agree_with_differences),
        TEST(embedding_picks_rows_and_adds_gradients_in_order),
        TEST(index_select_and_gather_pick_along_any_dim),
        TEST(embedding_gradients_are_the_same_bits_at_any_thread_count),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
