// Times the two kernels that can serve a quantised matrix product of 2 to 8 rows, for the table of dflash2-dispatch.h.
//
//   dflash2-measure [--device NAME] [--size COLUMNSxROWS] [--types q4_0,q4_K,...] [--milliseconds N]
//
// The device is the first one whose backend has the table, the size that of a 27B model's FFN. Prints, separated by
// tabs, "device NUMBER NAME" once and then "time TYPE ROWS VECTOR MATRIX" for each type and number of rows:
// microseconds of one product with the kernel for few rows and with the one for many, medians of interleaved runs.
// A device without the table gives the same kernel twice, which says what a row costs there.
#include "ggml-backend.h"
#include "ggml.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace {

constexpr int    MAX_ROWS    = 8;
constexpr int    REPETITIONS = 5;
constexpr size_t COLD_BYTES  = 192u << 20; // more than any cache: a product must read its weights from memory
constexpr int    MAX_COPIES  = 16;

struct options {
    std::string              device;
    int64_t                  columns      = 5120;
    int64_t                  rows         = 17408;
    double                   milliseconds = 4;
    std::vector<std::string> types = { "q4_0", "q4_1", "q5_0", "q5_1", "q8_0",   "q2_K",   "q3_K",
                                       "q4_K", "q5_K", "q6_K", "iq4_nl", "iq4_xs", "iq3_s", "mxfp4" };
};

struct bench_device {
    ggml_backend_dev_t device = nullptr;
    int                number = 0;
    void (*force)(int)        = nullptr; // null if the backend has no table
};

struct free_context { void operator()(ggml_context * ctx) const { ggml_free(ctx); } };
struct free_backend { void operator()(ggml_backend_t backend) const { ggml_backend_free(backend); } };
struct free_buffer  { void operator()(ggml_backend_buffer_t buffer) const { ggml_backend_buffer_free(buffer); } };

using context_ptr = std::unique_ptr<ggml_context, free_context>;
using backend_ptr = std::unique_ptr<ggml_backend, free_backend>;
using buffer_ptr  = std::unique_ptr<ggml_backend_buffer, free_buffer>;

options parse(int argc, char ** argv) {
    options given;
    for (int i = 1; i + 1 < argc; i += 2) {
        const std::string name = argv[i], value = argv[i + 1];
        if (name == "--device") {
            given.device = value;
        } else if (name == "--size") {
            char * end    = nullptr;
            given.columns = strtoll(value.c_str(), &end, 10);
            given.rows    = *end == 'x' ? strtoll(end + 1, &end, 10) : 0;
            if (given.columns < 256 || given.columns % 256 != 0 || given.rows < 1 || *end != '\0') {
                throw std::runtime_error("--size is COLUMNSxROWS, columns a multiple of 256");
            }
        } else if (name == "--types") {
            given.types.clear();
            std::istringstream list(value);
            for (std::string type; std::getline(list, type, ',');) {
                given.types.push_back(type);
            }
        } else if (name == "--milliseconds") {
            given.milliseconds = atof(value.c_str());
        } else {
            throw std::runtime_error("unknown option " + name);
        }
    }
    if (argc % 2 == 0) {
        throw std::runtime_error(std::string(argv[argc - 1]) + " has no value");
    }
    return given;
}

bench_device find_device(const std::string & name) {
    for (size_t i = 0; i < ggml_backend_dev_count(); i++) {
        bench_device found;
        found.device             = ggml_backend_dev_get(i);
        ggml_backend_reg_t owner = ggml_backend_dev_backend_reg(found.device);
        found.force  = (void (*)(int)) ggml_backend_reg_get_proc_address(owner, "dflash2_dispatch_force");
        auto number  = (int (*)(int)) ggml_backend_reg_get_proc_address(owner, "dflash2_dispatch_device");
        size_t index = 0;
        while (ggml_backend_reg_dev_get(owner, index) != found.device) {
            index++;
        }
        found.number = number != nullptr ? number((int) index) : 0;
        if (name.empty() ? found.force != nullptr : name == ggml_backend_dev_name(found.device)) {
            return found;
        }
    }
    throw std::runtime_error(name.empty() ? "no device here has a dispatch table" : "there is no device " + name);
}

ggml_type type_named(const std::string & name) {
    for (int type = 0; type < GGML_TYPE_COUNT; type++) {
        if (ggml_is_quantized((ggml_type) type) && name == ggml_type_name((ggml_type) type)) {
            return (ggml_type) type;
        }
    }
    throw std::runtime_error("no quantised type " + name);
}

// One row of `columns` weights that look like a model's, quantised.
std::vector<char> quantised_row(ggml_type type, int64_t columns) {
    std::vector<float> values(columns), importance(columns, 1.0f);
    for (int64_t i = 0; i < columns; i++) {
        values[i] = 0.05f * std::sin(0.7f * (float) i) * std::cos(0.013f * (float) (i * i % 1009));
    }
    std::vector<char> row(ggml_row_size(type, columns));
    ggml_quantize_chunk(type, values.data(), row.data(), 0, 1, columns, importance.data());
    return row;
}

// Products of one type with copies of the weights, so that none is in a cache when it is needed again.
class products {
  public:
    products(ggml_backend_t backend, ggml_type type, const options & given) : backend(backend) {
        const size_t bytes = ggml_row_size(type, given.columns) * given.rows;
        const int    copies = (int) std::clamp<size_t>(COLD_BYTES / bytes, 1, MAX_COPIES);
        ctx.reset(ggml_init({ ggml_tensor_overhead() * (copies * (MAX_ROWS + 1) + MAX_ROWS + 8)
                                  + ggml_graph_overhead() * MAX_ROWS, nullptr, true }));
        std::vector<ggml_tensor *> weights(copies);
        for (auto & weight : weights) {
            weight = ggml_new_tensor_2d(ctx.get(), type, given.columns, given.rows);
        }
        std::vector<ggml_tensor *> inputs;
        for (int rows = 1; rows <= MAX_ROWS; rows++) {
            inputs.push_back(ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, given.columns, rows));
            graphs.push_back(ggml_new_graph(ctx.get()));
            for (ggml_tensor * weight : weights) {
                ggml_build_forward_expand(graphs.back(), ggml_mul_mat(ctx.get(), weight, inputs.back()));
            }
        }
        buffer.reset(ggml_backend_alloc_ctx_tensors(ctx.get(), backend));
        if (!buffer) {
            throw std::runtime_error("not enough memory on the device");
        }
        fill(type, given, weights, inputs);
        count = copies;
    }

    // Whether the device multiplies with weights of this type at all.
    bool supported() const {
        return ggml_backend_supports_op(backend, ggml_graph_node(graphs.back(), 0));
    }

    // Microseconds of one product of `rows` rows, over as many runs as take `milliseconds`.
    double time(int rows, double milliseconds) const {
        int runs = 0;
        ggml_backend_graph_compute(backend, graphs[rows - 1]);
        ggml_backend_synchronize(backend);
        const auto start = std::chrono::steady_clock::now();
        double     spent = 0;
        while (spent < milliseconds) {
            ggml_backend_graph_compute(backend, graphs[rows - 1]);
            ggml_backend_synchronize(backend);
            runs++;
            spent = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
        }
        return 1000 * spent / (runs * count);
    }

  private:
    static void fill(ggml_type type, const options & given, const std::vector<ggml_tensor *> & weights,
                     const std::vector<ggml_tensor *> & inputs) {
        const std::vector<char> row = quantised_row(type, given.columns);
        std::vector<char>       all;
        for (int64_t i = 0; i < given.rows; i++) {
            all.insert(all.end(), row.begin(), row.end());
        }
        for (ggml_tensor * weight : weights) {
            ggml_backend_tensor_set(weight, all.data(), 0, all.size());
        }
        const std::vector<float> ones(given.columns * MAX_ROWS, 1.0f);
        for (ggml_tensor * input : inputs) {
            ggml_backend_tensor_set(input, ones.data(), 0, ggml_nbytes(input));
        }
    }

    ggml_backend_t             backend;
    context_ptr                ctx;
    buffer_ptr                 buffer;
    std::vector<ggml_cgraph *> graphs;
    int                        count = 0;
};

double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
}

// Times with the kernel for few rows and with the one for many; in turns, so that a drifting clock meets both.
std::pair<double, double> both_kernels(const products & work, const bench_device & on, int rows, double milliseconds) {
    std::vector<double> times[2];
    for (int i = 0; i < 2 * REPETITIONS; i++) {
        const bool matrix = (i + 1) / 2 % 2 == 1;
        if (on.force != nullptr) {
            on.force(matrix ? 1 : MAX_ROWS);
        }
        times[matrix].push_back(work.time(rows, milliseconds));
    }
    if (on.force != nullptr) {
        on.force(-1);
    }
    return { median(times[0]), median(times[1]) };
}

void measure(const options & given) {
    const bench_device on = find_device(given.device);
    backend_ptr        backend(ggml_backend_dev_init(on.device, nullptr));
    printf("device\t%d\t%s\n", on.number, ggml_backend_dev_description(on.device));
    for (const std::string & name : given.types) {
        const products work(backend.get(), type_named(name), given);
        if (!work.supported()) {
            continue;
        }
        for (int rows = 1; rows <= MAX_ROWS; rows++) {
            const auto times = both_kernels(work, on, rows, given.milliseconds);
            printf("time\t%s\t%d\t%.2f\t%.2f\n", name.c_str(), rows, times.first, times.second);
            fflush(stdout);
        }
    }
}

} // namespace

int main(int argc, char ** argv) {
    // A captured graph would repeat the kernels that it was captured with.
#ifdef _WIN32
    _putenv_s("GGML_CUDA_DISABLE_GRAPHS", "1");
#else
    setenv("GGML_CUDA_DISABLE_GRAPHS", "1", 1);
#endif
    try {
        const options given = parse(argc, argv);
        ggml_backend_load_all();
        measure(given);
    } catch (const std::exception & error) {
        fprintf(stderr, "dflash2-measure: %s\n", error.what());
        return 1;
    }
    return 0;
}
