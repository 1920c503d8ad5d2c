// A slot saved to a file takes its drafter's memory along, in a second file beside it: a drafter restored without its
// context drafts blindly, and one whose memory is of another length refuses the next batch.
//
// That file begins with a hash of the rest: llama.cpp aborts on some states that were damaged.

#pragma once

#include "llama.h"

#include <cstdint>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

// No slot can be saved under this name: the server refuses names with two dots in a row.
inline std::string dflash2_draft_file(const std::string & path) {
    return path + "..draft";
}

// FNV-1a
inline uint64_t dflash2_state_hash(const std::vector<uint8_t> & state) {
    uint64_t hash = 0xcbf29ce484222325;
    for (const uint8_t byte : state) {
        hash = (hash ^ byte) * 0x100000001b3;
    }
    return hash;
}

// without a drafter, a file that an earlier save left is removed: it would belong to another text
inline void dflash2_save_draft(llama_context * ctx_dft, const std::string & path, llama_seq_id seq_id) {
    const std::string file = dflash2_draft_file(path);
    std::vector<uint8_t> state(ctx_dft == nullptr ? 0 : llama_state_seq_get_size(ctx_dft, seq_id));
    if (!state.empty()) {
        state.resize(llama_state_seq_get_data(ctx_dft, state.data(), state.size(), seq_id));
    }
    const uint64_t hash = dflash2_state_hash(state);

    std::ofstream out(file, std::ios::binary);
    out.write(reinterpret_cast<const char *>(&hash), sizeof(hash));
    out.write(reinterpret_cast<const char *>(state.data()), state.size());
    out.close();
    if (state.empty() || !out) {
        std::remove(file.c_str());
    }
}

// where the drafter's part is missing, damaged, or ends elsewhere than the target's, its memory starts empty
inline void dflash2_load_draft(llama_context * ctx_tgt, llama_context * ctx_dft, const std::string & path,
        llama_seq_id seq_id) {
    if (ctx_dft == nullptr) {
        return;
    }
    auto * memory = llama_get_memory(ctx_dft);
    const llama_pos end = llama_memory_seq_pos_max(llama_get_memory(ctx_tgt), seq_id);
    llama_memory_seq_rm(memory, seq_id, -1, -1);

    std::ifstream in(dflash2_draft_file(path), std::ios::binary);
    uint64_t hash = 0;
    in.read(reinterpret_cast<char *>(&hash), sizeof(hash));
    const std::vector<uint8_t> state { std::istreambuf_iterator<char>(in), {} };
    if (hash != dflash2_state_hash(state) ||
            llama_state_seq_set_data(ctx_dft, state.data(), state.size(), seq_id) == 0 ||
            llama_memory_seq_pos_max(memory, seq_id) != end) {
        llama_memory_seq_rm(memory, seq_id, -1, -1);
    }
}
