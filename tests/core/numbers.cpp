// Arithmetic of one CPU variant against the C library and by exhaustion. Prints a checksum of results that
// all variants must share. Exit code 1 and a line on stderr: something is wrong.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>

#include "arch/target.h"

namespace {

namespace arch = dcp::DCP_NS::arch;
using dcp::BFloat16;
using dcp::Half;

uint64_t checksum = 1469598103934665603u;
void add(float x) {
  uint32_t bits = arch::bit_cast<uint32_t>(x);
  checksum = (checksum ^ bits) * 1099511628211u;
}

void require(bool ok, const char* what, double a, double b = 0, double c = 0) {
  if (ok) return;
  std::fprintf(stderr, "%s: %a %a %a\n", what, a, b, c);
  std::exit(1);
}

bool same(float a, float b) {
  return arch::bit_cast<uint32_t>(a) == arch::bit_cast<uint32_t>(b) || (a != a && b != b);
}

// fma is one rounding, also where the product or the sum is subnormal, huge or a tie.
void check_fma() {
  std::mt19937_64 random(1);
  auto any = [&](int spread) {
    const uint32_t bits = uint32_t(random());
    const int exponent = 127 + int(random() % (2 * spread + 1)) - spread;
    return arch::bit_cast<float>((bits & 0x807fffffu) | uint32_t(exponent) << 23);
  };
  for (int i = 0; i < 2000000; ++i) {
    const float a = any(i % 2 ? 60 : 3), b = any(i % 2 ? 60 : 3);
    // Half of the time c sits next to the product, where one rounding and two differ.
    const float c =
        i % 4 < 2 ? any(60) : float(-double(a) * double(b)) * (1 + float(int(random() % 7) - 3) * 0x1p-23f);
    const float got = arch::fma(a, b, c);
    require(same(got, std::fma(a, b, c)), "fma", a, b, c);
    add(got);
  }
  // Ties of the float that the double sum hides: 1 + 2^-24 + 2^-54 and its like.
  require(arch::fma(1.0f + 0x1p-12f, 1.0f + 0x1p-12f, 0x1p-60f) ==
              std::fma(1.0f + 0x1p-12f, 1.0f + 0x1p-12f, 0x1p-60f),
          "fma tie", 0);
  require(std::isinf(arch::fma(HUGE_VALF, 1.0f, 1.0f)) && std::isnan(arch::fma(HUGE_VALF, 0.0f, 1.0f)),
          "fma inf", 0);
}

void check_exp2() {
  double worst = 0;
  for (int i = 0; i < 3000000; ++i) {
    const float x = -float(i) * (126.0f / 3000000);
    const float got = arch::exp2(x);
    worst = std::fmax(worst, std::fabs(got / std::exp2(double(x)) - 1) * 0x1p24);
    add(got);
  }
  require(worst < 1.35, "exp2 error in 2^-24", worst);
  for (float x = -126.0f; x > -160.0f; x -= 0.37f) {
    require(std::fabs(arch::exp2(x) - std::exp2(double(x))) <= 0x1p-149, "exp2 subnormal", x, arch::exp2(x));
    add(arch::exp2(x));
  }
  require(arch::exp2(0.0f) == 1.0f && arch::exp2(-1.0f) == 0.5f && arch::exp2(-126.0f) == 0x1p-126f,
          "exp2 exact", 0);
  require(arch::exp2(-HUGE_VALF) == 0.0f && arch::exp2(-1000.0f) == 0.0f, "exp2 of -inf", 0);
  for (float x : {1.0f, 1.5f, 2.0f, 7.25f, 64.0f}) {
    require(std::fabs(arch::log2(x) - std::log2(double(x))) <= 0x1p-22, "log2", x);
  }
}

// Floats to T by the vector form. Which element a lane holds is the vector's own business: it is asked.
template <class T>
class Store {
 public:
  using Vec = arch::RowVec<T>;
  static constexpr int kLanes = Vec::kElements;
  Store() {
    T numbered[kLanes];
    float held[kLanes];
    for (int i = 0; i < kLanes; ++i) numbered[i] = arch::from_float<T>(float(i));
    const Vec probe = Vec::load(numbered);
    arch::store_pair(held, probe.first, probe.second);
    for (int lane = 0; lane < kLanes; ++lane) order_[lane] = int(held[lane]);
  }
  void operator()(const float* in, T* out, int num_elements) const {
    for (int i = 0; i < num_elements; i += kLanes) {
      float lanes[kLanes];
      for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = in[i + order_[lane]];
      Vec v;
      arch::load_pair(lanes, v.first, v.second);
      v.store(out + i);
    }
  }

 private:
  int order_[kLanes];
};
constexpr int kBatch = 32;  // a multiple of the elements of any vector: the same numbers for every variant

// Every half and every bfloat16 goes to float and back unchanged; floats between two neighbours go to the
// even one at a tie; the vector forms give the bits of the scalar ones.
template <class T>
void check_conversions(const char* name) {
  using Vec = arch::RowVec<T>;
  constexpr int kLanes = Vec::kElements;
  static_assert(kBatch % kLanes == 0);
  const Store<T> store;
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const T x = {uint16_t(bits)};
    const float f = arch::to_float(x);
    add(f != f ? 0.0f : f);
    if (f == f) require(arch::from_float<T>(f).bits == bits, name, f, bits);
    if (f != f) require(std::isnan(arch::to_float(arch::from_float<T>(f))), name, bits);
    T in[kLanes], back[kLanes];
    for (int i = 0; i < kLanes; ++i) in[i] = {uint16_t(bits ^ i)};
    const Vec v = Vec::load(in);
    v.store(back);
    for (int i = 0; i < kLanes; ++i) {
      if (arch::to_float(in[i]) == arch::to_float(in[i]))
        require(back[i].bits == in[i].bits, name, bits, back[i].bits);
    }
  }
  std::mt19937_64 random(2);
  for (int n = 0; n < 400000; ++n) {
    float in[kBatch];
    T out[kBatch];
    for (int i = 0; i < kBatch; ++i) {
      uint32_t bits = uint32_t(random());
      if (n % 3 == 1) bits = (bits & 0xffffe000u) | 0x1000;  // ties of a half
      if (n % 3 == 2) bits = (bits & 0xffff0000u) | 0x8000;  // ties of a bfloat16
      if (n % 2)
        bits = (bits & 0x807fffffu) | (100u + uint32_t(random() % 45)) << 23;  // around a half's range
      in[i] = arch::bit_cast<float>(bits);
    }
    store(in, out, kBatch);
    for (int i = 0; i < kBatch; ++i) {
      const uint16_t scalar = arch::from_float<T>(in[i]).bits;
      require(scalar == out[i].bits, name, in[i], scalar, out[i].bits);
      if (in[i] == in[i]) {
        // No neighbour is nearer, and at a tie the last bit is 0.
        const double here = std::fabs(double(arch::to_float(out[i])) - in[i]);
        for (int step : {-1, 1}) {
          const float other = arch::to_float(T{uint16_t(scalar + step)});
          if (!(other == other) || std::isinf(arch::to_float(out[i])) || std::isinf(other)) continue;
          const double there = std::fabs(double(other) - in[i]);
          require(here < there || (here == there && (scalar & 1) == 0), name, in[i], scalar, step);
        }
      }
      add(float(scalar));
    }
  }
}

// Every sign, exponent and upper fraction, with what lies around a tie below it: subnormals, NaNs of all
// kinds, infinities, what rounds to them. Such floats stand alone among ordinary ones, in every lane in turn,
// and side by side: an instruction that does not round them as it should has another way for the whole
// vector.
template <class T>
void check_hard_floats(const char* name) {
  const Store<T> store;
  float among[kBatch], all[kBatch];
  T out[kBatch];
  for (int i = 0; i < kBatch; ++i) among[i] = (i % 3 - 1.5f) * (1.0f + float(i) * 0x1.08p-9f);
  const auto check = [&](const float* in) {
    store(in, out, kBatch);
    for (int i = 0; i < kBatch; ++i) {
      const uint16_t scalar = arch::from_float<T>(in[i]).bits;
      require(scalar == out[i].bits, name, in[i], scalar, out[i].bits);
    }
  };
  int place = 0;
  for (uint32_t low : {0x0000u, 0x0001u, 0x0fffu, 0x1000u, 0x1001u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
    for (uint32_t high = 0; high < 0x10000; ++high) {
      const float hard = arch::bit_cast<float>(high << 16 | low);
      all[place] = hard;
      const float ordinary = among[place];
      among[place] = hard;
      check(among);
      among[place] = ordinary;
      add(float(arch::from_float<T>(hard).bits));
      place = (place + 1) % kBatch;
      if (place == 0) check(all);
    }
  }
}

}  // namespace

int main() {
  check_fma();
  check_exp2();
  check_conversions<Half>("float16");
  check_conversions<BFloat16>("bfloat16");
  check_hard_floats<Half>("float16, hard");
  check_hard_floats<BFloat16>("bfloat16, hard");
  require(std::isinf(arch::to_float(arch::from_float<Half>(65520.0f))), "float16 overflow", 65520);
  require(arch::from_float<Half>(65519.0f).bits == 0x7bff, "float16 largest", 65519);
  require(std::isinf(arch::to_float(arch::from_float<BFloat16>(3.4e38f))), "bfloat16 overflow", 3.4e38);
  std::printf("%016llx\n", static_cast<unsigned long long>(checksum));
  return 0;
}
