// Prints what the host part of mmvq.cu (decisions.inc, taken from the source) decides: a line for each compute
// capability, type and number of rows, "CC TYPE ROWS MMVQ EXPERT_ROWS".
#include "common.cuh"
#include "mmvq.cuh"

#include <cstdlib>
#ifdef PATCHED
#include "dflash2-dispatch.cu"
#endif

#include "decisions.inc"

int main(int argc, char ** argv) {
    for (int i = 1; i < argc; i++) {
        const int cc = atoi(argv[i]);
        for (int type = 0; type < GGML_TYPE_COUNT; type++) {
            if (!ggml_is_quantized((ggml_type) type)) {
                continue;
            }
            for (int rows = 1; rows <= 16; rows++) {
                printf("%d %s %d %d %d\n", cc, ggml_type_name((ggml_type) type), rows,
                       ggml_cuda_should_use_mmvq((ggml_type) type, cc, rows),
                       get_mmvq_mmid_max_batch((ggml_type) type, cc));
            }
        }
    }
#ifdef PATCHED
    auto decided = (int64_t (*)(int)) dflash2_cuda_proc_address("dflash2_dispatch_decided");
    auto device  = (int (*)(int)) dflash2_cuda_proc_address("dflash2_dispatch_device");
    auto force   = (void (*)(int)) dflash2_cuda_proc_address("dflash2_dispatch_force");
    printf("decided %lld %lld\n", (long long) decided(1), (long long) decided(0));
    printf("device %d %d\n", device(0), device(1));
    for (const int rows : { 3, 100, -1 }) {
        force(rows);
        printf("forced %d:", rows);
        for (int n = 1; n <= 9; n++) {
            printf(" %d", ggml_cuda_should_use_mmvq(GGML_TYPE_Q5_1, 700, n));
        }
        printf(" %d\n", get_mmvq_mmid_max_batch(GGML_TYPE_Q5_1, 700));
    }
    printf("other %d\n", dflash2_cuda_proc_address("ggml_backend_get_features") == nullptr);
#endif
    return 0;
}
