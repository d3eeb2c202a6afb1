/*
 * backend.cu: the CUDA device: opening it, its memory, copies, and faults found on it.
 *
 * The CUDA runtime is linked in; the driver is looked for when the device is opened, so that the
 * program starts where there is none.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cublas.h"
#include "cuda.h"

#define FAULTS 256                    /* launches that may be under way with a fault unseen */
#define STAGES 8                      /* pinned buffers that copies to the device go through */
#define STAGE_BYTES ((size_t)1 << 20) /* of one of them */
#define INLINE_BYTES 256              /* up to this, bytes travel as a kernel's argument */
#define NO_FAULT 0xFFFFFFFFFFFFFFFFull

/* What a launch may find out of range. */
struct fault_note {
    const struct xt_op *op; /* NULL: never used */
    const char *name;       /* "ids" */
    char wanted[96];        /* "the vocabulary has 50257" */
    struct xt_where where;  /* the recipe's line */
};

struct stage {
    void *data;       /* pinned */
    cudaEvent_t done; /* after the copy out of it */
    bool under_way;   /* done was recorded */
};

struct cuda {
    int device;
    cudaStream_t stream;
    struct cudaDeviceProp properties;
    int runtime, driver;       /* versions, 1000 * major + 10 * minor */
    struct xt_cublas *cublas;  /* cublas.cu's */
    unsigned long long *worst; /* FAULTS of them, on the device */
    volatile int *any_host;    /* mapped: some fault was noted */
    int *any_device;           /* the same word, as the device sees it */
    struct fault_note notes[FAULTS];
    int next_fault;
    struct xt_cuda_counter *counter; /* on the device */
    struct stage stages[STAGES];
    int next_stage;
};

static struct cuda *cuda_of(const struct xt_ctx *ctx) {
    return (struct cuda *)xt_backend_state(ctx, XT_CUDA);
}

enum xt_status xt_cuda_status(struct xt_ctx *ctx, cudaError_t error) {
    if (error == cudaSuccess) return XT_OK;
    return xt_fail(ctx, error == cudaErrorMemoryAllocation ? XT_MEMORY : XT_DEVICE, "CUDA: %s",
                   cudaGetErrorString(error));
}

cudaStream_t xt_cuda_stream(const struct xt_ctx *ctx) {
    return cuda_of(ctx)->stream;
}

int xt_cuda_multiprocessors(const struct xt_ctx *ctx) {
    return cuda_of(ctx)->properties.multiProcessorCount;
}

const char *xt_cuda_name(const struct xt_ctx *ctx) {
    return cuda_of(ctx)->properties.name;
}

int xt_cuda_capability(const struct xt_ctx *ctx) {
    return 10 * cuda_of(ctx)->properties.major + cuda_of(ctx)->properties.minor;
}

struct xt_cuda_counter *xt_cuda_counter(const struct xt_ctx *ctx) {
    return cuda_of(ctx)->counter;
}

struct xt_cublas **xt_cuda_cublas(const struct xt_ctx *ctx) {
    return &cuda_of(ctx)->cublas;
}

/* ---- opening --------------------------------------------------------------------------------- */

static void close_cuda(struct xt_ctx *ctx, void *state) {
    struct cuda *c = (struct cuda *)state;
    (void)ctx;
    if (c->cublas) xt_cublas_free(c->cublas);
    for (int i = 0; i < STAGES; i++) {
        if (c->stages[i].done) cudaEventDestroy(c->stages[i].done);
        if (c->stages[i].data) cudaFreeHost(c->stages[i].data);
    }
    if (c->worst) cudaFree(c->worst);
    if (c->counter) cudaFree(c->counter);
    if (c->any_host) cudaFreeHost((void *)c->any_host);
    if (c->stream) cudaStreamDestroy(c->stream);
    free(c);
}

static enum xt_status open_cuda(struct xt_ctx *ctx, void **state) {
    int count = 0;
    cudaError_t error = cudaGetDeviceCount(&count);
    if (error != cudaSuccess || count == 0)
        return xt_fail(ctx, XT_DEVICE, "%s",
                       error == cudaSuccess ? "no GPU" : cudaGetErrorString(error));
    struct cuda *c = (struct cuda *)calloc(1, sizeof *c);
    if (!c) return xt_fail(ctx, XT_MEMORY, "out of memory: the records of a device");
    *state = c;
    XT_CUDA_TRY(cudaGetDevice(&c->device));
    XT_CUDA_TRY(cudaGetDeviceProperties(&c->properties, c->device));
    XT_CUDA_TRY(cudaRuntimeGetVersion(&c->runtime));
    XT_CUDA_TRY(cudaDriverGetVersion(&c->driver));
    XT_CUDA_TRY(cudaStreamCreateWithFlags(&c->stream, cudaStreamNonBlocking));
    XT_CUDA_TRY(cudaMalloc((void **)&c->worst, FAULTS * sizeof *c->worst));
    XT_CUDA_TRY(cudaMemset(c->worst, 0xFF, FAULTS * sizeof *c->worst));
    XT_CUDA_TRY(cudaMalloc((void **)&c->counter, sizeof *c->counter));
    XT_CUDA_TRY(cudaMemset(c->counter, 0, sizeof *c->counter));
    XT_CUDA_TRY(cudaHostAlloc((void **)&c->any_host, sizeof(int), cudaHostAllocMapped));
    *c->any_host = 0;
    XT_CUDA_TRY(cudaHostGetDevicePointer((void **)&c->any_device, (void *)c->any_host, 0));
    for (int i = 0; i < STAGES; i++) {
        XT_CUDA_TRY(cudaHostAlloc(&c->stages[i].data, STAGE_BYTES, cudaHostAllocDefault));
        XT_CUDA_TRY(cudaEventCreateWithFlags(&c->stages[i].done, cudaEventDisableTiming));
    }
    return XT_OK;
}

static void describe(struct xt_ctx *ctx, char *text, size_t bytes) {
    const struct cuda *c = cuda_of(ctx);
    snprintf(text, bytes,
             "%s, compute capability %d.%d, %d multiprocessors, %.1f GiB; CUDA %d.%d, driver for "
             "%d.%d",
             c->properties.name, c->properties.major, c->properties.minor,
             c->properties.multiProcessorCount, (double)c->properties.totalGlobalMem / 1073741824.0,
             c->runtime / 1000, c->runtime % 1000 / 10, c->driver / 1000, c->driver % 1000 / 10);
}

/* ---- memory ---------------------------------------------------------------------------------- */

static void *allocate(struct xt_ctx *ctx, size_t bytes) {
    void *data = NULL;
    (void)ctx;
    if (cudaMalloc(&data, bytes) == cudaSuccess) return data;
    cudaGetLastError(); /* out of memory is no lasting error */
    return NULL;
}

static void release(struct xt_ctx *ctx, void *data) {
    cudaStreamSynchronize(cuda_of(ctx)->stream);
    cudaFree(data);
}

static enum xt_status fill(struct xt_ctx *ctx, void *data, int byte, size_t bytes) {
    return xt_cuda_status(ctx, cudaMemsetAsync(data, byte, bytes, cuda_of(ctx)->stream));
}

/* ---- faults ---------------------------------------------------------------------------------- */

struct xt_cuda_fault xt_cuda_fault(struct xt_ctx *ctx, const struct xt_op *op, const char *name,
                                   const char *wanted) {
    struct cuda *c = cuda_of(ctx);
    int k = c->next_fault;
    c->next_fault = (k + 1) % FAULTS;
    c->notes[k].op = op;
    c->notes[k].name = name;
    snprintf(c->notes[k].wanted, sizeof c->notes[k].wanted, "%s", wanted);
    c->notes[k].where = xt_here(ctx);
    struct xt_cuda_fault fault = {c->worst + k, c->any_device};
    return fault;
}

/* After a wait: fails with the oldest fault there is, and forgets all. */
static enum xt_status check_faults(struct xt_ctx *ctx) {
    struct cuda *c = cuda_of(ctx);
    if (!*c->any_host) return XT_OK;
    unsigned long long worst[FAULTS];
    XT_CUDA_TRY(cudaMemcpy(worst, c->worst, sizeof worst, cudaMemcpyDeviceToHost));
    XT_CUDA_TRY(cudaMemset(c->worst, 0xFF, sizeof worst));
    *c->any_host = 0;
    for (int i = 0; i < FAULTS; i++) {
        int k = (c->next_fault + i) % FAULTS;
        if (worst[k] == NO_FAULT) continue;
        const struct fault_note *n = &c->notes[k];
        return xt_fail(ctx, XT_VALUE, "%s: %s[%lld] is %d, %s (%s:%d; found on the GPU, later)",
                       n->op->name, n->name, (long long)(worst[k] >> 32) + 1,
                       (int)(int32_t)(uint32_t)worst[k], n->wanted,
                       n->where.file ? n->where.file : "?", n->where.line);
    }
    return XT_OK;
}

static enum xt_status finish(struct xt_ctx *ctx) {
    xt_count_wait(ctx, XT_CUDA);
    XT_CUDA_TRY(cudaStreamSynchronize(cuda_of(ctx)->stream));
    return check_faults(ctx);
}

/* ---- copies ---------------------------------------------------------------------------------- */

static enum xt_status to_host(struct xt_ctx *ctx, void *host, const void *data, size_t bytes) {
    if (bytes)
        XT_CUDA_TRY(
            cudaMemcpyAsync(host, data, bytes, cudaMemcpyDeviceToHost, cuda_of(ctx)->stream));
    return finish(ctx);
}

struct inline_bytes {
    unsigned char at[INLINE_BYTES];
};

static __global__ void write_bytes(unsigned char *to,
                                   const __grid_constant__ struct inline_bytes from, int n) {
    int i = (int)threadIdx.x;
    if (i < n) to[i] = from.at[i];
}

/* The next pinned buffer, once the copy out of it is done. */
static enum xt_status next_stage(struct xt_ctx *ctx, struct stage **out) {
    struct cuda *c = cuda_of(ctx);
    struct stage *s = &c->stages[c->next_stage];
    c->next_stage = (c->next_stage + 1) % STAGES;
    if (s->under_way && cudaEventQuery(s->done) != cudaSuccess) {
        cudaGetLastError();
        xt_count_wait(ctx, XT_CUDA);
        XT_CUDA_TRY(cudaEventSynchronize(s->done));
    }
    s->under_way = false;
    *out = s;
    return XT_OK;
}

static enum xt_status from_host(struct xt_ctx *ctx, void *data, const void *host, size_t bytes) {
    struct cuda *c = cuda_of(ctx);
    if (bytes == 0) return XT_OK;
    if (bytes <= INLINE_BYTES) {
        struct inline_bytes b;
        memcpy(b.at, host, bytes);
        write_bytes<<<1, INLINE_BYTES, 0, c->stream>>>((unsigned char *)data, b, (int)bytes);
        return xt_cuda_launched(ctx);
    }
    for (size_t at = 0; at < bytes; at += STAGE_BYTES) {
        size_t n = bytes - at < STAGE_BYTES ? bytes - at : STAGE_BYTES;
        struct stage *s;
        XT_TRY(next_stage(ctx, &s));
        memcpy(s->data, (const char *)host + at, n);
        XT_CUDA_TRY(
            cudaMemcpyAsync((char *)data + at, s->data, n, cudaMemcpyHostToDevice, c->stream));
        XT_CUDA_TRY(cudaEventRecord(s->done, c->stream));
        s->under_way = true;
    }
    return XT_OK;
}

/* ---- the backend ----------------------------------------------------------------------------- */

static const struct xt_kernel *const tables[] = {
    xt_cuda_pointwise_kernels,
    xt_cuda_pointwise_grad_kernels,
    xt_cuda_shape_kernels,
    xt_cuda_reduce_kernels,
    xt_cuda_softmax_kernels,
    xt_cuda_cumsum_kernels,
    xt_cuda_topk_kernels,
    xt_cuda_index_kernels,
    xt_cuda_gather_kernels,
    xt_cuda_linalg_kernels,
    xt_cuda_norm_kernels,
    xt_cuda_rope_kernels,
    xt_cuda_norm_rope_kernels,
    xt_cuda_loss_kernels,
    xt_cuda_linear_loss_kernels,
    xt_cuda_attention_kernels,
    xt_cuda_attention_softmax_kernels,
    xt_cuda_mlp_kernels,
    xt_cuda_random_kernels,
    xt_cuda_optim_kernels,
    NULL,
};

extern "C" {
extern const struct xt_backend xt_backend_cuda;
const struct xt_backend xt_backend_cuda = {
    .name = "cuda",
    .kernels = tables,
    .open = open_cuda,
    .close = close_cuda,
    .allocate = allocate,
    .release = release,
    .to_host = to_host,
    .from_host = from_host,
    .fill = fill,
    .finish = finish,
    .describe = describe,
    .product_library = xt_cublas_describe,
};
}
