// The width of a block drafter's pass apart from the number of drafts verified: a drafter sees the block it was trained
// on though --spec-draft-n-max keeps only the first of its drafts.

#pragma once

#include "arg.h"
#include "common.h"
#include "llama.h"

#include <algorithm>

// --spec-draft-block
inline common_arg dflash2_block_arg() {
    common_arg arg(
        {"--spec-draft-block"}, "N",
        "rows of a draft-dflash pass, the last token included, at most the block the drafter was trained on; "
        "drafts beyond --spec-draft-n-max are dropped (default: 0, as many rows as --spec-draft-n-max needs)",
        [](common_params & params, int value) {
            if (value < 0) {
                throw std::invalid_argument("must not be negative");
            }
            params.speculative.draft.block = value;
        });
    return arg.set_spec().set_examples({LLAMA_EXAMPLE_SERVER, LLAMA_EXAMPLE_CLI}).set_env("LLAMA_ARG_SPEC_DRAFT_BLOCK");
}

// rows of a draft pass for one sequence; never fewer than n_max + 1 drafts need
inline int32_t dflash2_block_rows(const common_params_speculative_draft & params, int32_t block_size) {
    return std::max(params.n_max + 1, std::min(params.block, block_size));
}
