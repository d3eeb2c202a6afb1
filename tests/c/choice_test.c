/* The algorithms of products (runtime/choice.c): the text, the set, and the committed table. */
#include "call.h"

static const char first[] = "PRODUCT(\"A GPU\", 130100, bf16, f32, 8, 16, 24, 1,\n"
                            "        24, 16, 16, 0, 0, 0, 1, 0, 0, 1, 64, 64, 64,\n"
                            "        0x1, 0x2, 0x3, 0x4,\n"
                            "        0x5, 0x6, 0x7, 0xffffffffffffffff)\n";

static struct xt_choice made_up_choice(int64_t m, uint64_t word) {
    struct xt_choice c;
    memset(&c, 0, sizeof c);
    strcpy(c.device, "A GPU");
    c.version = 130100;
    c.key.m = m, c.key.n = 16, c.key.k = 24, c.key.batch = 3;
    c.key.lda = 24, c.key.ldb = 16, c.key.ldc = 16;
    c.key.a_batch = 24 * m, c.key.c_batch = 16 * m;
    c.key.in = XT_BF16, c.key.out = XT_F32, c.key.b_turned = 1;
    c.key.a_align = 64, c.key.b_align = 16, c.key.c_align = 2;
    for (int i = 0; i < XT_CHOICE_WORDS; i++) c.words[i] = word + (uint64_t)i;
    return c;
}

static void a_row_is_written_as_it_is_read(void **state) {
    (void)state;
    struct xt_ctx *ctx = xt_ctx_new();
    struct xt_choices *set = xt_choices_new();
    const struct xt_choice **list = NULL;
    char text[XT_CHOICE_TEXT];
    int n = 0;
    ok(ctx, xt_choices_read(ctx, set, first, "a text", XT_FROM_TABLE));
    ok(ctx, xt_choices_list(ctx, set, &list, &n));
    assert_int_equal(n, 1);
    assert_int_equal(list[0]->key.k, 24);
    assert_int_equal(list[0]->key.a_turned, 1);
    assert_int_equal(list[0]->key.out, XT_F32);
    assert_true(list[0]->words[7] == UINT64_MAX);
    assert_int_equal(list[0]->from, XT_FROM_TABLE);
    xt_choice_write(list[0], text, sizeof text);
    assert_string_equal(text, first);
    free(list);
    xt_choices_free(set);
    xt_ctx_free(ctx);
}

/* Thousands of rows, in any order and some twice: each is found, by all that its key says, and the
   list is sorted. */
static void rows_are_found_by_their_whole_key(void **state) {
    (void)state;
    struct xt_ctx *ctx = xt_ctx_new();
    struct xt_choices *set = xt_choices_new();
    const struct xt_choice **list = NULL, *found;
    struct xt_choice c = made_up_choice(1, 0);
    const int count = 3000;
    int n = 0;
    assert_null(xt_choices_find(set, c.device, c.version, &c.key));
    for (int i = 0; i < 2 * count; i++) {
        const int64_t m = 1 + i * (int64_t)7 % count;
        c = made_up_choice(m, (uint64_t)(1000 * m + i / count));
        ok(ctx, xt_choices_put(ctx, set, &c));
    }
    ok(ctx, xt_choices_list(ctx, set, &list, &n));
    assert_int_equal(n, count);
    for (int i = 0; i < n; i++) assert_int_equal(list[i]->key.m, i + 1);
    free(list);
    for (int m = 1; m <= count; m++) {
        c = made_up_choice(m, 0);
        found = xt_choices_find(set, c.device, c.version, &c.key);
        assert_non_null(found);
        assert_true(found->words[0] == (uint64_t)(1000 * m + 1)); /* the later one */
    }
    assert_null(xt_choices_find(set, "A GP", c.version, &c.key));
    assert_null(xt_choices_find(set, c.device, c.version + 1, &c.key));
    c.key.c_align = 4;
    assert_null(xt_choices_find(set, c.device, c.version, &c.key));
    xt_choices_free(set);
    xt_ctx_free(ctx);
}

static void negative_and_large_numbers_come_back(void **state) {
    (void)state;
    struct xt_ctx *ctx = xt_ctx_new();
    struct xt_choices *set = xt_choices_new();
    struct xt_choice c = made_up_choice(123456789012345678, 0x8000000000000000u);
    char text[XT_CHOICE_TEXT];
    c.key.a_batch = -5, c.key.c_batch = 999999999999999999;
    memset(c.device, 'x', sizeof c.device - 1);
    xt_choice_write(&c, text, sizeof text);
    ok(ctx, xt_choices_read(ctx, set, text, "a text", XT_FROM_RUN));
    const struct xt_choice *found = xt_choices_find(set, c.device, c.version, &c.key);
    assert_non_null(found);
    assert_memory_equal(found->words, c.words, sizeof c.words);
    xt_choices_free(set);
    xt_ctx_free(ctx);
}

/* The first line of `first` with `what` in the place of `is`. */
static void refused(const char *is, const char *what, const char *sentence) {
    struct xt_ctx *ctx = xt_ctx_new();
    struct xt_choices *set = xt_choices_new();
    const struct xt_choice **list = NULL;
    char text[2 * sizeof first + 64];
    int n = 0;
    const char *at = strstr(first, is);
    assert_non_null(at);
    snprintf(text, sizeof text, "/* a comment\n of two lines */\n%s%.*s%s%s", first,
             (int)(at - first), first, what, at + strlen(is));
    assert_int_equal(xt_choices_read(ctx, set, text, "t.def", XT_FROM_TABLE), XT_FORMAT);
    if (!strstr(xt_error(ctx), sentence)) fail_msg("%s: %s", what, xt_error(ctx));
    ok(ctx, xt_choices_list(ctx, set, &list, &n));
    assert_int_equal(n, 0); /* not even the good row before it */
    free(list);
    xt_choices_free(set);
    xt_ctx_free(ctx);
}

static void a_malformed_row_is_refused_by_line_and_field(void **state) {
    (void)state;
    refused("PRODUCT", "PRODUKT", "t.def:7: 'PRODUCT(' is wanted");
    refused("\"A GPU\"", "\"\"", "t.def:7: a device's name is wanted");
    refused("\"A GPU\"", "A GPU", "t.def:7: '\"' is wanted");
    refused("130100", "0", "t.def:7: version, 1 or more, is wanted, not '0, bf16");
    refused("bf16", "bf17", "t.def:7: in, a float's dtype, is wanted");
    refused("f32", "i32", "t.def:7: out, a float's dtype, is wanted");
    refused(" 8,", " 8x,", "t.def:7: ',' is wanted");
    refused(" 8,", " -8,", "t.def:7: m, 1 or more, is wanted");
    refused(" 8,", " 8888888888888888888,", "t.def:7: m, 1 or more, is wanted");
    refused("24, 16, 16", "24, 0, 16", "t.def:8: ldb, 1 or more, is wanted");
    refused("1, 0, 0, 1", "1, 2, 0, 1", "t.def:8: b_turned, 0 to 1, is wanted");
    refused("64, 64, 64", "64, 64", "t.def:9: c_align, 1 to 64, is wanted, not '0x1");
    refused("0x4", "4", "t.def:9: a word 0x... is wanted");
    refused("0x4", "0x12345678901234567", "t.def:9: a word 0x... is wanted");
    refused("ffff)\n", "ffff", "t.def:10: ')' is wanted, not the end");
    refused("ffff)\n", "ffff)\n/* no end", "t.def:11: the end of a comment is wanted");
}

/* What a run used comes before the table, and what was chosen is to be looked up anew. */
static void a_runs_choices_come_first(void **state) {
    (void)state;
    struct xt_ctx *ctx = xt_ctx_new();
    struct xt_choices *set = NULL;
    ok(ctx, xt_choices_of(ctx, &set));
    struct xt_choice c = made_up_choice(8, 1);
    c.from = XT_FROM_TABLE;
    ok(ctx, xt_choices_put(ctx, set, &c));
    const int changed = xt_choices_changed(ctx);
    char text[XT_CHOICE_TEXT];
    c.words[3] = 77;
    xt_choice_write(&c, text, sizeof text);
    ok(ctx, xt_choices_use(ctx, text, "a run"));
    assert_int_not_equal(xt_choices_changed(ctx), changed);
    const struct xt_choice *found = xt_choices_find(set, c.device, c.version, &c.key);
    assert_non_null(found);
    assert_int_equal(found->from, XT_FROM_RUN);
    assert_true(found->words[3] == 77);
    xt_ctx_free(ctx);
}

/* kernels/products.def as it stands: whole, sorted, no product twice. */
static void the_committed_table_is_in_order(void **state) {
    (void)state;
    struct xt_ctx *ctx = xt_ctx_new();
    struct xt_choices *set = xt_choices_new();
    const struct xt_choice **list = NULL;
    FILE *file = fopen("kernels/products.def", "rb");
    assert_non_null(file);
    char *text = calloc(1, 1 << 22);
    assert_non_null(text);
    assert_true(fread(text, 1, (1 << 22) - 1, file) > 0 && feof(file));
    fclose(file);
    ok(ctx, xt_choices_read(ctx, set, text, "kernels/products.def", XT_FROM_TABLE));
    int n = 0, of_context = 0;
    ok(ctx, xt_choices_list(ctx, set, &list, &n));
    const char *at = strstr(text, "*/");
    assert_non_null(at);
    at += 2 + strspn(at + 2, "\n");
    for (int i = 0; i < n; i++) {
        char row[XT_CHOICE_TEXT];
        xt_choice_write(list[i], row, sizeof row);
        if (strncmp(at, row, strlen(row)) != 0)
            fail_msg("row %d is not where `./dev tune` would write it:\n%s", i + 1, row);
        at += strlen(row);
    }
    assert_int_equal(*at, 0);
    free(list);
    xt_choices_free(set);
    ok(ctx, xt_choices_of(ctx, &set));
    ok(ctx, xt_choices_list(ctx, set, &list, &of_context));
    assert_int_equal(of_context, n); /* the one that is compiled in */
    free(list);
    free(text);
    xt_ctx_free(ctx);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_row_is_written_as_it_is_read),
        cmocka_unit_test(rows_are_found_by_their_whole_key),
        cmocka_unit_test(negative_and_large_numbers_come_back),
        cmocka_unit_test(a_malformed_row_is_refused_by_line_and_field),
        cmocka_unit_test(a_runs_choices_come_first),
        cmocka_unit_test(the_committed_table_is_in_order),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
