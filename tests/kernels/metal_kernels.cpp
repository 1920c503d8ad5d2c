// The Metal kernels on the CPU, dispatched as dflash2-metal-ops.h dispatches them.

#include DFLASH2_METAL_SOURCE

#include <vector>

namespace {

// Calls `run(position in grid, position in threadgroup)` on every lane of every threadgroup.
template <typename Run>
void dispatch(uint nx, uint ny, int threads, Run run) {
    ushort3 lane = {};
    for (uint y = 0; y < ny; ++y) {
        for (uint x = 0; x < nx; ++x) {
            lanes::run_block(threads, [&] { const ushort3 me = lane; run(uint3 { x, y, 0 }, me); },
                    [&](int i) { lane = { (ushort) i, 0, 0 }; });
        }
    }
}

}  // namespace

extern "C" {

void metal_conv(int group, int n_groups, int taps, int block, int n_blocks, int side,
        const float * x, const float * delta, const float * base, float * out) {
    const int width   = group * n_groups;
    const int threads = 64;
    const ggml_metal_kargs_dflash2_conv args = {
        width, group, block, taps < block ? taps : block, n_groups, 2 * taps * n_groups, width,
    };
    dispatch((width + threads - 1) / threads, block * n_blocks, threads, [&](uint3 at, ushort3 lane) {
        kernel_dflash2_conv_f32(args, x, delta + side * taps * n_groups, base + side * taps * width, out, at, lane,
                ushort3 { (ushort) threads, 1, 1 });
    });
}

void metal_top_k(const float * src, int n_cols, int n_rows, int k, int * out) {
    const int n_parts = (n_cols + DFLASH2_TOP_K_PART - 1) / DFLASH2_TOP_K_PART;
    const ggml_metal_kargs_dflash2_top_k args = { n_cols, n_parts, k };
    std::vector<ulong> parts((size_t) n_rows * n_parts * k, 0xa5a5a5a5a5a5a5a5u);
    dispatch(n_parts, n_rows, DFLASH2_TOP_K_SCAN, [&](uint3 at, ushort3 lane) {
        kernel_dflash2_top_k_scan_f32(args, src, parts.data(), at, lane);
    });
    dispatch(n_rows, 1, DFLASH2_TOP_K_MERGE, [&](uint3 at, ushort3 lane) {
        kernel_dflash2_top_k_merge_f32(args, parts.data(), out, at, lane);
    });
}

}  // extern "C"
