// A slot saved to a file takes its drafter's memory along, in a second file beside it: a drafter restored without its
// context drafts blindly, and one whose memory is of another length refuses the next batch.

#pragma once

#include "llama.h"

#include <cstdio>
#include <string>

inline std::string dflash2_draft_file(const std::string & path) {
    return path + ".draft";
}

// without a drafter, a file that an earlier save left is removed: it would belong to another text
inline void dflash2_save_draft(llama_context * ctx_dft, const std::string & path, llama_seq_id seq_id) {
    const std::string file = dflash2_draft_file(path);
    if (ctx_dft == nullptr || llama_state_seq_save_file(ctx_dft, file.c_str(), seq_id, nullptr, 0) == 0) {
        std::remove(file.c_str());
    }
}

// where the drafter's part is missing or ends elsewhere than the target's, its memory starts empty
inline void dflash2_load_draft(llama_context * ctx_tgt, llama_context * ctx_dft, const std::string & path,
        llama_seq_id seq_id) {
    if (ctx_dft == nullptr) {
        return;
    }
    auto * memory = llama_get_memory(ctx_dft);
    const llama_pos end = llama_memory_seq_pos_max(llama_get_memory(ctx_tgt), seq_id);

    llama_memory_seq_rm(memory, seq_id, -1, -1);
    llama_token none = LLAMA_TOKEN_NULL; // the file holds no tokens
    size_t n_tokens = 0;
    const std::string file = dflash2_draft_file(path);
    if (llama_state_seq_load_file(ctx_dft, file.c_str(), seq_id, &none, 1, &n_tokens) == 0 ||
            llama_memory_seq_pos_max(memory, seq_id) != end) {
        llama_memory_seq_rm(memory, seq_id, -1, -1);
    }
}
