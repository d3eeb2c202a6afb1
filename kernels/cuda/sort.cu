/*
 * sort.cu: a stable radix sort, 8 bits a pass: counts of each digit for each block of BLOCK places,
 * their running sums digit by digit, then each block puts its places where they go. Places are
 * numbers of keys below SLAB.
 *
 * Traffic, a pass: the places and their keys read twice and the places written, 28 bytes each at
 * most.
 */
#include "sort.h"

#define SLAB ((int64_t)1 << 22) /* places sorted at a time */
#define THREADS 256
#define WARPS (THREADS / 32)
#define DIGITS 256 /* a thread of a block for each */
#define BLOCK 2048
#define ROUNDS (BLOCK / THREADS) /* of 32 places for each warp */
#define SCANNERS 1024            /* threads of the one block that sums counts */

/* ---- kernels --------------------------------------------------------------------------------- */

static __global__ void count_digits(const uint64_t *keys, const uint32_t *order, int n, int shift,
                                    uint32_t *counts, int blocks) {
    __shared__ uint32_t count[DIGITS];
    count[threadIdx.x] = 0;
    __syncthreads();
    int begin = (int)blockIdx.x * BLOCK;
    for (int i = begin + (int)threadIdx.x; i < n && i < begin + BLOCK; i += THREADS)
        atomicAdd(&count[keys[order ? order[i] : (uint32_t)i] >> shift & (DIGITS - 1)], 1u);
    __syncthreads();
    counts[(int64_t)threadIdx.x * blocks + blockIdx.x] = count[threadIdx.x];
}

/* Each number becomes the sum of those before it; one block. */
static __global__ void sum_before(uint32_t *counts, int n) {
    __shared__ uint32_t part[SCANNERS];
    int me = (int)threadIdx.x, each = (n + SCANNERS - 1) / SCANNERS;
    int begin = me * each < n ? me * each : n, end = begin + each < n ? begin + each : n;
    uint32_t sum = 0;
    for (int i = begin; i < end; i++) sum += counts[i];
    part[me] = sum;
    __syncthreads();
    for (int step = 1; step < SCANNERS; step *= 2) {
        uint32_t before = me >= step ? part[me - step] : 0;
        __syncthreads();
        part[me] += before;
        __syncthreads();
    }
    sum = me > 0 ? part[me - 1] : 0;
    for (int i = begin; i < end; i++) {
        uint32_t count = counts[i];
        counts[i] = sum;
        sum += count;
    }
}

static __global__ void place_digits(const uint64_t *keys, const uint32_t *order, int n, int shift,
                                    const uint32_t *counts, int blocks, uint32_t *sorted) {
    __shared__ uint32_t next[WARPS][DIGITS]; /* where a warp's next place with a digit goes */
    int me = (int)threadIdx.x, warp = me / 32, lane = me % 32;
    for (int w = 0; w < WARPS; w++) next[w][me] = 0;
    __syncthreads();
    /* A warp has 32 * ROUNDS places side by side. */
    int begin = (int)blockIdx.x * BLOCK + warp * 32 * ROUNDS + lane;
    uint32_t place[ROUNDS], digit[ROUNDS], same[ROUNDS];
#pragma unroll
    for (int r = 0; r < ROUNDS; r++) {
        int i = begin + r * 32;
        place[r] = i >= n ? 0 : order ? order[i] : (uint32_t)i;
        /* Beyond the end: a digit of its own, which is counted nowhere. */
        digit[r] = i < n ? (uint32_t)(keys[place[r]] >> shift & (DIGITS - 1)) : DIGITS;
        same[r] = __match_any_sync(0xFFFFFFFFu, digit[r]);
        if (digit[r] < DIGITS && __ffs((int)same[r]) - 1 == lane)
            next[warp][digit[r]] += (uint32_t)__popc(same[r]);
        __syncwarp();
    }
    __syncthreads();
    uint32_t sum = counts[(int64_t)me * blocks + blockIdx.x];
    for (int w = 0; w < WARPS; w++) {
        uint32_t count = next[w][me];
        next[w][me] = sum;
        sum += count;
    }
    __syncthreads();
#pragma unroll
    for (int r = 0; r < ROUNDS; r++) {
        if (digit[r] < DIGITS) {
            uint32_t before = (uint32_t)__popc(same[r] & ((1u << lane) - 1));
            sorted[next[warp][digit[r]] + before] = place[r];
        }
        __syncwarp();
        if (digit[r] < DIGITS && __ffs((int)same[r]) - 1 == lane)
            next[warp][digit[r]] += (uint32_t)__popc(same[r]);
        __syncwarp();
    }
}

/* ---- launchers ------------------------------------------------------------------------------- */

static int sort_blocks(int64_t n) {
    return (int)((n + BLOCK - 1) / BLOCK);
}

enum xt_status xt_sorter_open(struct xt_ctx *ctx, int64_t n, struct xt_sorter *s) {
    s->most = n < SLAB ? n : SLAB;
    size_t keys = (size_t)s->most * 8, places = ((size_t)s->most * 4 + 15) / 16 * 16;
    s->bytes = keys + 2 * places + (size_t)sort_blocks(s->most) * DIGITS * 4;
    XT_TRY(xt_scratch_get(ctx, XT_CUDA, s->bytes, &s->data));
    char *at = (char *)s->data;
    s->keys = (uint64_t *)at;
    s->order = (uint32_t *)(at + keys);
    s->spare = (uint32_t *)(at + keys + places);
    s->counts = (uint32_t *)(at + keys + 2 * places);
    return XT_OK;
}

void xt_sorter_close(struct xt_ctx *ctx, const struct xt_sorter *s) {
    xt_scratch_put(ctx, XT_CUDA, s->data, s->bytes);
}

enum xt_status xt_sorter_run(struct xt_ctx *ctx, struct xt_sorter *s, int64_t n, uint64_t largest) {
    cudaStream_t stream = xt_cuda_stream(ctx);
    int blocks = sort_blocks(n), shift = 0;
    do {
        const uint32_t *from = shift ? s->order : NULL;
        count_digits<<<blocks, THREADS, 0, stream>>>(s->keys, from, (int)n, shift, s->counts,
                                                     blocks);
        sum_before<<<1, SCANNERS, 0, stream>>>(s->counts, blocks * DIGITS);
        place_digits<<<blocks, THREADS, 0, stream>>>(s->keys, from, (int)n, shift, s->counts,
                                                     blocks, s->spare);
        uint32_t *sorted = s->spare;
        s->spare = s->order;
        s->order = sorted;
        XT_TRY(xt_cuda_launched(ctx));
        shift += 8;
    } while (shift < 64 && largest >> shift);
    return XT_OK;
}
