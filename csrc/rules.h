// The optimizers' elementwise arithmetic: one functor per rule, and the list of rules. CPU and CUDA include this file.
//
// A functor is built once per tensor from its group's hyper-parameters, the number of this step (1 for the first) and
// the coefficient. The call takes one element: parameter, gradient as it was read, and up to three states; second
// moments begin at kFirstSecondMoment. Scalars are computed in double and rounded to fp32 once. accumfused/optimizers/
// has the same arithmetic in PyTorch, under the same names.
#pragma once
#include "numeric.h"

namespace accumfused::AF_TARGET {

// p <- p - lr * g (with L2 weight decay).  Sutskever et al. 2013 for the momentum form below.
struct Sgd {
  static constexpr const char* kName = "sgd";
  static constexpr int kStates = 0;
  static constexpr int kFirstSecondMoment = 0;
  static constexpr const char* kStateNames[1] = {nullptr};
  static constexpr bool kCountsSteps = false;
  static constexpr int kHypers = 6;
  static constexpr const char* kHyperNames[kHypers] = {"lr",       "momentum",     "dampening",
                                                       "nesterov", "weight_decay", "maximize"};
  float coefficient, lr, weight_decay;

  AF_METHOD Sgd(const double* hyper, int64_t /*step*/, float coef)
      : coefficient(hyper[5] != 0 ? -coef : coef), lr(float(hyper[0])), weight_decay(float(hyper[4])) {}

  AF_METHOD void operator()(float& p, float grad, float&, float&, float&) const {
    float g = grad * coefficient;
    g = weight_decay != 0 ? g + p * weight_decay : g;
    p = p - g * lr;
  }
};

// b <- momentum * b + (1 - dampening) * g;  p <- p - lr * (nesterov ? g + momentum * b : b)
// The first step sets b = g.
struct SgdMomentum {
  static constexpr const char* kName = "sgd_momentum";
  static constexpr int kStates = 1;
  static constexpr int kFirstSecondMoment = 1;
  static constexpr const char* kStateNames[kStates] = {"momentum_buffer"};
  static constexpr bool kCountsSteps = true;
  static constexpr int kHypers = Sgd::kHypers;
  static constexpr const char* const* kHyperNames = Sgd::kHyperNames;
  float coefficient, lr, weight_decay, momentum, incoming;
  bool nesterov;

  AF_METHOD SgdMomentum(const double* hyper, int64_t step, float coef)
      : coefficient(hyper[5] != 0 ? -coef : coef),
        lr(float(hyper[0])),
        weight_decay(float(hyper[4])),
        momentum(float(hyper[1])),
        incoming(step == 1 ? 1.0f : float(1.0 - hyper[2])),
        nesterov(hyper[3] != 0) {}

  AF_METHOD void operator()(float& p, float grad, float& momentum_buffer, float&, float&) const {
    float g = grad * coefficient;
    g = weight_decay != 0 ? g + p * weight_decay : g;
    momentum_buffer = momentum_buffer * momentum + g * incoming;
    p = p - (nesterov ? g + momentum_buffer * momentum : momentum_buffer) * lr;
  }
};

// Kingma & Ba 2015; decoupled weight decay: Loshchilov & Hutter 2019; AMSGrad: Reddi et al. 2018.
//   m <- beta1 m + (1 - beta1) g;  v <- beta2 v + (1 - beta2) g^2
//   p <- p (1 - lr wd) - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
template <bool kAmsgrad>
struct AdamFamily {
  static constexpr const char* kName = kAmsgrad ? "adam_amsgrad" : "adam";
  static constexpr int kStates = kAmsgrad ? 3 : 2;
  static constexpr int kFirstSecondMoment = 1;
  static constexpr const char* kStateNames[3] = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"};
  static constexpr bool kCountsSteps = true;
  static constexpr int kHypers = 7;
  static constexpr const char* kHyperNames[kHypers] = {
      "lr", "beta1", "beta2", "eps", "weight_decay", "decoupled_weight_decay", "maximize"};
  float coefficient, beta1, one_minus_beta1, beta2, one_minus_beta2, eps, weight_decay, decay, step_size, inverse_root;

  AF_METHOD AdamFamily(const double* hyper, int64_t step, float coef)
      : coefficient(hyper[6] != 0 ? -coef : coef),
        beta1(float(hyper[1])),
        one_minus_beta1(float(1.0 - hyper[1])),
        beta2(float(hyper[2])),
        one_minus_beta2(float(1.0 - hyper[2])),
        eps(float(hyper[3])),
        weight_decay(hyper[5] != 0 ? 0.0f : float(hyper[4])),
        decay(hyper[5] != 0 ? float(1.0 - hyper[0] * hyper[4]) : 1.0f),
        step_size(float(hyper[0] / (1.0 - power(hyper[1], step)))),
        inverse_root(float(1.0 / double(square_root(float(1.0 - power(hyper[2], step)))))) {}

  AF_METHOD void operator()(float& p, float grad, float& exp_avg, float& exp_avg_sq, float& max_exp_avg_sq) const {
    moments(p, grad, exp_avg, exp_avg_sq);
    float second = exp_avg_sq;
    if constexpr (kAmsgrad) {
      second = exp_avg_sq > max_exp_avg_sq ? exp_avg_sq : max_exp_avg_sq;
      second = exp_avg_sq != exp_avg_sq ? exp_avg_sq : second;  // a NaN propagates, as in torch.maximum
      max_exp_avg_sq = second;
    }
    move(p, exp_avg, square_root(second), [](float a, float b) { return a / b; });
  }

  template <bool kDecays = true>
  AF_METHOD void moments(float p, float grad, float& exp_avg, float& exp_avg_sq) const {
    float g = grad * coefficient;
    if constexpr (kDecays) g = weight_decay != 0 ? g + p * weight_decay : g;
    exp_avg = exp_avg * beta1 + g * one_minus_beta1;
    exp_avg_sq = exp_avg_sq * beta2 + (g * g) * one_minus_beta2;
  }

  template <class Divide>
  AF_METHOD void move(float& p, float exp_avg, float root, const Divide& divide) const {
    const float denominator = root * inverse_root + eps;
    p = p * decay - divide(exp_avg * step_size, denominator);
  }
};
using Adam = AdamFamily<false>;
using AdamAmsgrad = AdamFamily<true>;

// Chen et al. 2023:  p <- p (1 - lr wd) - lr sign(beta1 m + (1 - beta1) g);  m <- beta2 m + (1 - beta2) g
struct Lion {
  static constexpr const char* kName = "lion";
  static constexpr int kStates = 1;
  static constexpr int kFirstSecondMoment = 1;
  static constexpr const char* kStateNames[kStates] = {"exp_avg"};
  static constexpr bool kCountsSteps = false;
  static constexpr int kHypers = 5;
  static constexpr const char* kHyperNames[kHypers] = {"lr", "beta1", "beta2", "weight_decay", "maximize"};
  float coefficient, lr, beta1, one_minus_beta1, beta2, one_minus_beta2, decay;

  AF_METHOD Lion(const double* hyper, int64_t /*step*/, float coef)
      : coefficient(hyper[4] != 0 ? -coef : coef),
        lr(float(hyper[0])),
        beta1(float(hyper[1])),
        one_minus_beta1(float(1.0 - hyper[1])),
        beta2(float(hyper[2])),
        one_minus_beta2(float(1.0 - hyper[2])),
        decay(float(1.0 - hyper[0] * hyper[3])) {}

  AF_METHOD void operator()(float& p, float grad, float& exp_avg, float&, float&) const {
    const float g = grad * coefficient;
    const float direction = exp_avg * beta1 + g * one_minus_beta1;
    exp_avg = exp_avg * beta2 + g * one_minus_beta2;
    const float sign = direction > 0 ? 1.0f : (direction < 0 ? -1.0f : direction);  // 0 and NaN stay
    p = p * decay - sign * lr;
  }
};

#define AF_RULES(X) X(Sgd) X(SgdMomentum) X(Adam) X(AdamAmsgrad) X(Lion)

}  // namespace accumfused::AF_TARGET
