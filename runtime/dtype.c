/* dtype.c: the element types. */
#include <string.h>

#include "op.h"

static const struct {
    const char *name;
    size_t bytes;
    bool is_float;
} dtypes[] = {
#define XT_DTYPE_ROW(name, text, bytes, is_float) {text, bytes, is_float},
    XT_DTYPE_LIST(XT_DTYPE_ROW)
#undef XT_DTYPE_ROW
};

const char *xt_dtype_name(enum xt_dtype dtype) {
    return dtypes[dtype].name;
}

bool xt_dtype_parse(const char *text, enum xt_dtype *out) {
    for (int i = 0; i < XT_DTYPE_COUNT; i++) {
        if (strcmp(dtypes[i].name, text) != 0) continue;
        *out = (enum xt_dtype)i;
        return true;
    }
    return false;
}

size_t xt_dtype_bytes(enum xt_dtype dtype) {
    return dtypes[dtype].bytes;
}

bool xt_dtype_is_float(enum xt_dtype dtype) {
    return dtypes[dtype].is_float;
}
