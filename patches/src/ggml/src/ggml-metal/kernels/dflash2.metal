#include "common.h"

// One thread per channel of one row; rows before a block's first count as zero.
kernel void kernel_dflash2_conv_f32(
        constant ggml_metal_kargs_dflash2_conv & args,
        device const float * x,
        device const float * delta,
        device const float * base,
        device       float * dst,
        uint3   tgpig[[threadgroup_position_in_grid]],
        ushort3 tpitg[[thread_position_in_threadgroup]],
        ushort3   ntg[[threads_per_threadgroup]]) {
    const int c = tgpig.x * ntg.x + tpitg.x;
    const int r = tgpig.y;
    if (c >= args.width) {
        return;
    }
    const int reach = MIN(args.n_taps - 1, r % args.block);

    device const float * xr = x     + (ulong) r * args.width + c;
    device const float * dr = delta + (ulong) r * args.delta_row + c / args.group;

    float sum = (dr[0] + base[c]) * xr[0];
    for (int t = 1; t <= reach; ++t) {
        sum += (dr[t * args.delta_tap] + base[t * args.base_tap + c]) * xr[-(t * args.width)];
    }
    dst[(ulong) r * args.width + c] = sum;
}

#define DFLASH2_TOP_K_MAX      64
#define DFLASH2_TOP_K_PER_LANE 16
#define DFLASH2_TOP_K_SCAN     256  // threads that scan a part of a row
#define DFLASH2_TOP_K_MERGE    512  // threads that merge the parts of a row
#define DFLASH2_TOP_K_PART     (DFLASH2_TOP_K_SCAN * DFLASH2_TOP_K_PER_LANE)
#define DFLASH2_TOP_K_REACHED  ((DFLASH2_TOP_K_MAX - 1) * DFLASH2_TOP_K_PER_LANE + 1)

// Orders like the float above and by the lower column below: no two columns of a row have equal keys.
// A NaN sorts by its sign and bits, as in a radix sort.
static inline ulong dflash2_key(float value, uint column) {
    const uint bits    = as_type<uint>(value);
    const uint ordered = bits ^ ((bits >> 31) ? 0xffffffffu : 0x80000000u);
    return ((ulong) ordered << 32) | (ulong) (~column);
}

// What the scan reads: columns of a row.
struct dflash2_columns {
    device const float * x;
    uint                 begin;

    ulong at(uint i) const { return dflash2_key(x[i], begin + i); }
};

// What the merge reads: keys that the scan found.
struct dflash2_keys {
    device const ulong * keys;

    ulong at(uint i) const { return keys[i]; }
};

// Where a threadgroup's answer goes: keys for the merge or, at the end, columns.
struct dflash2_key_sink {
    device ulong * out;

    void put(uint rank, ulong key) const { out[rank] = key; }
};

struct dflash2_column_sink {
    device int * out;

    void put(uint rank, ulong key) const { out[rank] = (int) (~(uint) key); }
};

// Threadgroup memory of one selection.
struct dflash2_top_k_shared {
    threadgroup ulong *       largest;    // [THREADS]
    threadgroup ulong *       reached;    // [DFLASH2_TOP_K_REACHED]
    threadgroup ulong *       bound;      // [1]
    threadgroup atomic_uint * n_reached;  // [1]
};

// Puts the k largest of n keys, largest first; n is at most THREADS * DFLASH2_TOP_K_PER_LANE. The k-th largest of the threads' own
// largest keys is a bound that at least k keys reach. Fewer than k threads have keys above it, so what reaches it fits.
template <int THREADS, typename Keys, typename Sink>
static inline void dflash2_select(Keys keys, Sink sink, uint n, uint k, uint tid, dflash2_top_k_shared s) {
    ulong mine = 0;  // below every key
    for (uint i = tid; i < n; i += THREADS) {
        const ulong key = keys.at(i);
        mine = key > mine ? key : mine;
    }
    s.largest[tid] = mine;
    if (tid == 0) {
        atomic_store_explicit(s.n_reached, 0u, memory_order_relaxed);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    uint above = 0;
    for (uint t = 0; t < THREADS; ++t) {
        above += s.largest[t] > mine ? 1 : 0;
    }
    // fewer than k threads have keys: every key reaches
    if (above == k - 1 && mine != 0) {
        s.bound[0] = mine;
    } else if (tid == 0 && n < k) {
        s.bound[0] = 1;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    for (uint i = tid; i < n; i += THREADS) {
        const ulong key = keys.at(i);
        if (key >= s.bound[0]) {
            s.reached[atomic_fetch_add_explicit(s.n_reached, 1u, memory_order_relaxed)] = key;
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    const uint n_reached = atomic_load_explicit(s.n_reached, memory_order_relaxed);
    for (uint i = tid; i < n_reached; i += THREADS) {
        const ulong key = s.reached[i];
        uint rank = 0;
        for (uint j = 0; j < n_reached; ++j) {
            rank += s.reached[j] > key ? 1 : 0;
        }
        if (rank < k) {
            sink.put(rank, key);
        }
    }
}

// Threadgroup (p, r) finds the k largest keys of part p of row r; a part shorter than k leaves zeros, which lose.
kernel void kernel_dflash2_top_k_scan_f32(
        constant ggml_metal_kargs_dflash2_top_k & args,
        device const float * src,
        device       ulong * parts,
        uint3   tgpig[[threadgroup_position_in_grid]],
        ushort3 tpitg[[thread_position_in_threadgroup]]) {
    threadgroup ulong       largest[DFLASH2_TOP_K_SCAN];
    threadgroup ulong       reached[DFLASH2_TOP_K_REACHED];
    threadgroup ulong       bound[1];
    threadgroup atomic_uint n_reached[1];

    const uint k     = args.k;
    const uint begin = tgpig.x * DFLASH2_TOP_K_PART;
    const uint n     = MIN((uint) args.n_cols - begin, (uint) DFLASH2_TOP_K_PART);

    device const float * x   = src   + (ulong) tgpig.y * args.n_cols + begin;
    device       ulong * out = parts + ((ulong) tgpig.y * args.n_parts + tgpig.x) * k;

    for (uint i = n + tpitg.x; i < k; i += DFLASH2_TOP_K_SCAN) {
        out[i] = 0;
    }
    dflash2_select<DFLASH2_TOP_K_SCAN>(dflash2_columns { x, begin }, dflash2_key_sink { out }, n, k, tpitg.x,
            dflash2_top_k_shared { largest, reached, bound, n_reached });
}

// Threadgroup r merges the parts of row r.
kernel void kernel_dflash2_top_k_merge_f32(
        constant ggml_metal_kargs_dflash2_top_k & args,
        device const ulong * parts,
        device       int   * dst,
        uint3   tgpig[[threadgroup_position_in_grid]],
        ushort3 tpitg[[thread_position_in_threadgroup]]) {
    threadgroup ulong       largest[DFLASH2_TOP_K_MERGE];
    threadgroup ulong       reached[DFLASH2_TOP_K_REACHED];
    threadgroup ulong       bound[1];
    threadgroup atomic_uint n_reached[1];

    const uint n = args.n_parts * args.k;
    dflash2_select<DFLASH2_TOP_K_MERGE>(dflash2_keys { parts + (ulong) tgpig.x * n }, dflash2_column_sink { dst + (ulong) tgpig.x * args.k },
            n, args.k, tpitg.x, dflash2_top_k_shared { largest, reached, bound, n_reached });
}
