// Which kernel serves a quantised matrix product of a few rows: a table that can be measured and replaced at run time.
//
// A GPU backend has two kernels for the 2 to 8 rows that a verify pass multiplies: one that grew out of the product
// with a single vector, and one that multiplies tiles. Where the second becomes the faster one depends on the type of
// the weights and on the card. An entry of the table says up to how many rows the first is used.
//
// Entries come from the code below, then from the file dflash2-dispatch.txt beside the library, where the measuring puts
// them, then from the environment variable DFLASH2_DISPATCH: the path of a file, or the entries themselves, separated by
// ';'. The last one that fits counts; where none does, the backend decides as it always did. DFLASH2_NO_DISPATCH=1
// ignores all entries. One entry a line, '#' before a comment:
//
//     backend device operation type rows          for example: cuda 860 mul_mat q4_K 5
//
// backend    cuda (HIP and MUSA too) or metal
// device     its compute capability as ggml counts it (860: 8.6); * for all
// operation  mul_mat, mul_mat_id (experts; can only be lowered), or
//            pass: rows that Metal's small-batch kernel takes at once, 2 to 5
// type       of the weights, as ggml_type_name says; * for all quantised ones
// rows       1 to 8
#pragma once

#include "dflash2-switch.h"
#include "ggml.h"

#include <array>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <sstream>
#include <string>
#include <vector>

#ifdef _WIN32
#    ifndef NOMINMAX
#        define NOMINMAX
#    endif
#    include <windows.h>
#else
#    include <dlfcn.h>
#endif

namespace dflash2 {

enum dispatch_op { DISPATCH_MUL_MAT, DISPATCH_MUL_MAT_ID, DISPATCH_PASS, DISPATCH_OPS };

constexpr int DISPATCH_MAX_ROWS   = 8;
constexpr int DISPATCH_ANY_DEVICE = -1;

struct dispatch_entry {
    std::string backend;
    int         device; // or DISPATCH_ANY_DEVICE
    dispatch_op op;
    ggml_type   type;   // or GGML_TYPE_COUNT: every quantised one
    int         rows;
};

// What the table says of one device: rows by operation and type, -1 where the backend decides.
struct dispatch_limits {
    std::array<std::array<int8_t, GGML_TYPE_COUNT>, DISPATCH_OPS> rows;

    int of(dispatch_op op, ggml_type type) const { return rows[op][type]; }
};

using dispatch_entries = std::vector<dispatch_entry>;
using dispatch_report  = std::function<void(const std::string &)>;

// Cards that upstream has no limits for, by what was published; `dflash2 build --measure-dispatch` replaces them.
// sm_75: upstream's 8, said aloud. No sweep of K-quants was found, and the GTX 16 and MX cards, which have the same
//   number but no tensor cores for MMQ, may lose by what a T4 gains.
// sm_80, sm_86, K-quants: the larger of upstream's limits for sm_70 and sm_120; no sweep of such a card was found. MMVQ
//   decodes the weights anew for every row, so what should count is multiprocessors x GHz over GB/s: the V100 (0.13),
//   RTX 5090 (0.23) and Orin (0.10, limit 1) switch, the RTX 4090 (0.32) and GB10 (0.42) hardly; the A100 has 0.1, the
//   RTX 3090 0.15, the A10 0.2. On an RTX 3090 a limit of 3 for all types made DFlash 2 overtake MTP (club-3090 PR 1056).
// sm_86, q4_0 and q8_0: MMQ wins from 8 rows on an A10, by 9.1% end to end for q4_0, from 4 on an RTX 3050 (llama.cpp
//   issue 28090). sm_80 keeps 8 there: the V100 and the L20 lose with 7 (same issue).
inline dispatch_entries dispatch_built_in() {
    dispatch_entries entries = {
        { "cuda", 750, DISPATCH_MUL_MAT, GGML_TYPE_COUNT, 8 },
        { "cuda", 800, DISPATCH_MUL_MAT, GGML_TYPE_COUNT, 8 },
        { "cuda", 860, DISPATCH_MUL_MAT, GGML_TYPE_Q4_0, 7 },
        { "cuda", 860, DISPATCH_MUL_MAT, GGML_TYPE_Q8_0, 7 },
    };
    for (const int device : { 800, 860 }) {
        entries.push_back({ "cuda", device, DISPATCH_MUL_MAT, GGML_TYPE_Q2_K, 5 });
        entries.push_back({ "cuda", device, DISPATCH_MUL_MAT, GGML_TYPE_Q3_K, 6 });
        entries.push_back({ "cuda", device, DISPATCH_MUL_MAT, GGML_TYPE_Q4_K, 5 });
        entries.push_back({ "cuda", device, DISPATCH_MUL_MAT, GGML_TYPE_Q5_K, 6 });
        entries.push_back({ "cuda", device, DISPATCH_MUL_MAT, GGML_TYPE_Q6_K, 7 });
    }
    return entries;
}

// One line as an entry. An empty one (or a comment) gives false and no message, a wrong one false and what is wrong.
inline bool dispatch_parse_line(const std::string & line, dispatch_entry & entry, std::string & problem) {
    std::istringstream       words(line.substr(0, line.find('#')));
    std::vector<std::string> word;
    for (std::string next; words >> next;) {
        word.push_back(next);
    }
    problem.clear();
    if (word.empty()) {
        return false;
    }
    if (word.size() != 5) {
        problem = "not five words: " + line;
        return false;
    }

    entry.backend = word[0];
    if (entry.backend != "cuda" && entry.backend != "metal") {
        problem = "unknown backend " + entry.backend;
        return false;
    }

    char * end   = nullptr;
    entry.device = word[1] == "*" ? DISPATCH_ANY_DEVICE : (int) strtol(word[1].c_str(), &end, 10);
    if (word[1] != "*" && (*end != '\0' || entry.device < 0)) {
        problem = "unknown device " + word[1];
        return false;
    }

    static const std::array<const char *, DISPATCH_OPS> names = { "mul_mat", "mul_mat_id", "pass" };
    int op = 0;
    while (op < DISPATCH_OPS && word[2] != names[op]) {
        op++;
    }
    if (op == DISPATCH_OPS) {
        problem = "unknown operation " + word[2];
        return false;
    }
    entry.op = (dispatch_op) op;

    int type = 0;
    while (word[3] != "*" && type < GGML_TYPE_COUNT
           && (!ggml_is_quantized((ggml_type) type) || word[3] != ggml_type_name((ggml_type) type))) {
        type++;
    }
    if (type == GGML_TYPE_COUNT) {
        problem = "no quantised type " + word[3];
        return false;
    }
    entry.type = word[3] == "*" ? GGML_TYPE_COUNT : (ggml_type) type;

    const long rows = strtol(word[4].c_str(), &end, 10);
    const long low  = entry.op == DISPATCH_PASS ? 2 : 1;
    const long high = entry.op == DISPATCH_PASS ? 5 : DISPATCH_MAX_ROWS;
    if (*end != '\0' || rows < low || rows > high) {
        problem = "rows are not " + std::to_string(low) + " to " + std::to_string(high) + ": " + word[4];
        return false;
    }
    entry.rows = (int) rows;
    return true;
}

// Every entry of `text`, which has one a line or separates them by ';'. What is wrong goes to `report` and is left out.
inline dispatch_entries dispatch_parse(std::string text, const dispatch_report & report) {
    for (char & c : text) {
        c = c == ';' ? '\n' : c;
    }
    dispatch_entries   entries;
    std::istringstream lines(text);
    for (std::string line; std::getline(lines, line);) {
        dispatch_entry entry;
        std::string    problem;
        if (dispatch_parse_line(line, entry, problem)) {
            entries.push_back(entry);
        } else if (!problem.empty()) {
            report(problem);
        }
    }
    return entries;
}

// Path of the measured table: beside the library, or program, that this is compiled into; "" if its path is not known.
inline std::string dispatch_measured() {
    std::string path;
#ifdef _WIN32
    HMODULE     module = nullptr;
    char        name[MAX_PATH];
    const DWORD flags = GET_MODULE_HANDLE_EX_FLAG_FROM_ADDRESS | GET_MODULE_HANDLE_EX_FLAG_UNCHANGED_REFCOUNT;
    if (GetModuleHandleExA(flags, (LPCSTR) &dispatch_measured, &module)) {
        path.assign(name, GetModuleFileNameA(module, name, MAX_PATH));
    }
#else
    Dl_info info;
    if (dladdr((void *) &dispatch_measured, &info) != 0 && info.dli_fname != nullptr) {
        path = info.dli_fname;
    }
#endif
    const size_t folder = path.find_last_of("/\\");
    return folder == std::string::npos ? "" : path.substr(0, folder + 1) + "dflash2-dispatch.txt";
}

// What the file at `path` holds; "" if it is none. A folder can be opened, but has nothing to read.
inline std::string dispatch_read(const std::string & path) {
    std::ifstream      file(path);
    std::ostringstream text;
    return file.is_open() && text << file.rdbuf() ? text.str() : "";
}

// Whether `text` can only be meant as a path: entries have blanks and no slashes.
inline bool dispatch_is_path(const std::string & text) {
    const bool has_slash = text.find_first_of("/\\") != std::string::npos;
    const bool has_blank = text.find_first_of(" \t") != std::string::npos;
    return !text.empty() && (has_slash || !has_blank);
}

// The entries in force: built in, then the measured ones, then those of the environment.
inline dispatch_entries dispatch_load(const dispatch_report & report) {
    if (dflash2_switched_off("DFLASH2_NO_DISPATCH")) {
        return {};
    }
    dispatch_entries entries = dispatch_built_in();
    const auto add = [&](const std::string & text) {
        const dispatch_entries more = dispatch_parse(text, report);
        entries.insert(entries.end(), more.begin(), more.end());
    };
    add(dispatch_read(dispatch_measured()));
    const char *      given = getenv("DFLASH2_DISPATCH");
    const std::string text  = given != nullptr ? dispatch_read(given) : "";
    if (!text.empty()) {
        add(text);
    } else if (given != nullptr && dispatch_is_path(given)) {
        report(std::string("DFLASH2_DISPATCH: no such file, or nothing in it: ") + given);
    } else if (given != nullptr) {
        add(given);
    }
    return entries;
}

// What `entries` say of one device.
inline dispatch_limits dispatch_for(const dispatch_entries & entries, const std::string & backend, int device) {
    dispatch_limits limits;
    for (auto & by_type : limits.rows) {
        by_type.fill(-1);
    }
    for (const dispatch_entry & entry : entries) {
        if (entry.backend != backend || (entry.device != DISPATCH_ANY_DEVICE && entry.device != device)) {
            continue;
        }
        for (int type = 0; type < GGML_TYPE_COUNT; type++) {
            if (entry.type == type || (entry.type == GGML_TYPE_COUNT && ggml_is_quantized((ggml_type) type))) {
                limits.rows[entry.op][type] = (int8_t) entry.rows;
            }
        }
    }
    return limits;
}

// Rows of one pass when `rows` are taken `most` at a time, as evenly as can be.
inline int dispatch_pass_rows(int rows, int most) {
    const int passes = (rows + most - 1) / most;
    return (rows + passes - 1) / passes;
}

} // namespace dflash2
