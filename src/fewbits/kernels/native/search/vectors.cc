// The Python bindings of codes for vectors: check every size, release the interpreter lock, and share rows among threads.
#include "search/vectors.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <new>
#include <optional>
#include <string>
#include <vector>

#include "platform/threads.h"
#include "search/quantize.h"
#include "search/vectors_book.h"

namespace nb = nanobind;

namespace fewbits {
namespace vectors {
namespace {

using quantize::needs;
template <typename Number, size_t kDimensions>
using Array = nb::ndarray<Number, nb::ndim<kDimensions>, nb::c_contig, nb::device::cpu>;
using Matrix = Array<const float, 2>;
using List = Array<const float, 1>;

void make_book(OwnedBook* into, size_t dimension, int signs, const std::vector<float>& shifts, const std::vector<float>& levels,
               const std::vector<size_t>& first, const std::vector<size_t>& second, const Matrix& points) {
  new (into) OwnedBook(dimension, signs, shifts, levels, first, second, {points.data(), points.shape(0), points.shape(1)});
}

// Calls work(begin, end) over all rows; shares are whole registers of rows, so that no result depends on the number of threads.
template <typename Work>
void in_shares(size_t rows, size_t weights, size_t together, int threads, const Work& work) {
  constexpr size_t kWorthAThread = 1 << 11;
  const size_t tiles = (rows + together - 1) / together;
  const size_t shares = shares_of(threads, std::min(tiles, weights / kWorthAThread));
  run_shares(shares, [&](size_t i) {
    const size_t begin = tiles * i / shares * together, end = std::min(rows, tiles * (i + 1) / shares * together);
    if (begin < end) work(begin, end);
  });
}

void nearest(const std::string& isa, const OwnedBook& owned, const Matrix& x, const List& weight, Array<int32_t, 2> codes,
             const std::optional<Matrix>& scale, const std::optional<Matrix>& offset, int threads) {
  const Searches& searches = find_searches(isa);
  const size_t rows = x.shape(0), cols = x.shape(1), d = owned.book.dimension;
  needs(cols % d == 0 && weight.shape(0) == cols && codes.shape(0) == rows && codes.shape(1) == cols / d,
        "there is a code for each vector, and an importance for each column");
  const size_t groups = scale ? scale->shape(1) : 1;
  needs(!scale || (scale->shape(0) == rows && groups > 0 && cols % groups == 0 && cols / groups % d == 0),
        "there is a scale for each group of vectors");
  needs(!offset || (scale && offset->shape(0) == rows && offset->shape(1) == groups),
        "there is an offset for each scale, or none");
  nb::gil_scoped_release released;
  const NearestRows of{
      x.data(),    weight.data(), cols, cols / groups, scale ? scale->data() : nullptr, offset ? offset->data() : nullptr,
      codes.data()};
  in_shares(rows, rows * cols, searches.lanes, threads,
            [&](size_t begin, size_t end) { searches.nearest(owned.book, of, begin, end); });
}

void fit(const std::string& isa, const OwnedBook& owned, const std::vector<size_t>& sizes, const std::vector<float>& numbers,
         const Matrix& x, const List& weight, Array<int8_t, 2> sub, std::optional<Array<int8_t, 2>> shift, Array<uint16_t, 2> d,
         int threads) {
  const Searches& searches = find_searches(isa);
  const Fit given = fit_of(owned.book, sizes, numbers);
  const size_t rows = x.shape(0), cols = x.shape(1);
  needs(cols % kBlock == 0 && weight.shape(0) == cols, "blocks have 256 columns, each with an importance");
  needs(sub.shape(0) == rows && sub.shape(1) == cols / given.group && d.shape(0) == rows && d.shape(1) == cols / kBlock,
        "there is an integer for each group and a scale for each block");
  needs(!shift == (given.group_shift == 0) && (!shift || (shift->shape(0) == rows && shift->shape(1) == cols / given.group)),
        "there is a shift for each group, or none");
  nb::gil_scoped_release released;
  const FitRows of{x.data(), weight.data(), cols, sub.data(), shift ? shift->data() : nullptr, d.data()};
  in_shares(rows, rows * cols, 2 * searches.lanes, threads,
            [&](size_t begin, size_t end) { searches.fit(owned.book, given, of, begin, end); });
}

void visit(const std::string& isa, const OwnedBook& owned, const Matrix& targets, const Matrix& weights, Array<float, 2> errors,
           Array<int32_t, 2> codes, const Matrix& scale, const std::optional<Matrix>& offset, const Matrix& coupling,
           const Matrix& metric, bool keep, int attempts, int threads) {
  const Searches& searches = find_searches(isa);
  const size_t columns = targets.shape(0), rows = targets.shape(1), d = owned.book.dimension;
  const auto is = [](const auto& array, size_t first, size_t second) {
    return array.shape(0) == first && array.shape(1) == second;
  };
  needs(columns <= kMostColumns && columns % d == 0, "a tile has whole vectors, 128 columns at most");
  needs(is(weights, columns, rows) && is(errors, columns, rows) && is(scale, columns, rows) && is(codes, columns / d, rows) &&
            (!offset || is(*offset, columns, rows)) && is(coupling, columns, columns) && is(metric, columns, d),
        "the arrays of a tile do not belong together");
  const Book& book = owned.book;
  for (size_t i = 0; keep && i < codes.size(); ++i) {
    const int32_t code = codes.data()[i];
    const int bits = static_cast<int>(d / book.width) * book.index_bits +
                     (book.signs == Signs::kInPoints ? (book.shift_count ? 1 : 0) : static_cast<int>(d));
    needs(code >= 0 && code < 1 << bits, "a code is beyond the codebook");
  }
  nb::gil_scoped_release released;
  const Tile tile{columns,         rows,         targets.data(), weights.data(),
                  errors.data(),   codes.data(), scale.data(),   offset ? offset->data() : nullptr,
                  coupling.data(), columns,      metric.data(),  keep,
                  attempts};
  in_shares(rows, rows * columns, searches.lanes, threads,
            [&](size_t begin, size_t end) { searches.visit(book, tile, begin, end); });
}

}  // namespace
}  // namespace vectors

void register_vectors(nb::module_& m) {
  nb::class_<vectors::OwnedBook>(m, "VectorBook").def("__init__", &vectors::make_book);
  // noconvert: a mismatched array must be refused, because a silent copy would be written instead of the caller's memory.
  m.def("nearest_vectors", &vectors::nearest, nb::arg("isa"), nb::arg("book"), nb::arg("x").noconvert(),
        nb::arg("weight").noconvert(), nb::arg("codes").noconvert(), nb::arg("scale").noconvert().none(),
        nb::arg("offset").noconvert().none(), nb::arg("threads"));
  m.def("fit_vectors", &vectors::fit, nb::arg("isa"), nb::arg("book"), nb::arg("sizes"), nb::arg("numbers"),
        nb::arg("x").noconvert(), nb::arg("weight").noconvert(), nb::arg("sub").noconvert(), nb::arg("shift").noconvert().none(),
        nb::arg("d").noconvert(), nb::arg("threads"));
  m.def("visit_vectors", &vectors::visit, nb::arg("isa"), nb::arg("book"), nb::arg("targets").noconvert(),
        nb::arg("weights").noconvert(), nb::arg("errors").noconvert(), nb::arg("codes").noconvert(), nb::arg("scale").noconvert(),
        nb::arg("offset").noconvert().none(), nb::arg("coupling").noconvert(), nb::arg("metric").noconvert(), nb::arg("keep"),
        nb::arg("attempts"), nb::arg("threads"));
}

}  // namespace fewbits
