// Whether the program that loads this backend has the ggml that the backend was compiled against.
//
// ggml asks a loadable backend for its API version only, which stays the same through changes of every structure. A
// backend built from patched source is meant for programs of exactly one commit.

#include "ggml-backend-impl.h"
#include "ggml.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>

// The macro gives the backend's own entry point, the one that ggml looks for, another name.
#undef ggml_backend_init
extern "C" {
ggml_backend_reg_t dflash2_unchecked_init(void);
GGML_BACKEND_API ggml_backend_reg_t ggml_backend_init(void);
}

// Both are short hashes, perhaps of different length, with "-dirty" or what patched them behind; "unknown" is what a
// build outside a git checkout says.
static bool same_commit(const char * a, const char * b) {
    const size_t n_a = strcspn(a, "+-");
    const size_t n_b = strcspn(b, "+-");
    return strncmp(a, "unknown", n_a) == 0 || strncmp(b, "unknown", n_b) == 0 || strncmp(a, b, std::min(n_a, n_b)) == 0;
}

static bool same_numbers() {
    return strcmp(ggml_op_name(GGML_OP_MUL_MAT), "MUL_MAT") == 0 && strcmp(ggml_op_name(GGML_OP_TOP_K), "TOP_K") == 0 &&
           strcmp(ggml_op_name(GGML_OP_GLU), "GLU") == 0;
}

// A tensor and the private header that ggml puts before it: two sizes, a pointer, an enum, padding.
static size_t expected_overhead() {
    return sizeof(ggml_tensor) + 2 * sizeof(size_t) + sizeof(void *) + 2 * sizeof(int32_t);
}

// Every function of ggml called here is the loading program's own.
static const char * misfit() {
    if (strcmp(ggml_version(), DFLASH2_GGML_VERSION) != 0) {
        return "it has another version of ggml";
    }
    if (!same_commit(ggml_commit(), DFLASH2_GGML_COMMIT)) {
        return "it is of another commit";
    }
    if (ggml_tensor_overhead() != expected_overhead()) {
        return "its tensors have another size";
    }
    return same_numbers() ? nullptr : "its operations are numbered differently";
}

// ggml reports and refuses a backend whose entry point returns NULL.
ggml_backend_reg_t ggml_backend_init(void) {
    if (const char * reason = misfit()) {
        fprintf(stderr, "dflash2: this backend is for ggml %s (%s), the program that loads it has %s (%s): %s\n",
                DFLASH2_GGML_VERSION, DFLASH2_GGML_COMMIT, ggml_version(), ggml_commit(), reason);
        return nullptr;
    }
    return dflash2_unchecked_init();
}
