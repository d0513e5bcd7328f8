// One token through a decoder of the Llama family, in one call: norms, products with packed weights, rotary positions, attention
// over a KV cache of float16, SwiGLU. It reads the caller's memory; nothing is copied.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "attention/float16.h"
#include "decoder/elementwise.h"
#include "formats/codebook.h"
#include "matmul/dense.h"
#include "matmul/exact.h"
#include "matmul/matmul.h"
#include "matmul/tiles.h"
#include "platform/threads.h"

namespace nb = nanobind;

namespace fewbits {
namespace {

template <typename T, int Dimensions>
using Given = nb::ndarray<const T, nb::ndim<Dimensions>, nb::c_contig, nb::device::cpu>;
template <typename T, int Dimensions>
using Into = nb::ndarray<T, nb::ndim<Dimensions>, nb::c_contig, nb::device::cpu>;
using Vector = Given<float, 1>;

void must(bool holds, const std::string& what) {
  if (!holds) throw std::invalid_argument(what);
}

// The weights of one product: in tiles, as they are stored, or floats. Integers are multiplied by activations in int8, floats by
// exact ones.
struct Matrix {
  size_t rows, cols;
  const Kernel* kernel = nullptr;  // null: floats of this kind
  Dense dense = Dense::kFloat32;
  std::vector<Given<uint8_t, 2>> arrays;  // one of tiles; the parts of the stored form; or the floats
  bool tiled = false;
  std::optional<Vector> bias;

  PackedWeight weight() const {
    PackedWeight found;
    for (size_t i = 0; !tiled && i < arrays.size(); ++i) {
      found.start[i] = arrays[i].data();
      found.stride[i] = arrays[i].shape(0) == 1 ? 0 : arrays[i].shape(1);
    }
    return found;
  }

  void multiply(const float* x, QuantizedRow& quantized, bool& filled, float* out, int threads) const {
    const float* const add = bias ? bias->data() : nullptr;
    if (!kernel) return multiply_floats(x, add, out, threads);
    if (!kernel->of.dot_row) return multiply_exactly({*kernel, weight(), nullptr, 1, cols, rows, x, add, out}, threads);
    if (!filled) quantized.fill(kernel->isa, x, cols);
    filled = true;
    multiply_row({*kernel, weight(), tiled ? arrays[0].data() : nullptr, 1, cols, rows, nullptr, add, out}, quantized, threads);
  }

 private:
  void multiply_floats(const float* x, const float* add, float* out, int threads) const {
    const DotDense dot = find_dot_dense(dense);
    const PackedWeight stored = weight();
    const size_t shares = shares_of(threads, rows * cols >> 15);
    run_shares(shares, [&](size_t share) {
      for (size_t row = rows * share / shares; row < rows * (share + 1) / shares; ++row) {
        const float sum = dot(stored.at(row)[0], x, cols);
        out[row] = add ? sum + add[row] : sum;
      }
    });
  }
};

// Matrices that multiply the same x; their results follow each other.
struct Products {
  std::vector<Matrix> parts;

  size_t rows() const {
    size_t count = 0;
    for (const Matrix& part : parts) count += part.rows;
    return count;
  }

  void multiply(const float* x, QuantizedRow& quantized, float* out, int threads) const {
    bool filled = false;
    for (const Matrix& part : parts) {
      part.multiply(x, quantized, filled, out, threads);
      out += part.rows;
    }
  }
};

struct Layer {
  Vector input_norm, output_norm;
  std::optional<Vector> q_norm, k_norm;  // of each head
  Products qkv, o, gate_up, down;
};

struct Shape {
  size_t hidden, heads, kv_heads, width, inner;
  float eps;
};

class Decoder {
 public:
  Decoder(size_t hidden, size_t heads, size_t kv_heads, size_t width, size_t inner, float eps)
      : shape_{hidden, heads, kv_heads, width, inner, eps} {
    must(hidden && kv_heads && width && inner && heads % kv_heads == 0 && width % 8 == 0,
         "heads are a multiple of those of keys, and channels of eight");
    normed_.resize(std::max(hidden, inner));
    projected_.resize(std::max((heads + 2 * kv_heads) * width, 2 * inner));
    attended_.resize(heads * width);
    added_.resize(hidden);
  }

  void add_layer(const Vector& input_norm, const std::optional<Vector>& q_norm, const std::optional<Vector>& k_norm,
                 const nb::list& qkv, const nb::list& o, const Vector& output_norm, const nb::list& gate_up,
                 const nb::list& down) {
    const Shape& s = shape_;
    Layer layer{input_norm, output_norm, q_norm, k_norm, {}, {}, {}, {}};
    layer.qkv = products(qkv, (s.heads + 2 * s.kv_heads) * s.width, s.hidden);
    layer.o = products(o, s.hidden, s.heads * s.width);
    layer.gate_up = products(gate_up, 2 * s.inner, s.hidden);
    layer.down = products(down, s.hidden, s.inner);
    must(input_norm.shape(0) == s.hidden && output_norm.shape(0) == s.hidden, "a norm's weight for each channel");
    must((!q_norm || q_norm->shape(0) == s.width) && (!k_norm || k_norm->shape(0) == s.width),
         "a norm's weight for each channel");
    layers_.push_back(std::move(layer));
  }

  void set_head(const Vector& norm, const nb::list& head, size_t vocabulary) {
    must(norm.shape(0) == shape_.hidden, "a norm's weight for each channel");
    norm_ = norm;
    head_ = products(head, vocabulary, shape_.hidden);
  }

  // `hidden` is the token's embedding, and afterwards the output of the last layer. Keys and values (layers, heads, room,
  // width) are written at this position and read up to it.
  void step(Into<float, 1> hidden, const Vector& cosine, const Vector& sine, size_t position, Into<uint16_t, 4> keys,
            Into<uint16_t, 4> values, Into<float, 1> logits, int threads) {
    const Shape& s = shape_;
    const size_t room = keys.shape(2);
    for (const auto& cache : {keys, values})
      must(
          cache.shape(0) == layers_.size() && cache.shape(1) == s.kv_heads && cache.shape(2) == room && cache.shape(3) == s.width,
          "the cache is another model's");
    must(room % kKeyTokens == 0 && position < room, "the cache is full");
    check_angles(cosine, sine);
    must(hidden.shape(0) == s.hidden && logits.shape(0) == head_.rows() && head_.rows(), "results do not belong to this model");
    nb::gil_scoped_release released;
    const size_t per_layer = s.kv_heads * room * s.width;
    for (size_t l = 0; l < layers_.size(); ++l) {
      project(layers_[l], hidden.data(), cosine.data(), sine.data(), threads);
      const float *const k = projected_.data() + s.heads * s.width, *const v = k + s.kv_heads * s.width;
      const HalfCache cache{s.kv_heads, s.width, room, keys.data() + l * per_layer, values.data() + l * per_layer};
      append_token(cache, position, k, v);
      attend_halves(cache, position + 1, projected_.data(), s.heads / s.kv_heads, factor(), attended_.data(), threads);
      finish(layers_[l], attended_.data(), hidden.data(), threads);
    }
    rms_norm(hidden.data(), norm_->data(), s.hidden, s.eps, normed_.data());
    head_.multiply(normed_.data(), quantized_, logits.data(), threads);
  }

  // The same in two steps, for other kinds of KV cache: the query, key and value of layer `l`, then the rest of the layer from
  // the result of attention.
  void before(size_t l, const Vector& hidden, const Vector& cosine, const Vector& sine, Into<float, 1> qkv, int threads) {
    must(l < layers_.size() && hidden.shape(0) == shape_.hidden && qkv.shape(0) == layers_[l].qkv.rows(), "not of this layer");
    check_angles(cosine, sine);
    nb::gil_scoped_release released;
    project(layers_[l], hidden.data(), cosine.data(), sine.data(), threads);
    std::copy_n(projected_.data(), qkv.shape(0), qkv.data());
  }

  void after(size_t l, const Vector& attended, Into<float, 1> hidden, int threads) {
    must(l < layers_.size() && hidden.shape(0) == shape_.hidden && attended.shape(0) == attended_.size(), "not of this layer");
    nb::gil_scoped_release released;
    finish(layers_[l], attended.data(), hidden.data(), threads);
  }

  void logits(const Vector& hidden, Into<float, 1> out, int threads) {
    must(hidden.shape(0) == shape_.hidden && out.shape(0) == head_.rows() && head_.rows(), "results do not belong to this model");
    nb::gil_scoped_release released;
    rms_norm(hidden.data(), norm_->data(), shape_.hidden, shape_.eps, normed_.data());
    head_.multiply(normed_.data(), quantized_, out.data(), threads);
  }

 private:
  float factor() const { return 1 / std::sqrt(static_cast<float>(shape_.width)); }

  void check_angles(const Vector& cosine, const Vector& sine) const {
    must(cosine.shape(0) == shape_.width / 2 && sine.shape(0) == shape_.width / 2, "an angle for each pair of channels");
  }

  void project(const Layer& layer, const float* hidden, const float* cosine, const float* sine, int threads) {
    const Shape& s = shape_;
    rms_norm(hidden, layer.input_norm.data(), s.hidden, s.eps, normed_.data());
    layer.qkv.multiply(normed_.data(), quantized_, projected_.data(), threads);
    float *const q = projected_.data(), *const k = q + s.heads * s.width;
    if (layer.q_norm)
      for (size_t h = 0; h < s.heads; ++h) rms_norm(q + h * s.width, layer.q_norm->data(), s.width, s.eps, q + h * s.width);
    if (layer.k_norm)
      for (size_t h = 0; h < s.kv_heads; ++h) rms_norm(k + h * s.width, layer.k_norm->data(), s.width, s.eps, k + h * s.width);
    rotate(q, s.heads + s.kv_heads, s.width, cosine, sine);
  }

  void finish(const Layer& layer, const float* attended, float* hidden, int threads) {
    const Shape& s = shape_;
    layer.o.multiply(attended, quantized_, added_.data(), threads);
    for (size_t i = 0; i < s.hidden; ++i) hidden[i] += added_[i];
    rms_norm(hidden, layer.output_norm.data(), s.hidden, s.eps, normed_.data());
    layer.gate_up.multiply(normed_.data(), quantized_, projected_.data(), threads);
    silu_and_multiply(projected_.data(), projected_.data() + s.inner, s.inner, projected_.data());
    layer.down.multiply(projected_.data(), quantized_, added_.data(), threads);
    for (size_t i = 0; i < s.hidden; ++i) hidden[i] += added_[i];
  }

  // Each is (kind, isa, rows, arrays, bias); the kind is a format, or float32, float16 or bfloat16.
  static Products products(const nb::list& given, size_t rows, size_t cols) {
    Products found;
    for (const auto& item : given) {
      const auto entry = nb::cast<nb::tuple>(item);
      const auto kind = nb::cast<std::string>(entry[0]), isa = nb::cast<std::string>(entry[1]);
      Matrix matrix{nb::cast<size_t>(entry[2]), cols};
      matrix.arrays = nb::cast<std::vector<Given<uint8_t, 2>>>(entry[3], false);
      matrix.bias = nb::cast<std::optional<Vector>>(entry[4]);
      must(!matrix.bias || matrix.bias->shape(0) == matrix.rows, "a bias for each row");
      must(!matrix.arrays.empty(), "a matrix without arrays");
      if (kind == "float32" || kind == "float16" || kind == "bfloat16") {
        matrix.dense = kind == "float32" ? Dense::kFloat32 : kind == "float16" ? Dense::kFloat16 : Dense::kBfloat16;
        check_array(matrix, 0, cols * dense_bytes(matrix.dense));
      } else {
        bind(matrix, kind, isa);
      }
      found.parts.push_back(std::move(matrix));
    }
    must(found.rows() == rows, "matrices have other rows than the model");
    return found;
  }

  static void bind(Matrix& matrix, const std::string& format, const std::string& isa) {
    const Kernel* const kernel = matrix.kernel = find_kernel(format.c_str(), isa.c_str());
    must(kernel && kernel->runs_here(), "no " + isa + " kernel reads " + format + " here");
    require_grid(format.c_str());
    const Layout& layout = kernel->layout;
    const bool tiles = kernel->of.dot_row && find_tiles(kernel->isa, kernel->of.bytes).dot;
    if (tiles && matrix.arrays.size() == 1 && matrix.arrays[0].shape(0) == 1 &&
        matrix.arrays[0].shape(1) == tiled_bytes(*kernel, matrix.rows, matrix.cols)) {
      matrix.tiled = true;
      return;
    }
    must(matrix.cols % layout.block == 0, "columns do not divide into " + format + "'s blocks");
    size_t i = 0;
    for (; i < kMaxFields && layout.parts[i].name; ++i) {
      must(i < matrix.arrays.size(), format + " has more arrays");
      check_array(matrix, i, layout.parts[i].row_bytes(matrix.cols / layout.block));
    }
    must(i == matrix.arrays.size(), format + " has fewer arrays");
  }

  static void check_array(const Matrix& matrix, size_t i, size_t row_bytes) {
    const auto& array = matrix.arrays[i];
    must((array.shape(0) == matrix.rows || array.shape(0) == 1) && array.shape(1) == row_bytes, "a row of bytes for each row");
  }

  Shape shape_;
  std::vector<Layer> layers_;
  std::optional<Vector> norm_;
  Products head_;
  std::vector<float> normed_, projected_, attended_, added_;
  QuantizedRow quantized_;
};

}  // namespace

void register_decoder(nb::module_& m) {
  nb::class_<Decoder>(m, "Decoder")
      .def(nb::init<size_t, size_t, size_t, size_t, size_t, float>(), nb::arg("hidden"), nb::arg("heads"), nb::arg("kv_heads"),
           nb::arg("width"), nb::arg("inner"), nb::arg("eps"))
      .def("add_layer", &Decoder::add_layer, nb::arg("input_norm"), nb::arg("q_norm").none(), nb::arg("k_norm").none(),
           nb::arg("qkv"), nb::arg("o"), nb::arg("output_norm"), nb::arg("gate_up"), nb::arg("down"))
      .def("set_head", &Decoder::set_head, nb::arg("norm"), nb::arg("head"), nb::arg("vocabulary"))
      .def("step", &Decoder::step, nb::arg("hidden").noconvert(), nb::arg("cosine").noconvert(), nb::arg("sine").noconvert(),
           nb::arg("position"), nb::arg("keys").noconvert(), nb::arg("values").noconvert(), nb::arg("logits").noconvert(),
           nb::arg("threads"))
      .def("before", &Decoder::before, nb::arg("layer"), nb::arg("hidden").noconvert(), nb::arg("cosine").noconvert(),
           nb::arg("sine").noconvert(), nb::arg("qkv").noconvert(), nb::arg("threads"))
      .def("after", &Decoder::after, nb::arg("layer"), nb::arg("attended").noconvert(), nb::arg("hidden").noconvert(),
           nb::arg("threads"))
      .def("logits", &Decoder::logits, nb::arg("hidden").noconvert(), nb::arg("out").noconvert(), nb::arg("threads"));
}

}  // namespace fewbits
