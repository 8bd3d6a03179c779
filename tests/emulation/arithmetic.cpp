// Root and quotient of csrc/cuda/step_packed.cuh, from every approximation that the hardware may give: a program that
// prints where the results are not those of IEEE. Its argument: how much worse the approximations are than NVIDIA's
// documents say (1: as they say).
//
// Scaling by powers of four, or two, changes no mantissa: all numbers on the way are normal but the remainders, which
// are exact. So all mantissas are tried with some exponents, and some mantissas with all; what is printed is scaled.
#define AF_TARGET gpu
#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <set>

#include "../../csrc/cuda/step_packed.cuh"

namespace {

using namespace accumfused::gpu;

constexpr int kMantissas = 1 << 23;
double worse = 1;
std::set<std::string> wrong;

// From 1 on and below 2; below 4 if the exponent is to stay even.
float scaled(float value, bool even = false) {
  int exponent;
  const float mantissa = 2 * frexpf(value, &exponent);
  return even && exponent % 2 == 0 ? 2 * mantissa : mantissa;
}

void report(const char* format, float first, float second, float third) {
  char line[99];
  snprintf(line, sizeof line, format, first, second, third);
  if (!wrong.insert(line).second) return;
  puts(line);
  if (wrong.size() == 20) exit(0);  // enough
}

// Calls body with the fp32 numbers within `error` of a positive number.
template <class Body>
void for_each_near(double exact, double error, const Body& body) {
  float y = float(exact - error);
  if (y < exact - error) y = nextafterf(y, INFINITY);
  for (; y <= exact + error; y = float_from_bits(bits_of(y) + 1)) body(y);
}

// rsqrt.approx.ftz.f32 has a relative error of 2^-22.9 (PTX ISA).
void try_root(float value) {
  const float expected = sqrtf(value);
  const double exact = 1 / sqrt(double(value));
  for_each_near(exact, exact * 0x1.126p-23 * worse, [&](float y) {
    if (refined_root(both(value), both(y)).y != expected)
      report("root of %a from %a", scaled(value, true), scaled(y), 0);
  });
}

// rcp.approx.ftz.f32 has an error of 1 ulp (PTX ISA).
template <class Body>
void for_each_inverse(float b, const Body& body) {
  int exponent;
  frexp(1 / double(b), &exponent);
  for_each_near(1 / double(b), ldexp(worse, exponent - 24), body);
}

void try_quotient(float a, float b, float y, float expected) {
  if (refined_quotient(both(a), both(b), both(y)).y != expected)
    report("%a / %a from %a", scaled(fabsf(a)), scaled(b), scaled(y));
}

float number(int exponent, int mantissa) {
  return float_from_bits(uint32_t(exponent + 127) << 23 | uint32_t(mantissa));
}

void try_roots() {
  for (int exponent = -101; exponent <= 60; ++exponent) {
    const bool all = exponent < -99 || exponent == 0 || exponent == 1 || exponent > 58;
    for (int m = 0; m < kMantissas; m += all ? 1 : 1021) try_root(number(exponent, m));
  }
}

uint32_t inverse_of_odd(uint32_t value) {  // modulo 2^32
  uint32_t inverse = value;
  for (int i = 0; i < 4; ++i) inverse *= 2 - value * inverse;
  return inverse;
}

// A quotient A / B of whole numbers below 2^24 is rounded wrongly only where a number halfway between two, M / 2^K with
// odd M, is so close that |A 2^K - M B| is small. With e, the relative error of the refined reciprocal, what is rounded
// last is off by at most (1 + 2^25 |e|) (|e| + 2^-24) of half a last place. All A to which that can matter are tried.
void try_hard_quotients(int mantissa) {
  const float b = number(0, mantissa);
  const int64_t whole = kMantissas + mantissa, shift = __builtin_ctzll(whole);
  const uint32_t inverse = inverse_of_odd(uint32_t(whole >> shift));
  for_each_inverse(b, [&](float y) {
    const double e = fabs(double(b) * __fmaf_rn(y, __fmaf_rn(-b, y, 1.0f), y) - 1);
    const double most = double(whole) * (1 + 0x1p25 * e) * (e + 0x1p-24);
    for (int64_t difference = int64_t(1) << shift; difference <= most; difference += int64_t(2) << shift) {
      for (int k = 24; k <= 25; ++k) {  // quotients from 1 on, and below
        for (const int64_t n : {difference, -difference}) {
          const int64_t modulus = int64_t(1) << (k - shift), begin = 1 << 24;
          const int64_t first = (-(n >> shift) * inverse) & (modulus - 1);
          for (int64_t m = first + (begin - first + modulus - 1) / modulus * modulus; m < 2 * begin; m += modulus) {
            const int64_t a = (n + m * whole) >> k;
            if (a < kMantissas || a >= 2 * kMantissas) continue;
            const float exact = number(0, int(a - kMantissas));
            try_quotient(exact, b, y, exact / b);
          }
        }
      }
    }
  });
}

void try_quotients() {
  for (int m = 0; m < kMantissas; ++m) try_hard_quotients(m);
  std::mt19937 random;
  for (int first = -102; first <= 60; ++first) {
    for (int second = -51; second <= 40 && first - second > -102; ++second) {
      for (int i = 0; i < 40; ++i) {
        const float a = number(first, i == 0 ? 0 : int(random() % kMantissas)) * (i % 2 ? 1.0f : -1.0f);
        const float b = number(second, i < 2 ? kMantissas - 1 : int(random() % kMantissas));
        for_each_inverse(b, [&](float y) { try_quotient(a, b, y, a / b); });
      }
    }
  }
}

// The rule takes this way only for roots and quotients of the exponents above, or where a parameter is so large that it
// does not change by the quotient.
void try_rules() {
  std::mt19937 random;
  const auto power_of_two = [&](int least, int most) {
    return number(least + int(random() % unsigned(most - least + 1)), random() % 4 ? 0 : int(random() % kMantissas));
  };
  long usual = 0, small = 0;
  for (int i = 0; i < 4000000; ++i) {
    const double beta = 1 - power_of_two(-20, -2);
    const double lr = power_of_two(-50, 42), eps = random() % 2 ? power_of_two(-60, 45) : 0.0f;
    const double hyper[] = {lr, 0.9, beta, eps, random() % 2 ? 0x1.ff8p-1 / lr : 0, 1, 0};
    const PackedRule<AdamFunctor> rule(hyper, 1 + int(random() % 100), 1.0f);
    float p[kEight], m[kEight], v[kEight];
    const int first = int(random() % 205) - 140, second = int(random() % 170) - 105, size = int(random() % 120) - 90;
    for (int k = 0; k < kEight; ++k) {
      p[k] = power_of_two(size - 1, size + 1) * (random() % 2 ? 1.0f : -1.0f);
      m[k] = power_of_two(first - 1, first + 1) / rule.step_size_ * (random() % 2 ? 1.0f : -1.0f);
      if (random() % 64 == 0) m[k] = random() % 2 ? 0.0f : -0.0f;
      v[k] = power_of_two(second - 1, second + 1);
    }
    const int odd_one = int(random() % (4 * kEight));
    if (odd_one < kEight) p[odd_one] = random() % 2 ? float_from_bits(kNan) : 0.0f;
    if (!rule.is_usual(Extent(p, m, v))) continue;
    if (odd_one < kEight) report("not as usual: a parameter of %a", p[odd_one], 0, 0);
    ++usual;
    for (int k = 0; k < kEight; ++k) {
      const float a = m[k] * rule.step_size_, b = sqrtf(v[k]) * rule.inverse_root_ + rule.eps_, x = p[k] * rule.decay_;
      bool known = v[k] >= 0x1p-101f && v[k] < 0x1p61f && fabsf(a) < 0x1p61f && b >= 0x1p-51f && b < 0x1p41f;
      if (fabsf(a) < 0x1p-102f || fabsf(a / b) < 0x1p-102f) {
        for_each_inverse(b, [&](float y) {
          const float quotient = refined_quotient(both(a), both(b), both(y)).y;
          known &= x - a / b == x && x - quotient == x && bits_of(x - a / b) == bits_of(x - quotient);
        });
        ++small;
      }
      if (!known) report("not as usual: %a / (root of %a -> %a)", a, v[k], b);
    }
  }
  if (usual < 100000 || small < 100000)
    report("the usual is too rare: %a, of these %a small", float(usual), float(small), 0);
}

// What pair.cuh takes for a product on 10.0: the sum with minus_zero has the same bits, those of NaN left out.
void try_products() {
  std::mt19937 random;
  for (int i = 0; i < 2000000; ++i) {
    const float a = float_from_bits(uint32_t(random())), b = i % 8 ? float_from_bits(uint32_t(random())) : 0.0f;
    const Pair product = both(a) * both(b), sum = fused(both(a), both(b), both(minus_zero));
    const bool same = bits_of(sum.x) == bits_of(product.x) && bits_of(sum.y) == bits_of(product.y);
    if (!same && product.x == product.x) report("%a * %a", a, b, 0);
  }
}

}  // namespace

int main(int count, char** arguments) {
  if (count > 1) worse = atof(arguments[1]);
  try_roots();
  try_quotients();
  try_rules();
  try_products();
}
