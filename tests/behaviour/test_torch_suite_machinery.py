"""torch's own test machinery, run as it stands: unittest classes, one test per optimizer, device and dtype.

The name of the class is that of torch's own test, so the tolerances and skips of each OptimizerInfo apply.
"""

from __future__ import annotations

from typing import Any

import torch
from table import random_params
from torch_infos import (
    INFOS,
    TestCase,
    copies,
    instantiate_device_type_tests,
    make,
    make_stock,
    optims,
    params_of,
    train,
)

# ruff: noqa: PT009, PT027 (unittest's assertions, which follow the tolerances)


class TestOptimRenewed(TestCase):
    @optims(INFOS)
    def test_errors(self, device: str, dtype: torch.dtype, optim_info: Any) -> None:
        for given in optim_info.optim_error_inputs_func(device=device, dtype=dtype):
            params, options = given.optimizer_error_input.params, given.optimizer_error_input.kwargs
            params = [torch.ones(2, device=device, dtype=dtype, requires_grad=True)] if params is None else params
            # A parameter listed twice draws torch's warning that it will be an error; here it is one.
            error, text = given.error_type, given.error_regex
            if error is UserWarning:
                error, text = ValueError, "holds the same parameter twice"
            with self.assertRaisesRegex(error, text):
                optim_info.optim_cls(params, **options)

    @optims(INFOS)
    def test_fused_matches_forloop(self, device: str, dtype: torch.dtype, optim_info: Any) -> None:
        for given in optim_info.optim_inputs_func(device=device):
            params = [p.detach().to(device, dtype).requires_grad_() for p in random_params([(5, 3), (7,), (0,)])]
            ours, stock = make(optim_info, given, params), make_stock(optim_info, given, copies(params))
            train(ours, stock, steps=7)
            self.assertEqual(params, params_of(stock))
            for param, truth in zip(params, params_of(stock), strict=True):
                theirs = {k: v for k, v in stock.state.get(truth, {}).items() if v is not None}
                self.assertEqual({k: ours.state[param][k] for k in theirs}, theirs, exact_device=False)


instantiate_device_type_tests(TestOptimRenewed, globals(), only_for=("cpu", "cuda"))
