/*
 * onednn.c: oneDNN, opened at run time and only when asked: matrix products of bf16 on processors
 * that have instructions for them. Everywhere else the kernels' own product is used, which on f32
 * is no slower. XT_ONEDNN=0 in the environment switches it off.
 *
 * A primitive is not shared between threads (its scratchpad is one), and is made while oneDNN sees
 * one thread only, so that it never shares out its own work: the bits then depend on the shape
 * alone.
 */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <omp.h>

#include "context.h"

/* The C API of oneDNN 2.x and 3.x (include/oneapi/dnnl/dnnl.h): what is used of it. In 2.x memory
   and operation descriptors are structs of 696 and 2800 bytes at most, in 3.x they are handles. */
enum { DNNL_CPU = 1, DNNL_IN_ORDER = 1, DNNL_BF16 = 2, DNNL_F32 = 3 };
enum { ARG_SRC = 1, ARG_DST = 17, ARG_WEIGHTS = 33 };

union descriptor {
    void *handle;       /* 3.x */
    int64_t bytes[512]; /* 2.x, with room to spare */
};

struct exec_arg {
    int arg;
    void *memory;
};

struct version {
    int major, minor, patch;
};

struct functions {
    const struct version *(*version)(void);
    int (*engine_create)(void **engine, int kind, size_t index);
    int (*engine_destroy)(void *engine);
    int (*stream_create)(void **stream, void *engine, unsigned flags);
    int (*stream_destroy)(void *stream);
    int (*stream_wait)(void *stream);
    int (*memory_create)(void **memory, const void *descriptor, void *engine, void *data);
    int (*memory_set)(void *memory, void *data); /* dnnl_memory_set_data_handle */
    int (*memory_destroy)(void *memory);
    int (*primitive_create)(void **primitive, const void *primitive_desc);
    int (*primitive_execute)(const void *primitive, void *stream, int n,
                             const struct exec_arg *args);
    int (*primitive_destroy)(void *primitive);
    int (*desc_destroy)(void *primitive_desc); /* dnnl_primitive_desc_destroy */
    /* 2.x */
    int (*init_by_strides)(void *md, int ndim, const int64_t *dims, int type,
                           const int64_t *strides);
    int (*matmul_init)(void *op, const void *src, const void *weights, const void *bias,
                       const void *dst);
    int (*desc_create)(void **desc, const void *op, const void *attr, void *engine,
                       const void *hint);
    /* 3.x */
    int (*create_with_strides)(void **md, int ndim, const int64_t *dims, int type,
                               const int64_t *strides);
    int (*md_destroy)(void *md);
    int (*matmul_create)(void **desc, void *engine, const void *src, const void *weights,
                         const void *bias, const void *dst, const void *attr);
};

struct xt_onednn_job {
    struct xt_onednn_product product;
    void *primitive; /* NULL: an empty place */
    void *a, *b, *c; /* its memory objects */
};

/* What one thread owns. The jobs made last stay; more shapes than places are made anew. */
struct thread {
    void *stream;
    int next;
    struct xt_onednn_job jobs[32];
};

struct xt_onednn {
    void *library; /* NULL: not found, or switched off */
    char path[96];
    bool off;    /* by XT_ONEDNN=0 */
    bool serves; /* bf16 products, on this processor */
    struct functions f;
    void *engine; /* made with the first thread */
    struct thread **threads;
    int n_threads;
};

/* ---- opening --------------------------------------------------------------------------------- */

static bool find(void *library, const char *name, void *function, bool needed) {
    void *found = dlsym(library, name);
    memcpy(function, &found, sizeof found);
    return found || !needed;
}

static bool find_all(void *library, struct functions *f) {
    if (!find(library, "dnnl_version", &f->version, true)) return false;
    const int major = f->version()->major;
    if (major != 2 && major != 3) return false;
    const bool two = major == 2;
    return find(library, "dnnl_engine_create", &f->engine_create, true) &&
           find(library, "dnnl_engine_destroy", &f->engine_destroy, true) &&
           find(library, "dnnl_stream_create", &f->stream_create, true) &&
           find(library, "dnnl_stream_destroy", &f->stream_destroy, true) &&
           find(library, "dnnl_stream_wait", &f->stream_wait, true) &&
           find(library, "dnnl_memory_create", &f->memory_create, true) &&
           find(library, "dnnl_memory_set_data_handle", &f->memory_set, true) &&
           find(library, "dnnl_memory_destroy", &f->memory_destroy, true) &&
           find(library, "dnnl_primitive_create", &f->primitive_create, true) &&
           find(library, "dnnl_primitive_execute", &f->primitive_execute, true) &&
           find(library, "dnnl_primitive_destroy", &f->primitive_destroy, true) &&
           find(library, "dnnl_primitive_desc_destroy", &f->desc_destroy, true) &&
           find(library, "dnnl_memory_desc_init_by_strides", &f->init_by_strides, two) &&
           find(library, "dnnl_matmul_desc_init", &f->matmul_init, two) &&
           find(library, "dnnl_primitive_desc_create", &f->desc_create, two) &&
           find(library, "dnnl_memory_desc_create_with_strides", &f->create_with_strides, !two) &&
           find(library, "dnnl_memory_desc_destroy", &f->md_destroy, !two) &&
           find(library, "dnnl_matmul_primitive_desc_create", &f->matmul_create, !two);
}

static bool processor_has_bf16(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512bf16");
#else
    return false;
#endif
}

/* The library's state, opened on the first call; NULL when memory is out. */
static struct xt_onednn *opened(struct xt_ctx *ctx) {
    static const char *const names[] = {"libdnnl.so.3", "libdnnl.so.2"};
    if (ctx->onednn) return ctx->onednn;
    struct xt_onednn *o = calloc(1, sizeof *o);
    if (!o) return NULL;
    ctx->onednn = o;
    const char *asked = getenv("XT_ONEDNN");
    o->off = asked && strcmp(asked, "0") == 0;
    for (size_t i = 0; i < sizeof names / sizeof *names && !o->off && !o->library; i++) {
        void *library = dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
        if (!library) continue;
        if (!find_all(library, &o->f)) {
            dlclose(library);
            continue;
        }
        Dl_info where;
        void *symbol;
        memcpy(&symbol, &o->f.version, sizeof symbol);
        const bool known = dladdr(symbol, &where) != 0 && where.dli_fname;
        snprintf(o->path, sizeof o->path, "%s", known ? where.dli_fname : names[i]);
        o->library = library;
    }
    o->serves = o->library && processor_has_bf16() && strcmp(ctx->isa, "v4") == 0;
    return o;
}

static void drop_job(const struct functions *f, struct xt_onednn_job *job) {
    if (job->a) f->memory_destroy(job->a);
    if (job->b) f->memory_destroy(job->b);
    if (job->c) f->memory_destroy(job->c);
    if (job->primitive) f->primitive_destroy(job->primitive);
    memset(job, 0, sizeof *job);
}

void xt_onednn_close(struct xt_ctx *ctx) {
    struct xt_onednn *o = ctx->onednn;
    if (!o) return;
    for (int t = 0; t < o->n_threads; t++) {
        struct thread *thread = o->threads[t];
        for (size_t i = 0; i < sizeof thread->jobs / sizeof *thread->jobs; i++)
            drop_job(&o->f, &thread->jobs[i]);
        if (thread->stream) o->f.stream_destroy(thread->stream);
        free(thread);
    }
    if (o->engine) o->f.engine_destroy(o->engine);
    free(o->threads);
    free(o); /* the library stays: it may have left things in other threads */
    ctx->onednn = NULL;
}

enum xt_status xt_library_onednn(struct xt_ctx *ctx, struct xt_library *out) {
    const struct xt_onednn *o = opened(ctx);
    if (!o) return xt_fail(ctx, XT_MEMORY, "oneDNN: out of memory");
    *out = (struct xt_library){.name = "oneDNN", .found = o->library != NULL};
    if (o->off) {
        snprintf(out->detail, sizeof out->detail, "switched off by XT_ONEDNN=0");
    } else if (!o->library) {
        snprintf(out->detail, sizeof out->detail, "not found; the package libdnnl2 brings it");
    } else {
        const struct version *v = o->f.version();
        snprintf(out->version, sizeof out->version, "%d.%d.%d", v->major, v->minor, v->patch);
        snprintf(out->detail, sizeof out->detail, "%s, %s", o->path,
                 o->serves ? "multiplies bf16"
                           : "not used: this processor has no bf16 instructions");
    }
    return XT_OK;
}

bool xt_onednn_serves(struct xt_ctx *ctx) {
    /* The library is opened only where it may serve: that takes milliseconds. */
    if (!ctx->onednn && !processor_has_bf16()) return false;
    const struct xt_onednn *o = opened(ctx);
    return o && o->serves;
}

/* ---- products -------------------------------------------------------------------------------- */

static bool describe(const struct functions *f, enum xt_dtype dtype, int64_t rows, int64_t cols,
                     int64_t row, int64_t col, union descriptor *out) {
    const int64_t dims[12] = {rows, cols}, strides[12] = {row, col};
    const int type = dtype == XT_BF16 ? DNNL_BF16 : DNNL_F32;
    if (f->create_with_strides && !f->init_by_strides)
        return f->create_with_strides(&out->handle, 2, dims, type, strides) == 0;
    return f->init_by_strides(out, 2, dims, type, strides) == 0;
}

static bool make_job(const struct xt_onednn *o, const struct xt_onednn_product *p,
                     struct xt_onednn_job *job) {
    const struct functions *f = &o->f;
    const bool three = !f->init_by_strides;
    static const union descriptor none;
    union descriptor a = none, b = none, c = none, op = none;
    void *desc = NULL;
    bool made = describe(f, p->dtype, p->m, p->k, p->a_row, p->a_col, &a) &&
                describe(f, p->dtype, p->k, p->n, p->b_row, p->b_col, &b) &&
                describe(f, XT_F32, p->m, p->n, p->n, 1, &c);
    const void *pa = three ? a.handle : &a, *pb = three ? b.handle : &b;
    const void *pc = three ? c.handle : &c;
    if (made && three)
        made = f->matmul_create(&desc, o->engine, pa, pb, NULL, pc, NULL) == 0;
    else if (made)
        made = f->matmul_init(&op, pa, pb, NULL, pc) == 0 &&
               f->desc_create(&desc, &op, NULL, o->engine, NULL) == 0;
    job->product = *p;
    made = made && f->primitive_create(&job->primitive, desc) == 0 &&
           f->memory_create(&job->a, pa, o->engine, NULL) == 0 &&
           f->memory_create(&job->b, pb, o->engine, NULL) == 0 &&
           f->memory_create(&job->c, pc, o->engine, NULL) == 0;
    if (!made) drop_job(f, job);
    if (desc) f->desc_destroy(desc);
    if (three && a.handle) f->md_destroy(a.handle);
    if (three && b.handle) f->md_destroy(b.handle);
    if (three && c.handle) f->md_destroy(c.handle);
    return made;
}

static struct thread *thread_of(struct xt_onednn *o, int index) {
    if (!o->engine && o->f.engine_create(&o->engine, DNNL_CPU, 0) != 0) return NULL;
    while (o->n_threads <= index) {
        struct thread **more =
            realloc(o->threads, (size_t)(o->n_threads + 1) * sizeof(struct thread *));
        if (!more) return NULL;
        o->threads = more;
        struct thread *thread = calloc(1, sizeof *thread);
        if (!thread) return NULL;
        if (o->f.stream_create(&thread->stream, o->engine, DNNL_IN_ORDER) != 0) {
            free(thread);
            return NULL;
        }
        o->threads[o->n_threads++] = thread;
    }
    return o->threads[index];
}

static bool same_product(const struct xt_onednn_product *a, const struct xt_onednn_product *b) {
    return a->dtype == b->dtype && a->m == b->m && a->n == b->n && a->k == b->k &&
           a->a_row == b->a_row && a->a_col == b->a_col && a->b_row == b->b_row &&
           a->b_col == b->b_col;
}

struct xt_onednn_job *xt_onednn_prepare(struct xt_ctx *ctx, int thread,
                                        const struct xt_onednn_product *product) {
    struct xt_onednn *o = opened(ctx);
    struct thread *t = o && o->library ? thread_of(o, thread) : NULL;
    if (!t) return NULL;
    const int places = (int)(sizeof t->jobs / sizeof *t->jobs);
    for (int i = 0; i < places; i++)
        if (t->jobs[i].primitive && same_product(&t->jobs[i].product, product)) return &t->jobs[i];
    struct xt_onednn_job *job = &t->jobs[t->next];
    t->next = (t->next + 1) % places;
    drop_job(&o->f, job);
    const int threads = omp_get_max_threads();
    omp_set_num_threads(1);
    const bool made = make_job(o, product, job);
    omp_set_num_threads(threads);
    return made ? job : NULL;
}

bool xt_onednn_run(struct xt_ctx *ctx, int thread, struct xt_onednn_job *job, const void *a,
                   const void *b, float *c) {
    const struct functions *f = &ctx->onednn->f;
    void *stream = ctx->onednn->threads[thread]->stream;
    const struct exec_arg args[] = {{ARG_SRC, job->a}, {ARG_WEIGHTS, job->b}, {ARG_DST, job->c}};
    const int threads = omp_get_max_threads();
    omp_set_num_threads(1); /* of the team this thread would start: nobody else's */
    const bool ran =
        f->memory_set(job->a, (void *)(uintptr_t)a) == 0 &&
        f->memory_set(job->b, (void *)(uintptr_t)b) == 0 && f->memory_set(job->c, c) == 0 &&
        f->primitive_execute(job->primitive, stream, 3, args) == 0 && f->stream_wait(stream) == 0;
    omp_set_num_threads(threads);
    return ran;
}
