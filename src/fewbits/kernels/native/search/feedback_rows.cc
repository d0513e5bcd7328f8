// Error feedback over the blocks of some rows: `Rows` of methods/error_feedback/rows.py does the same operations in the same
// order.
//
// Layout: a strip of up to 64 rows has its own arrays, (columns, rows) with rows padded to whole registers, so that a block of it
// stays in the cache; the couplings are read once for each strip. Strips know nothing of each other.
#include <algorithm>
#include <cmath>

#include "search/feedback.h"

namespace fewbits {
namespace {

template <typename Code>
struct Tile {  // as FeedbackTile, with the metric of vectors
  size_t columns, rows;
  const float *targets, *weights;
  float* errors;
  Code* codes;
  const float *scale, *offset, *coupling;
  size_t coupling_stride;
  const float* metric;
  bool keep;
};

struct ByLevel {
  using Code = uint8_t;
  FeedbackVisit visit_rows;
  FeedbackLevels levels;
  size_t dimension = 1;

  void visit(const Tile<Code>& of, size_t count) const {
    visit_rows({of.columns, of.rows, of.targets, of.weights, of.errors, of.codes, of.scale, of.offset, of.coupling,
                of.coupling_stride, of.keep},
               levels, 0, count);
  }
  void values(const Code& code, float* into) const { *into = levels.by_code[code]; }
};

struct ByVector {
  using Code = int32_t;
  const vectors::Searches& searches;
  const vectors::Book& book;
  int attempts;
  size_t dimension;

  void visit(const Tile<Code>& of, size_t count) const {
    searches.visit(book,
                   {of.columns, of.rows, of.targets, of.weights, of.errors, of.codes, of.scale, of.offset, of.coupling,
                    of.coupling_stride, of.metric, of.keep, attempts},
                   0, count);
  }
  void values(const Code& code, float* into) const {
    const int32_t above = code >> (dimension / book.width * static_cast<size_t>(book.index_bits));
    for (size_t j = 0; j < dimension; ++j) {
      const int32_t index = code >> (j / book.width * static_cast<size_t>(book.index_bits)) & ((1 << book.index_bits) - 1);
      const float value = book.grid[static_cast<size_t>(index) * book.width + j % book.width];
      into[j] = book.signs != vectors::Signs::kInPoints && (above >> j & 1) ? -value : value;
      if (book.shift_count) into[j] += book.shifts[above & 1];
    }
  }
};

// `total` of formats/search/groups.py, over n rows of lanes; overwrites them. The sums are the first row.
void fold(float* values, size_t n, size_t lanes) {
  while (n > 1) {
    const size_t part = n % 4 == 0 ? n / 4 : n / 2, ways = n % 4 == 0 ? 4 : 2;
    for (size_t way = 1; way < ways; ++way)
      for (size_t i = 0; i < part * lanes; ++i) values[i] += values[way * part * lanes + i];
    if (n % ways)
      for (size_t i = 0; i < lanes; ++i) values[i] += values[(n - 1) * lanes + i];
    n = part;
  }
}

template <typename Visits>
class Strip {
  using Code = typename Visits::Code;

  // Some columns: each array begins at the first of them.
  struct Columns {
    size_t count;
    const float* weights;
    float* errors;
    Code* codes;
    float *scale, *offset;
  };

 public:
  Strip(const FeedbackOrder& order, const FeedbackRows& all, const Fitter* fitter, const std::string& isa, const Visits& visits,
        size_t first, size_t count)
      : h_(order),
        all_(all),
        fitter_(fitter),
        isa_(isa),
        visits_(visits),
        multiply_(find_multiply(isa)),
        first_(first),
        count_(count),
        lanes_((count + kProductLanes - 1) / kProductLanes * kProductLanes),
        most_(widest()),
        weights_(h_.columns * lanes_),
        errors_(h_.columns * lanes_),
        scale_(h_.columns * lanes_),
        offset_(has_offsets() ? h_.columns * lanes_ : 0),
        codes_(h_.columns / visits.dimension * lanes_),
        trial_{std::vector<float>(most_ * lanes_), std::vector<float>(most_ * lanes_), std::vector<float>(most_ * lanes_),
               std::vector<Code>(most_ / visits.dimension * lanes_)} {
    for (std::vector<float>* each : {&correction_, &wanted_, &targets_, &loss_, &other_loss_}) each->resize(most_ * lanes_);
    for (size_t row = 0; row < count_; ++row) {
      const size_t from = (first_ + row) * h_.columns;
      for (size_t c = 0; c < h_.columns; ++c) {
        const size_t at = c * lanes_ + row, natural = from + static_cast<size_t>(h_.natural[c]);
        weights_[at] = all_.w[natural];
        if (all_.scale) scale_[at] = all_.scale[natural];
        if (all_.offset) offset_[at] = all_.offset[natural];
      }
    }
    if (fitter_) {
      values_.resize(count_ * most_);
      fitted_scale_.resize(count_ * most_ / fitter_->group);
      fitted_offset_.resize(fitter_->offsets ? fitted_scale_.size() : 0);
      for (const Fitter::Field& field : fitter_->fields) fitted_.emplace_back(count_ * field.bytes);
    }
  }

  bool solve() {
    if (!round()) return false;
    for (int pass = 0; pass < all_.passes; ++pass) {
      if (!improve(pass < all_.refits)) return false;
      settle(columns(0, h_.columns), h_.every, h_.own);
    }
    Code* const codes = static_cast<Code*>(all_.codes);
    const size_t d = visits_.dimension, per_row = h_.columns / d;
    for (size_t v = 0; v < per_row; ++v)
      for (size_t row = 0; row < count_; ++row)
        codes[(first_ + row) * per_row + static_cast<size_t>(h_.natural[v * d]) / d] = codes_[v * lanes_ + row];
    return true;
  }

 private:
  size_t blocks() const { return h_.starts.size() - 1; }
  bool has_offsets() const { return fitter_ ? fitter_->offsets : all_.offset != nullptr; }
  size_t widest() const {
    size_t most = 0;
    for (size_t b = 0; b < blocks(); ++b) most = std::max(most, h_.starts[b + 1] - h_.starts[b]);
    return most;
  }

  Columns columns(size_t first, size_t count) {
    const size_t at = first * lanes_;
    return {count,
            weights_.data() + at,
            errors_.data() + at,
            codes_.data() + at / visits_.dimension,
            scale_.data() + at,
            offset_.empty() ? nullptr : offset_.data() + at};
  }

  const float* of_column(const float* metric, size_t column) const {
    return metric ? metric + column * visits_.dimension : nullptr;
  }

  void times(const float* coupling, size_t stride, size_t rows, size_t columns, const float* right, const float* base,
             float* into) {
    multiply_({coupling, stride, rows, columns}, right, lanes_, lanes_, base, into);
  }

  void visit(const Columns& some, size_t first, size_t count, const float* targets, const float* coupling, size_t stride,
             const float* metric, bool keep) {
    const size_t at = first * lanes_;
    visits_.visit(
        {count, lanes_, targets, some.weights + at, some.errors + at, some.codes + at / visits_.dimension, some.scale + at,
         some.offset ? some.offset + at : nullptr, coupling + first * stride + first, stride, of_column(metric, first), keep},
        count_);
  }

  // `feed` of columns.py; overwrites targets.
  void feed(const Columns& some, float* targets, const float* coupling, size_t stride, const float* metric) {
    for (size_t first = 0; first < some.count; first += kFeedbackColumns) {
      const size_t count = std::min(kFeedbackColumns, some.count - first);
      float* const at = targets + first * lanes_;
      if (first) times(coupling + first * stride, stride, count, first, some.errors, at, at);
      visit(some, first, count, at, coupling, stride, metric, false);
    }
  }

  // `settle` of columns.py. The coupling has a row for each of all columns.
  void settle(const Columns& some, const float* coupling, const float* metric) {
    const size_t stride = h_.columns;
    room_.resize(kFeedbackColumns * lanes_);
    for (size_t first = 0; first < some.count; first += kFeedbackColumns) {
      const size_t count = std::min(kFeedbackColumns, some.count - first);
      times(coupling + first * stride, stride, count, some.count, some.errors, some.weights + first * lanes_, room_.data());
      visit(some, first, count, room_.data(), coupling, stride, metric, true);
    }
  }

  bool round() {
    for (size_t b = 0; b < blocks(); ++b) {
      const size_t first = h_.starts[b], width = h_.starts[b + 1] - first, size = width * lanes_;
      const Columns some = columns(first, width);
      const float* const forward = h_.forward + first * h_.columns + first;
      times(h_.ahead + first * h_.columns, h_.columns, width, first, errors_.data(), nullptr, correction_.data());
      for (size_t i = 0; i < size; ++i) wanted_[i] = some.weights[i] + correction_[i];
      if (fitter_) {
        if (!fit(b, wanted_.data(), some.scale, some.offset)) return false;
        for (size_t row = 0; row < count_; ++row) keep_grid(b, row);
      }
      times(forward, h_.columns, width, width, correction_.data(), wanted_.data(), wanted_.data());
      feed(some, wanted_.data(), forward, h_.columns, of_column(h_.pivots, first));
    }
    return true;
  }

  bool improve(bool refit) {
    if (blocks() == 1) return true;
    for (size_t b = 0; b < blocks(); ++b) {
      const FeedbackPart& part = h_.parts[b];
      const size_t first = h_.starts[b], width = h_.starts[b + 1] - first, size = width * lanes_;
      const Columns present = columns(first, width);
      times(part.others, h_.columns, width, h_.columns, errors_.data(), present.weights, wanted_.data());
      const Columns trial{width,
                          wanted_.data(),
                          trial_.errors.data(),
                          trial_.codes.data(),
                          refit ? trial_.scale.data() : present.scale,
                          !present.offset ? nullptr
                          : refit         ? trial_.offset.data()
                                          : present.offset};
      if (refit && !fit(b, wanted_.data(), trial.scale, trial.offset)) return false;
      std::fill_n(trial.errors, size, 0.0f);
      std::fill_n(trial.codes, size / visits_.dimension, Code{});
      std::copy_n(wanted_.data(), size, targets_.data());
      feed(trial, targets_.data(), part.forward, width, part.pivots);
      settle(trial, h_.every + first * h_.columns + first, of_column(h_.own, first));
      const std::vector<bool> better = is_better(present, trial, part.hessian);
      for (size_t row = 0; row < count_; ++row) {
        if (!better[row]) continue;
        take(present, trial, row, refit);
        if (refit) keep_grid(b, row);
      }
    }
    return true;
  }

  // Of each row: whether the trial loses less, both seen from the trial's targets.
  std::vector<bool> is_better(const Columns& present, const Columns& trial, const float* hessian) {
    const size_t width = trial.count, size = width * lanes_;
    for (size_t i = 0; i < size; ++i) targets_[i] = present.errors[i] + (trial.weights[i] - present.weights[i]);
    const auto lose = [&](const float* errors, std::vector<float>& loss) {
      times(hessian, width, width, width, errors, nullptr, loss.data());
      for (size_t i = 0; i < size; ++i) loss[i] *= errors[i];
      fold(loss.data(), width, lanes_);
    };
    lose(trial.errors, loss_);
    lose(targets_.data(), other_loss_);
    std::vector<bool> better;
    for (size_t row = 0; row < count_; ++row) better.push_back(loss_[row] < other_loss_[row]);
    return better;
  }

  void take(const Columns& present, const Columns& trial, size_t row, bool refit) {
    const size_t d = visits_.dimension;
    for (size_t c = 0; c < trial.count; c += d) {
      float values[vectors::kMostDimension];
      const size_t code = c / d * lanes_ + row;
      visits_.values(trial.codes[code], values);
      present.codes[code] = trial.codes[code];
      for (size_t j = 0; j < d; ++j) {
        const size_t at = (c + j) * lanes_ + row;
        const float decoded = values[j] * trial.scale[at];
        present.errors[at] = present.weights[at] - (trial.offset ? decoded + trial.offset[at] : decoded);
        if (!refit) continue;
        present.scale[at] = trial.scale[at];
        if (trial.offset) present.offset[at] = trial.offset[at];
      }
    }
  }

  // The grid of a block for these values, (columns, lanes), and its scales and offsets in the same shape.
  bool fit(size_t b, const float* values, float* scale, float* offset) {
    const size_t first = h_.starts[b], width = h_.starts[b + 1] - first, groups = width / fitter_->group;
    const int64_t* const natural = h_.natural + first;
    const size_t begin = static_cast<size_t>(*std::min_element(natural, natural + width));
    for (size_t c = 0; c < width; ++c)
      for (size_t row = 0; row < count_; ++row)
        values_[row * width + static_cast<size_t>(natural[c]) - begin] = values[c * lanes_ + row];
    Fitter::Into into{fitted_scale_.data(), fitted_offset_.data(), {}};
    for (std::vector<uint8_t>& field : fitted_) into.fields.push_back(field.data());
    if (!fitter_->fit(isa_, values_.data(), count_, h_.weight + begin, into)) return false;
    for (size_t c = 0; c < width; ++c) {
      const size_t group = (static_cast<size_t>(natural[c]) - begin) / fitter_->group;
      for (size_t row = 0; row < count_; ++row) {
        scale[c * lanes_ + row] = fitted_scale_[row * groups + group];
        if (offset) offset[c * lanes_ + row] = fitted_offset_[row * groups + group];
      }
    }
    return true;
  }

  // What was fitted last becomes the grid of a row's block.
  void keep_grid(size_t b, size_t row) {
    const size_t block = static_cast<size_t>(h_.natural[h_.starts[b]]) / fitter_->columns;
    for (size_t i = 0; i < fitted_.size(); ++i) {
      const size_t bytes = fitter_->fields[i].bytes;
      std::copy_n(fitted_[i].data() + row * bytes, bytes, all_.grid[i] + ((first_ + row) * blocks() + block) * bytes);
    }
  }

  const FeedbackOrder& h_;
  const FeedbackRows& all_;
  const Fitter* const fitter_;
  const std::string& isa_;
  const Visits& visits_;
  const Multiply multiply_;
  const size_t first_, count_, lanes_, most_;  // rows, padded to registers; columns of the widest block
  std::vector<float> weights_, errors_, scale_, offset_;
  std::vector<Code> codes_;
  struct {
    std::vector<float> errors, scale, offset;
    std::vector<Code> codes;
  } trial_;
  std::vector<float> correction_, wanted_, targets_, loss_, other_loss_, room_;  // (columns of a block, lanes)
  std::vector<float> values_, fitted_scale_, fitted_offset_;                     // (rows, columns or groups of a block)
  std::vector<std::vector<uint8_t>> fitted_;                                     // (rows, bytes) of each field
};

template <typename Visits>
bool solve(const FeedbackOrder& order, const FeedbackRows& rows, const Fitter* fitter, const std::string& isa,
           const Visits& visits, size_t begin, size_t end) {
  for (size_t first = begin; first < end; first += kFeedbackRows)
    if (!Strip<Visits>(order, rows, fitter, isa, visits, first, std::min(kFeedbackRows, end - first)).solve()) return false;
  return true;
}

}  // namespace

bool feed_back(const FeedbackOrder& order, const FeedbackRows& rows, const Fitter* fitter, const std::string& isa,
               const FeedbackLevels& levels, size_t begin, size_t end) {
  return solve(order, rows, fitter, isa, ByLevel{find_feedback(isa.c_str()), levels}, begin, end);
}

bool feed_back(const FeedbackOrder& order, const FeedbackRows& rows, const Fitter* fitter, const std::string& isa,
               const vectors::Book& book, int attempts, size_t begin, size_t end) {
  return solve(order, rows, fitter, isa, ByVector{vectors::find_searches(isa), book, attempts, book.dimension}, begin, end);
}

}  // namespace fewbits
