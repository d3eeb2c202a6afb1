/*
 * norm_rope.cu: rope of rmsnorm on the device, in one pass each way.
 *
 * With n = x * rstd, rstd = 1 / sqrt(mean(x^2) + eps):  y = turned(round(n) * w). Forward reads x
 * and writes y. Backward, with up the gradient of y turned back and h = up * w:
 *     dx = rstd * (h - n * mean(h * n)), dw = sum of up * n over rows;
 * it reads g and x and writes dx.
 *
 * The angles of a position are those of all its heads, and of all sequences unless each has
 * positions of its own: a block takes many rows of few places, computes their angles once and keeps
 * them in shared memory while its rows are on their way. A row is shared by a group of threads of
 * which each holds two vectors of it, the pairs it turns.
 */
#include <string.h>

#include <type_traits>

#include "rope.h"
#include "rows.h"

#define THREADS 256
#define ROWS 2     /* that a thread of forward has on their way at once */
#define STEPS 4    /* rows of a unit that a thread of backward works on, one after the other */
#define PARTS 264  /* of the rows, at most, whose gains' gradients are summed together */
#define ROOM 40960 /* bytes of shared memory for the angles of a unit, unless one row needs more */

/* ---- how the rows are cut into units --------------------------------------------------------- */

/*
 * Division by a number that the host knows, of n below 2^31 (Granlund, Montgomery 1994): times is
 * 2^shift / d rounded up, with shift 31 more than the bits of d - 1, so that the rest is too small
 * to show.
 */
struct norm_rope_divisor {
    uint32_t times; /* below 2^32 */
    int shift;      /* 31 to 62 */
};

static struct norm_rope_divisor norm_rope_divisor_of(int d) {
    struct norm_rope_divisor v = {0, 31};
    while ((int64_t)1 << (v.shift - 31) < d) v.shift++;
    v.times = (uint32_t)((((uint64_t)1 << v.shift) + (uint64_t)d - 1) / (uint64_t)d);
    return v;
}

static __device__ __forceinline__ int divided(int n, const struct norm_rope_divisor &v) {
    return (int)((uint64_t)(uint32_t)n * v.times >> v.shift);
}

/*
 * A unit is what a block works on with one set of angles: `span` places s with all their rows, or,
 * of one place with many rows, `each` of them. The rows of one place are those of all (b, h). All
 * counts are below 2^31, as the rows of x are.
 */
struct norm_rope_plan {
    struct xt_rope_heads x; /* as x lies */
    struct xt_positions at; /* of the places */
    int B, S, H;            /* of x */
    int own;                /* 1 where every sequence has positions of its own, else 0 */
    int lines;              /* rows of a place, B * H */
    int span, each;         /* places of a unit; of one place, rows of a unit */
    int blocks_s;           /* units side by side along S */
    int units;              /* all of them */
    int tables;             /* positions of a unit, at most */
    struct norm_rope_divisor by_H, by_lines, by_blocks_s; /* division by each */
};

static int norm_rope_pieces(int n, int each) {
    return (int)(((int64_t)n + each - 1) / each);
}

/* For units of `steps` rows a group of threads, or fewer where `table` bytes for each position of a
   unit are more than there is room for. */
static struct norm_rope_plan plan_units(const struct xt_tensor *x, const struct xt_tensor *p,
                                        int64_t offset, int groups, int steps, size_t table) {
    struct norm_rope_plan w = {};
    w.x = xt_rope_heads_of(x);
    w.at = xt_positions_of(p, offset);
    w.B = (int)w.x.B;
    w.S = (int)w.x.S;
    w.H = (int)w.x.H;
    w.own = w.at.b != 0 && w.B > 1;
    w.lines = w.B * w.H;
    w.by_H = norm_rope_divisor_of(w.H);
    w.by_lines = norm_rope_divisor_of(w.lines);
    for (;; steps /= 2) {
        const int tile = groups * steps;
        int chunks = 1;
        if (w.lines < tile) {
            w.span = tile / w.lines < w.S ? tile / w.lines : w.S;
            w.each = w.lines;
            w.tables = w.span * (w.own ? w.B : 1);
        } else {
            w.span = 1;
            const int even = norm_rope_pieces(w.lines, norm_rope_pieces(w.lines, tile));
            w.each = norm_rope_pieces(even, groups) * groups;
            chunks = norm_rope_pieces(w.lines, w.each);
            w.tables = w.own ? (w.each - 1) / w.H + 2 : 1;
        }
        w.blocks_s = norm_rope_pieces(w.S, w.span);
        w.by_blocks_s = norm_rope_divisor_of(w.blocks_s);
        w.units = w.blocks_s * chunks;
        if (steps == 1 || (size_t)w.tables * table <= ROOM) return w;
    }
}

/* One unit. */
struct norm_rope_unit {
    int s;         /* its first place */
    int first;     /* of one place: its first row there */
    int rows;      /* of all its places, counted place after place */
    int places;    /* along s */
    int b;         /* of the first row, where sequences have angles of their own */
    int sequences; /* that have angles of their own, for each place */
};

static __device__ __forceinline__ struct norm_rope_unit unit_at(const struct norm_rope_plan &w,
                                                                int i) {
    struct norm_rope_unit u;
    const int chunk = divided(i, w.by_blocks_s);
    u.s = (i - chunk * w.blocks_s) * w.span;
    u.first = chunk * w.each;
    u.b = 0;
    u.sequences = 1;
    if (w.span > 1) {
        u.places = min(w.S - u.s, w.span);
        u.rows = u.places * w.lines;
        if (w.own) u.sequences = w.B;
    } else {
        u.places = 1;
        u.rows = min(w.lines - u.first, w.each);
        if (w.own) {
            u.b = divided(u.first, w.by_H);
            u.sequences = divided(u.first + u.rows - 1, w.by_H) - u.b + 1;
        }
    }
    return u;
}

/* Where a row is. */
struct norm_rope_place {
    int b, s, h; /* of x */
    int table;   /* of the unit's, the angles of (b, s) */
};

static __device__ __forceinline__ struct norm_rope_place
row_place(const struct norm_rope_plan &w, const struct norm_rope_unit &u, int row) {
    struct norm_rope_place p;
    int place = 0;
    if (w.span > 1) {
        place = divided(row, w.by_lines);
        row -= place * w.lines;
    }
    row += u.first;
    p.s = u.s + place;
    p.b = divided(row, w.by_H);
    p.h = row - p.b * w.H;
    p.table = place * u.sequences + (w.own ? p.b - u.b : 0);
    return p;
}

/* The first element of a row of a tensor that lies as q says. */
template <class T>
static __device__ __forceinline__ const T *start_of_row(const T *x, const struct xt_rope_heads &q,
                                                        const struct norm_rope_place &p) {
    return x + p.b * q.b + p.s * q.s + p.h * q.h;
}

/* The number of a row, in row-major order. */
static __device__ __forceinline__ int row_number(const struct norm_rope_plan &w,
                                                 const struct norm_rope_place &p) {
    return (p.b * w.S + p.s) * w.H + p.h;
}

/* All threads of the block fill in the angles of a unit: row t of the tables is position t. */
template <class R>
static __device__ __forceinline__ void
fill_angles(const struct norm_rope_plan &w, const struct xt_frequencies<R> &f, R sign,
            const struct norm_rope_unit &u, R *cosine, R *sine) {
    const int n = u.places * u.sequences * f.n;
    for (int i = (int)threadIdx.x; i < n; i += THREADS) {
        const int t = i / f.n, place = t / u.sequences;
        const int64_t at = xt_position_at(w.at, u.b + (t - place * u.sequences), u.s + place);
        xt_angle((R)at, f.at[i - t * f.n], sign, &cosine[i], &sine[i]);
    }
}

/* ---- the two vectors of a thread ------------------------------------------------------------- */

/*
 * Thread v of a group holds N elements from low and N from high: v * N and D/2 + v * N. A pair has
 * one in each, or, where pairs lie side by side, both in one; of a single such pair, N being 1, low
 * and high are the two elements.
 */
template <bool INTERLEAVED, int N> struct norm_rope_lane {
    static constexpr bool across = !INTERLEAVED || N == 1; /* a pair has one element in each */

    static __device__ __forceinline__ int low(int v) {
        return INTERLEAVED && N == 1 ? 2 * v : v * N;
    }
    static __device__ __forceinline__ int high(int v, int half) {
        return INTERLEAVED && N == 1 ? 2 * v + 1 : half + v * N;
    }
    /* The N pairs' numbers out of a table of all. */
    template <class R>
    static __device__ __forceinline__ void pick(const R *table, int v, int half, R *to) {
        if constexpr (across) {
            xt_load<N>(table + v * N, to);
        } else {
            xt_load<N / 2>(table + v * N / 2, to);
            xt_load<N / 2>(table + (half + v * N) / 2, to + N / 2);
        }
    }
    template <class R>
    static __device__ __forceinline__ void turn(const R *c, const R *s, R *low, R *high) {
        if constexpr (across) {
#pragma unroll
            for (int k = 0; k < N; k++) one(c[k], s[k], low[k], high[k]);
        } else {
#pragma unroll
            for (int k = 0; k < N / 2; k++) {
                one(c[k], s[k], low[2 * k], low[2 * k + 1]);
                one(c[N / 2 + k], s[N / 2 + k], high[2 * k], high[2 * k + 1]);
            }
        }
    }
    template <class R> static __device__ __forceinline__ void one(R c, R s, R &a, R &b) {
        const R turned = a * c - b * s;
        b = b * c + a * s;
        a = turned;
    }
};

/* N elements that are kept as they were read: as words, which take half the registers of 16-bit
   numbers. */
template <class T, int N> struct norm_rope_words {
    static constexpr int bytes = (int)sizeof(T) * N;
    static constexpr bool one = bytes < 4; /* 16-bit number */
    static constexpr int count = one ? 1 : bytes / 4;
    using word = std::conditional_t<one, uint16_t, uint32_t>;
    using pack = xt_vector<word, count>;
    pack at; /* their bits */

    __device__ __forceinline__ void read(const T *from) { at = *(const pack *)from; }
    __device__ __forceinline__ void widen(xt_real<T> *to) const {
        xt_vector<T, N> v;
        memcpy(&v, &at, sizeof v);
#pragma unroll
        for (int k = 0; k < N; k++) to[k] = xt_to<xt_real<T>>(v.at[k]);
    }
};

/* N numbers rounded to T, of 16-bit ones two by an instruction. */
template <class T, int N> static __device__ __forceinline__ void round_all(xt_real<T> *x) {
    if constexpr (sizeof(T) == 2 && N % 2 == 0) {
#pragma unroll
        for (int k = 0; k < N; k += 2) {
            if constexpr (std::is_same_v<T, __half>) {
                const __half2 two = __floats2half2_rn(x[k], x[k + 1]);
                x[k] = __low2float(two);
                x[k + 1] = __high2float(two);
            } else {
                const __nv_bfloat162 two = __floats2bfloat162_rn(x[k], x[k + 1]);
                x[k] = __low2float(two);
                x[k + 1] = __high2float(two);
            }
        }
    } else {
#pragma unroll
        for (int k = 0; k < N; k++) x[k] = xt_to<xt_real<T>>(xt_to<T>(x[k]));
    }
}

/* ---- forward --------------------------------------------------------------------------------- */

/* A unit has at most AHEAD rows a group: they are read, then angles computed, then rows written. */
template <class T, bool INTERLEAVED, int LANES, int N, int AHEAD>
static __global__ void __launch_bounds__(THREADS, 3)
    norm_rope_rows(const __grid_constant__ struct norm_rope_plan w,
                   const __grid_constant__ struct xt_frequencies<xt_real<T>> f,
                   const __grid_constant__ struct xt_gain weight, const xt_real<T> eps, const T *x,
                   T *y, xt_real<T> *rstds) {
    using R = xt_real<T>;
    using lane_of = norm_rope_lane<INTERLEAVED, N>;
    constexpr int GROUPS = THREADS / LANES;
    extern __shared__ __align__(16) unsigned char norm_rope_room[];
    const int half = (int)(w.x.D / 2), v = xt_lane<LANES>(), group = (int)threadIdx.x / LANES;
    const int low = lane_of::low(v), high = lane_of::high(v, half);
    const bool inside = v * N < half;
    R *cosine = (R *)norm_rope_room, *sine = cosine + w.tables * half;
    R gain_low[N] = {}, gain_high[N] = {};
    if (inside) {
        xt_load_gain<T, N>(weight, low, 1, gain_low);
        xt_load_gain<T, N>(weight, high, 1, gain_high);
    }
    for (int i = (int)blockIdx.x; i < w.units; i += (int)gridDim.x) {
        const struct norm_rope_unit u = unit_at(w, i);
        norm_rope_words<T, N> from_low[AHEAD], from_high[AHEAD];
        int to[AHEAD]; /* the row of y, or -1 */
        int table[AHEAD];
#pragma unroll
        for (int r = 0; r < AHEAD; r++) {
            const int line = r * GROUPS + group;
            from_low[r] = {};
            from_high[r] = {};
            to[r] = -1;
            table[r] = 0;
            if (line >= u.rows) continue;
            const struct norm_rope_place p = row_place(w, u, line);
            const T *from = start_of_row(x, w.x, p);
            to[r] = row_number(w, p);
            table[r] = p.table * half;
            if (!inside) continue;
            from_low[r].read(from + low);
            from_high[r].read(from + high);
        }
        __syncthreads(); /* the angles of the unit before are no longer read */
        fill_angles<R>(w, f, 1, u, cosine, sine);
        __syncthreads();
#pragma unroll
        for (int r = 0; r < AHEAD; r++) {
            R a[N], b[N], c[N], s[N], squares = 0;
            from_low[r].widen(a);
            from_high[r].widen(b);
#pragma unroll
            for (int k = 0; k < N; k++) {
                squares += a[k] * a[k];
                squares += b[k] * b[k];
            }
            const R rstd = 1 / sqrt(xt_group_sum<LANES>(squares) / (R)w.x.D + eps);
            if (to[r] < 0 || !inside) continue;
#pragma unroll
            for (int k = 0; k < N; k++) {
                a[k] *= rstd;
                b[k] *= rstd;
            }
            round_all<T, N>(a);
            round_all<T, N>(b);
#pragma unroll
            for (int k = 0; k < N; k++) {
                a[k] *= gain_low[k];
                b[k] *= gain_high[k];
            }
            lane_of::pick(cosine + table[r], v, half, c);
            lane_of::pick(sine + table[r], v, half, s);
            lane_of::turn(c, s, a, b);
            T *row = y + to[r] * w.x.D;
            xt_store<N>(a, row + low);
            xt_store<N>(b, row + high);
            if (rstds && v == 0) rstds[to[r]] = rstd;
        }
    }
}

/* ---- backward -------------------------------------------------------------------------------- */

/* A thread's part of one row, as read. */
template <class T, int N> struct norm_rope_read {
    norm_rope_words<T, N> g_low, g_high, x_low, x_high; /* zeros where there is no row */
    xt_real<T> rstd;                                    /* 0 where there is no row */
    int row;                                            /* of dx, or -1 */
    int table;                                          /* where its angles begin */
};

/*
 * The rows of a step are on their way while those before are worked on, across units too. parts,
 * unless NULL: D numbers a block, its rows' sum of up * n.
 */
template <class T, bool INTERLEAVED, int LANES, int N>
static __global__ void __launch_bounds__(THREADS, 2)
    norm_rope_grad_rows(const __grid_constant__ struct norm_rope_plan w,
                        const __grid_constant__ struct xt_frequencies<xt_real<T>> f,
                        const __grid_constant__ struct xt_rope_heads gq,
                        const __grid_constant__ struct xt_gain weight, const T *g, const T *x,
                        const xt_real<T> *rstds, T *dx, xt_real<T> *parts) {
    using R = xt_real<T>;
    using lane_of = norm_rope_lane<INTERLEAVED, N>;
    constexpr int GROUPS = THREADS / LANES;
    extern __shared__ __align__(16) unsigned char norm_rope_room[];
    const int D = (int)w.x.D, half = D / 2, v = xt_lane<LANES>();
    const int group = (int)threadIdx.x / LANES;
    const int low = lane_of::low(v), high = lane_of::high(v, half);
    const bool inside = v * N < half;
    R *cosine = (R *)norm_rope_room, *sine = cosine + w.tables * half;
    R gain_low[N] = {}, gain_high[N] = {}, dw_low[N] = {}, dw_high[N] = {};
    if (inside) {
        xt_load_gain<T, N>(weight, low, 1, gain_low);
        xt_load_gain<T, N>(weight, high, 1, gain_high);
    }
    auto read = [&](const struct norm_rope_unit &u, int line) {
        norm_rope_read<T, N> to = {};
        to.row = -1;
        if (line + group >= u.rows) return to;
        const struct norm_rope_place p = row_place(w, u, line + group);
        to.row = row_number(w, p);
        to.table = p.table * half;
        to.rstd = rstds[to.row];
        if (!inside) return to;
        const T *from_g = start_of_row(g, gq, p), *from_x = start_of_row(x, w.x, p);
        to.g_low.read(from_g + low);
        to.g_high.read(from_g + high);
        to.x_low.read(from_x + low);
        to.x_high.read(from_x + high);
        return to;
    };
    norm_rope_read<T, N> next = read(unit_at(w, (int)blockIdx.x), 0);
    for (int i = (int)blockIdx.x; i < w.units; i += (int)gridDim.x) {
        const struct norm_rope_unit u = unit_at(w, i);
        __syncthreads(); /* the angles of the unit before are no longer read */
        fill_angles<R>(w, f, -1, u, cosine, sine);
        __syncthreads();
        for (int line = 0; line < u.rows; line += GROUPS) {
            R a[N], b[N], n_low[N], n_high[N], c[N], s[N], dot = 0;
            const R rstd = next.rstd;
            const int row = next.row, table = next.table;
            next.g_low.widen(a);
            next.g_high.widen(b);
            next.x_low.widen(n_low);
            next.x_high.widen(n_high);
            if (line + GROUPS < u.rows)
                next = read(u, line + GROUPS);
            else if (i + (int)gridDim.x < w.units)
                next = read(unit_at(w, i + (int)gridDim.x), 0);
            if (inside) {
                lane_of::pick(cosine + table, v, half, c);
                lane_of::pick(sine + table, v, half, s);
                lane_of::turn(c, s, a, b);
#pragma unroll
                for (int k = 0; k < N; k++) {
                    n_low[k] *= rstd;
                    n_high[k] *= rstd;
                    dw_low[k] += a[k] * n_low[k];
                    dw_high[k] += b[k] * n_high[k];
                    a[k] *= gain_low[k];
                    b[k] *= gain_high[k];
                    dot += a[k] * n_low[k];
                    dot += b[k] * n_high[k];
                }
            }
            dot = xt_group_sum<LANES>(dot) / (R)w.x.D;
            if (row < 0 || !inside) continue;
#pragma unroll
            for (int k = 0; k < N; k++) {
                a[k] = rstd * (a[k] - n_low[k] * dot);
                b[k] = rstd * (b[k] - n_high[k] * dot);
            }
            T *to = dx + row * w.x.D;
            xt_store<N>(a, to + low);
            xt_store<N>(b, to + high);
        }
    }
    if (!parts) return;
    R *part = parts + (int64_t)blockIdx.x * D;
    if constexpr (LANES > 32) {
        if (!inside) return;
#pragma unroll
        for (int k = 0; k < N; k++) {
            part[low + k] = dw_low[k];
            part[high + k] = dw_high[k];
        }
    } else {
        /* Within a warp in a tree, then warp after warp. */
#pragma unroll
        for (int step = LANES; step < 32; step *= 2)
#pragma unroll
            for (int k = 0; k < N; k++) {
                dw_low[k] += __shfl_xor_sync(0xFFFFFFFFu, dw_low[k], step);
                dw_high[k] += __shfl_xor_sync(0xFFFFFFFFu, dw_high[k], step);
            }
        R *all = (R *)norm_rope_room, *own = all + threadIdx.x / 32 * D; /* (warps, D) */
        __syncthreads(); /* no angles are read any more */
        if (threadIdx.x % 32 < LANES && inside)
#pragma unroll
            for (int k = 0; k < N; k++) {
                own[low + k] = dw_low[k];
                own[high + k] = dw_high[k];
            }
        __syncthreads();
        for (int i = (int)threadIdx.x; i < D; i += THREADS) {
            R sum = all[i];
            for (int k = 1; k < THREADS / 32; k++) sum += all[k * D + i];
            part[i] = sum;
        }
    }
}

/* ---- the host's side ------------------------------------------------------------------------- */

/* Threads a row and elements of a vector: 16 bytes, or 1 where rows do not lie well or are long. */
template <int L, int V> struct norm_rope_shape { static constexpr int lanes = L, n = V; };

/* Calls launch with the shape for rows of `half` pairs. */
template <class T, class Launch>
static enum xt_status by_shape(int64_t half, bool aligned, const Launch &launch) {
    constexpr int N = xt_lanes<T>;
    const int64_t vectors = half / N;
    if (aligned && half % N == 0) {
        if (vectors <= 2) return launch(norm_rope_shape<2, N>());
        if (vectors <= 4) return launch(norm_rope_shape<4, N>());
        if (vectors <= 8) return launch(norm_rope_shape<8, N>());
        if (vectors <= 16) return launch(norm_rope_shape<16, N>());
        if (vectors <= 32) return launch(norm_rope_shape<32, N>());
    }
    if (half <= 32) return launch(norm_rope_shape<32, 1>());
    return launch(norm_rope_shape<THREADS, 1>());
}

/* What the op promises. */
static enum xt_status want_fitting(struct xt_ctx *ctx, const struct xt_tensor *x) {
    if (x->shape[3] <= 2 * XT_ROPE_PAIRS && xt_numel(x) / x->shape[3] <= INT32_MAX) return XT_OK;
    return xt_fail(ctx, XT_UNSUPPORTED, "rows of more than %d elements, or 2^31 of them",
                   2 * XT_ROPE_PAIRS);
}

template <class T, bool INTERLEAVED>
static enum xt_status norm_rope_of(struct xt_ctx *ctx, const struct xt_launch *l) {
    using R = xt_real<T>;
    const struct xt_tensor *x = l->in[0];
    const int64_t half = x->shape[3] / 2;
    if (xt_numel(x) == 0) return xt_fill_nothing(ctx, l);
    XT_TRY(want_fitting(ctx, x));
    const struct xt_gain weight = xt_gain_of(l->in[1], x->dtype);
    const struct xt_frequencies<R> f = xt_frequencies_of<R>((R)l->attrs[1].f, 0, x->shape[3]);
    const R eps = (R)l->attrs[0].f;
    const T *from = (const T *)xt_data(x);
    T *y = (T *)xt_data(l->out[0]);
    R *rstds = l->out[1] ? (R *)xt_data(l->out[1]) : NULL;
    const bool aligned =
        xt_rope_heads_aligned(x, xt_lanes<T>) && xt_is_aligned16(weight.data) && xt_is_aligned16(y);
    return by_shape<T>(half, aligned, [&](auto shape) {
        constexpr int LANES = decltype(shape)::lanes, N = decltype(shape)::n;
        constexpr int AHEAD = N > 1 ? ROWS : 1;
        const size_t table = 2 * (size_t)half * sizeof(R);
        const struct norm_rope_plan w =
            plan_units(x, l->in[2], l->attrs[3].i, THREADS / LANES, AHEAD, table);
        norm_rope_rows<T, INTERLEAVED, LANES, N, AHEAD>
            <<<xt_cuda_blocks(w.units, 1), THREADS, w.tables * table, xt_cuda_stream(ctx)>>>(
                w, f, weight, eps, from, y, rstds);
        return xt_cuda_launched(ctx);
    });
}

template <class T, bool INTERLEAVED>
static enum xt_status norm_rope_grad_of(struct xt_ctx *ctx, const struct xt_launch *l) {
    using R = xt_real<T>;
    const struct xt_tensor *g = l->in[0], *x = l->in[1];
    const int64_t D = x->shape[3], half = D / 2;
    if (xt_numel(x) == 0) return xt_fill_nothing(ctx, l);
    XT_TRY(want_fitting(ctx, x));
    const struct xt_rope_heads gq = xt_rope_heads_of(g);
    const struct xt_gain weight = xt_gain_of(l->in[2], x->dtype);
    const struct xt_frequencies<R> f = xt_frequencies_of<R>((R)l->attrs[1].f, 0, D);
    const T *from_g = (const T *)xt_data(g), *from_x = (const T *)xt_data(x);
    const R *rstds = (const R *)xt_data(l->in[3]);
    T *dx = (T *)xt_data(l->out[0]);
    const bool gain = l->attrs[0].i != 0;
    const bool aligned = xt_rope_heads_aligned(g, xt_lanes<T>) &&
                         xt_rope_heads_aligned(x, xt_lanes<T>) && xt_is_aligned16(weight.data) &&
                         xt_is_aligned16(dx);
    cudaStream_t stream = xt_cuda_stream(ctx);
    return by_shape<T>(half, aligned, [&](auto shape) {
        constexpr int LANES = decltype(shape)::lanes, N = decltype(shape)::n;
        const size_t table = 2 * (size_t)half * sizeof(R), sums = THREADS / 32 * D * sizeof(R);
        const struct norm_rope_plan w =
            plan_units(x, l->in[4], l->attrs[3].i, THREADS / LANES, STEPS, table);
        const size_t angles = w.tables * table, room = angles > sums ? angles : sums;
        const unsigned n_parts = (unsigned)(w.units < PARTS ? w.units : PARTS);
        const size_t bytes = gain ? n_parts * (size_t)D * sizeof(R) : 0;
        R *parts = NULL;
        if (gain) XT_TRY(xt_scratch_get(ctx, XT_CUDA, bytes, (void **)&parts));
        norm_rope_grad_rows<T, INTERLEAVED, LANES, N><<<n_parts, THREADS, room, stream>>>(
            w, f, gq, weight, from_g, from_x, rstds, dx, parts);
        enum xt_status status = xt_cuda_launched(ctx);
        if (gain && status == XT_OK)
            status = xt_sum_parts(ctx, parts, n_parts, D, D, (R *)xt_data(l->out[1]), (R *)NULL);
        if (gain) xt_scratch_put(ctx, XT_CUDA, parts, bytes);
        return status;
    });
}

/* ---- the table ------------------------------------------------------------------------------- */

static enum xt_status norm_rope(struct xt_ctx *ctx, const struct xt_launch *l) {
    XT_CUDA_FLOATS(l->in[0]->dtype, return l->attrs[2].i == 1 ? norm_rope_of<T, true>(ctx, l)
                                                              : norm_rope_of<T, false>(ctx, l);)
    return XT_OK;
}

static enum xt_status norm_rope_grad(struct xt_ctx *ctx, const struct xt_launch *l) {
    XT_CUDA_FLOATS(l->in[0]->dtype, return l->attrs[2].i == 1
                                               ? norm_rope_grad_of<T, true>(ctx, l)
                                               : norm_rope_grad_of<T, false>(ctx, l);)
    return XT_OK;
}

const struct xt_kernel xt_cuda_norm_rope_kernels[] = {
    {"rmsnorm_rope_fused", XT_FLOATS, XT_INNER, norm_rope},
    {"rmsnorm_rope_grad", XT_FLOATS, XT_INNER, norm_rope_grad},
    {},
};
