// Prints what Metal's table says: for each type on the command line its name, whether ggml_metal_op_mul_mat_use_mm
// takes products of 1 to 10 rows, and the rows of one pass for 2 to 8 rows where upstream's choice is given.
#include "dflash2-dispatch-metal.h"
#include "ggml-metal-common.h"

#include <cstdio>
#include <cstdlib>

int main(int argc, char ** argv) {
    const int stock[9] = { 0, 0, 2, 3, 4, 5, 3, 4, 4 };
    ggml_context * ctx = ggml_init({ 1 << 20, nullptr, true });
    for (int i = 1; i < argc; i++) {
        const ggml_type type = (ggml_type) atoi(argv[i]);
        printf("%s", ggml_type_name(type));
        for (int rows = 1; rows <= 10; rows++) {
            ggml_tensor * product = ggml_mul_mat(ctx, ggml_new_tensor_2d(ctx, type, 256, 8),
                                                 ggml_new_tensor_2d(ctx, GGML_TYPE_F32, 256, rows));
            printf(" %d", ggml_metal_op_mul_mat_use_mm(product, true));
            if (ggml_metal_op_mul_mat_use_mm(product, false)) {
                return 1;
            }
        }
        for (int rows = 2; rows <= 8; rows++) {
            printf(" %d", dflash2_metal_pass_rows(type, rows, stock[rows]));
        }
        printf("\n");
    }
    ggml_free(ctx);
    return 0;
}
