// Batched top-k over wide rows: one pass per row against the smallest value kept so far.

#include "dflash2-cpu.h"

#include "../dflash2-switch.h"
#include "ggml-cpu-impl.h"
#include "ops.h"

#include <algorithm>
#include <atomic>
#include <cstring>

namespace {

constexpr int     MAX_K     = 64;
constexpr int64_t MIN_COLS  = 1024;  // below, the op costs nothing
constexpr int     LANES     = 64;    // columns compared at once; a multiple of every vector width
constexpr int     PREFETCH  = 1024;  // columns ahead

std::atomic<uint64_t> n_top_k{0};

bool switched_off() {
    static const bool off = dflash2_switched_off("DFLASH2_NO_TOPK");
    return off;
}

struct candidate {
    float   value;
    int32_t column;
};

// The k largest of the columns given so far, the smallest of them on top.
class kept {
public:
    explicit kept(int k) : k(k) {}

    void fill(const float * row, int64_t begin) {
        for (int i = 0; i < k; ++i) {
            heap[i] = { row[begin + i], (int32_t) (begin + i) };
        }
        std::make_heap(heap, heap + k, larger);
    }

    float threshold() const { return heap[0].value; }

    // Replaces the smallest; the hole sinks to where the new value belongs.
    void replace(float value, int32_t column) {
        int hole = 0;
        for (int child = 1; child < k; child = 2 * hole + 1) {
            if (child + 1 < k && heap[child + 1].value < heap[child].value) {
                ++child;
            }
            if (!(heap[child].value < value)) {
                break;
            }
            heap[hole] = heap[child];
            hole       = child;
        }
        heap[hole] = { value, column };
    }

    const candidate & operator[](int i) const { return heap[i]; }

private:
    static bool larger(const candidate & a, const candidate & b) { return a.value > b.value; }

    int       k;
    candidate heap[MAX_K];
};

// True if one of LANES values is above the threshold or not a number.
inline bool any_above(const float * x, float threshold) {
    int32_t any = 0;
    for (int i = 0; i < LANES; ++i) {
        any |= !(x[i] <= threshold);
    }
    return any != 0;
}

// Keeps the k largest of row[begin, end); false if it meets a NaN, which no order covers.
bool scan(const float * row, int64_t begin, int64_t end, int k, kept & best) {
    for (int64_t i = begin; i < begin + k; ++i) {
        if (row[i] != row[i]) {
            return false;
        }
    }
    best.fill(row, begin);

    float threshold = best.threshold();

    const auto offer = [&](int64_t i) {
        if (!(row[i] <= threshold)) {
            if (row[i] != row[i]) {
                return false;
            }
            best.replace(row[i], (int32_t) i);
            threshold = best.threshold();
        }
        return true;
    };

    int64_t i = begin + k;
    for (; i + LANES <= end; i += LANES) {
#if defined(__GNUC__)
        for (int line = 0; line < LANES; line += CACHE_LINE_SIZE / (int) sizeof(float)) {
            __builtin_prefetch(row + i + PREFETCH + line);
        }
#endif
        if (any_above(row + i, threshold)) {
            for (int64_t j = i; j < i + LANES; ++j) {
                if (!offer(j)) {
                    return false;
                }
            }
        }
    }
    for (; i < end; ++i) {
        if (!offer(i)) {
            return false;
        }
    }
    return true;
}

// A row with a NaN has no order: the comparison sort that the op used before decides, so the answer stays the same.
void sort_row(const float * row, int64_t n_cols, int k, int32_t * columns, int32_t * dst) {
    for (int64_t i = 0; i < n_cols; ++i) {
        columns[i] = (int32_t) i;
    }
    std::partial_sort(columns, columns + k, columns + n_cols, [row](int32_t a, int32_t b) { return row[a] > row[b]; });
    std::copy(columns, columns + k, dst);
    if (k > 1) {
        std::swap(dst[0], dst[1]);
    }
}

// What one thread found in its part of a row, kept at the start of its share of the work buffer.
struct part {
    int32_t   has_nan;
    candidate best[MAX_K];
};
static_assert(sizeof(part) <= MIN_COLS * sizeof(int32_t), "a part fits the share that the plan reserves");

struct rows {
    const char * src;
    char *       dst;
    int64_t      n_rows;
    int64_t      n_cols;
    int          k;
    size_t       src_stride;  // bytes
    size_t       dst_stride;  // bytes
    char *       work;
    size_t       share;       // bytes of the work buffer that each thread has, as the stock op lays them out

    const float * row(int64_t r)    const { return (const float *) (src + r * src_stride); }
    int32_t *     result(int64_t r) const { return (int32_t *) (dst + r * dst_stride); }
    void *        share_of(int ith) const { return work + share * ith; }
};

void whole_rows(const rows & t, int ith, int nth) {
    for (int64_t r = ith; r < t.n_rows; r += nth) {
        kept best(t.k);
        if (scan(t.row(r), 0, t.n_cols, t.k, best)) {
            int32_t * result = t.result(r);
            for (int i = 0; i < t.k; ++i) {
                result[i] = best[i].column;
            }
        } else {
            sort_row(t.row(r), t.n_cols, t.k, (int32_t *) t.share_of(ith), t.result(r));
        }
    }
}

// More threads than rows: `n_parts` threads per row, whose first merges what they found.
void split_rows(const rows & t, int n_parts, const ggml_compute_params * params) {
    const int     ith    = params->ith;
    const int64_t r      = ith / n_parts;
    const int     p      = ith % n_parts;
    const int64_t width  = (t.n_cols + n_parts - 1) / n_parts;
    const bool    active = r < t.n_rows;

    if (active) {
        const int64_t begin = p * width;
        const int64_t end   = std::min(begin + width, t.n_cols);

        kept   best(t.k);
        part * mine   = (part *) t.share_of(ith);
        mine->has_nan = !scan(t.row(r), begin, end, t.k, best);
        for (int i = 0; i < t.k && !mine->has_nan; ++i) {
            mine->best[i] = best[i];
        }
    }
    ggml_barrier(params->threadpool);
    if (!active || p != 0) {
        return;
    }

    candidate all[2 * MAX_K];
    int       n       = 0;
    bool      has_nan = false;
    for (int q = 0; q < n_parts; ++q) {
        const part * found = (const part *) t.share_of(ith + q);
        has_nan = has_nan || found->has_nan;
        if (has_nan) {
            continue;
        }
        std::copy(found->best, found->best + t.k, all + n);
        n += t.k;
        if (n > t.k) {
            std::nth_element(all, all + t.k - 1, all + n,
                    [](const candidate & a, const candidate & b) { return a.value > b.value; });
            n = t.k;
        }
    }
    if (has_nan) {
        sort_row(t.row(r), t.n_cols, t.k, (int32_t *) t.share_of(ith), t.result(r));
        return;
    }
    for (int i = 0; i < t.k; ++i) {
        t.result(r)[i] = all[i].column;
    }
}

}  // namespace

bool ggml_cpu_dflash2_top_k(const ggml_compute_params * params, ggml_tensor * dst) {
    const ggml_tensor * src = dst->src[0];

    if (switched_off() || params->use_ref || src->type != GGML_TYPE_F32 || src->ne[0] < MIN_COLS || dst->ne[0] > MAX_K ||
            dst->ne[0] < 1 || !ggml_is_contiguous(src) || !ggml_is_contiguous(dst)) {
        return false;
    }

    const size_t share = (src->ne[0] + CACHE_LINE_SIZE_F32) * sizeof(int32_t);
    const rows t = { (const char *) src->data, (char *) dst->data, ggml_nrows(src), src->ne[0], (int) dst->ne[0],
                     src->nb[1], dst->nb[1], (char *) params->wdata, share };

    // a part must be wider than k, or its first k columns are not there
    const int64_t n_parts = std::min<int64_t>(params->nth / std::max<int64_t>(t.n_rows, 1), t.n_cols / MIN_COLS);
    if (n_parts > 1) {
        split_rows(t, (int) n_parts, params);
    } else {
        whole_rows(t, params->ith, params->nth);
    }

    if (params->ith == 0) {
        n_top_k.fetch_add(1, std::memory_order_relaxed);
    }
    return true;
}

uint64_t ggml_cpu_dflash2_top_k_count(void) {
    return n_top_k.load(std::memory_order_relaxed);
}
