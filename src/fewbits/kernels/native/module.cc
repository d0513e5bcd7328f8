// The Python bindings: check every size, release the interpreter lock, and pass rows to a kernel.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "formats/codebook.h"
#include "formats/halves.h"
#include "kernels.h"
#include "matmul/exact.h"
#include "matmul/matmul.h"
#include "matmul/tiles.h"
#include "matmul/w8a8.h"
#include "platform/threads.h"
#include "search/feedback.h"

namespace nb = nanobind;

namespace fewbits {
namespace {

using Bytes = nb::ndarray<const uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using BytesInto = nb::ndarray<uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using FloatsInto = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using FloatList = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using HalvesInto = nb::ndarray<uint16_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using IntegersInto = nb::ndarray<int8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using FloatListInto = nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Integers = nb::ndarray<const int8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using ByteListInto = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ByteList = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Row pointers of up to kMaxFields arrays. Stride 0: all rows share one (a field of the whole weight).
template <typename Byte>
struct Fields {
  std::array<Byte*, kMaxFields> start{};
  std::array<size_t, kMaxFields> stride{};

  std::array<Byte*, kMaxFields> at(size_t row) const {
    std::array<Byte*, kMaxFields> here{};
    for (size_t i = 0; i < kMaxFields; ++i) here[i] = start[i] + row * stride[i];
    return here;
  }
};

size_t count(const Field* fields) {
  return std::find_if(fields, fields + kMaxFields, [](auto& f) { return !f.name; }) - fields;
}

std::vector<std::string> names(const Field* fields) {
  std::vector<std::string> found;
  for (size_t i = 0; i < count(fields); ++i) found.emplace_back(fields[i].name);
  return found;
}

size_t blocks_of(const Layout& layout, size_t cols) {
  if (cols % layout.block)
    throw std::invalid_argument(std::to_string(cols) + " columns do not divide into " + layout.format + "'s blocks of " +
                                std::to_string(layout.block));
  return cols / layout.block;
}

// Kernels read and write only inside the sizes that are checked here.
template <typename Byte, typename Array>
Fields<Byte> checked(const Layout& layout, const Field* fields, const std::vector<Array>& arrays, size_t rows, size_t blocks) {
  if (arrays.size() != count(fields))
    throw std::invalid_argument(std::string(layout.format) + " has " + std::to_string(count(fields)) + " of these arrays, " +
                                std::to_string(arrays.size()) + " were given");
  Fields<Byte> result;
  for (size_t i = 0; i < arrays.size(); ++i) {
    const size_t has_rows = arrays[i].shape(0), has_bytes = arrays[i].shape(1), bytes = fields[i].row_bytes(blocks);
    const bool shared = std::is_const_v<Byte> && has_rows == 1;
    if ((has_rows != rows && !shared) || has_bytes != bytes)
      throw std::invalid_argument(std::string(layout.format) + " `" + fields[i].name + "` needs " + std::to_string(rows) + " x " +
                                  std::to_string(bytes) + " bytes, it has " + std::to_string(has_rows) + " x " +
                                  std::to_string(has_bytes));
    result.start[i] = arrays[i].data();
    result.stride[i] = has_rows == 1 ? 0 : bytes;
  }
  return result;
}

// Rows are independent, so the result does not depend on how many threads share them.
template <typename Work>
void for_rows(size_t rows, size_t cols, int threads, const Work& work) {
  constexpr size_t kWorthAThread = 1 << 16;  // weights: decoding them takes 10 us, waking a thread of the pool one or two
  const size_t most = std::max<size_t>(1, std::min(rows, rows * cols / kWorthAThread));
  const size_t shares = shares_of(threads, most);
  const auto share = [&](size_t i) {
    for (size_t row = rows * i / shares; row < rows * (i + 1) / shares; ++row) work(row);
  };
  run_shares(shares, share);
}

// Null if it cannot run here. A codebook whose points were not given is an error: weights would be garbage.
const Kernel* usable(const std::string& format, const std::string& isa) {
  const Kernel* kernel = find_kernel(format.c_str(), isa.c_str());
  if (!kernel || !kernel->runs_here()) return nullptr;
  require_grid(kernel->layout.format);
  return kernel;
}

constexpr size_t kPastTheCaches = 1 << 22;  // weights: 16 MB as float32, more than the caches hold

void decode(const std::string& format, const std::string& isa, const std::vector<Bytes>& parts, FloatsInto out, int threads) {
  const Kernel* kernel = usable(format, isa);
  if (!kernel) throw std::invalid_argument("no " + isa + " kernel decodes " + format + " here");
  const size_t rows = out.shape(0), cols = out.shape(1);
  const auto from = checked<const uint8_t>(kernel->layout, kernel->layout.parts, parts, rows, blocks_of(kernel->layout, cols));
  float* const into = out.data();
  const bool past = rows * cols >= kPastTheCaches && cols % 16 == 0 && reinterpret_cast<uintptr_t>(into) % 64 == 0;
  nb::gil_scoped_release released;
  for_rows(rows, cols, threads,
           [&](size_t row) { kernel->of.decode_row(kernel->layout, from.at(row).data(), cols, into + row * cols, past); });
}

// The same in 16 bits: each row is decoded to float32 and rounded while it is in the cache.
void decode_half(const std::string& format, const std::string& isa, const std::vector<Bytes>& parts, HalvesInto out,
                 bool bfloat16, int threads) {
  const Kernel* kernel = usable(format, isa);
  if (!kernel) throw std::invalid_argument("no " + isa + " kernel decodes " + format + " here");
  const size_t rows = out.shape(0), cols = out.shape(1);
  const auto from = checked<const uint8_t>(kernel->layout, kernel->layout.parts, parts, rows, blocks_of(kernel->layout, cols));
  const ToHalf to_half = find_to_half(bfloat16 ? Half::kBfloat16 : Half::kFloat16, kernel->isa);
  uint16_t* const into = out.data();
  nb::gil_scoped_release released;
  for_rows(rows, cols, threads, [&](size_t row) {
    thread_local std::vector<float> wide;
    wide.resize(cols);
    kernel->of.decode_row(kernel->layout, from.at(row).data(), cols, wide.data(), false);
    to_half(wide.data(), cols, into + row * cols);
  });
}

void pack(const std::string& format, const Bytes& codes, const std::vector<Bytes>& grid, const std::vector<BytesInto>& parts,
          int threads) {
  const Kernel* kernel = find_packer(format.c_str());
  if (!kernel) throw std::invalid_argument("no kernel packs " + format + " here");
  const size_t rows = codes.shape(0), cols = codes.shape(1), blocks = blocks_of(kernel->layout, cols);
  const auto from = checked<const uint8_t>(kernel->layout, kernel->layout.grid, grid, rows, blocks);
  const auto into = checked<uint8_t>(kernel->layout, kernel->layout.parts, parts, rows, blocks);
  const uint8_t* const code = codes.data();
  nb::gil_scoped_release released;
  for_rows(rows, cols, threads, [&](size_t row) {
    kernel->of.pack_row(kernel->layout, code + row * cols, from.at(row).data(), cols, into.at(row).data());
  });
}

// x (rows, cols) times the weight (weights, cols) transposed -> out (rows, weights); `bias` has a number for each weight.
void matmul_with(void (*multiplies)(const Product&, int), const Kernel& kernel, const Floats& x, const std::vector<Bytes>& parts,
                 FloatsInto& out, const std::optional<FloatList>& bias, int threads) {
  const size_t rows = x.shape(0), cols = x.shape(1), weights = out.shape(1);
  if (out.shape(0) != rows || (bias && bias->shape(0) != weights))
    throw std::invalid_argument("x, out and bias do not belong together");
  const auto from = checked<const uint8_t>(kernel.layout, kernel.layout.parts, parts, weights, blocks_of(kernel.layout, cols));
  const Product product{kernel,   {from.start, from.stride},     nullptr,   rows, cols, weights,
                        x.data(), bias ? bias->data() : nullptr, out.data()};
  nb::gil_scoped_release released;
  if (rows && weights) multiplies(product, threads);
}

void matmul(const std::string& format, const std::string& isa, const Floats& x, const std::vector<Bytes>& parts, FloatsInto out,
            const std::optional<FloatList>& bias, int threads) {
  const Kernel* kernel = usable(format, isa);
  if (!kernel || !kernel->of.dot_row) throw std::invalid_argument("no " + isa + " kernel multiplies by " + format + " here");
  matmul_with(multiply, *kernel, x, parts, out, bias, threads);
}

// The same without rounding the activations, for any format that has a decoder.
void matmul_exact(const std::string& format, const std::string& isa, const Floats& x, const std::vector<Bytes>& parts,
                  FloatsInto out, const std::optional<FloatList>& bias, int threads) {
  const Kernel* kernel = usable(format, isa);
  if (!kernel) throw std::invalid_argument("no " + isa + " kernel decodes " + format + " here");
  matmul_with(multiply_exactly, *kernel, x, parts, out, bias, threads);
}

// Bytes of a weight in the layout of matmul/tiles.h; 0: no kernel multiplies tiles of this format.
size_t tiled_size(const std::string& format, const std::string& isa, size_t weights, size_t cols) {
  const Kernel* kernel = usable(format, isa);
  if (!kernel || !kernel->of.dot_row || !find_tiles(kernel->isa, kernel->of.bytes).dot) return 0;
  return tiled_bytes(*kernel, weights, cols);
}

const Kernel& tiling_kernel(const std::string& format, const std::string& isa, size_t weights, size_t cols, size_t bytes) {
  if (bytes != tiled_size(format, isa, weights, cols) || bytes == 0)
    throw std::invalid_argument("these are no tiles of " + format + " for " + isa);
  return *find_kernel(format.c_str(), isa.c_str());
}

bool tile_weight(const std::string& format, const std::string& isa, const std::vector<Bytes>& parts, size_t weights, size_t cols,
                 ByteListInto tiles, int threads) {
  const Kernel& kernel = tiling_kernel(format, isa, weights, cols, tiles.shape(0));
  const auto from = checked<const uint8_t>(kernel.layout, kernel.layout.parts, parts, weights, blocks_of(kernel.layout, cols));
  nb::gil_scoped_release released;
  return tile(kernel, {from.start, from.stride}, weights, cols, tiles.data(), threads);
}

void matmul_tiles(const std::string& format, const std::string& isa, const Floats& x, const ByteList& tiles, FloatsInto out,
                  const std::optional<FloatList>& bias, int threads) {
  const size_t rows = x.shape(0), cols = x.shape(1), weights = out.shape(1);
  const Kernel& kernel = tiling_kernel(format, isa, weights, cols, tiles.shape(0));
  if (out.shape(0) != rows || (bias && bias->shape(0) != weights))
    throw std::invalid_argument("x, out and bias do not belong together");
  const Product product{kernel, {}, tiles.data(), rows, cols, weights, x.data(), bias ? bias->data() : nullptr, out.data()};
  nb::gil_scoped_release released;
  if (rows && weights) multiply(product, threads);
}

// x (rows, cols) int8 times w (weights, cols) int8 transposed, exactly; then both scales, and the bias.
void w8a8(const std::string& isa, const Integers& x, const FloatList& x_scale, const Integers& w, const FloatList& w_scale,
          const std::optional<FloatList>& bias, FloatsInto out, int threads) {
  const size_t rows = x.shape(0), cols = x.shape(1), weights = w.shape(0);
  if (w.shape(1) != cols || x_scale.shape(0) != rows || w_scale.shape(0) != weights || (bias && bias->shape(0) != weights) ||
      out.shape(0) != rows || out.shape(1) != weights)
    throw std::invalid_argument("x, w, their scales, bias and out do not belong together");
  const IntegerProduct product{
      rows, cols, weights, x.data(), x_scale.data(), w.data(), w_scale.data(), bias ? bias->data() : nullptr, out.data()};
  nb::gil_scoped_release released;
  if (rows && weights) multiply_integers(isa.c_str(), product, threads);
}

void quantize_rows_to_int8(const std::string& isa, const Floats& x, IntegersInto codes, FloatListInto scale, int threads) {
  if (codes.shape(0) != x.shape(0) || codes.shape(1) != x.shape(1) || scale.shape(0) != x.shape(0))
    throw std::invalid_argument("x, its codes and scales do not belong together");
  nb::gil_scoped_release released;
  quantize_tokens(isa.c_str(), x.data(), x.shape(0), x.shape(1), codes.data(), scale.data(), threads);
}

template <typename Array>
void needs_shape(const char* name, const Array& array, size_t rows, size_t cols) {
  if (array.shape(0) != rows || array.shape(1) != cols)
    throw std::invalid_argument(std::string("`") + name + "` needs " + std::to_string(rows) + " x " + std::to_string(cols) +
                                ", it has " + std::to_string(array.shape(0)) + " x " + std::to_string(array.shape(1)));
}

// All arrays are (columns, rows) except the coupling, (columns, columns). `values` are ascending; `by_code` has 256 entries.
void feedback(const std::string& isa, const Floats& targets, const Floats& weights, FloatsInto errors, BytesInto codes,
              const Floats& scale, const std::optional<Floats>& offset, const Floats& coupling, const FloatList& values,
              const FloatList& boundaries, const ByteList& value_codes, const FloatList& by_code, bool consecutive,
              int minus_zero, bool keep, int threads) {
  const FeedbackVisit visit = find_feedback(isa.c_str());
  if (!visit) throw std::invalid_argument("no " + isa + " error feedback runs here");
  const size_t columns = targets.shape(0), rows = targets.shape(1), count = values.shape(0);
  if (columns > kFeedbackColumns)
    throw std::invalid_argument("a tile has at most " + std::to_string(kFeedbackColumns) + " columns");
  needs_shape("weights", weights, columns, rows);
  needs_shape("errors", errors, columns, rows);
  needs_shape("codes", codes, columns, rows);
  needs_shape("scale", scale, columns, rows);
  if (offset) needs_shape("offset", *offset, columns, rows);
  needs_shape("coupling", coupling, columns, columns);
  if (count < 1 || count > 256 || boundaries.shape(0) != count - 1 || value_codes.shape(0) != count || by_code.shape(0) != 256)
    throw std::invalid_argument("the levels' arrays do not belong together");
  const FeedbackLevels levels{count,          consecutive, values.data(), boundaries.data(), value_codes.data(),
                              by_code.data(), minus_zero};
  const FeedbackTile tile{columns,
                          rows,
                          targets.data(),
                          weights.data(),
                          errors.data(),
                          codes.data(),
                          scale.data(),
                          offset ? offset->data() : nullptr,
                          coupling.data(),
                          columns,
                          keep};
  nb::gil_scoped_release released;
  const size_t strips = feedback_strips(rows);
  for_rows(strips, columns * rows / std::max<size_t>(1, strips), threads,
           [&](size_t strip) { visit_feedback_strip(visit, tile, levels, strip); });
}

// The points of a codebook, (points, coordinates); what is given first stays.
void give_grid(const std::string& format, const Integers& coordinates) {
  Codebook* const codebook = find_codebook(format.c_str());
  if (!codebook) throw std::invalid_argument(format + " has no codebook");
  needs_shape("coordinates", coordinates, codebook->points, codebook->dims);
  codebook->give(coordinates.data());
}

// Formats whose points must be given before a weight is read.
std::vector<std::string> grids() {
  std::vector<std::string> found;
  for (const Kernel* k = first_kernel(); k; k = k->next)
    if (k->of.point_codes) found.emplace_back(k->layout.format);
  return found;
}

// (format, isa, runs here, part names, grid names, whether it multiplies, whether the format has a packer) of every kernel.
nb::list kernels() {
  nb::list found;
  for (const Kernel* k = first_kernel(); k; k = k->next)
    found.append(nb::make_tuple(k->layout.format, k->isa, k->runs_here(), names(k->layout.parts), names(k->layout.grid),
                                k->of.dot_row != nullptr, find_packer(k->layout.format) != nullptr));
  return found;
}

}  // namespace

void register_search(nb::module_& m);      // search/long_rows.cc
void register_vectors(nb::module_& m);     // search/vectors.cc
void register_feedback(nb::module_& m);    // search/feedback_binding.cc
void register_attention(nb::module_& m);   // attention/attention.cc
void register_statistics(nb::module_& m);  // measure/statistics.cc
void register_roofline(nb::module_& m);    // measure/roofline.cc
void register_decoder(nb::module_& m);     // decoder/decoder.cc

NB_MODULE(_native, m) {
  m.attr("ABI") = kAbi;
  m.def("kernels", &kernels);
  m.def("grids", &grids);
  m.def("give_grid", &give_grid);
  // noconvert: a mismatched array must be refused, because a silent copy would be written instead of the caller's memory.
  m.def("decode", &decode, nb::arg("format"), nb::arg("isa"), nb::arg("parts").noconvert(), nb::arg("out").noconvert(),
        nb::arg("threads"));
  m.def("decode_half", &decode_half, nb::arg("format"), nb::arg("isa"), nb::arg("parts").noconvert(), nb::arg("out").noconvert(),
        nb::arg("bfloat16"), nb::arg("threads"));
  m.def("pack", &pack, nb::arg("format"), nb::arg("codes").noconvert(), nb::arg("grid").noconvert(), nb::arg("parts").noconvert(),
        nb::arg("threads"));
  m.def("matmul", &matmul, nb::arg("format"), nb::arg("isa"), nb::arg("x").noconvert(), nb::arg("parts").noconvert(),
        nb::arg("out").noconvert(), nb::arg("bias").noconvert().none(), nb::arg("threads"));
  m.def("matmul_exact", &matmul_exact, nb::arg("format"), nb::arg("isa"), nb::arg("x").noconvert(), nb::arg("parts").noconvert(),
        nb::arg("out").noconvert(), nb::arg("bias").noconvert().none(), nb::arg("threads"));
  m.def("tiled_size", &tiled_size);
  m.def("tile", &tile_weight, nb::arg("format"), nb::arg("isa"), nb::arg("parts").noconvert(), nb::arg("weights"),
        nb::arg("cols"), nb::arg("tiles").noconvert(), nb::arg("threads"));
  m.def("matmul_tiles", &matmul_tiles, nb::arg("format"), nb::arg("isa"), nb::arg("x").noconvert(), nb::arg("tiles").noconvert(),
        nb::arg("out").noconvert(), nb::arg("bias").noconvert().none(), nb::arg("threads"));
  m.def("w8a8", &w8a8, nb::arg("isa"), nb::arg("x").noconvert(), nb::arg("x_scale").noconvert(), nb::arg("w").noconvert(),
        nb::arg("w_scale").noconvert(), nb::arg("bias").noconvert().none(), nb::arg("out").noconvert(), nb::arg("threads"));
  m.def("quantize_tokens", &quantize_rows_to_int8, nb::arg("isa"), nb::arg("x").noconvert(), nb::arg("codes").noconvert(),
        nb::arg("scale").noconvert(), nb::arg("threads"));
  m.def("feedback", &feedback, nb::arg("isa"), nb::arg("targets").noconvert(), nb::arg("weights").noconvert(),
        nb::arg("errors").noconvert(), nb::arg("codes").noconvert(), nb::arg("scale").noconvert(),
        nb::arg("offset").noconvert().none(), nb::arg("coupling").noconvert(), nb::arg("values"), nb::arg("boundaries"),
        nb::arg("value_codes"), nb::arg("by_code"), nb::arg("consecutive"), nb::arg("minus_zero"), nb::arg("keep"),
        nb::arg("threads"));
  register_search(m);
  register_vectors(m);
  register_feedback(m);
  register_attention(m);
  register_statistics(m);
  register_roofline(m);
  register_decoder(m);
}

}  // namespace fewbits
