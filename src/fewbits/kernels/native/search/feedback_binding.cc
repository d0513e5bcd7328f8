// The Python bindings of error feedback over whole rows: check every size, release the interpreter lock, share rows among
// threads.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <optional>
#include <tuple>

#include "platform/threads.h"
#include "search/feedback.h"
#include "search/vectors_book.h"

namespace nb = nanobind;

namespace fewbits {
namespace {

using quantize::needs;
template <typename Number, size_t kDimensions>
using Array = nb::ndarray<Number, nb::ndim<kDimensions>, nb::c_contig, nb::device::cpu>;
using Matrix = Array<const float, 2>;
using List = Array<const float, 1>;
using Part = std::tuple<Matrix, Matrix, Matrix, std::optional<Matrix>>;

bool is(const auto& array, size_t rows, size_t columns) { return array.shape(0) == rows && array.shape(1) == columns; }
bool is(const std::optional<Matrix>& array, size_t rows, size_t columns) { return !array || is(*array, rows, columns); }
const float* at(const std::optional<Matrix>& array) { return array ? array->data() : nullptr; }

// A prepared Hessian, and the arrays that it points to.
struct Order {
  Array<const int64_t, 1> natural;
  List weight;
  Matrix forward;
  std::optional<Matrix> ahead, every, pivots, own;
  std::vector<Part> parts;
  FeedbackOrder of;

  Order(const Array<const int64_t, 1>& columns, const std::vector<size_t>& starts, const List& importance, const Matrix& forward,
        const std::optional<Matrix>& ahead, const std::optional<Matrix>& every, const std::optional<Matrix>& pivots,
        const std::optional<Matrix>& own, const std::vector<Part>& given)
      : natural(columns),
        weight(importance),
        forward(forward),
        ahead(ahead),
        every(every),
        pivots(pivots),
        own(own),
        parts(given) {
    const size_t n = columns.shape(0), d = pivots ? pivots->shape(1) : 1;
    needs(starts.size() > 1 && starts.front() == 0 && starts.back() == n && weight.shape(0) == n, "blocks hold all columns");
    needs(is(forward, n, n) && is(ahead, n, n) && is(every, n, n) && is(pivots, n, d) && is(own, n, d) && d >= 1 &&
              d <= vectors::kMostDimension,
          "the couplings do not belong together");
    needs(starts.size() == 2 || (ahead && (parts.empty() || (every && parts.size() + 1 == starts.size()))),
          "there is a part for each block");
    of = {n, natural.data(), starts, weight.data(), at(ahead), forward.data(), at(every), at(pivots), at(own), {}};
    for (size_t b = 0; b + 1 < starts.size(); ++b) {
      needs(starts[b] < starts[b + 1] && starts[b + 1] <= n && starts[b] % d == 0, "a block has columns, and whole vectors");
      const size_t width = starts[b + 1] - starts[b];
      const auto [low, high] = std::minmax_element(of.natural + starts[b], of.natural + starts[b + 1]);
      needs(*low >= 0 && *high < static_cast<int64_t>(n) && *high - *low < static_cast<int64_t>(width),
            "columns lie in their block");
      if (parts.empty()) continue;
      const auto& [others, inside, hessian, metric] = parts[b];
      needs(is(others, width, n) && is(inside, width, width) && is(hessian, width, width) && is(metric, width, d) &&
                metric.has_value() == pivots.has_value(),
            "a part has the size of its block");
      of.parts.push_back({others.data(), inside.data(), hessian.data(), at(metric)});
    }
  }
};

std::vector<Fitter::Field> fields_of(const std::vector<std::string>& names, size_t subs, size_t supers, bool exponents) {
  std::vector<Fitter::Field> found;
  for (const std::string& name : names) {
    const bool is_byte = name == "sub" || name == "sub_min" || name == "shift" || (name == "scales" && exponents);
    found.push_back({name, is_byte ? subs : 2 * supers});
  }
  return found;
}

template <typename Search, typename Units>
std::shared_ptr<Fitter> group_fitter(size_t columns, size_t group, const Search& search, const Units& units,
                                     const quantize::Codes& codes, const std::vector<std::string>& names) {
  const size_t per_super = quantize::per_super_of(units), block = group * per_super;
  needs(group >= 2 && group <= quantize::kMost && group % 2 == 0 && block <= quantize::kMost && columns % block == 0 && columns,
        "columns are whole blocks");
  constexpr bool kExponents = std::is_same_v<Search, quantize::ExponentSearch>;
  auto fields = fields_of(names, columns / group, columns / block, kExponents);
  return std::make_shared<GroupFitter<Search, Units>>(columns, group, search, units, codes, std::move(fields));
}

template <typename Search>
std::shared_ptr<Fitter> plain_fitter(size_t columns, size_t group, const Search& search, const quantize::Codes& codes,
                                     const std::vector<std::string>& names) {
  return group_fitter(columns, group, search, nullptr, codes, names);
}

std::shared_ptr<Fitter> vector_fitter(const vectors::OwnedBook& owned, const std::vector<size_t>& sizes,
                                      const std::vector<float>& numbers, const std::vector<std::string>& names) {
  const vectors::Fit given = vectors::fit_of(owned.book, sizes, numbers);
  return std::make_shared<VectorFitter>(owned.book, given, fields_of(names, vectors::kBlock / given.group, 1, false));
}

struct Wanted {
  const std::string& isa;
  const Order& order;
  const Fitter* fitter;
  const Matrix& w;
  int passes, refits;
  const std::optional<Matrix>&scale, &offset;
  const std::vector<Array<uint8_t, 2>>& grid;
  int threads;
};

// Calls solve(rows, begin, end) in shares of whole registers of rows.
template <typename Solve>
bool in_shares(const Wanted& wanted, void* codes, const Solve& solve) {
  const FeedbackOrder& of = wanted.order.of;
  const size_t rows = wanted.w.shape(0), n = of.columns, blocks = of.starts.size() - 1;
  needs(wanted.w.shape(1) == n && is(wanted.scale, rows, n) && is(wanted.offset, rows, n), "the weight has the order's columns");
  needs(wanted.passes == 0 || (of.every && of.parts.size() == (blocks == 1 ? 0 : blocks)), "later passes need all couplings");
  const Fitter* const fitter = wanted.fitter;
  needs(fitter ? !wanted.scale : wanted.scale && wanted.grid.empty(), "scales are fitted or given");
  if (fitter) {
    needs(wanted.grid.size() == fitter->fields.size(), "there is an array for each field of the grid");
    for (size_t i = 0; i < wanted.grid.size(); ++i)
      needs(is(wanted.grid[i], rows, blocks * fitter->fields[i].bytes), "the grid has the weight's blocks");
    for (size_t b = 0; b < blocks; ++b) needs(of.starts[b + 1] - of.starts[b] == fitter->columns, "a block is the fitter's");
  }
  FeedbackRows all{wanted.w.data(), rows, wanted.passes, wanted.refits, at(wanted.scale), at(wanted.offset), codes, {}};
  for (const auto& field : wanted.grid) all.grid.push_back(field.data());
  std::atomic<bool> numbers = true;
  nb::gil_scoped_release released;
  const size_t tiles = (rows + kProductLanes - 1) / kProductLanes;
  const size_t shares = shares_of(wanted.threads, tiles);
  run_shares(shares, [&](size_t i) {
    const size_t begin = tiles * i / shares * kProductLanes, end = std::min(rows, tiles * (i + 1) / shares * kProductLanes);
    if (begin < end && !solve(all, begin, end)) numbers = false;
  });
  return numbers;
}

// (values, boundaries, codes, by code, whether they are consecutive, the code of -0): see `FeedbackLevels`.
using Levels = std::tuple<List, List, Array<const uint8_t, 1>, List, bool, int>;

bool feedback_levels(const std::string& isa, const Order& order, const Fitter* fitter, const Levels& given, const Matrix& w,
                     int passes, int refits, const std::optional<Matrix>& scale, const std::optional<Matrix>& offset,
                     Array<uint8_t, 2> codes, const std::vector<Array<uint8_t, 2>>& grid, int threads) {
  needs(find_feedback(isa.c_str()), "no such error feedback runs here");
  const auto& [values, boundaries, value_codes, by_code, consecutive, minus_zero] = given;
  const size_t count = values.shape(0);
  needs(
      count >= 1 && count <= 256 && boundaries.shape(0) == count - 1 && value_codes.shape(0) == count && by_code.shape(0) == 256,
      "the levels' arrays do not belong together");
  needs(!order.of.pivots && is(codes, w.shape(0), w.shape(1)), "there is a code for each column");
  const FeedbackLevels levels{count,          consecutive, values.data(), boundaries.data(), value_codes.data(),
                              by_code.data(), minus_zero};
  return in_shares({isa, order, fitter, w, passes, refits, scale, offset, grid, threads}, codes.data(),
                   [&](const FeedbackRows& rows, size_t begin, size_t end) {
                     return feed_back(order.of, rows, fitter, isa, levels, begin, end);
                   });
}

bool feedback_vectors(const std::string& isa, const Order& order, const Fitter* fitter, const vectors::OwnedBook& owned,
                      const Matrix& w, int passes, int refits, const std::optional<Matrix>& scale,
                      const std::optional<Matrix>& offset, Array<int32_t, 2> codes, const std::vector<Array<uint8_t, 2>>& grid,
                      int attempts, int threads) {
  vectors::find_searches(isa);
  const size_t d = owned.book.dimension;
  needs(
      order.of.pivots && order.pivots->shape(1) == d && !order.of.own == !order.of.every && is(codes, w.shape(0), w.shape(1) / d),
      "there is a code for each vector");
  return in_shares({isa, order, fitter, w, passes, refits, scale, offset, grid, threads}, codes.data(),
                   [&](const FeedbackRows& rows, size_t begin, size_t end) {
                     return feed_back(order.of, rows, fitter, isa, owned.book, attempts, begin, end);
                   });
}

// out (rows, lanes) = base + coupling times right. The coupling may be a part of a larger matrix.
void product(const std::string& isa, const nb::ndarray<const float, nb::ndim<2>, nb::device::cpu>& coupling, const Matrix& right,
             const std::optional<Matrix>& base, Array<float, 2> out) {
  constexpr size_t kAtOnce = 64;
  const Multiply multiply = find_multiply(isa);
  const size_t rows = coupling.shape(0), terms = coupling.shape(1), lanes = right.shape(1);
  needs(right.shape(0) == terms && is(out, rows, lanes) && is(base, rows, lanes), "the matrices do not belong together");
  needs(rows < 2 || terms < 2 || (coupling.stride(1) == 1 && coupling.stride(0) >= 0), "a row of the coupling lies in one piece");
  const size_t stride = rows < 2 ? terms : static_cast<size_t>(coupling.stride(0));
  nb::gil_scoped_release released;
  std::vector<float> from(terms * kAtOnce), into(rows * kAtOnce);
  for (size_t first = 0; first < lanes; first += kAtOnce) {
    const size_t count = std::min(kAtOnce, lanes - first);
    for (size_t k = 0; k < terms; ++k) std::copy_n(right.data() + k * lanes + first, count, from.data() + k * kAtOnce);
    for (size_t i = 0; i < rows; ++i)
      if (base) std::copy_n(base->data() + i * lanes + first, count, into.data() + i * kAtOnce);
    multiply({coupling.data(), stride, rows, terms}, from.data(), kAtOnce, kAtOnce, base ? into.data() : nullptr, into.data());
    for (size_t i = 0; i < rows; ++i) std::copy_n(into.data() + i * kAtOnce, count, out.data() + i * lanes + first);
  }
}

}  // namespace

void register_feedback(nb::module_& m) {
  // noconvert: a mismatched array must be refused, because a silent copy would be written instead of the caller's memory.
  nb::class_<Order>(m, "FeedbackOrder")
      .def(nb::init<const Array<const int64_t, 1>&, const std::vector<size_t>&, const List&, const Matrix&,
                    const std::optional<Matrix>&, const std::optional<Matrix>&, const std::optional<Matrix>&,
                    const std::optional<Matrix>&, const std::vector<Part>&>(),
           nb::arg("columns").noconvert(), nb::arg("starts"), nb::arg("weight").noconvert(), nb::arg("forward").noconvert(),
           nb::arg("ahead").noconvert().none(), nb::arg("every").noconvert().none(), nb::arg("pivots").noconvert().none(),
           nb::arg("own").noconvert().none(), nb::arg("parts").noconvert());
  nb::class_<Fitter>(m, "BlockFitter");
  m.def("block_fitter", &group_fitter<quantize::ScaleSearch, quantize::ScaleUnits>);
  m.def("block_fitter", &group_fitter<quantize::LineSearch, quantize::LineUnits>);
  m.def("block_fitter", &plain_fitter<quantize::ScaleSearch>);
  m.def("block_fitter", &plain_fitter<quantize::LineSearch>);
  m.def("block_fitter", &plain_fitter<quantize::ExponentSearch>);
  m.def("vector_fitter", &vector_fitter, nb::keep_alive<0, 1>());
  m.def("feed_back", &feedback_levels, nb::arg("isa"), nb::arg("order"), nb::arg("fitter").none(), nb::arg("levels").noconvert(),
        nb::arg("w").noconvert(), nb::arg("passes"), nb::arg("refits"), nb::arg("scale").noconvert().none(),
        nb::arg("offset").noconvert().none(), nb::arg("codes").noconvert(), nb::arg("grid").noconvert(), nb::arg("threads"));
  m.def("feed_back", &feedback_vectors, nb::arg("isa"), nb::arg("order"), nb::arg("fitter").none(), nb::arg("book"),
        nb::arg("w").noconvert(), nb::arg("passes"), nb::arg("refits"), nb::arg("scale").noconvert().none(),
        nb::arg("offset").noconvert().none(), nb::arg("codes").noconvert(), nb::arg("grid").noconvert(), nb::arg("attempts"),
        nb::arg("threads"));
  m.def("product", &product, nb::arg("isa"), nb::arg("coupling").noconvert(), nb::arg("right").noconvert(),
        nb::arg("base").noconvert().none(), nb::arg("out").noconvert());
}

}  // namespace fewbits
